"""The graph with each proven site as one call."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import fx
from torch.fx import Node

from opsmith.compiler.find.operands import insert
from opsmith.compiler.find.site import Site
from opsmith.compiler.steps.sizes import symbols
from opsmith.compiler.steps.slots import may_be_view


def rewrite(gm: fx.GraphModule, sites: Sequence[tuple[str, Site]]) -> fx.GraphModule:
    """A copy of the graph in which each named site is a call of its card's public function.

    The call node carries `meta["site"]`, the site's name, and `meta["symbols"]`, those in the sizes of its results.
    Since the functions are public ones, the graph still differentiates; the program for inference is made from the
    same nodes with the chosen implementations.
    """
    graph = fx.Graph()
    new: dict[Node, Node] = {}
    output = graph.graph_copy(gm.graph, new)
    graph.output(output).meta = dict(gm.graph.find_nodes(op="output")[0].meta)
    made: dict[str, Node] = {}
    for name, site in sites:
        targets = [new[n] for n in site.outputs]
        at = min(targets)
        with graph.inserting_before(at):
            call = {k: insert(v, graph, new.__getitem__, at, made) for k, v in site.arguments.items()}
            node = graph.call_function(site.card.function, (), call)
            node.meta["site"] = name
            sizes = symbols([n.meta.get("val") for n in site.outputs])
            node.meta["symbols"] = sizes
            if site.columns:
                results = _columns(graph, node, site.columns)
            elif len(targets) == 1:
                results = [node]
            else:
                results = [graph.call_function(operator.getitem, (node, i)) for i in range(len(targets))]
            for function, more in site.after:
                results = [graph.call_function(function, (r, *more)) for r in results]
            for result in results:
                result.meta["symbols"] = sizes
        for old, target, result in zip(site.outputs, targets, results, strict=True):
            target.replace_all_uses_with(result)
            if site.columns:
                _by_any_stride(result)
            new[old] = result
        # Dead-code elimination keeps what it takes for impure (attention draws a seed for its dropout).
        inner = [new[n] for n in site.region if n not in site.outputs and n in new]
        for dead in sorted({*targets, *inner}, reverse=True):
            if not dead.users and "site" not in dead.meta:
                graph.erase_node(dead)
    graph.eliminate_dead_code()
    graph.lint()
    return fx.GraphModule(gm, graph)


def _columns(graph: fx.Graph, node: Node, columns: Sequence[int]) -> list[Node]:
    """The parts of a result that stand side by side in its last dimension."""
    ends = list(accumulate(columns))
    return [
        graph.call_function(torch.ops.aten.slice.Tensor, (node, -1, end - n, end))
        for n, end in zip(columns, ends, strict=True)
    ]


def _by_any_stride(node: Node) -> None:
    """Let what the model views as a tensor without gaps be a copy where its new strides allow no view."""
    for user in node.users:
        if may_be_view(user):
            if user.target is torch.ops.aten.view.default:
                user.target = torch.ops.aten.reshape.default
            _by_any_stride(user)
