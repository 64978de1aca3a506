"""Sites that take in their neighbors, and sites that one operator can do together.

A norm takes in the addition before it, a linear layer the activation behind it. Queries and keys are rotated by one
call, an output layer and its loss are another. Whether together is faster is measured: a merged site keeps its parts,
and where these are faster they run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from opsmith.compiler.algebra.canon import arguments, op_name, shape_of
from opsmith.compiler.find.operands import Made, Operand, nodes_in, shape_of_operand
from opsmith.compiler.find.site import Site, check
from opsmith.operator import Kind, MergedCalls, MergedChain, Operator

# Whether the operator accepts the call, and nothing changed in place is in the way.
Fits = Callable[[Site], bool]
Slices = list[tuple[Any, ...]]  # of some value, the first one first


def grow(sites: list[Site], cards: Mapping[str, Operator], disturbed: Callable[[Site], bool]) -> list[Site]:
    """Let sites take in what their operators can, and merge them as the cards say."""

    def fits(site: Site) -> bool:
        return check(site) is None and not disturbed(site)

    by_root = {s.root: s for s in sites}
    sites = [s for s in sites if not (s.card.epilogue and _absorbed(s, by_root, fits))]
    computed = set(by_root)  # what another site gives, which no second one gives too
    for site in sites:
        if site.card.kind is Kind.NORM and "residual" in inspect.signature(site.card.function).parameters:
            _absorb_residual(site, computed, fits)
            computed.update(site.outputs)
    sites = _pairs(_chains(sites, cards, fits), cards, fits)
    inside = {node for site in sites for node in site.region}
    for site in sites:
        if site.card.kind is Kind.MATMUL:
            _read_fewer_rows(site, inside, fits)
    return sites


def _absorb_residual(site: Site, computed: set[Node], fits: Fits) -> None:
    x = site.arguments.get("x")
    if not isinstance(x, Node) or op_name(x) != "aten::add" or "residual" in site.arguments or x in computed:
        return
    args = arguments(x)
    a, b = args["self"], args["other"]
    if not isinstance(a, Node) or not isinstance(b, Node) or args.get("alpha", 1) != 1:
        return
    if any((shape_of(n), n.meta["val"].dtype) != (shape_of(x), x.meta["val"].dtype) for n in (a, b)):
        return
    if any(x < node for name, v in site.arguments.items() if name != "x" for node in nodes_in(v)):
        return  # a weight computed after the addition: the call could not stand where its results are needed
    call = {**site.arguments, "x": a, "residual": b}
    _grow(site, fits, arguments=call, outputs=(site.root, x), region=site.region | {x})


def _grow(site: Site, fits: Fits, **larger: Any) -> bool:
    """Let a site be a larger one, where that fits."""
    grown = replace(site, **larger)
    if not fits(grown):
        return False
    site.arguments, site.outputs, site.region = grown.arguments, grown.outputs, grown.region
    return True


def _read_fewer_rows(site: Site, inside: set[Node], fits: Fits) -> None:
    """Multiply only the rows of a product that are read: the logits of the last position, where nobody asks for others.

    Rows of a product are the product of rows.
    """
    while (
        "residual" not in site.arguments and not site.after and len(site.root.users) == len(site.outputs) == 1
    ):
        x, (user,) = site.arguments.get("x"), site.root.users
        rank = len(shape_of(site.root))
        fewer = op_name(user) in ("aten::slice", "aten::select")
        if not fewer or x is None or len(shape_of_operand(x)) != rank:
            return
        given = arguments(user)
        axis, more = int(given["dim"]) % rank, [v for n, v in given.items() if n not in ("self", "dim")]
        if axis == rank - 1 or user in inside or any(isinstance(v, Node) for v in more):
            return  # columns; or what a site behind reads as rows of all; or rows not known before a call
        sizes = (*shape_of(user)[:-1], *shape_of_operand(x)[-1:])
        call = {**site.arguments, "x": Made(user.target, (x, axis, *more), sizes)}  # type: ignore[arg-type]
        if not _grow(site, fits, arguments=call, outputs=(user,), region=site.region | {user}):
            return


def _absorbed(site: Site, by_root: Mapping[Node, Site], fits: Fits) -> bool:
    """Whether an activation went into the site whose result it is of."""
    assert site.card.epilogue is not None
    source = by_root.get(site.arguments.get("x"))  # type: ignore[arg-type]
    if source is None or "activation" not in inspect.signature(source.card.function).parameters:
        return False
    if "activation" in source.arguments or not set(source.root.users) <= site.region:
        return False
    activation = site.card.epilogue(**{n: v for n, v in site.arguments.items() if n != "x"})
    call, region = {**source.arguments, "activation": activation}, source.region | site.region
    return activation is not None and _grow(source, fits, arguments=call, outputs=site.outputs, region=region)


def _pairs(sites: list[Site], cards: Mapping[str, Operator], fits: Fits) -> list[Site]:
    """Two calls of one operator, such as ropes by one table, as one."""
    merging = {c.merges.of: (c, c.merges) for c in cards.values() if isinstance(c.merges, MergedCalls)}
    result: list[Site] = []
    for site in sites:
        how = merging.get(site.card.name)
        before = next((s for s in reversed(result) if s.card is site.card), None)
        merged = _paired(*how, before, site) if how and before else None
        if before and merged and fits(merged):
            result[result.index(before)] = merged
        else:
            result.append(site)
    return result


def _paired(card: Operator, how: MergedCalls, first: Site, second: Site) -> Site | None:
    settings = [{n: v for n, v in s.arguments.items() if n != how.over} for s in (first, second)]
    start = min(first.root, second.root)
    if settings[0] != settings[1] or first.after != second.after:
        return None
    if any(not n < start for n in (*first.inputs, *second.inputs)):
        return None
    values = (first.arguments[how.over], second.arguments[how.over])
    call = {**dict(zip(how.inputs, values, strict=True)), **settings[0]}
    outputs, region = (first.root, second.root), first.region | second.region
    return Site(card, first.pattern, call, outputs, region, first.after, (first, second))


def _chains(sites: list[Site], cards: Mapping[str, Operator], fits: Fits) -> list[Site]:
    """Operators with the one whose result they read, such as losses with the output layer, if nothing else needs it."""
    by_root = {s.root: s for s in sites}
    merging = {c.merges.last: (c, c.merges) for c in cards.values() if isinstance(c.merges, MergedChain)}
    gone: list[Site] = []
    result: list[Site] = []
    for site in sites:
        longer = merging.get(site.card.name)
        through = longer[1].through if longer is not None else site.card.widens
        if through:
            read, chain, slices = _unwrapped(site.arguments[through])
            if through == site.card.widens and isinstance(read, Node):
                _spare_cast(site, read, chain, slices, fits)
            layer = by_root.get(read) if isinstance(read, Node) else None
            merged = _with_layer(*longer, site, layer, chain, slices) if longer and layer else None
            if layer is not None and merged is not None and fits(merged):
                gone.append(layer)
                site = merged
        result.append(site)
    return [s for s in result if not any(s is g for g in gone)]


_VIEWS = ("aten::view", "aten::reshape", "aten::_unsafe_view", "aten::flatten")
_COPIES = ("aten::to", "aten::_to_copy", "aten::contiguous", "aten::clone", "aten::type_as")


def _unwrapped(value: Any) -> tuple[Any, list[Node], Slices]:
    """What a value is rows of: the node behind casts, copies, views and slices, these nodes, and the slices."""
    chain: list[Node] = []
    slices: Slices = []
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
    return value, chain, slices


def _rows(value: Operand, slices: Slices, like: Operand) -> Operand:
    """The slices of a value as rows, of as many axes as another value has."""
    for more in slices:
        shape = list(shape_of_operand(value))
        shape[more[0]] = -1  # not known here, and not needed
        value = Made(torch.ops.aten.slice.Tensor, (value, *more), tuple(shape))
    shape = list(shape_of_operand(value))
    if len(shape) == len(shape_of_operand(like)):
        return value
    return Made(torch.ops.aten.reshape.default, (value, [-1, shape[-1]]), (-1, shape[-1]))


def _dtype_of(site: Site, source: Node) -> dict[str, Any]:
    """The result's dtype, where it is not that of what it is computed from."""
    dtype = site.root.meta["val"].dtype
    return {} if dtype == source.meta["val"].dtype else {"dtype": dtype}


def _with_layer(
    card: Operator, how: MergedChain, site: Site, layer: Site, chain: list[Node], slices: Slices
) -> Site | None:
    inner = {*chain, *site.region}
    if layer.card.name != how.first or any(not set(node.users) <= inner for node in (layer.root, *chain)):
        return None
    if layer.after or not set(layer.arguments) <= {how.over, *inspect.signature(card.function).parameters}:
        return None
    call = {
        how.rows: _rows(layer.arguments[how.over], slices, site.arguments[how.through]),
        **{n: v for n, v in layer.arguments.items() if n != how.over},
        **{n: v for n, v in site.arguments.items() if n != how.through},
        **_dtype_of(site, layer.root),
    }
    return Site(card, site.pattern, call, site.outputs, inner | layer.region, site.after, (layer, site))


def _spare_cast(site: Site, read: Node, chain: list[Node], slices: Slices, fits: Fits) -> None:
    """Let an operator read a narrow input itself, where the model widens a copy of it first."""
    dtype = _dtype_of(site, read)
    rows = _rows(read, slices, site.arguments[site.card.widens])
    call = {**site.arguments, site.card.widens: rows, **dtype}
    if dtype:
        _grow(site, fits, arguments=call, region=site.region | set(chain))
