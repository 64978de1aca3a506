"""Linear layers that read one input, as one product: queries, keys and values, or a gate and what it multiplies.

As of packed layers (`joined`), each call starts all threads and waits for them, and reads its input once more. The
layers' own weights lie side by side in one memory, so that the product of all reads them as they are; what each layer
gives are columns of its result. Whether that is faster than a call for each is measured, as for any merged site.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from opsmith.compiler.algebra.canon import shape_of
from opsmith.compiler.capture.mutation import Effects
from opsmith.compiler.find.joined import joined, private, runs, source
from opsmith.compiler.find.operands import Made, nodes_in
from opsmith.compiler.find.site import Site
from opsmith.measure.pages import advise, is_mapped
from opsmith.ops.linear import CARD

_PAGE = 1 << 21  # bytes of a large one
Lay = Callable[[Sequence[torch.nn.Parameter]], bool]  # lays weights side by side in one memory, where it may


def together(
    sites: Sequence[Site], graph: fx.Graph, inputs: Sequence[Any], lay: Lay, effects: Effects
) -> list[Site]:
    """The sites of a graph, those of linear layers with one input as one that is made of them, where that may be."""
    values = zip(graph.find_nodes(op="placeholder"), inputs, strict=True)
    own = {n: v for n, v in values if isinstance(v, torch.nn.Parameter) and not v.is_inference()}
    merged: dict[int, Site] = {}  # by a part: what it became part of
    of = {s.root: s for s in sites if _plain(s, own)}
    for group in runs(graph, of.get, _alike):
        site = _site(group)
        if private(site, graph, effects) and lay([own[s.arguments["weight"]] for s in group]):
            merged |= dict.fromkeys(map(id, group), site)
    # Large weights that are read as they lie get large pages: where they are, if one would be much that is there twice.
    most = sum(p.nbytes for p in own.values()) // 4
    for weight in (s.arguments.get("weight") for s in sites if s.card is CARD):
        p = own.get(weight) if isinstance(weight, Node) else None
        if p is None or not p.is_cpu or p.nbytes < _PAGE:
            continue
        if p.nbytes <= most or is_mapped(p):
            lay([p])
        else:
            advise(p.data_ptr(), p.nbytes, "MADV_COLLAPSE")
    return list({id(s): s for s in (merged.get(id(s), s) for s in sites)}.values())


def weights(site: Site) -> list[Node]:
    """The inputs of a graph that a site reads side by side; none of a site of another kind."""
    weight = site.arguments.get("weight")
    if site.card is not CARD or not isinstance(weight, Made) or weight.target is not joined:
        return []
    return list(nodes_in(weight))


def _plain(site: Site, own: Collection[Node]) -> bool:
    """Whether a site is a layer with parameters of its own and nothing behind its product."""
    call = dict(site.arguments)
    x, weight, bias = call.pop("x", None), call.pop("weight", None), call.pop("bias", None)
    parameters = all(isinstance(n, Node) and n in own for n in (weight, bias) if n is not None)
    return site.card is CARD and not call and not site.after and isinstance(x, Node) and parameters


def _alike(site: Site, group: list[Site]) -> bool:
    """Whether one call can stand where the group's first does, and is one product of one input."""
    calls = [s.arguments for s in (site, group[0])]
    mine, its = ((source(c["x"]), shape_of(c["x"]), c.get("bias") is None) for c in calls)
    return mine == its and all(s.arguments["weight"] is not site.arguments["weight"] for s in group)


def _site(group: list[Site]) -> Site:
    call: dict[str, Any] = {"x": min(s.arguments["x"] for s in group)}
    for name in ("weight", "bias"):
        if group[0].arguments.get(name) is not None:
            call[name] = Made(joined, (0, *(s.arguments[name] for s in group)), ())
    roots = tuple(s.root for s in group)
    region = set().union(*(s.region for s in group))
    columns = tuple(int(shape_of(n)[-1]) for n in roots)
    pattern = f"{len(group)} layers of one input"
    return Site(CARD, pattern, call, roots, region, parts=tuple(group), columns=columns)
