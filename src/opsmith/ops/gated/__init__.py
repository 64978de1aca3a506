"""Gated activations: the SiLU or GELU of one half of a feed-forward layer, times the other half."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from opsmith.call.common import (
    alike,
    as_rows,
    check_float,
    check_like,
    check_out,
    compiling,
    flat,
    flat_out,
    fresh,
    kernels,
    native,
    nbytes,
    needs_grad,
    recorded,
    short,
    small_node,
    soonest,
    writable,
)
from opsmith.kernels import calls, nodes
from opsmith.operator import Cost, Implementation, Kind, Make, Operator, Pattern, Sample, register

SILU, GELU, GELU_TANH = 0, 1, 2
_CURVES: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    torch._C._nn.silu,  # what F.silu calls, without its wrapper
    F.gelu,
    partial(F.gelu, approximate="tanh"),
)

# Where autograd records, PyTorch's nodes are faster up to 2^this times as many elements as else: ours are Python. GELU
# with the error function is oneDNN's there, whose set-up takes longer than a node of ours.
_NODES = {SILU: 2, GELU_TANH: 0}

_REFUSED = (
    RuntimeError,
    IndexError,
    AttributeError,
    TypeError,
    ValueError,
)  # by the kernel's binding, or by what is no such tensor


def silu_mul(
    gate: torch.Tensor, up: torch.Tensor | None = None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
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
    if out is None and not compiling():
        y = _at_once(gate, up, SILU)
        if y is not None:
            return y
    return _gated("silu_mul", gate, up, SILU, out)


def gelu_mul(
    gate: torch.Tensor, up: torch.Tensor | None = None, *, tanh: bool = False, out: torch.Tensor | None = None
) -> torch.Tensor:
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
    if out is None and not compiling():
        y = _at_once(gate, up, curve)
        if y is not None:
            return y
    return _gated("gelu_mul", gate, up, curve, out)


def silu_reference(gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    """The definition of `silu_mul`, in plain PyTorch."""
    return _reference(gate, up, SILU)


def gelu_reference(gate: torch.Tensor, up: torch.Tensor | None = None, *, tanh: bool = False) -> torch.Tensor:
    """The definition of `gelu_mul`, in plain PyTorch."""
    return _reference(gate, up, GELU_TANH if tanh else GELU)


def _reference(gate: torch.Tensor, up: torch.Tensor | None, curve: int) -> torch.Tensor:
    if up is None:
        gate, up = gate.chunk(2, -1)
    return _CURVES[curve](gate) * up


def _gated(
    op: str, gate: torch.Tensor, up: torch.Tensor | None, curve: int, out: torch.Tensor | None
) -> torch.Tensor:
    _check(op, gate, up, out)
    training = needs_grad(gate, up)
    if native(gate, *_KERNELS[: 1 + training]) is not True or (
        training and curve in _NODES and small_node(gate.numel() >> _NODES[curve])
    ):
        y = _reference(gate, up, curve)
    elif training:
        y = recorded(_Gated, gate, up, curve)
    elif out is None or writable(out):
        return _forward(gate, up, curve, out)
    else:
        y = _forward(gate, up, curve, None)
    return y if out is None else out.copy_(y)


def _check(op: str, gate: Any, up: Any, out: Any) -> None:
    check_float(op, gate, "gate")
    if up is None:
        if gate.shape[-1] % 2:
            raise ValueError(
                f"{op}: without up, gate must hold both halves in a last dimension of even size, "
                f"got shape {tuple(gate.shape)}"
            )
    elif not alike(up, gate, gate.shape):
        check_like(op, up, gate, "up", gate.shape, "the shape of gate", "gate")
        raise TypeError(
            f"{op}: up must be {short(gate.dtype)} like gate, got {short(up.dtype)}; cast it first"
        )
    if out is not None:
        gate, up = gate.chunk(2, -1) if up is None else (gate, up)
        check_out(op, out, gate, onto=("gate", "up"), gate=gate, up=up)


def _half(shape: torch.Size) -> torch.Size:
    return torch.Size((*shape[:-1], shape[-1] // 2))


def _at_once(gate: torch.Tensor, up: torch.Tensor | None, curve: int) -> torch.Tensor | None:
    """The kernel, whose binding refuses what does not fit; None for a refused call, or one in another form."""
    try:
        half = True if up is not None else gate.size(-1) // 2
        return calls.new_gated(gate, up, curve, y=half)  # type: ignore[no-any-return]
    except _REFUSED:  # the checks say why
        return None


def _forward(
    gate: torch.Tensor, up: torch.Tensor | None, curve: int, out: torch.Tensor | None
) -> torch.Tensor:
    y = out
    if y is None:
        y = fresh(gate) if up is not None else fresh(gate, _half(gate.shape))
    soonest(GATED)(*_flat(gate, up), curve, y=flat_out(y))
    return y


def _flat(gate: torch.Tensor, up: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Both as the kernel takes them: of one shape, which its binding holds them to."""
    if up is None:
        return flat(gate), None
    return (gate, up) if gate.is_contiguous() and up.is_contiguous() else (as_rows(gate), as_rows(up))


