"""Experts: the gated feed-forward layers of a mixture, of which each token has a few."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from opsmith.call.arguments import check_fit, check_number
from opsmith.call.dispatch import compiling, native
from opsmith.call.fast import direct
from opsmith.call.layouts import as_rows, nbytes
from opsmith.call.run import Call
from opsmith.call.signature import Dtype, Gradient, Input, Made, Number, Output, Saved, Signature, Slope
from opsmith.kernels import libraries
from opsmith.operator import Cost, GradientCost, Kind, Make, Sample, Supports
from opsmith.ops.embedding import IdError
from opsmith.ops.experts.backward import experts_backward
from opsmith.ops.experts.middle import ACTIVATIONS, middle
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


def experts(
    x: torch.Tensor,
    gate_up: torch.Tensor | Sequence[torch.nn.Module],
    down: torch.Tensor | Sequence[torch.nn.Module],
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    activation: str = "silu",
    bias: tuple[torch.Tensor, torch.Tensor] | None = None,
    limit: float | None = None,
) -> torch.Tensor:
    """Sum the gated feed-forward layers that each token was sent to, reading the weights of no others.

    `y[t] = sum_j weights[t, j] * down[e] @ (act(gate) * up)` with `e = ids[t, j]`, the gate the first I rows of
    `gate_up[e] @ x[t]`, up the last I. Sums are float32, and rounded once.

    >>> gate_up, down = torch.randn(8, 2 * 48, 64), torch.randn(8, 64, 48)
    >>> ids, weights = moe_route(torch.randn(5, 8), 2)
    >>> experts(torch.randn(5, 64), gate_up, down, ids, weights).shape
    torch.Size([5, 64])

    Args:
        x: [T, D], float32, bfloat16 or float16 (float64 through PyTorch).
        gate_up: [E, 2I, D] in x's dtype; each expert's rows or its columns contiguous, else it is copied. Or packed:
            E modules `PackedLinear`, whose weights get no gradient.
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
    if not isinstance(gate_up, torch.Tensor) or not isinstance(down, torch.Tensor):
        return _packed(x, gate_up, down, ids, weights, first, last, code, most)
    call = _CALL.traced if compiling() else _CALL.fast.call
    return call(x, gate_up, down, ids, weights, first, last, code, most, None)  # type: ignore[no-any-return]


def _biases(bias: Any) -> tuple[Any, Any]:
    if bias is None:
        return None, None
    if not isinstance(bias, tuple | list) or len(bias) != 2:
        got = f"{len(bias)} of them" if isinstance(bias, tuple | list) else type(bias).__name__
        raise TypeError(f"{_OP}: bias must be two tensors, of gate_up [E, 2I] and of down [E, D], got {got}")
    return bias[0], bias[1]


def definition(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    activation: int,
    limit: float,
) -> torch.Tensor:
    """The definition, in plain PyTorch: expert by expert, or where no values are known token by token."""
    if ids.numel() and has_values(ids, x) and not torch._C._are_functorch_transforms_active():
        check_ids(ids, len(down))
        # Taken apart at once, so that backward puts the gradients together at once.
        parts = [
            [None] * len(down) if t is None else t.unbind() for t in (gate_up, down, gate_up_bias, down_bias)
        ]

        def expert(e: int, rows: torch.Tensor) -> torch.Tensor:
            first, last, first_bias, last_bias = (part[e] for part in parts)
            assert first is not None
            assert last is not None
            return F.linear(middle(F.linear(rows, first, first_bias), activation, limit), last, last_bias)

        return _by_expert(x, ids, weights, expert)
    ids = ids.long()
    between = torch.einsum("tkjd,td->tkj", gate_up[ids], x)
    if gate_up_bias is not None:
        between = between + gate_up_bias[ids]
    y = torch.einsum("tkdi,tki->tkd", down[ids], middle(between, activation, limit))
    if down_bias is not None:
        y = y + down_bias[ids]
    return (y * weights[..., None]).sum(1).to(x.dtype)


def _by_expert(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, expert: Any) -> torch.Tensor:
    y = torch.zeros_like(x, memory_format=torch.contiguous_format)
    for e in ids.unique().tolist():
        token, place = (ids == e).nonzero(as_tuple=True)
        part = expert(e, x[token]) * weights[token, place, None]
        y = y.index_add(0, token, part.to(x.dtype))
    return y


def check_ids(ids: torch.Tensor, count: int) -> None:
    """Refuse ids of experts that are not there."""
    bad = ((ids < 0) | (ids >= count)).nonzero()
    if len(bad):
        at = tuple(bad[0].tolist())
        raise IdError(f"{_OP}: ids must be in [0, {count}), the experts, got {int(ids[at])} at position {at}")


