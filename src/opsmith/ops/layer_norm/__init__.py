"""LayerNorm, alone or fused with the residual addition before it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from opsmith.call.common import (
    alike,
    as_rows,
    check_float,
    check_like,
    check_number,
    compiling,
    dense,
    fresh,
    kernels,
    native,
    needs_grad,
    one_of,
    out_rows,
    recorded,
    short,
    small_node,
    soonest,
)
from opsmith.call.pair import NODE, Result, check_pair, store, writes_rows
from opsmith.kernels import calls, nodes
from opsmith.operator import Cost, Implementation, Kind, Make, Operator, Pattern, Sample, register

# Where autograd records, PyTorch's is faster up to 2^this as many elements: our nodes are Python.
_NODES = 4


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: torch.Tensor | None = None,
    out: Result | None = None,
) -> Result:
    """Normalize the last dimension to mean 0 and variance 1, then scale and shift; one pass over memory.

    `y = (s - mean(s)) / sqrt(var(s) + eps) * weight + bias`, with `s = x`, or `s = x + residual`.
    Mean and variance come from Welford's update, merged across vector lanes by Chan's formula, so they stay
    accurate where `E[s^2] - E[s]^2` cancels.

    >>> x = torch.randn(2, 128, 384)
    >>> layer_norm(x, torch.ones(384), torch.zeros(384)).shape
    torch.Size([2, 128, 384])
    >>> y, s = layer_norm(x, residual=torch.randn(2, 128, 384))   # s = x + residual

    Args:
        x: [..., N], float32, bfloat16 or float16 (float64 through PyTorch).
        weight, bias: [N], in x's dtype or float32.
        eps: added to the variance, under the root.
        residual: as x; then the sum is normalized and returned too, from the same kernel.
        out: a tensor like x to write into (with `residual`: a pair); x or residual itself is allowed when no
            gradient is needed.

    Returns:
        y, or (y, x + residual).

    Raises:
        TypeError, ValueError: for a wrong dtype, shape or device.

    Source: Ba, Kiros, Hinton, "Layer Normalization", 2016; Welford 1962; Chan, Golub, LeVeque 1979.
    """
    if out is None and not compiling():
        summed = None if residual is None else True
        try:
            made: Result | None = calls.new_layer_norm(x, residual, weight, bias, eps, summed=summed)
            if made is not None:
                return made
        except (RuntimeError, TypeError):  # the checks say why
            pass
    _check(x, weight, bias, residual, out)
    check_number("layer_norm", "eps", eps)
    training = needs_grad(x, weight, bias, residual)
    if native(x, *_KERNELS[: 1 + training]) is not True or (training and small_node(x.numel() >> _NODES)):
        return store(reference(x, weight, bias, eps, residual=residual), out)
    if training:
        y, s = recorded(_LayerNorm, x, weight, bias, eps, residual)
        return store((y, s) if residual is not None else y, out)
    if writes_rows(out):
        return _native(x, weight, bias, eps, residual=residual, out=out)
    return store(_native(x, weight, bias, eps, residual=residual), out)


def reference(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: torch.Tensor | None = None,
) -> Result:
    """The definition, in plain PyTorch."""
    s = x if residual is None else x + residual
    if s.dtype in (torch.bfloat16, torch.float16) and any(
        t is not None and t.dtype != s.dtype for t in (weight, bias)
    ):
        wide = [None if t is None else t.float() for t in (weight, bias)]
        y = F.layer_norm(s.float(), s.shape[-1:], wide[0], wide[1], eps).to(s.dtype)
    else:
        y = F.layer_norm(s, s.shape[-1:], weight, bias, eps)
    return y if residual is None else (y, s)


def _check(x: Any, weight: Any, bias: Any, residual: Any, out: Any) -> None:
    check_float("layer_norm", x)
    vector = (x.shape[-1],)
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None and not alike(t, x, vector):
            check_like("layer_norm", t, x, name, x.shape[-1:], "the size of x's last dimension")
            if t.dtype not in (x.dtype, torch.float32):
                raise TypeError(
                    f"layer_norm: {name} must be {one_of(x.dtype, torch.float32)}, got {short(t.dtype)}"
                )
    check_pair("layer_norm", x, residual, out, weight=weight, bias=bias)


def _native(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: torch.Tensor | None = None,
    out: Result | None = None,
) -> Result:
    """The CPU kernel, without autograd."""
    y, summed = out if isinstance(out, tuple) else (out, None)
    if y is None:
        y = fresh(x)
    if residual is None:
        soonest(LAYER_NORM)(as_rows(x), None, dense(weight), dense(bias), eps, y=out_rows(y))
        return y
    if summed is None:
        summed = fresh(x)
    soonest(LAYER_NORM)(
        as_rows(x), as_rows(residual), dense(weight), dense(bias), eps, y=out_rows(y), summed=out_rows(summed)
    )
    return y, summed


class _LayerNorm(torch.autograd.Function):
    """Forward keeps the normalized tensor and two numbers a row; backward is one kernel."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = as_rows(x)
        y = fresh(x)
        mean, rstd = torch.empty(2, rows.shape[0], dtype=torch.float32, device=x.device).unbind()
        s = x if residual is None else fresh(x)
        soonest(LAYER_NORM)(
            rows,
            None if residual is None else as_rows(residual),
            dense(weight),
            dense(bias),
            eps,
            y=out_rows(y),
            summed=None if residual is None else out_rows(s),
            mean=mean,
            rstd=rstd,
        )
        ctx.save_for_backward(s, mean, rstd, weight, bias)
        ctx.has_residual = residual is not None
        if residual is None:
            s = torch.empty(0)  # nobody reads it; x itself may not be returned from its own function
            ctx.mark_non_differentiable(s)
        return y, s

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor, dsummed: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        s, mean, rstd, weight, bias = ctx.saved_tensors
        need_x, need_w, need_b, _, need_r = ctx.needs_input_grad
        dx = fresh(s) if need_x or need_r else None
        dw = fresh(weight) if need_w else None
        db = fresh(bias) if need_b else None
        soonest(LAYER_NORM_BACKWARD)(
            as_rows(dy),
            as_rows(dsummed) if ctx.has_residual else None,
            as_rows(s),
            mean,
            rstd,
            dense(weight),
            dx=None if dx is None else out_rows(dx),
            dweight=dw,
            dbias=db,
        )
        return dx if need_x else None, dw, db, None, dx if need_r else None


