"""Graph nodes as terms: what each ATen operator means in the algebra of `terms`.

`Canon` reads a node of a traced graph, and what feeds it, into a polynomial. Where it stops is a leaf: inputs,
weights, integer arithmetic, operators without a rule, and the nodes of `cut`. Casts between floating-point
types, dropout out of training, copies and layout changes that cancel leave no trace.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from opsmith.compiler.algebra.terms import Poly, Shape, Space, TooLarge

Rule = Callable[..., Poly]
RULES: dict[str, Rule] = {}  # by operator; `aten::split[]` is what one of the several results of a split is


def _aten(names: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in names.split())


# An operator that feeds another is a boundary; softmax and matmul are not, for they are parts of attention.
BOUNDARIES = _aten(
    "linear addmm layer_norm native_layer_norm rms_norm scaled_dot_product_attention embedding cross_entropy_loss"
)


def shape_of(node: Any) -> Shape:
    """The sizes of a node's value, symbolic ones as expressions (comparing those adds no guard)."""
    return shape_of_value(node.meta.get("val") if isinstance(node, Node) else None)


def shape_of_value(value: Any) -> Shape:
    """The sizes of a tensor; none of anything else."""
    return tuple(dim_of(d) for d in value.shape) if isinstance(value, Tensor) else ()


def dim_of(d: Any) -> Any:
    """A size as an int or a sympy expression."""
    if isinstance(d, torch.SymInt):
        expr = d.node.expr
        return expr if expr.is_Symbol else int(expr) if expr.is_Integer else _divided(expr)
    return int(d)


@functools.lru_cache(maxsize=1024)
def _divided(expr: Any) -> Any:
    """A size whose divisions leave no rest without them: `view(..., -1)` has `n**2 // n` for n."""

    def whole(division: Any) -> Any:
        a, b = division.args
        return a / b if (a / b).is_integer else division

    return expr.replace(lambda e: type(e).__name__ == "FloorDiv", whole)


def op_name(node: Node) -> str:
    """`aten::add` for an `aten.add.Tensor` call, else an empty string."""
    return str(node.target._schema.name) if isinstance(node.target, torch._ops.OpOverload) else ""


class Canon:
    """Terms of the nodes of one graph, relative to `cut` (nodes that are leaves whatever they compute)."""

    def __init__(
        self,
        space: Space,
        cut: Mapping[Node, Poly] | None = None,
        root: Node | None = None,
        window: Collection[Node] | None = None,
        keeps: frozenset[str] = frozenset(),
    ):
        self.space = space
        self.keeps = keeps  # what is not rewritten: see `Pattern.keeps`
        self.root = root
        self.window = window  # the nodes whose formulas are read, where that is not all
        self.memo: dict[Node, Poly] = dict(cut or {})
        self.nodes: dict[Poly, list[Node]] = {}
        for node, poly in self.memo.items():
            self.nodes.setdefault(poly, []).append(node)

    def __call__(self, value: Any) -> Poly:
        """The term of a node or of a number."""
        if not isinstance(value, Node):
            if isinstance(value, bool | int | float):
                return self.space.const(float(value))
            if isinstance(value, complex):
                return value.real + self.space.i * value.imag
            return self.space.leaf(value, ())
        if value not in self.memo:
            try:
                self.memo[value] = self._read(value)
            except TooLarge:
                self.memo[value] = self.leaf(value)
            self.nodes.setdefault(self.memo[value], []).append(value)
        return self.memo[value]

    def leaf(self, node: Node) -> Poly:
        """The node as an opaque value; a complex one as its two parts."""
        leaf = self.space.leaf(node, shape_of(node))
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or not value.is_complex():
            return leaf
        return self.space.fn("real", leaf) + self.space.i * self.space.fn("imag", leaf)

    def _read(self, node: Node) -> Poly:
        if node.op == "get_attr":
            constant = node.meta.get("constant")
            return self.space.const(constant) if constant is not None else self.leaf(node)
        within = node is self.root or self.window is None or node in self.window
        if not within or not is_readable(node, node is self.root):
            return self.leaf(node)
        if node.target is operator.getitem:
            source: Any = node.args[0]
            return self._apply(node, source, source=source, index=node.args[1])
        return self._apply(node, node)

    def _apply(self, node: Node, call: Node, **which: Any) -> Poly:
        try:
            return RULES[_rule(node)](self, node, **which, **arguments(call))
        except Unreadable:
            return self.leaf(node)


class Unreadable(Exception):
    """This call has no meaning in the algebra (another axis, a rounding division): its node is a leaf."""


def only(known: object) -> None:
    """Go on with a rule where this holds; else its node is a leaf."""
    if not known:
        raise Unreadable


_BOOLEAN = _aten("tril triu one_hot logical_not bitwise_not gt lt ge le eq ne to _to_copy")
_MASKS = _BOOLEAN | _aten("view reshape unsqueeze")
# Whose rules hold for complex numbers too.
_COMPLEX = _aten(
    "add sub mul neg polar complex view_as_complex to _to_copy contiguous "
    "view reshape unsqueeze squeeze flatten slice clone"
)


def _rule(node: Node) -> str:
    """The name under which a call has a rule, where it has one."""
    call = node.args[0] if node.target is operator.getitem else node
    return op_name(node) if call is node else f"{op_name(call)}[]" if isinstance(call, Node) else ""


def is_readable(node: Node, root: bool = False) -> bool:
    """Whether a rule says what a node computes; that of a boundary is for the root alone."""
    name, value = _rule(node), node.meta.get("val")
    if node.op != "call_function" or name not in RULES or (name in BOUNDARIES and not root):
        return False
    if node.target is operator.getitem or not isinstance(value, Tensor) or value.is_floating_point():
        return True
    return name in (_COMPLEX if value.is_complex() else _MASKS if value.dtype == torch.bool else _BOOLEAN)


def read_by(node: Node) -> list[Node]:
    """The nodes whose values a rule reads: what a call is given, of one of several results too."""
    call = node.args[0] if node.target is operator.getitem else node
    return call.all_input_nodes if isinstance(call, Node) else []


def arguments(node: Node) -> dict[str, Any]:
    """A call's arguments by the names of its schema, defaults included."""
    assert isinstance(node.target, torch._ops.OpOverload)
    defaults = _defaults(node.target)
    return {**defaults, **dict(zip(defaults, node.args, strict=False)), **node.kwargs}


@functools.lru_cache(maxsize=1024)
def _defaults(target: torch._ops.OpOverload) -> dict[str, Any]:
    """The names of an operator's arguments in order, and the defaults: asked of every node, many times."""
    return {a.name: a.default_value for a in target._schema.arguments}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register what an ATen operator means; of one with several results, as `split[]`, what each does by its index."""

    def decorate(fn: Rule) -> Rule:
        RULES.update((f"aten::{name}", fn) for name in names)
        return fn

    return decorate
