"""Experts: the gated feed-forward layers of a mixture, of which each token has a few."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from opsmith.call.arguments import check_device, check_fit, check_number
from opsmith.call.dispatch import compiling, native, needs_grad
from opsmith.call.fast import direct
from opsmith.call.layouts import as_rows, nbytes
from opsmith.call.run import Call
from opsmith.call.signature import Dtype, Gradient, Input, Made, Number, Output, Saved, Signature, Slope
from opsmith.kernels import libraries
from opsmith.operator import Cost, GradientCost, Kind, Make, Sample, Supports
from opsmith.ops.embedding import IdError
from opsmith.ops.experts.backward import experts_backward
from opsmith.ops.experts.middle import ACTIVATIONS, middle
from opsmith.ops.packed_linear import definition as multiply
from opsmith.ops.packed_linear.formats import FORMATS, Scales
from opsmith.ops.packed_linear.module import PackedExperts, PackedLinear
from opsmith.ops.pages import has_values

_OP = "experts"

SIGNATURE = Signature(
    _OP,
    (
        *(
            Input("x", "T D"),
            Input("gate_up", "E J D"),
            Input("down", "E D I"),
            Input("ids", "T K", torch.int64),
        ),
        *(Input("weights", "T K", Dtype.FIRST_OR_FLOAT32), Input("gate_up_bias", "E J", optional=True)),
        *(Input("down_bias", "E D", optional=True), Number("activation", int), Number("limit", float)),
    ),
    (Output("y", "T D"),),
    gradient=Gradient(
        "experts_backward",
        (
            *(Slope("y"), Saved("x"), Saved("gate_up"), Saved("down"), Saved("ids"), Saved("weights")),
            *(Saved("gate_up_bias"), Saved("down_bias"), Saved("activation"), Saved("limit")),
        ),
        tuple(map(Made, ("x", "gate_up", "down", "weights", "gate_up_bias", "down_bias"))),
    ),
)


_WEIGHT = ("", "_scale", "_zero", "_outer")
_FORM = ("_bits", "_group", "_scales")
PACKED = Signature(
    "experts_packed",
    (
        Input("x", "T D"),
        *(
            Input(f"{name}{part}", "... N", torch.uint8, optional=bool(part))
            for name in ("gate_up", "down")
            for part in _WEIGHT
        ),
        *SIGNATURE.arguments[3:7],
        Number("hidden", int),
        *(Number(f"{name}{part}", int) for name in ("gate_up", "down") for part in _FORM),
        *SIGNATURE.arguments[7:],
    ),
    (Output("y", "T D"),),
)


def experts(
    x: Tensor,
    gate_up: Tensor | Sequence[PackedLinear],
    down: Tensor | Sequence[PackedLinear],
    ids: Tensor,
    weights: Tensor,
    *,
    activation: str = "silu",
    bias: tuple[Tensor, Tensor] | None = None,
    limit: float | None = None,
) -> Tensor:
    """Sum the gated feed-forward layers that each token was sent to, reading the weights of no others.

    `y[t] = sum_j weights[t, j] * down[e] @ (act(gate) * up)` with `e = ids[t, j]`, the gate the first I rows of
    `gate_up[e] @ x[t]`, up the last I. Sums are float32, and rounded once.

    >>> gate_up, down = torch.randn(8, 2 * 48, 64), torch.randn(8, 64, 48)
    >>> ids, weights = moe_route(torch.randn(5, 8), 2)
    >>> experts(torch.randn(5, 64), gate_up, down, ids, weights).shape
    torch.Size([5, 64])

    Args:
        x: [T, D], float32, bfloat16 or float16 (float64 through PyTorch).
        gate_up: [E, 2I, D] in x's dtype; each expert's rows or its columns contiguous, else it is copied. Or packed, a
            `PackedExperts`, whose weights get no gradient; E `PackedLinear` are put together at each call.
        down: [E, D, I], or packed, likewise.
        ids: [T, k], int32 or int64, each in [0, E).
        weights: [T, k] in x's dtype or float32.
        activation: "silu", "gelu", "gelu_tanh"; or "swiglu_oss", GPT-OSS's `(up + 1) * gate * sigmoid(1.702 gate)`, for
            which the rows of `gate_up` take turns: gate, up, gate, up.
        bias: of both products, [E, 2I] and [E, D] in x's dtype.
        limit: the gate is at most this, and up between minus this and this.

    Raises:
        IdError: (an IndexError and a ValueError) an id is outside [0, E); nothing is read out of range.
        TypeError, ValueError: for a wrong dtype, shape, device or activation.

    Source: Shazeer et al., "Outrageously Large Neural Networks", 2017; Gale et al., "MegaBlocks", 2023.
    """
    code = ACTIVATIONS.get(activation, repr(activation)) if isinstance(activation, str) else repr(activation)
    most = math.inf if limit is None else limit
    first, last = _biases(bias)
    if not isinstance(gate_up, Tensor) or not isinstance(down, Tensor):
        packed = _together(x, gate_up, down)
        given = (*packed[0].packed, *packed[1].packed, ids, weights, first, last, packed[1].in_features)
        forms = [n for one in packed for n in (one.bits, one.group_size, int(FORMATS[one.format].scales))]
        call = _PACKED.compiled if compiling() else _PACKED.fast.call
        return call(x, *given, *forms, code, most, None)  # type: ignore[no-any-return]
    call = _CALL.compiled if compiling() else _CALL.fast.call
    return call(x, gate_up, down, ids, weights, first, last, code, most, None)  # type: ignore[no-any-return]


def _biases(bias: Any) -> tuple[Any, Any]:
    if bias is None:
        return None, None
    if not isinstance(bias, tuple | list) or len(bias) != 2:
        got = f"{len(bias)} of them" if isinstance(bias, tuple | list) else type(bias).__name__
        raise TypeError(f"{_OP}: bias must be two tensors, of gate_up [E, 2I] and of down [E, D], got {got}")
    return bias[0], bias[1]


def definition(x: Tensor, *given: Any) -> Tensor:
    """The definition, in plain PyTorch, of the kernel's arguments."""
    gate_up, down, ids, weights, gate_up_bias, down_bias, activation, limit = given
    # Taken apart at once, so that backward puts the gradients together at once.
    parts: list[Any] = [
        [None] * len(down) if t is None else t.unbind() for t in (gate_up, down, gate_up_bias, down_bias)
    ]

    def expert(e: int, rows: Tensor) -> Tensor:
        first, last, first_bias, last_bias = (part[e] for part in parts)
        return F.linear(middle(F.linear(rows, first, first_bias), activation, limit), last, last_bias)

    return _summed(x, ids, weights, len(down), expert)


