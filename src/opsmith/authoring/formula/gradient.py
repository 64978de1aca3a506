"""Derivatives of a formula, as formulas: reverse mode over the nodes, so that backward is a kernel like forward."""

from __future__ import annotations

import math
from collections.abc import Callable

from opsmith.authoring.formula.nodes import Formula, Graph, Node

__all__ = ["NoDerivative", "gradients"]


class NoDerivative(ValueError):
    """The formula holds something whose derivative is left to autograd; says what."""


def gradients(formula: Formula, wanted: list[str]) -> dict[str, Node]:
    """The gradient of each wanted input that the outputs depend on, before what was broadcast is summed over rows.

    The gradients of the outputs are inputs named d<output>. What the last axis was broadcast over is summed already.

    Raises:
        NoDerivative: for a maximum or minimum along rows, whose ties PyTorch shares out.
    """
    graph = formula.graph
    seen: dict[int, Node] = {}
    for name, root in formula.outputs.items():
        seed = graph.leaf("input", f"d{name}", root.shape)
        seen[id(root)] = graph.make("add", seen[id(root)], seed) if id(root) in seen else seed
    for node in reversed(formula.nodes):
        if id(node) not in seen or node.number or node.kind in ("input", "matmul"):
            continue
        for arg, share in zip(node.args, _shares(graph, node, seen[id(node)]), strict=True):
            if share is None or arg.number or arg.truth:
                continue
            if (
                arg.shape is not None
                and arg.shape[-1] == 1
                and share.shape is not None
                and share.shape[-1] != 1
            ):
                share = graph.make("sum", share)
            seen[id(arg)] = graph.make("add", seen[id(arg)], share) if id(arg) in seen else share
    leaves = {
        str(n.value) if n.kind == "input" else "product": n
        for n in formula.nodes
        if n.kind in ("input", "matmul")
    }
    return {name: seen[id(leaves[name])] for name in wanted if name in leaves and id(leaves[name]) in seen}


def _shares(graph: Graph, node: Node, g: Node) -> tuple[Node | None, ...]:
    """The part of a node's gradient that goes to each argument."""
    make, number = graph.make, graph.constant

    def times(*factors: Node) -> Node:
        result = factors[0]
        for factor in factors[1:]:
            result = make("mul", result, factor)
        return result

    a = node.args[0]
    if node.kind in _SIMPLE:
        return _SIMPLE[node.kind](graph, node, a, g)
    if node.kind in ("mul", "div"):
        b = node.args[1]
        if node.kind == "mul":
            return times(g, b), times(g, a)
        return make("div", g, b), make("neg", make("div", times(g, node), b))
    if node.kind in ("max", "min") and len(node.args) == 2:
        return _of_larger(graph, node, g)
    if node.kind == "where":
        zero = number(0)
        return None, make("where", node.args[0], g, zero), make("where", node.args[0], zero, g)
    if node.kind == "mean":
        return (make("div", g, graph.leaf("size", None)),)
    if node.kind == "var":
        scaled = make("div", times(g, number(2)), graph.leaf("size", None))
        return (times(scaled, make("sub", a, make("mean", a))),)
    if node.kind == "softmax":
        return (times(node, make("sub", g, make("sum", times(g, node)))),)
    if node.kind in ("rotate_half", "rotate_interleaved"):
        return (make("neg", make(node.kind, g)),)
    if node.kind in ("max", "min"):
        raise NoDerivative(f"{node.kind} along rows: PyTorch shares the gradient among equal elements")
    return tuple(None for _ in node.args)  # comparisons


def _of_larger(graph: Graph, node: Node, g: Node) -> tuple[Node, Node]:
    """As torch.clamp where one side is a number, else as torch.maximum, which halves it where both are equal."""
    make, zero = graph.make, graph.constant(0)
    a, b = node.args
    if a.number or b.number:
        inside = "ge" if node.kind == "max" else "le"
        tensor, bound = (b, a) if a.number else (a, b)
        share = make("where", make(inside, tensor, bound), g, zero)
        return share, share
    above = "gt" if node.kind == "max" else "lt"
    half = make("where", make("eq", a, b), make("mul", g, graph.constant(0.5)), zero)
    return make("where", make(above, a, b), g, half), make("where", make(above, b, a), g, half)


_Rule = Callable[[Graph, Node, Node, Node], "tuple[Node | None, ...]"]


def _slope(kind: str) -> _Rule:
    return lambda graph, node, a, g: (graph.make("mul", g, graph.make(kind, a)),)


def _abs(graph: Graph, node: Node, a: Node, g: Node) -> tuple[Node]:
    zero = graph.constant(0)
    below = graph.make("where", graph.make("lt", a, zero), graph.make("neg", g), zero)
    return (graph.make("where", graph.make("gt", a, zero), g, below),)


def _bell(graph: Graph, node: Node, a: Node, g: Node) -> tuple[Node]:
    power = graph.make("exp", graph.make("neg", graph.make("mul", a, a)))
    return (graph.make("mul", graph.make("mul", g, power), graph.constant(2 / math.sqrt(math.pi))),)


def _one_minus(graph: Graph, node: Node) -> Node:
    return graph.make("sub", graph.constant(1), node)


_SIMPLE: dict[str, _Rule] = {
    "add": lambda graph, node, a, g: (g, g),
    "sub": lambda graph, node, a, g: (g, graph.make("neg", g)),
    "neg": lambda graph, node, a, g: (graph.make("neg", g),),
    "sum": lambda graph, node, a, g: (g,),
    "cast": lambda graph, node, a, g: (g,),
    "exp": lambda graph, node, a, g: (graph.make("mul", g, node),),
    "log": lambda graph, node, a, g: (graph.make("div", g, a),),
    "sqrt": lambda graph, node, a, g: (graph.make("div", graph.make("mul", g, graph.constant(0.5)), node),),
    "rsqrt": lambda graph, node, a, g: (
        graph.make(
            "mul",
            graph.make("mul", g, graph.constant(-0.5)),
            graph.make("mul", node, graph.make("mul", node, node)),
        ),
    ),
    "tanh": lambda graph, node, a, g: (
        graph.make("mul", g, _one_minus(graph, graph.make("mul", node, node))),
    ),
    "sigmoid": lambda graph, node, a, g: (
        graph.make("mul", g, graph.make("mul", node, _one_minus(graph, node))),
    ),
    "relu": lambda graph, node, a, g: (
        graph.make("where", graph.make("gt", a, graph.constant(0)), g, graph.constant(0)),
    ),
    "abs": _abs,
    "erf": _bell,
    "silu": _slope("silu_slope"),
    "gelu": _slope("gelu_slope"),
    "gelu_tanh": _slope("gelu_tanh_slope"),
}
