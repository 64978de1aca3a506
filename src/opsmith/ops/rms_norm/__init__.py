"""RMSNorm in the ways of Llama, Gemma and T5, alone or fused with the residual addition before it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from opsmith.call.arguments import EPS
from opsmith.call.dispatch import compiling
from opsmith.call.layouts import nbytes
from opsmith.call.run import Call, declare
from opsmith.call.signature import Dtype, Gradient, Input, Kept, Made, Number, Output, Saved, Signature, Slope
from opsmith.operator import Cost, Kind, Make, Pattern, Sample

Result = Tensor | tuple[Tensor, Tensor]  # y, or (y, x + residual)

SIGNATURE = Signature(
    "rms_norm",
    (
        Input("x", "... N"),
        Input("residual", "... N", optional=True),
        Input("weight", "N", Dtype.FIRST_OR_FLOAT32, optional=True),
        Number("eps", float, within=EPS),
        Number("weight_offset", float),
        Number("round_before_weight", bool),
    ),
    (
        Output("y", "... N", onto=("x", "residual")),
        Output("summed", "... N", when="residual", called="sum", onto=("x", "residual")),
    ),
    kept=(Kept("rstd"),),
    gradient=Gradient(
        "rms_norm_backward",
        (
            *(Slope("y"), Slope("summed"), Saved("summed", "s", instead="x")),
            *(Saved("rstd"), Saved("weight"), Saved("weight_offset")),
        ),
        (Made("x", shared=("residual",)), Made("weight")),
    ),
)


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    residual: Tensor | None = None,
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
        eps: added to the mean square, under the root; 0 or more.
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
    run = _CALL.compiled if compiling() else _CALL.fast.call
    return run(x, residual, weight, eps, weight_offset, round_before_weight, out)  # type: ignore[no-any-return]


def definition(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    weight_offset: float,
    round_before_weight: bool,
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


def eager(*given: Any) -> Result:
    """PyTorch's own function where it computes the same, else what models write."""
    x, residual, weight, eps, weight_offset, round_before_weight = given
    fused = weight is None or (not weight_offset and not round_before_weight and weight.dtype == x.dtype)
    if not fused:
        return definition(*given)
    s = x if residual is None else x + residual
    y = F.rms_norm(s, s.shape[-1:], weight, eps)
    return y if residual is None else (y, s)


_CALL = Call(SIGNATURE, rms_norm, definition, eager=eager)


def _cost(x: Tensor, weight: Any = None, eps: float = 0.0, *, residual: Any = None, **_: Any) -> Cost:
    tensors = 2 if residual is None else 4
    return Cost(4.0 * x.numel(), tensors * x.numel() * x.element_size() + nbytes(weight))


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


def _t5(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    return weight * (x * torch.rsqrt(variance + eps))


def _llama(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return weight * h.to(x.dtype)


def _gemma(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return (h * (1.0 + weight.float())).type_as(x)


_INPUTS: dict[str, tuple[int | str, ...] | float] = {"x": ("B", "N"), "weight": ("N",), "eps": 1.25e-3}

CARD = _CALL.card(
    kind=Kind.NORM,
    cost=_cost,
    samples=_samples,
    workloads=_workloads,
    # The recognizer sees arithmetic on reals, in which Llama's and T5's are one: the second rounding, which
    # loses accuracy and no more, is left out of what they become.
    patterns=(
        Pattern("Llama", _llama, _INPUTS),
        Pattern("T5", _t5, _INPUTS),
        Pattern("Gemma", _gemma, _INPUTS, fixed={"weight_offset": 1.0}),
        Pattern(
            "rms_norm(x, weight)", lambda x, weight, eps: F.rms_norm(x, x.shape[-1:], weight, eps), _INPUTS
        ),
        Pattern(
            "rms_norm(x)",
            lambda x, eps: F.rms_norm(x, x.shape[-1:], None, eps),
            {"x": ("B", "N"), "eps": 1.25e-3},
        ),
    ),
    schemas=declare(SIGNATURE, "rms_norm", "rms_norm_backward", bound=True),
    source="Zhang, Sennrich, 2019",
)