def _summed(x: Tensor, ids: Tensor, weights: Tensor, count: int, expert: Any) -> Tensor:
    """What experts give, by weight: each its own tokens; or, where no values are known of them, each all."""
    y = torch.zeros_like(x, memory_format=torch.contiguous_format)
    if ids.numel() and has_values(ids, x) and not torch._C._are_functorch_transforms_active():
        check_ids(ids, count)
        for e in ids.unique().tolist():
            token, place = (ids == e).nonzero(as_tuple=True)
            y = y.index_add(0, token, (expert(e, x[token]) * weights[token, place, None]).to(x.dtype))
        return y
    for e in range(count):
        y = y + expert(e, x) * (weights * (ids == e)).sum(1, keepdim=True)
    return y.to(x.dtype)


def check_ids(ids: Tensor, count: int) -> None:
    """Refuse ids of experts that are not there."""
    bad = ((ids < 0) | (ids >= count)).nonzero()
    if len(bad):
        at = tuple(bad[0].tolist())
        raise IdError(f"{_OP}: ids must be in [0, {count}), the experts, got {int(ids[at])} at position {at}")


def _check_routing(x: Any, ids: Any, weights: Any, activation: Any, limit: Any) -> None:
    routed = ("ids", ids, "T k", torch.int64, torch.int32), ("weights", weights, "T k", None, torch.float32)
    check_fit(_OP, ("x", x, "T D"), *routed)
    if isinstance(activation, str):
        raise ValueError(f"{_OP}: activation must be one of {', '.join(ACTIVATIONS)}, got {activation}")
    check_number(_OP, "limit", limit)
    if not limit > 0:
        raise ValueError(f"{_OP}: limit must be above 0, got {limit}")


