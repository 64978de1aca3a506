"""LayerNorm, alone or fused with the residual addition before it."""

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
    "layer_norm",
    (
        Input("x", "... N"),
        Input("residual", "... N", optional=True),
        Input("weight", "N", Dtype.FIRST_OR_FLOAT32, optional=True),
        Input("bias", "N", Dtype.FIRST_OR_FLOAT32, optional=True),
        Number("eps", float, within=EPS),
    ),
    (
        Output("y", "... N", onto=("x", "residual")),
        Output("summed", "... N", when="residual", called="sum", onto=("x", "residual")),
    ),
    kept=(Kept("mean"), Kept("rstd")),
    gradient=Gradient(
        "layer_norm_backward",
        (
            *(Slope("y"), Slope("summed"), Saved("summed", "s", instead="x")),
            *(Saved("mean"), Saved("rstd"), Saved("weight")),
        ),
        (Made("x", shared=("residual",)), Made("weight"), Made("bias")),
    ),
)


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
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
        eps: added to the variance, under the root; 0 or more.
        residual: as x; then the sum is normalized and returned too, from the same kernel.
        out: a tensor like x to write into (with `residual`: a pair); x or residual itself is allowed when no
            gradient is needed.

    Returns:
        y, or (y, x + residual).

    Raises:
        TypeError, ValueError: for a wrong dtype, shape or device.

    Source: Ba, Kiros, Hinton, "Layer Normalization", 2016; Welford 1962; Chan, Golub, LeVeque 1979.
    """
    return (_CALL.compiled if compiling() else _CALL.fast.call)(x, residual, weight, bias, eps, out)  # type: ignore[no-any-return]


def definition(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
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


_CALL = Call(SIGNATURE, layer_norm, definition)


def _cost(x: Tensor, weight: Any = None, bias: Any = None, eps: float = 0.0, *, residual: Any = None) -> Cost:
    tensors = 2 if residual is None else 4
    return Cost(8.0 * x.numel(), tensors * x.numel() * x.element_size() + nbytes(weight, bias))


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


CARD = _CALL.card(
    kind=Kind.NORM,
    cost=_cost,
    samples=_samples,
    workloads=_workloads,
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
    schemas=declare(SIGNATURE, "layer_norm", "layer_norm_backward", bound=True),
    source="Ba, Kiros, Hinton, 2016; Welford, 1962; Chan, Golub, LeVeque, 1979",
)
