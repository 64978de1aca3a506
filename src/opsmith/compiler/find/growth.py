"""Sites that take in their neighbors: a norm the addition before it, a linear layer the activation behind it."""

from __future__ import annotations

import inspect
from dataclasses import replace

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
    if not isinstance(a, Node) or not isinstance(b, Node) or args.get("alpha", 1) != 1:
        return
    if any((shape_of(n), n.meta["val"].dtype) != (shape_of(x), x.meta["val"].dtype) for n in (a, b)):
        return
    if any(x < node for name, v in site.arguments.items() if name != "x" for node in nodes_in(v)):
        return  # a weight computed after the addition: the call could not stand where its results are needed
    call = {**site.arguments, "x": a, "residual": b}
    grown = replace(site, arguments=call, outputs=(site.root, x), region=site.region | {x})
    if check(grown) is None and not disturbed(grown):
        site.grow(grown)


def _absorb_activation(site: Site, by_root: dict[Node, Site], gone: set[int], disturbed: Disturbed) -> None:
    assert site.card.epilogue is not None
    source = by_root.get(site.arguments.get("x"))  # type: ignore[arg-type]
    if source is None or "activation" not in inspect.signature(source.card.function).parameters:
        return
    if "activation" in source.arguments or not set(source.root.users) <= site.region:
        return
    activation = site.card.epilogue(**{n: v for n, v in site.arguments.items() if n != "x"})
    if activation is None:
        return
    call, region = {**source.arguments, "activation": activation}, source.region | site.region
    grown = replace(source, arguments=call, outputs=site.outputs, region=region)
    if not disturbed(grown):
        source.grow(grown)
        gone.add(id(site))