class _Experts(Call):
    """Weights may be transposed; ids have to be experts; gradients are written in Python."""

    def check(self, values: Sequence[Any]) -> None:
        x, gate_up, down, ids, weights, gate_up_bias, down_bias, activation, limit = values
        _check_routing(x, ids, weights, activation, limit)
        biases = ("bias[1]", down_bias, "E D"), ("bias[0]", gate_up_bias, "E 2I")
        given = (bias for bias in biases if bias[1] is not None)
        check_fit(_OP, ("x", x, "T D"), ("down", down, "E D I"), ("gate_up", gate_up, "E 2I D"), *given)
        if gate_up.shape[1] != 2 * down.shape[2]:
            raise ValueError(
                f"{_OP}: gate_up must have {2 * down.shape[2]} rows an expert, two for each of down's columns, "
                f"got {tuple(gate_up.shape)}"
            )

    def supported(self, values: Sequence[Any], *more: str) -> Supports:
        return native(values[0], _OP)  # gradients are written in Python

    def explain(self, values: Sequence[Any]) -> None:
        known = self.named(values)
        check_ids(known["ids"], len(known["down"]))

    def taken(self, of: Any, t: Tensor | None) -> Tensor | None:
        if t is None:
            return None
        if of.name in ("gate_up", "down"):
            return t if 1 in t.stride()[1:] else t.contiguous()
        return as_rows(t) if t.dim() == 2 else t


def _together(x: Any, *weights: Any) -> list[PackedExperts]:
    """Packed weights in one piece each, of sizes that belong together."""
    for name, one in zip(("gate_up", "down"), weights, strict=True):
        if isinstance(one, Tensor) or not isinstance(one, Sequence | torch.nn.Module):
            raise TypeError(f"{_OP}: {name} must be packed as the other weight is, got {type(one).__name__}")
    found = [one if isinstance(one, PackedExperts) else PackedExperts.of(one, len(one)) for one in weights]
    first, last = found
    got = len(first), first.in_features, first.out_features
    if got != (wanted := (len(last), last.out_features, 2 * last.in_features)):
        raise ValueError(f"{_OP}: gate_up must be {wanted}, E, D and 2I, as down is, got {got}")
    if isinstance(x, Tensor) and x.shape[-1:] != (first.in_features,):
        raise ValueError(f"{_OP}: x must have shape [T, {first.in_features}], got {tuple(x.shape)}")
    return found


def packed_definition(x: Tensor, *given: Any) -> Tensor:
    """The same of packed weights, in plain PyTorch."""
    ids, weights, *biases, _, b1, g1, s1, b2, g2, s2, activation, limit = given[8:]

    def product(rows: Tensor, e: int, parts: Any, bias: Any, *form: int) -> Tensor:
        scale, zero, outer, bias = (None if t is None else t[e] for t in (*parts[1:], bias))
        return multiply(rows, parts[0][e], scale, zero, bias, outer, *form)

    def expert(e: int, rows: Tensor) -> Tensor:
        between = middle(product(rows, e, given[:4], biases[0], b1, g1, s1), activation, limit)
        return product(between, e, given[4:8], biases[1], b2, g2, s2)

    return _summed(x, ids, weights, len(given[4]), expert)


class _Packed(_Experts):
    """What PackedExperts hold: their buffers, and what these mean."""

    def check(self, values: Sequence[Any]) -> None:
        x, down, (ids, weights, *biases, hidden) = values[0], values[5], values[9:14]
        _check_routing(x, ids, weights, *values[-2:])
        for t in values[1:9]:
            if t is not None:
                check_device(_OP, t, x, "the packed weight")
        for name, t, n in zip(("bias[0]", "bias[1]"), biases, (2 * hidden, x.shape[1]), strict=True):
            if t is not None:
                check_fit(_OP, ("x", x, "T D"), (name, t, "E N"))
                if t.shape != (len(down), n):
                    raise ValueError(f"{_OP}: {name} must have shape {(len(down), n)}, got {tuple(t.shape)}")
        if Scales.DYNAMIC in (values[16], values[19]) and needs_grad(x):
            raise ValueError(f"{_OP}: rounding x has no gradient; use torch.no_grad(), or format='int8'")

    def supported(self, values: Sequence[Any], *more: str) -> Supports:
        return native(values[0], "experts_packed") if values[0].is_cpu else "packed they have no kernel there"

    def taken(self, of: Any, t: Tensor | None) -> Tensor | None:
        return t if of.sizes[:1] == ("...",) else super().taken(of, t)


_CALL = _Experts(
    SIGNATURE,
    experts,
    definition,
    converted={
        "gate_up_bias": lambda bias: _biases(bias)[0],
        "down_bias": lambda bias: _biases(bias)[1],
        "activation": lambda activation: ACTIVATIONS[activation],
        "limit": lambda limit: math.inf if limit is None else limit,
    },
)


