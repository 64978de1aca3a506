"""Gated activations: the SiLU or GELU of one half of a feed-forward layer, times the other half."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from opsmith.call.dispatch import compiling
from opsmith.call.layouts import nbytes
from opsmith.call.run import Call, declare
from opsmith.call.signature import Gradient, Input, Made, Number, Output, Saved, Signature, Slope
from opsmith.operator import Cost, Kind, Make, Pattern, Sample

SILU, GELU, GELU_TANH = 0, 1, 2
_CURVES: tuple[Callable[[Tensor], Tensor], ...] = (
    torch._C._nn.silu,  # what F.silu calls, without its wrapper
    F.gelu,
    partial(F.gelu, approximate="tanh"),
)

SIGNATURE = Signature(
    "gated",
    (
        Input("gate", "... I"),
        Input("up", "... I", optional=True),
        Number("activation", int, within=(SILU, GELU_TANH)),
    ),
    (Output("y", "... I", halved_without="up", onto=("gate", "up")),),
    gradient=Gradient(
        "gated_backward",
        (Slope("y"), Saved("gate"), Saved("up"), Saved("activation")),
        (Made("gate", optional=False), Made("up", always=True)),
    ),
)


def silu_mul(gate: Tensor, up: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """The gated SiLU (SwiGLU's middle) in one pass over memory.

    `y = gate * sigmoid(gate) * up`, rounded once.

    >>> silu_mul(torch.randn(2, 128, 11008), torch.randn(2, 128, 11008)).shape
    torch.Size([2, 128, 11008])
    >>> silu_mul(torch.randn(2, 128, 22016)).shape   # gate and up side by side, as one matmul writes them
    torch.Size([2, 128, 11008])

    Args:
        gate: [..., I], float32, bfloat16 or float16 (float64 through PyTorch); without `up` [..., 2I], the first
            half of the last dimension the gate, the second half what it multiplies.
        up: a tensor like gate.
        out: [..., I] in gate's dtype to write into; gate or up itself is allowed when no gradient is needed.

    Raises:
        TypeError, ValueError: for a wrong dtype, shape or device.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    return (_SILU.compiled if compiling() else _SILU.fast.call)(gate, up, SILU, out)  # type: ignore[no-any-return]


def gelu_mul(
    gate: Tensor, up: Tensor | None = None, *, tanh: bool = False, out: Tensor | None = None
) -> Tensor:
    """The gated GELU (GEGLU's middle) in one pass over memory.

    `y = gelu(gate) * up`, rounded once; `gelu` as in `opsmith.ops.gelu`.

    >>> gelu_mul(torch.randn(2, 128, 11008), torch.randn(2, 128, 11008), tanh=True).shape
    torch.Size([2, 128, 11008])

    Args:
        gate: [..., I], float32, bfloat16 or float16 (float64 through PyTorch); without `up` [..., 2I], the first
            half of the last dimension the gate, the second half what it multiplies.
        up: a tensor like gate.
        tanh: the approximation that Gemma was trained with.
        out: [..., I] in gate's dtype to write into; gate or up itself is allowed when no gradient is needed.

    Raises:
        TypeError, ValueError: for a wrong dtype, shape or device.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    curve = GELU_TANH if tanh else GELU
    return (_GELU.compiled if compiling() else _GELU.fast.call)(gate, up, curve, out)  # type: ignore[no-any-return]


def definition(gate: Tensor, up: Tensor | None, curve: int) -> Tensor:
    """The definition of both, in plain PyTorch."""
    if up is None:
        gate, up = gate.chunk(2, -1)
    return _CURVES[curve](gate) * up


class _Gated(Call):
    """Without `up`, the gate holds both."""

    def check(self, values: Sequence[Any]) -> None:
        super().check(values)
        gate, up, _ = values
        if up is None and gate.shape[-1] % 2:
            raise ValueError(
                f"{self.op}: without up, gate must hold both halves in a last dimension of even size, "
                f"got shape {tuple(gate.shape)}"
            )

    def apart(self, values: Sequence[Any]) -> Sequence[str]:
        return ("...",) if values[1] is None else ("...", "I")

    def check_out(self, values: Sequence[Any], out: Any) -> None:
        gate, up, activation = values
        super().check_out((*(gate.chunk(2, -1) if up is None else (gate, up)), activation), out)


_SILU = _Gated(SIGNATURE, silu_mul, definition, converted={"activation": SILU})
_GELU = _Gated(
    SIGNATURE, gelu_mul, definition, converted={"activation": lambda tanh: GELU_TANH if tanh else GELU}
)

# The exponential, the division or the polynomial, and the products, as a fused kernel computes them.
_FLOPS = 20.0


def _cost(gate: Tensor, up: Tensor | None = None, **options: Any) -> Cost:
    n = gate.numel() if up is not None else gate.numel() // 2
    return Cost(_FLOPS * n, nbytes(gate, up) + n * gate.element_size())


def _samples(make: Make, **options: Any) -> Iterator[Sample]:
    for shape in ((384,), (3, 7), (9, 33), (2, 5, 130), (16, 1536)):
        yield Sample("x".join(map(str, shape)), (make(*shape, scale=3.0), make(*shape)), options)
    for shape in ((14,), (5, 66), (2, 3, 1538)):
        yield Sample("packed " + "x".join(map(str, shape)), (make(*shape, scale=2.0),), options)
    yield Sample("large", (make(4, 65, scale=200.0), make(4, 65)), options)
    yield Sample("small", (make(4, 65, scale=1e-3), make(4, 65)), options)
    yield Sample("negative tail", (make(4, 129, scale=0.5, shift=-8.0), make(4, 129)), options)
    yield Sample("strided", (make(6, 64).t(), make(64, 6)), options)
    yield Sample("halves", tuple(make(3, 4, 80).chunk(2, -1)), options)
    yield Sample("packed, sliced rows", (make(8, 200)[:, 20:84],), options)
    yield Sample("empty", (make(0, 16), make(0, 16)), options)


def _gelu_samples(make: Make) -> Iterator[Sample]:
    yield from _samples(make)
    for sample in _samples(make, tanh=True):
        yield Sample(sample.name + " tanh", sample.args, sample.kwargs)


def _workloads(make: Make, **options: Any) -> Iterator[Sample]:
    yield Sample("4096x11008", (make(4096, 11008), make(4096, 11008)), options)
    yield Sample("4096x2x5504 packed", (make(4096, 11008),), options)
    yield Sample("1x11008", (make(1, 11008), make(1, 11008)), options)


_SOURCE = "Shazeer, 2020"
_SHAPES = {"gate": ("B", "N"), "up": ("B", "N")}


SILU_CARD = _SILU.card(
    kind=Kind.ACTIVATION,
    cost=_cost,
    samples=_samples,
    workloads=_workloads,
    patterns=(Pattern("silu_mul(gate, up)", lambda gate, up: F.silu(gate) * up, _SHAPES),),
    schemas=declare(SIGNATURE, bound=True),
    source=_SOURCE,
)

GELU_CARD = _GELU.card(
    kind=Kind.ACTIVATION,
    cost=_cost,
    samples=_gelu_samples,
    workloads=partial(_workloads, tanh=True),
    patterns=(
        Pattern("gelu_mul(gate, up)", lambda gate, up: F.gelu(gate) * up, _SHAPES),
        Pattern(
            "gelu_mul(gate, up, tanh=True)",
            lambda gate, up: F.gelu(gate, approximate="tanh") * up,
            _SHAPES,
            fixed={"tanh": True},
        ),
    ),
    source=_SOURCE,
)
