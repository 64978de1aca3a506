"""RMSNorm in the ways of Llama, Gemma and T5, alone or fused with the residual addition before it."""

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
    out_rows,
    recorded,
    short,
    soonest,
)
from opsmith.call.pair import NODE, Result, check_pair, store, writes_rows
from opsmith.kernels import calls, nodes
from opsmith.operator import Cost, Implementation, Kind, Make, Operator, Pattern, Sample, register


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    residual: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    out: Result | None = None,
) -> Result:
    """Divide the last dimension by its root mean square, then scale; one pass over memory.

    `y = s / sqrt(mean(s^2) + eps) * (weight_offset + weight)`, with `s = x`, or `s = x + residual`.

    >>> x = torch.randn(2, 128, 384)
    >>> rms_norm(x, torch.ones(384)).shape
    torch.Size([2, 128, 384])
    >>> y, s = rms_norm(x, torch.ones(384), residual=torch.randn(2, 128, 384))   # s = x + residual
    >>> rms_norm(x, torch.zeros(384), weight_offset=1.0).shape                   # as Gemma keeps its weights
    torch.Size([2, 128, 384])

    Args:
        x: [..., N], float32, bfloat16 or float16 (float64 through PyTorch).
        weight: [N], in x's dtype or float32.
        eps: added to the mean square, under the root.
        residual: as x; then the sum is normalized and returned too, from the same kernel.
        weight_offset: added to the weight, in float32 (1.0 in Gemma); without a weight it is not used.
        round_before_weight: round the normalized value to x's dtype before it meets the weight, as Llama's
            code does; else it is rounded once, at the end.
        out: a tensor like x to write into (with `residual`: a pair); x or residual itself is allowed when no
            gradient is needed.

    Returns:
        y, or (y, x + residual).

    Raises:
        TypeError, ValueError: for a wrong dtype, shape or device.

    Source: Zhang, Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    if out is None and not compiling():
        summed = None if residual is None else True
        try:
            made: Result | None = calls.new_rms_norm(
                x, residual, weight, eps, weight_offset, round_before_weight, summed=summed
            )
            if made is not None:
                return made
        except RuntimeError:  # the checks say why
            pass
    _check(x, weight, residual, out)
    check_number("rms_norm", "eps", eps)
    check_number("rms_norm", "weight_offset", weight_offset)
    how: dict[str, Any] = {"weight_offset": weight_offset, "round_before_weight": round_before_weight}
    training = needs_grad(x, weight, residual)
    if native(x, *_KERNELS[: 1 + training]) is not True:
        return store(eager(x, weight, eps, residual=residual, **how), out)
    if training:
        y, s = recorded(_RMSNorm, x, weight, eps, residual, weight_offset, round_before_weight)
        return store((y, s) if residual is not None else y, out)
    if writes_rows(out):
        return _native(x, weight, eps, residual=residual, **how, out=out)
    return store(_native(x, weight, eps, residual=residual, **how), out)


def reference(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    residual: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
) -> Result:
    """The definition, in plain PyTorch."""
    s = x if residual is None else x + residual
    wide = s if s.dtype == torch.float64 else s.float()
    y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if weight is not None:
        if round_before_weight:
            y = y.to(s.dtype).to(wide.dtype)
        scale = weight.to(wide.dtype)
        y = y * (scale + weight_offset if weight_offset else scale)
    y = y.to(s.dtype)
    return y if residual is None else (y, s)


def eager(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    residual: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
) -> Result:
    """PyTorch's own function where it computes the same, else what models write."""
    fused = weight is None or (not weight_offset and not round_before_weight and weight.dtype == x.dtype)
    if not fused:
        return reference(
            x,
            weight,
            eps,
            residual=residual,
            weight_offset=weight_offset,
            round_before_weight=round_before_weight,
        )
    s = x if residual is None else x + residual
    y = F.rms_norm(s, s.shape[-1:], weight, eps)
    return y if residual is None else (y, s)


def _check(x: Any, weight: Any, residual: Any, out: Any) -> None:
    check_float("rms_norm", x)
    if weight is not None and not alike(weight, x, (x.shape[-1],)):
        check_like("rms_norm", weight, x, "weight", x.shape[-1:], "the size of x's last dimension")
        if weight.dtype not in (x.dtype, torch.float32):
            either = " or ".join(dict.fromkeys((short(x.dtype), "float32")))
            raise TypeError(f"rms_norm: weight must be {either}, got {short(weight.dtype)}; cast it")
    check_pair("rms_norm", x, residual, out, weight=weight)


def _native(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    residual: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    out: Result | None = None,
) -> Result:
    """The kernel, without autograd."""
    y, summed = out if isinstance(out, tuple) else (out, None)
    if y is None:
        y = fresh(x)
    if residual is None:
        soonest(RMS_NORM)(
            as_rows(x), None, dense(weight), eps, weight_offset, round_before_weight, y=out_rows(y)
        )
        return y
    if summed is None:
        summed = fresh(x)
    soonest(RMS_NORM)(
        as_rows(x),
        as_rows(residual),
        dense(weight),
        eps,
        weight_offset,
        round_before_weight,
        y=out_rows(y),
        summed=out_rows(summed),
    )
    return y, summed