def _cost(x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor, **_: Any) -> Cost:
    """Of as many experts as there are ids, or all."""
    visited = min(ids.numel(), len(down))
    each = (gate_up[:1].numel() + down[:1].numel()) * x.element_size()
    products = 6.0 * ids.numel() * down.shape[1] * down.shape[2]
    return Cost(products + 20.0 * ids.numel() * down.shape[2], nbytes(x, x, ids, weights) + visited * each)


def _entry(*given: Any, **rest: Any) -> Cost:
    """The entry of the gradients: five products for the forward's two, of which it repeats one."""
    _, x, gate_up, down, ids, weights, *_ = given
    forward = _cost(x, gate_up, down, ids, weights)
    return Cost(2.5 * forward.flops, forward.min_bytes + nbytes(*(t for t in rest.values() if t is not None)))


def _samples(make: Make) -> Iterator[Sample]:
    def sized(t: int, k: int, e: int, d: int, i: int) -> tuple[Tensor, ...]:
        return (
            make(t, d),
            make(e, 2 * i, d, scale=d**-0.5),
            make(e, d, i, scale=i**-0.5),
            make.ids(t, k, high=e),
            make(t, k).softmax(-1),
        )

    sizes = (1, 1, 1, 1, 1), (1, 2, 4, 33, 7), (5, 3, 9, 40, 19), (40, 2, 3, 70, 33), (3, 2, 4, 530, 65)
    for t, k, e, d, i in sizes:
        yield Sample(f"{t}x{d}, {k} of {e} of {i}", sized(t, k, e, d, i))
    x, gate_up, down, ids, weights = sized(21, 2, 3, 34, 17)
    for activation in ACTIVATIONS:
        for limit in (None, 0.7):
            options = {"activation": activation, "limit": limit}
            yield Sample(f"{activation}, limit {limit}", (x, gate_up, down, ids, weights), options)
    wide = weights if make.dtype == torch.float64 else weights.float()
    yield Sample("float32 weights, int32 ids", (x, gate_up, down, ids.int(), wide))
    one = sized(13, 2, 4, 48, 20)
    yield Sample("an expert twice", (*one[:3], one[3][:, :1].expand(-1, 2), one[4]))

    def turned(*weights: Tensor) -> list[Tensor]:
        return [t.transpose(1, 2).contiguous().transpose(1, 2) for t in weights]

    options = {"activation": "swiglu_oss"}
    yield Sample("transposed", (x, *turned(gate_up, down), ids, weights), options)
    few = sized(7, 2, 4, 530, 65)
    yield Sample("transposed, few tokens", (few[0], *turned(*few[1:3]), *few[3:]), options)
    yield Sample("strided", (make(34, 21).t(), gate_up, down, make.ids(2, 21, high=3).t(), make(2, 21).t()))
    yield Sample("empty", (x[:0], gate_up, down, ids[:0], weights[:0]))


def _workloads(make: Make) -> Iterator[Sample]:
    gate_up, down = make(64, 2048, 2048, scale=0.02), make(64, 2048, 1024, scale=0.03)
    for t in (1, 4, 512):
        ids = make(t, 64).topk(8).indices
        args = make(t, 2048), gate_up, down, ids, make(t, 8).softmax(-1)
        yield Sample(f"{t}x2048, 8 of 64 of 1024", args)


_PACKED = _Packed(PACKED, experts, packed_definition)


def _promised(x: Any, gate_up: Any, down: Any, ids: Any, weights: Tensor, **more: Any) -> bool:
    """Not infinite weights of tokens, multiplied before sums or after; nor the NaN of tokens sent to nobody."""
    return bool(weights.isfinite().all()) and (ids.numel() > 0 or bool(x.isfinite().all()))


CARD = _CALL.card(
    kind=Kind.MATMUL,
    cost=_cost,
    samples=_samples,
    workloads=_workloads,
    # No model writes this as plain PyTorch without a loop: modules of transformers are handed over whole.
    entries={"experts_backward": _entry},
    gradient=GradientCost(flops=2.5, bytes=3.0),
    domain=_promised,
    schemas=(*SIGNATURE.schemas(), *PACKED.schemas()),
    source="Shazeer et al., 2017; Gale et al., 2023",
)

libraries.offer(_OP, _OP, "experts_packed")
direct.declare(SIGNATURE)
direct.declare(PACKED)
_LIBRARY = torch.library.Library("opsmith", "IMPL")
for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("experts_backward", experts_backward, _key)
