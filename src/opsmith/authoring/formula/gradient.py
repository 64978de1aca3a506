"""Derivatives of a formula, as formulas: reverse mode over the nodes, so that backward is a kernel like forward."""

from __future__ import annotations

from opsmith.authoring.formula import derived
from opsmith.authoring.formula.nodes import Formula, Graph, Node


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
            if share is None or arg.shape is None or arg.truth:
                continue
            if share.shape is not None and arg.shape[-1] == 1 != share.shape[-1]:
                share = graph.make("sum", share)
            seen[id(arg)] = graph.make("add", seen[id(arg)], share) if id(arg) in seen else share
    ends = [n for n in formula.nodes if n.kind in ("input", "matmul")]
    leaves = {str(n.value) if n.kind == "input" else "product": n for n in ends}
    return {name: seen[id(leaves[name])] for name in wanted if name in leaves and id(leaves[name]) in seen}


def _shares(graph: Graph, node: Node, g: Node) -> tuple[Node | None, ...]:
    """The part of a node's gradient that goes to each argument."""
    kind = node.kind
    rules: tuple[str | None, ...]
    if kind in ("max", "min"):
        if len(node.args) == 1:
            raise NoDerivative(f"{kind} along rows: PyTorch shares the gradient among equal elements")
        numbers = [a.number for a in node.args]
        rules = _BOUNDS[kind][numbers[1]] if any(numbers) else _LARGER[kind]
    elif kind in _SLOPES:
        return (graph.make("mul", g, graph.make(_SLOPES[kind], node.args[0])),)
    else:
        rules = _RULES.get(kind, (None,) * len(node.args))  # comparisons have none
    known = dict(zip("abc", node.args, strict=False))
    known |= {"g": g, "y": node, "size": graph.leaf("size", None)}
    return tuple(None if rule is None else derived(graph, rule, known) for rule in rules)


# What goes to each argument a, b, c of a function y, of its own gradient g: formulas, too.
_RULES: dict[str, tuple[str | None, ...]] = {
    "add": ("g", "g"),
    "sub": ("g", "-g"),
    "mul": ("g * b", "g * a"),
    "div": ("g / b", "-(g * y / b)"),
    "neg": ("-g",),
    "where": (None, "where(a, g, 0)", "where(a, 0, g)"),
    "cast": ("g",),
    "exp": ("g * y",),
    "log": ("g / a",),
    "sqrt": ("g * 0.5 / y",),
    "rsqrt": ("g * -0.5 * (y * (y * y))",),
    "tanh": ("g * (1 - y * y)",),
    "sigmoid": ("g * (y * (1 - y))",),
    "erf": ("g * exp(-(a * a)) * 1.1283791670955126",),  # 2 / sqrt(pi)
    "relu": ("where(a > 0, g, 0)",),
    "abs": ("where(a > 0, g, where(a < 0, -g, 0))",),
    "sum": ("g",),
    "mean": ("g / size",),
    "var": ("g * 2 / size * (a - mean(a))",),
    "softmax": ("y * (g - sum(g * y))",),
    "rotate_half": ("-rotate_half(g)",),
    "rotate_interleaved": ("-rotate_interleaved(g)",),
}
_SLOPES = {kind: f"{kind}_slope" for kind in ("silu", "gelu", "gelu_tanh")}
# Of two tensors as torch.maximum, which halves it where both are equal; of a tensor and a number as torch.clamp.
_LARGER = {
    "max": ("where(a > b, g, where(a == b, g * 0.5, 0))", "where(b > a, g, where(a == b, g * 0.5, 0))"),
    "min": ("where(a < b, g, where(a == b, g * 0.5, 0))", "where(b < a, g, where(a == b, g * 0.5, 0))"),
}
_BOUNDS = {
    "max": ((None, "where(b >= a, g, 0)"), ("where(a >= b, g, 0)", None)),
    "min": ((None, "where(b <= a, g, 0)"), ("where(a <= b, g, 0)", None)),
}