class _RMSNorm(torch.autograd.Function):
    """Forward keeps the normalized tensor and one number a row; backward is one kernel."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        residual: torch.Tensor | None,
        weight_offset: float,
        round_before_weight: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = as_rows(x)
        y = fresh(x)
        rstd = torch.empty(rows.shape[0], dtype=torch.float32, device=x.device)
        s = x if residual is None else fresh(x)
        soonest(RMS_NORM)(
            rows,
            None if residual is None else as_rows(residual),
            dense(weight),
            eps,
            weight_offset,
            round_before_weight,
            y=out_rows(y),
            summed=None if residual is None else out_rows(s),
            rstd=rstd,
        )
        ctx.save_for_backward(s, rstd, weight)
        ctx.has_residual = residual is not None
        ctx.weight_offset = weight_offset
        if residual is None:
            s = torch.empty(0)  # nobody reads it; x itself may not be returned from its own function
            ctx.mark_non_differentiable(s)
        return y, s

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor, dsummed: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        s, rstd, weight = ctx.saved_tensors
        need_x, need_w, _, need_r, *_ = ctx.needs_input_grad
        dx = fresh(s) if need_x or need_r else None
        dw = fresh(weight) if need_w else None
        soonest(RMS_NORM_BACKWARD)(
            as_rows(dy),
            as_rows(dsummed) if ctx.has_residual else None,
            as_rows(s),
            rstd,
            dense(weight),
            ctx.weight_offset,
            dx=None if dx is None else out_rows(dx),
            dweight=dw,
        )
        return dx if need_x else None, dw, None, dx if need_r else None, None, None


def _cost(x: torch.Tensor, weight: Any = None, eps: float = 0.0, *, residual: Any = None, **_: Any) -> Cost:
    tensors = 2 if residual is None else 4
    vector = 0 if weight is None else weight.numel() * weight.element_size()
    return Cost(4.0 * x.numel(), tensors * x.numel() * x.element_size() + vector)


def _samples(make: Make) -> Iterator[Sample]:
    for rows, n in ((1, 1), (1, 384), (9, 7), (17, 33), (64, 768), (5, 4097)):
        yield Sample(f"{rows}x{n}", (make(rows, n), make(n, scale=0.3, shift=1.0)))
    x = make(2, 9, 130)
    yield Sample("residual", (x, make(130)), {"residual": make(2, 9, 130)})
    yield Sample("no weight", (x,), {"eps": 1e-3})
    yield Sample("Gemma", (x, make(130, scale=0.3)), {"weight_offset": 1.0})
    yield Sample(
        "Gemma, residual", (x, make(130, scale=0.3)), {"weight_offset": 1.0, "residual": make(2, 9, 130)}
    )
    yield Sample("Llama", (make(11, 200), make(200)), {"round_before_weight": True})
    yield Sample(
        "Llama, residual", (make(11, 96), make(96)), {"round_before_weight": True, "residual": make(11, 96)}
    )
    yield Sample("mean 1e4", (make(4, 1024, shift=1e4), make(1024)))
    yield Sample("strided", (make(60, 64).t(), make(60)))
    yield Sample("sliced rows", (make(8, 200)[:, 20:84], make(64)), {"residual": make(8, 64)})
    yield Sample("strided weight", (make(5, 40), make(40, 2)[:, 0]))
    yield Sample("empty", (make(0, 16), make(16)))
    yield Sample("near zero", (make(4, 96, scale=1e-4), make(96)))


def _workloads(make: Make) -> Iterator[Sample]:
    yield Sample("4096x4096", (make(4096, 4096), make(4096)))
    yield Sample("4096x2048 residual", (make(4096, 2048), make(2048)), {"residual": make(4096, 2048)})
    yield Sample("1x4096", (make(1, 4096), make(4096)))


def _t5(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    return weight * (x * torch.rsqrt(variance + eps))


def _llama(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return weight * h.to(x.dtype)


def _gemma(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return (h * (1.0 + weight.float())).type_as(x)


_INPUTS: dict[str, tuple[int | str, ...] | float] = {"x": ("B", "N"), "weight": ("N",), "eps": 1.25e-3}

CARD = register(
    Operator(
        name="rms_norm",
        kind=Kind.NORM,
        function=rms_norm,
        reference=reference,
        cost=_cost,
        samples=_samples,
        workloads=_workloads,
        implementations=[
            *kernels(_native, lambda x, *a, **k: native(x, "rms_norm")),
            Implementation("eager", eager),
        ],
        # The recognizer sees arithmetic on reals, in which Llama's and T5's are one: the second rounding, which
        # loses accuracy and no more, is left out of what they become.
        patterns=(
            Pattern("Llama", _llama, _INPUTS),
            Pattern("T5", _t5, _INPUTS),
            Pattern("Gemma", _gemma, _INPUTS, fixed={"weight_offset": 1.0}),
            Pattern(
                "rms_norm(x, weight)",
                lambda x, weight, eps: F.rms_norm(x, x.shape[-1:], weight, eps),
                _INPUTS,
            ),
            Pattern(
                "rms_norm(x)",
                lambda x, eps: F.rms_norm(x, x.shape[-1:], None, eps),
                {"x": ("B", "N"), "eps": 1.25e-3},
            ),
        ),
        schemas=(
            "rms_norm(Tensor x, Tensor? residual, Tensor? weight, float eps, float weight_offset, "
            "bool round_before_weight, *, Tensor(a!) y, Tensor(b!)? summed=None, Tensor(c!)? rstd=None) -> ()",
            "rms_norm_backward(Tensor dy, Tensor? dsummed, Tensor s, Tensor rstd, Tensor? weight, "
            "float weight_offset, *, Tensor(a!)? dx=None, Tensor(b!)? dweight=None) -> ()",
        ),
        onto=(("x", "residual"), ("x", "residual")),
        source="Zhang, Sennrich, 2019",
    )
)

_KERNELS = ("rms_norm", "rms_norm_backward")  # the second one for gradients
nodes.declare("rms_norm", **NODE)
RMS_NORM = torch.ops.opsmith.rms_norm.default
RMS_NORM_BACKWARD = torch.ops.opsmith.rms_norm_backward.default