def _cost(
    x: torch.Tensor, weight: Any = None, bias: Any = None, eps: float = 0.0, *, residual: Any = None
) -> Cost:
    tensors = 2 if residual is None else 4
    vectors = sum(t.numel() * t.element_size() for t in (weight, bias) if t is not None)
    return Cost(8.0 * x.numel(), tensors * x.numel() * x.element_size() + vectors)


def _samples(make: Make) -> Iterator[Sample]:
    for rows, n in ((1, 1), (1, 384), (9, 7), (17, 33), (64, 768), (5, 4097)):
        yield Sample(f"{rows}x{n}", (make(rows, n), make(n), make(n)))
    x = make(2, 9, 130)
    yield Sample("residual", (x, make(130), make(130)), {"residual": make(2, 9, 130)})
    yield Sample("no weight", (x,), {"eps": 1e-3})
    yield Sample("weight, no bias", (x, make(130)))
    yield Sample("mean 1e4", (make(4, 1024, shift=1e4), make(1024), make(1024)))
    yield Sample("strided", (make(60, 64).t(), make(60), make(60)))
    yield Sample("sliced rows", (make(8, 200)[:, 20:84], make(64), make(64)), {"residual": make(8, 64)})
    yield Sample("strided weight", (make(5, 40), make(40, 2)[:, 0], make(40, 2)[:, 1]))
    yield Sample("empty", (make(0, 16), make(16), make(16)))
    yield Sample("tiny variance", (make(4, 96, scale=1e-4),), {"eps": 1e-12})


def _workloads(make: Make) -> Iterator[Sample]:
    yield Sample("4096x4096", (make(4096, 4096), make(4096), make(4096)))
    yield Sample("4096x384 residual", (make(4096, 384), make(384), make(384)), {"residual": make(4096, 384)})
    yield Sample("1x4096", (make(1, 4096), make(4096), make(4096)))


CARD = register(
    Operator(
        name="layer_norm",
        kind=Kind.NORM,
        function=layer_norm,
        reference=reference,
        cost=_cost,
        samples=_samples,
        workloads=_workloads,
        implementations=[
            *kernels(_native, lambda x, *a, **k: native(x, "layer_norm")),
            Implementation("eager", reference),
        ],
        patterns=(
            Pattern(
                "layer_norm(x, weight, bias)",
                lambda x, weight, bias, eps: F.layer_norm(x, x.shape[-1:], weight, bias, eps),
                {"x": ("B", "N"), "weight": ("N",), "bias": ("N",), "eps": 1.25e-3},
            ),
            Pattern(
                "layer_norm(x, weight)",
                lambda x, weight, eps: F.layer_norm(x, x.shape[-1:], weight, None, eps),
                {"x": ("B", "N"), "weight": ("N",), "eps": 1.25e-3},
            ),
            Pattern(
                "layer_norm(x)",
                lambda x, eps: F.layer_norm(x, x.shape[-1:], None, None, eps),
                {"x": ("B", "N"), "eps": 1.25e-3},
            ),
        ),
        schemas=(
            "layer_norm(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, *, "
            "Tensor(a!) y, Tensor(b!)? summed=None, Tensor(c!)? mean=None, Tensor(d!)? rstd=None) -> ()",
            "layer_norm_backward(Tensor dy, Tensor? dsummed, Tensor s, Tensor mean, Tensor rstd, "
            "Tensor? weight, *, Tensor(a!)? dx=None, Tensor(b!)? dweight=None, Tensor(c!)? dbias=None) -> ()",
        ),
        onto=(("x", "residual"), ("x", "residual")),
        source="Ba, Kiros, Hinton, 2016; Welford, 1962; Chan, Golub, LeVeque, 1979",
    )
)

_KERNELS = ("layer_norm", "layer_norm_backward")  # the second one for gradients
nodes.declare("layer_norm", **NODE)
LAYER_NORM = torch.ops.opsmith.layer_norm.default
LAYER_NORM_BACKWARD = torch.ops.opsmith.layer_norm_backward.default
