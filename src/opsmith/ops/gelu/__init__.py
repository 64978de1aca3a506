"""GELU, alone or fused with the bias addition before it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from opsmith.call.dispatch import compiling
from opsmith.call.layouts import nbytes
from opsmith.call.run import Call, declare
from opsmith.call.signature import Gradient, Input, Made, Number, Output, Saved, Signature, Slope
from opsmith.operator import Cost, Kind, Make, Pattern, Sample

SIGNATURE = Signature(
    "gelu",
    (Input("x", "... N", scalar=True), Input("bias", "N", optional=True), Number("tanh", bool)),
    (Output("y", "... N", onto=("x",)),),
    gradient=Gradient(
        "gelu_backward",
        (Slope("y"), Saved("x"), Saved("bias"), Saved("tanh")),
        (Made("x", optional=False), Made("bias")),
    ),
)


def gelu(x: Tensor, *, tanh: bool = False, out: Tensor | None = None) -> Tensor:
    """The Gaussian error linear unit: `x` weighted by the normal distribution's share below it.

    `y = x * (1 + erf(x / sqrt(2))) / 2`, or with `tanh`
    `y = x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))) / 2`.

    >>> gelu(torch.randn(2, 128, 1536)).shape
    torch.Size([2, 128, 1536])

    Args:
        x: any shape, float32, bfloat16 or float16 (float64 through PyTorch).
        tanh: the approximation that GPT-2 and Gemma were trained with.
        out: a tensor like x to write into; x itself is allowed when no gradient is needed.

    Raises:
        TypeError, ValueError: for a wrong dtype, shape or device.

    Source: Hendrycks, Gimpel, "Gaussian Error Linear Units", 2016.
    """
    return (_GELU.compiled if compiling() else _GELU.fast.call)(x, None, tanh, out)  # type: ignore[no-any-return]


def bias_gelu(x: Tensor, bias: Tensor, *, tanh: bool = False, out: Tensor | None = None) -> Tensor:
    """GELU of `x + bias`, the sum never written to memory: `y = gelu(x + bias)`.

    >>> bias_gelu(torch.randn(2, 128, 1536), torch.zeros(1536)).shape
    torch.Size([2, 128, 1536])

    Args:
        x: [..., N], float32, bfloat16 or float16 (float64 through PyTorch).
        bias: [N], in x's dtype.
        tanh: the tanh approximation, as in `gelu`.
        out: a tensor like x to write into; x itself is allowed when no gradient is needed.

    Raises:
        TypeError, ValueError: for a wrong dtype, shape or device.

    Source: Hendrycks, Gimpel, "Gaussian Error Linear Units", 2016.
    """
    here = bias is not None and not compiling()
    return (_BIAS_GELU.fast.call if here else _BIAS_GELU.compiled)(x, bias, tanh, out)  # type: ignore[no-any-return]


def definition(x: Tensor, bias: Tensor | None, tanh: bool) -> Tensor:
    """The definition of both, in plain PyTorch."""
    return F.gelu(x if bias is None else x + bias, approximate="tanh" if tanh else "none")


class _Each(Call):
    """Each number by itself."""

    def apart(self, values: Sequence[Any]) -> Sequence[str]:
        return "...", "N"


_GELU = _Each(SIGNATURE, gelu, definition)
_BIAS_GELU = _Each(SIGNATURE, bias_gelu, definition)

# The polynomial, the exponential and the products, as a fused kernel computes them.
_FLOPS = 20.0


def _cost(x: Tensor, bias: Tensor | None = None, *, tanh: bool = False) -> Cost:
    each = _FLOPS + (bias is not None)
    return Cost(each * x.numel(), 2 * x.numel() * x.element_size() + nbytes(bias))


def _samples(make: Make) -> Iterator[Sample]:
    for shape in ((384,), (3, 7), (9, 33), (2, 5, 130), (16, 1536)):
        for tanh in (False, True):
            name = "x".join(map(str, shape)) + (" tanh" if tanh else "")
            yield Sample(name, (make(*shape, scale=3.0),), {"tanh": tanh})
    yield Sample("large", (make(4, 65, scale=200.0),))
    yield Sample("large tanh", (make(4, 65, scale=200.0),), {"tanh": True})
    yield Sample("small", (make(4, 65, scale=1e-3),))
    yield Sample("negative tail", (make(4, 129, scale=1.0, shift=-5.0),))
    yield Sample("scalar", (make(shift=3.0),))
    yield Sample("strided", (make(6, 64).t(),))
    yield Sample("sliced rows", (make(8, 200)[:, 20:84],), {"tanh": True})
    yield Sample("empty", (make(0, 16),))


def _bias_samples(make: Make) -> Iterator[Sample]:
    for rows, n in ((1, 384), (3, 7), (5, 130), (16, 1536)):
        for tanh in (False, True):
            name = f"{rows}x{n}" + (" tanh" if tanh else "")
            yield Sample(name, (make(rows, n, scale=2.0), make(n)), {"tanh": tanh})
    yield Sample("3-D", (make(2, 3, 33), make(33)))
    yield Sample("vector", (make(19), make(19)))
    yield Sample("strided", (make(6, 64).t(), make(6)))
    yield Sample("strided bias", (make(3, 32), make(32, 2)[:, 0]))
    yield Sample("empty", (make(0, 16), make(16)))


def _workloads(make: Make) -> Iterator[Sample]:
    yield Sample("4096x4096", (make(4096, 4096),))
    yield Sample("4096x4096 tanh", (make(4096, 4096),), {"tanh": True})
    yield Sample("1x1536", (make(1, 1536),))


def _bias_workloads(make: Make) -> Iterator[Sample]:
    yield Sample("4096x4096", (make(4096, 4096), make(4096)))
    yield Sample("128x1536", (make(128, 1536), make(1536)))


_SOURCE = "Hendrycks, Gimpel, 2016"

CARD = _GELU.card(
    epilogue=lambda tanh=False: "gelu_tanh" if tanh else "gelu",
    kind=Kind.ACTIVATION,
    cost=_cost,
    samples=_samples,
    workloads=_workloads,
    patterns=(
        Pattern("gelu(x)", lambda x: F.gelu(x), {"x": ("B", "N")}),
        Pattern(
            "gelu(x, tanh=True)",
            lambda x: F.gelu(x, approximate="tanh"),
            {"x": ("B", "N")},
            fixed={"tanh": True},
        ),
    ),
    schemas=declare(SIGNATURE, "gelu", "gelu_backward", bound=True),
    source=_SOURCE,
)

BIAS_CARD = _BIAS_GELU.card(
    kind=Kind.ACTIVATION,
    cost=_cost,
    samples=_bias_samples,
    workloads=_bias_workloads,
    patterns=(
        Pattern("bias_gelu(x, bias)", lambda x, bias: F.gelu(x + bias), {"x": ("B", "N"), "bias": ("N",)}),
        Pattern(
            "bias_gelu(x, bias, tanh=True)",
            lambda x, bias: F.gelu(x + bias, approximate="tanh"),
            {"x": ("B", "N"), "bias": ("N",)},
            fixed={"tanh": True},
        ),
    ),
    source=_SOURCE,
)
