"""Sites that take in their neighbors: a norm the addition before it, a linear layer the activation behind it."""

from __future__ import annotations

import inspect

from torch.fx import Node

from opsmith.compiler.algebra.canon import arguments, op_name, shape_of
from opsmith.compiler.find.merge import Cards, Disturbed, merge
from opsmith.compiler.find.operands import nodes_in
from opsmith.compiler.find.site import Site, check
from opsmith.operator import Kind


def grow(sites: list[Site], cards: Cards, disturbed: Disturbed) -> list[Site]:
    """Let sites take in what their operators can: additions, activations, the output layer before a loss."""
    by_root = {s.root: s for s in sites}
    gone: set[int] = set()
    for site in sites:
        if site.card.epilogue is not None:
            _absorb_activation(site, by_root, gone, disturbed)
    computed = set(by_root)  # what another site gives, which no second one gives too
    for site in sites:
        if site.card.kind is Kind.NORM and "residual" in inspect.signature(site.card.function).parameters:
            _absorb_residual(site, computed, disturbed)
            computed.update(site.outputs)
    sites = [s for s in sites if id(s) not in gone]
    return merge(sites, cards, disturbed)


def _absorb_residual(site: Site, computed: set[Node], disturbed: Disturbed) -> None:
    x = site.arguments.get("x")
    if not isinstance(x, Node) or op_name(x) != "aten::add" or "residual" in site.arguments or x in computed:
        return
    args = arguments(x)
    a, b = args["self"], args["other"]
    nodes = isinstance(a, Node) and isinstance(b, Node) and args.get("alpha", 1) == 1
    if not nodes or shape_of(a) != shape_of(x) or shape_of(b) != shape_of(x):
        return
    if a.meta["val"].dtype != x.meta["val"].dtype or b.meta["val"].dtype != x.meta["val"].dtype:
        return
    if any(x < node for name, v in site.arguments.items() if name != "x" for node in nodes_in(v)):
        return  # a weight computed after the addition: the call could not stand where its results are needed
    grown = Site(
        site.card, site.pattern, {**site.arguments, "x": a, "residual": b}, (site.root, x), site.region | {x}
    )
    if check(grown) is None and not disturbed(grown):
        site.arguments, site.outputs, site.region = grown.arguments, grown.outputs, grown.region


def _absorb_activation(site: Site, by_root: dict[Node, Site], gone: set[int], disturbed: Disturbed) -> None:
    assert site.card.epilogue is not None
    source = by_root.get(site.arguments.get("x"))  # type: ignore[arg-type]
    if source is None or "activation" not in inspect.signature(source.card.function).parameters:
        return
    if "activation" in source.arguments or not set(source.root.users) <= site.region:
        return
    extras = {n: v for n, v in site.arguments.items() if n != "x"}
    activation = site.card.epilogue(**extras)
    if activation is None:
        return
    call = {**source.arguments, "activation": activation}
    grown = Site(source.card, source.pattern, call, site.outputs, source.region | site.region, source.after)
    if disturbed(grown):
        return
    source.arguments, source.outputs, source.region = grown.arguments, grown.outputs, grown.region
    gone.add(id(site))
