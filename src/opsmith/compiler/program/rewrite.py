"""The graph with each proven site as one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from opsmith.compiler.find.operands import Made, evaluate
from opsmith.compiler.find.site import Site
from opsmith.compiler.steps.slots import may_be_view


def rewrite(gm: fx.GraphModule, sites: Sequence[tuple[str, Site]]) -> fx.GraphModule:
    """A copy of the graph in which each named site is a call of its card's public function.

    The call node carries `meta["site"]`, the site's name, and as its value those of the nodes that it replaces. Since
    the functions are public ones, the graph still differentiates; the program for inference is made from the same nodes
    with the chosen implementations.
    """
    graph = fx.Graph()
    new: dict[Node, Node] = {}
    output = graph.graph_copy(gm.graph, new)
    graph.output(output).meta = dict(gm.graph.find_nodes(op="output")[0].meta)
    made: dict[str, Node] = {}
    dead: set[Node] = set()

    def insert(operand: Made, args: tuple[Any, ...]) -> Node:
        """An operand as a node before the call: one that was made for another site, or a new one."""
        known = made.get(repr(operand))
        if known is None or not known < at:
            known = made[repr(operand)] = graph.call_function(operand.target, args)
        return known

    for name, site in sites:
        targets = [new[n] for n in site.outputs]
        at = min(targets)
        with graph.inserting_before(at):
            call = {k: evaluate(v, new.__getitem__, insert) for k, v in site.arguments.items()}
            node = graph.call_function(site.card.function, (), call)
            node.meta |= {"site": name, "val": [n.meta.get("val") for n in site.outputs]}
            results = [proxy.node for proxy in site.results(fx.Proxy(node))]
            for result in results:
                result.meta["val"] = node.meta["val"]
        for old, target, result in zip(site.outputs, targets, results, strict=True):
            target.replace_all_uses_with(result)
            if site.columns or site.after:
                _by_any_stride(result)
            new[old] = result
        dead.update(targets, (new[n] for n in site.region if n not in site.outputs and n in new))
    # After all calls, which may read what is inside of another. Dead-code elimination keeps what it takes for impure.
    for node in sorted(dead, reverse=True):
        if not node.users and "site" not in node.meta:
            graph.erase_node(node)
    graph.eliminate_dead_code()
    graph.lint()
    return fx.GraphModule(gm, graph)


def _by_any_stride(node: Node) -> None:
    """Let what the model views as a tensor without gaps be a copy where its new strides allow no view."""
    for user in node.users:
        if may_be_view(user):
            if user.target is torch.ops.aten.view.default:
                user.target = torch.ops.aten.reshape.default
            _by_any_stride(user)