def _native_silu(
    gate: torch.Tensor, up: torch.Tensor | None = None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The kernel, without autograd."""
    return _forward(gate, up, SILU, out)


def _native_gelu(
    gate: torch.Tensor, up: torch.Tensor | None = None, *, tanh: bool = False, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The kernel, without autograd."""
    return _forward(gate, up, GELU_TANH if tanh else GELU, out)


class _Gated(torch.autograd.Function):
    """Backward computes the curve again from what came in: nothing but the inputs is kept."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor | None, curve: int) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        ctx.curve = curve
        return _forward(gate, up, curve, None)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        dgate, dup = fresh(gate), None if up is None else fresh(up)
        soonest(GATED_BACKWARD)(flat(dy), *_flat(gate, up), ctx.curve, dgate=dgate, dup=dup)
        return dgate, dup, None


# The exponential, the division or the polynomial, and the products, as a fused kernel computes them.
_FLOPS = 20.0


def _cost(gate: torch.Tensor, up: torch.Tensor | None = None, **options: Any) -> Cost:
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


def _supports(gate: torch.Tensor, *args: Any, **options: Any) -> bool | str:
    return native(gate, "gated")


SILU_CARD = register(
    Operator(
        name="silu_mul",
        kind=Kind.ACTIVATION,
        function=silu_mul,
        reference=silu_reference,
        cost=_cost,
        samples=_samples,
        workloads=_workloads,
        implementations=[*kernels(_native_silu, _supports), Implementation("eager", silu_reference)],
        patterns=(Pattern("silu_mul(gate, up)", lambda gate, up: F.silu(gate) * up, _SHAPES),),
        schemas=(
            "gated(Tensor gate, Tensor? up, int activation, *, Tensor(a!) y) -> ()",
            "gated_backward(Tensor dy, Tensor gate, Tensor? up, int activation, *, Tensor(a!) dgate, "
            "Tensor(b!)? dup=None) -> ()",
        ),
        onto=(("gate", "up"),),
        source=_SOURCE,
    )
)

GELU_CARD = register(
    Operator(
        name="gelu_mul",
        kind=Kind.ACTIVATION,
        function=gelu_mul,
        reference=gelu_reference,
        cost=_cost,
        samples=_gelu_samples,
        workloads=partial(_workloads, tanh=True),
        implementations=[*kernels(_native_gelu, _supports), Implementation("eager", gelu_reference)],
        patterns=(
            Pattern("gelu_mul(gate, up)", lambda gate, up: F.gelu(gate) * up, _SHAPES),
            Pattern(
                "gelu_mul(gate, up, tanh=True)",
                lambda gate, up: F.gelu(gate, approximate="tanh") * up,
                _SHAPES,
                fixed={"tanh": True},
            ),
        ),
        onto=(("gate", "up"),),
        source=_SOURCE,
    )
)

_KERNELS = ("gated", "gated_backward")  # the second one for gradients
nodes.declare("gated", always=("up",))
GATED = torch.ops.opsmith.gated.default
GATED_BACKWARD = torch.ops.opsmith.gated_backward.default
