"""Sites that one operator can do together: queries and keys that are rotated, an output layer and its loss.

Whether together is faster is measured: a merged site keeps its parts, and where these are faster they run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Node

from opsmith.compiler.algebra.canon import arguments, op_name, shape_of
from opsmith.compiler.find.operands import Made, Operand, shape_of_operand
from opsmith.compiler.find.site import Site, check
from opsmith.operator import Operator

Cards = Mapping[str, Operator]
Disturbed = Callable[[Site], bool]


def pair(sites: list[Site], cards: Cards, disturbed: Disturbed) -> list[Site]:
    """Two ropes by one table as one `rope_qk`."""
    card = cards.get("rope_qk")
    result: list[Site] = []
    for site in sites:
        before = next((s for s in reversed(result) if s.card.name == "rope"), None)
        merged = None
        if card is not None and site.card.name == "rope" and before is not None:
            merged = _paired(card, before, site)
        if merged is None or before is None or check(merged) is not None or disturbed(merged):
            result.append(site)
        else:
            result[result.index(before)] = merged
    return result


def _paired(card: Operator, q: Site, k: Site) -> Site | None:
    settings = [{n: v for n, v in s.arguments.items() if n != "x"} for s in (q, k)]
    first = min(q.root, k.root)
    if settings[0] != settings[1] or q.after != k.after or any(not n < first for n in (*q.inputs, *k.inputs)):
        return None
    call = {"q": q.arguments["x"], "k": k.arguments["x"], **settings[0]}
    outputs = (q.root, k.root)
    return Site(card, q.pattern, call, outputs, q.region | k.region, q.after, (q, k))


def with_output_layer(sites: list[Site], cards: Cards, disturbed: Disturbed) -> list[Site]:
    """Losses of a linear layer's output with the layer, where nothing else needs the logits."""
    by_root = {s.root: s for s in sites}
    card = cards.get("linear_cross_entropy")
    gone: list[Site] = []
    result: list[Site] = []
    for site in sites:
        merged = None
        if site.card.name == "cross_entropy":
            logits, chain, slices = _unwrapped(site.arguments["logits"])
            layer = by_root.get(logits) if isinstance(logits, Node) else None
            if card is not None and layer is not None and layer.card.name == "linear":
                merged = _with_layer(card, site, layer, chain, slices)
            if merged is not None and (check(merged) is not None or disturbed(merged)):
                merged = None
            if merged is not None and layer is not None:
                gone.append(layer)
            _spare_cast(site, logits, slices)
        result.append(site if merged is None else merged)
    return [s for s in result if not any(s is g for g in gone)]


_VIEWS = ("aten::view", "aten::reshape", "aten::_unsafe_view", "aten::flatten")
_COPIES = ("aten::to", "aten::_to_copy", "aten::contiguous", "aten::clone", "aten::type_as")


def _unwrapped(value: Any) -> tuple[Any, list[Node], list[tuple[Any, ...]]]:
    """What logits are rows of: the node behind casts, copies, views and slices, these nodes, and the slices."""
    chain: list[Node] = []
    slices: list[tuple[Any, ...]] = []
    viewed = isinstance(value, Node)
    while isinstance(value, Node):
        name, source = op_name(value), value.args[0] if value.args else None
        if not isinstance(source, Node):
            break
        if name == "aten::slice":
            given = arguments(value)
            dim = int(given["dim"]) % len(shape_of(source))
            more = (dim, given["start"], given["end"], given["step"])
            if dim == len(shape_of(source)) - 1 or any(isinstance(v, Node) for v in more):
                break
            slices.insert(0, more)
        elif name in _VIEWS:
            if shape_of(source)[-1:] != shape_of(value)[-1:] or slices:
                break
        elif name not in _COPIES or not source.meta["val"].is_floating_point():
            break
        chain.append(value)
        value = source
    return (value, chain, slices) if viewed else (value, [], [])


def _rows(value: Operand, slices: list[tuple[Any, ...]]) -> Operand:
    """The slices of a value as rows."""
    for more in slices:
        shape = list(shape_of_operand(value))
        shape[more[0]] = -1  # not known here, and not needed
        value = Made(torch.ops.aten.slice.Tensor, (value, *more), tuple(shape))
    shape = list(shape_of_operand(value))
    if len(shape) == 2 and not slices:
        return value
    return Made(torch.ops.aten.reshape.default, (value, [-1, shape[-1]]), (-1, shape[-1]))


def _dtype_of(site: Site, source: Any) -> dict[str, Any]:
    """The loss's dtype, where it is not that of what it is computed from."""
    dtype = site.root.meta["val"].dtype
    return {} if dtype == source.meta["val"].dtype else {"dtype": dtype}


def _with_layer(
    card: Operator, site: Site, layer: Site, chain: list[Node], slices: list[tuple[Any, ...]]
) -> Site | None:
    inner = {*chain, *site.region}
    if any(not set(node.users) <= inner for node in (layer.root, *chain)):
        return None
    if layer.after or not set(layer.arguments) <= {"x", "weight", "bias"}:
        return None
    rest = {n: v for n, v in site.arguments.items() if n != "logits"}
    call = {
        "hidden": _rows(layer.arguments["x"], slices),
        **{n: v for n, v in layer.arguments.items() if n != "x"},
        **rest,
        **_dtype_of(site, layer.root),
    }
    return Site(card, site.pattern, call, site.outputs, inner | layer.region, (), (layer, site))


def _spare_cast(site: Site, logits: Any, slices: list[tuple[Any, ...]]) -> None:
    """Let the loss read narrow logits itself, where the model widens a copy of them first."""
    given = site.arguments["logits"]
    if not isinstance(logits, Node) or not isinstance(given, Node) or not _dtype_of(site, logits):
        return
    spared = Site(
        site.card,
        site.pattern,
        {**site.arguments, "logits": _rows(logits, slices), **_dtype_of(site, logits)},
        site.outputs,
        site.region | set(_unwrapped(given)[1]),
    )
    if check(spared) is None:
        site.arguments, site.region = spared.arguments, spared.region