def _check_routing(x: Any, ids: Any, weights: Any, activation: Any, limit: Any) -> None:
    wide = (None, torch.float32)
    check_fit(
        _OP,
        ("x", x, "T D"),
        ("ids", ids, "T k", torch.int64, torch.int32),
        ("weights", weights, "T k", *wide),
    )
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
        shapes = [("x", x, "T D"), ("down", down, "E D I"), ("gate_up", gate_up, "E 2I D")]
        if down_bias is not None:
            shapes.append(("bias[1]", down_bias, "E D"))
        if gate_up_bias is not None:
            shapes.append(("bias[0]", gate_up_bias, "E 2I"))
        check_fit(_OP, *shapes)
        if gate_up.shape[1] != 2 * down.shape[2]:
            raise ValueError(
                f"{_OP}: gate_up must have {2 * down.shape[2]} rows an expert, two for each of down's columns, "
                f"got {tuple(gate_up.shape)}"
            )

    def supported(self, values: Sequence[Any], *more: str) -> Supports:
        x = values[0]
        return native(x, _OP)  # gradients are written in Python

    def explain(self, values: Sequence[Any]) -> None:
        check_ids(values[3], len(values[2]))

    def taken(self, of: Any, t: torch.Tensor | None) -> torch.Tensor | None:
        if t is None:
            return None
        if of.name in ("gate_up", "down"):
            return t if 1 in t.stride()[1:] else t.contiguous()
        return as_rows(t) if t.dim() == 2 else t


def _packed(x: Any, gate_up: Any, down: Any, ids: Any, weights: Any, *rest: Any) -> torch.Tensor:
    """Experts whose weights are packed: each is two linear layers of its own."""
    first_bias, last_bias, activation, limit = rest
    _check_routing(x, ids, weights, activation, limit)
    count = len(down)
    for name, layers in (("gate_up", gate_up), ("down", down)):
        if isinstance(layers, torch.Tensor) or len(layers) != count or not count:
            got = "a tensor" if isinstance(layers, torch.Tensor) else f"{len(layers)} modules"
            raise TypeError(f"{_OP}: {name} must be {count} packed layers, as down is, got {got}")
    d, hidden = x.shape[1], down[0].in_features
    for name, layers, sizes in (("gate_up", gate_up, (d, 2 * hidden)), ("down", down, (hidden, d))):
        for e, layer in enumerate(layers):
            if (its := (layer.in_features, layer.out_features)) != sizes:
                raise ValueError(f"{_OP}: {name}[{e}] must be a layer of {sizes} features, got {its}")
    for name, t, n in (("bias[0]", first_bias, 2 * hidden), ("bias[1]", last_bias, d)):
        if t is not None:
            check_fit(_OP, ("x", x, "T D"), (name, t, "E N"))
            if t.shape != (count, n):
                raise ValueError(f"{_OP}: {name} must have shape {(count, n)}, got {tuple(t.shape)}")
    check_ids(ids, count)

    def expert(e: int, rows: torch.Tensor) -> torch.Tensor:
        between = gate_up[e](rows)
        y: torch.Tensor = down[e](
            middle(between if first_bias is None else between + first_bias[e], activation, limit)
        )
        return y if last_bias is None else y + last_bias[e]

    return _by_expert(x, ids, weights, expert)


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


def _cost(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    **_: Any,
) -> Cost:
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
    def sized(t: int, k: int, e: int, d: int, i: int) -> tuple[torch.Tensor, ...]:
        return (
            make(t, d),
            make(e, 2 * i, d, scale=d**-0.5),
            make(e, d, i, scale=i**-0.5),
            make.ids(t, k, high=e),
            make(t, k).softmax(-1),
        )

    for t, k, e, d, i in (
        (1, 1, 1, 1, 1),
        (1, 2, 4, 33, 7),
        (5, 3, 9, 40, 19),
        (40, 2, 3, 70, 33),
        (3, 2, 4, 530, 65),
    ):
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
    turned = (
        gate_up.transpose(1, 2).contiguous().transpose(1, 2),
        down.transpose(1, 2).contiguous().transpose(1, 2),
    )
    yield Sample("transposed", (x, *turned, ids, weights), {"activation": "swiglu_oss"})
    yield Sample("strided", (make(34, 21).t(), gate_up, down, make.ids(2, 21, high=3).t(), make(2, 21).t()))
    yield Sample("empty", (x[:0], gate_up, down, ids[:0], weights[:0]))


def _workloads(make: Make) -> Iterator[Sample]:
    gate_up, down = make(64, 2048, 2048, scale=0.02), make(64, 2048, 1024, scale=0.03)
    for t in (1, 4, 512):
        ids = make(t, 64).topk(8).indices
        yield Sample(
            f"{t}x2048, 8 of 64 of 1024", (make(t, 2048), gate_up, down, ids, make(t, 8).softmax(-1))
        )


CARD = _CALL.card(
    kind=Kind.MATMUL,
    cost=_cost,
    samples=_samples,
    workloads=_workloads,
    # No model writes this as plain PyTorch without a loop: modules of transformers are handed over whole.
    entries={"experts_backward": _entry},
    gradient=GradientCost(flops=2.5, bytes=3.0),
    schemas=SIGNATURE.schemas(),
    source="Shazeer et al., 2017; Gale et al., 2023",
)

libraries.offer(_OP, _OP)
direct.declare(SIGNATURE)
_LIBRARY = torch.library.Library("opsmith", "IMPL")
for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("experts_backward", experts_backward, _key)
