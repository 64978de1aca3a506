"""The formula language: parsed by Python's grammar, never evaluated; checked for names, types and shapes.

    y = (x - mean(x)) * rsqrt(var(x) + eps) * weight + bias

Arithmetic, comparisons, `where`, the functions of `FUNCTIONS`, reductions over the last axis (which they keep, with
size 1), rotations of pairs, and one `matmul` of two inputs in front. Every other thing is an error that points at it.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping
from typing import NoReturn

from opsmith.authoring.formula.nodes import REDUCTIONS, ROTATIONS, Formula, Graph, Node
from opsmith.authoring.formula.shapes import ANY, Shape, broadcast, shown

_LONGEST = 4000  # characters
_DEEPEST = 60  # levels of brackets and operators

# name: (least, most) number of arguments
FUNCTIONS: dict[str, tuple[int, int]] = {
    **dict.fromkeys(("exp", "log", "sqrt", "rsqrt", "tanh", "sigmoid", "silu", "gelu", "gelu_tanh"), (1, 1)),
    **dict.fromkeys(("erf", "abs", "relu", "softmax", "sum", "mean", "var"), (1, 1)),
    **dict.fromkeys(ROTATIONS, (1, 1)),
    "min": (1, 2),
    "max": (1, 2),
    "clamp": (3, 3),
    "where": (3, 3),
    "cast": (2, 2),
    "matmul": (2, 2),
}
_STRANGE = re.compile(r"[^A-Za-z0-9_ .,()+\-*/<>=!]")
_DTYPES = ("float32", "bfloat16", "float16")
_POWERS: dict[object, str] = {
    2.0: "x * x", 3.0: "x * x * x", 4.0: "x * x * x * x", 0.5: "sqrt(x)",
    -1.0: "1 / x", -2.0: "1 / (x * x)", -0.5: "rsqrt(x)",
}  # fmt: skip
_OPERATORS: dict[type[ast.AST], str] = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div"}
_OPERATORS |= {ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge", ast.Eq: "eq", ast.NotEq: "ne"}


class FormulaError(ValueError):
    """A formula that is not in the language, with a mark under what is wrong."""


def names_in(text: str) -> set[str]:
    """All words of a formula."""
    return set(re.findall(r"[A-Za-z_][A-Za-z0-9_]*", text))


def parse(
    text: Mapping[str, str],
    inputs: Mapping[str, Shape],
    outputs: Mapping[str, Shape | None],
    attributes: Mapping[str, float | int | bool | None] | None = None,
    truths: frozenset[str] = frozenset(),
) -> Formula:
    """Read the formula of each output; a formula may name the outputs above it. Attributes are kept where one is used.

    >>> f = parse({"y": "x * rsqrt(mean(x * x) + eps)"}, {"x": ("...", "N")}, {"y": None}, {"eps": 1e-6})
    >>> f.outputs["y"].shape
    ('...', 'N')

    Raises:
        FormulaError: with the formula, and a mark under what is wrong with it.
    """
    attributes = dict(attributes or {})
    graph = Graph()
    nodes = {name: graph.leaf("input", name, shape, name in truths) for name, shape in inputs.items()}
    nodes |= {n: graph.leaf("attribute", n, truth=isinstance(v, bool)) for n, v in attributes.items()}
    shapes: dict[str, Shape] = {}
    made: dict[str, Node] = {}
    for name in text:
        if name not in outputs:
            raise FormulaError(f"formula {name!r} belongs to no output; the outputs are {', '.join(outputs)}")
    for name, declared in outputs.items():
        if name not in text:
            raise FormulaError(f'output {name} has no formula; add one, such as {name!r}: "..."')
        parser = _Parser(name, text[name], graph, {**nodes, **made})
        node = parser.parse()
        shapes[name] = parser.fit(node, declared)
        made[name] = node
    words = names_in(" ".join(text.values()))
    used = {name: default for name, default in attributes.items() if name in words}
    formula = Formula(dict(inputs), used, made, shapes, dict(text), graph, truths)
    _check_whole(formula)
    return formula


def derived(graph: Graph, text: str, names: Mapping[str, Node]) -> Node:
    """One more node of a graph, from the formula of others."""
    parser = _Parser("a gradient", text, graph, names)
    return parser.node(ast.parse(text, mode="eval").body, 0)


def _check_whole(formula: Formula) -> None:
    nodes = formula.nodes
    leaves = [*nodes, *(formula.product.args if formula.product else ())]
    used = {n.value for n in leaves if n.kind == "input"}
    if unused := [name for name in formula.inputs if name not in used]:
        raise FormulaError(
            f"input {', '.join(unused)} is not used by the formula; use it there, or leave it out of input_desc"
        )
    if len([n for n in nodes if n.kind == "matmul"]) > 1:
        raise FormulaError("two matmuls: a formula has one, in front; make two operators")
    if {"rotate_half", "rotate_interleaved"} <= {n.kind for n in nodes}:
        raise FormulaError("rotate_half and rotate_interleaved pair elements differently; use one of them")
    space: Shape = ()
    for name, node in formula.outputs.items():
        shape = node.shape or ()
        both = broadcast(space, shape)
        if both is None or (space and (both[:-1] != space[:-1] or len(shape) != len(space))):
            raise FormulaError(
                f"output {name} has shape {shown(shape)}, another {shown(space)}; "
                "one kernel writes outputs of one shape, or with a last axis of 1: make two operators"
            )
        space = both


class _Parser:
    def __init__(self, output: str, text: str, graph: Graph, names: Mapping[str, Node]) -> None:
        self.output, self.text, self.graph, self.names = output, text, graph, names

    def parse(self) -> Node:
        if len(self.text) > _LONGEST:
            raise FormulaError(
                f"the formula of {self.output} has {len(self.text)} characters; {_LONGEST} are allowed"
            )
        # Formulas are quoted in what is generated, in comments and docstrings: no character may end one there.
        if strange := _STRANGE.search(self.text):
            self.refuse(strange.start(), f"{strange[0]!r} is no character of formulas")
        try:
            tree = ast.parse(self.text.lstrip(" \t"), mode="eval").body
        except SyntaxError as error:
            at = (error.offset or len(self.text)) - 1 + len(self.text) - len(self.text.lstrip(" \t"))
            self.refuse(min(at, len(self.text)), f"here the formula can't be read: {error.msg}")
        except (RecursionError, MemoryError, ValueError):
            raise FormulaError(f"the formula of {self.output} is nested too deeply") from None
        node = self.node(tree, 0)
        if node.number:
            self.wrong(tree, "the formula gives a number; an output is a tensor of at least one input")
        if node.truth:
            self.wrong(tree, "the formula gives truth values; use where(condition, 1, 0)")
        return node

    def fit(self, node: Node, declared: Shape | None) -> Shape:
        """The output's shape: what the formula gives, or as declared, where that is the same."""
        assert node.shape is not None
        if declared in (None, node.shape) or (node.shape[-1] == 1 and declared == node.shape[:-1]):
            return declared or node.shape
        raise FormulaError(
            f"output {self.output} is declared {shown(declared)}, but its formula gives {shown(node.shape)}; "
            f"change either\n  {self.output} = {self.text}"
        )

    def refuse(self, at: int, why: str) -> NoReturn:
        start = max(0, at - 60)
        label = f"  {self.output} = {'…' if start else ''}"
        line = "".join(c if c.isprintable() else " " for c in self.text[start : at + 60])
        raise FormulaError(f"{why} (column {at + 1})\n{label}{line}\n{' ' * (len(label) + at - start)}^")

    def wrong(self, tree: ast.expr, why: str) -> NoReturn:
        self.refuse(tree.col_offset + len(self.text) - len(self.text.lstrip(" \t")), why)

    def make(self, tree: ast.expr, kind: str, *args: Node, value: str | float | None = None) -> Node:
        try:
            return self.graph.make(kind, *args, value=value)
        except ValueError:
            shapes = " and ".join(shown(a.shape) for a in args if a.shape is not None)
            self.wrong(tree, f"shapes {shapes} do not broadcast")

    def node(self, tree: ast.expr, depth: int) -> Node:
        if depth > _DEEPEST:
            self.wrong(tree, f"nested more than {_DEEPEST} levels deep")
        match tree:
            case ast.Constant(value=bool() | int() | float() as value):
                if isinstance(value, bool) or not math.isfinite(value) or abs(value) > 3e38:
                    self.wrong(tree, f"{value} is no number that float32 holds")
                return self.graph.constant(value)
            case ast.Name(id=name):
                if name in self.names:
                    return self.names[name]
                if name in FUNCTIONS:
                    self.wrong(tree, f"{name} is a function; call it: {name}(...)")
                self.wrong(tree, f"{name} is unknown; there are: {', '.join(self.names)}")
            case ast.UnaryOp(op=ast.USub() | ast.UAdd() as op, operand=operand):
                inside = self.value(operand, depth)
                return self.make(tree, "neg", inside) if isinstance(op, ast.USub) else inside
            case ast.BinOp(op=ast.Pow(), left=left, right=right):
                return self.power(tree, self.value(left, depth), self.value(right, depth))
            case (
                ast.BinOp(op=op, left=left, right=right)
                | ast.Compare(ops=[op], left=left, comparators=[right])
            ) if type(op) in _OPERATORS:
                kind = _OPERATORS[type(op)]
                return self.make(tree, kind, self.value(left, depth), self.value(right, depth))
            case ast.Compare():
                self.wrong(tree, "one comparison at a time, of <, <=, >, >=, == and !=")
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in FUNCTIONS:
                least, most = FUNCTIONS[name]
                if not least <= len(args) <= most:
                    takes = str(least) if least == most else f"{least} or {most}"
                    self.wrong(tree, f"{name} takes {takes} argument(s), got {len(args)}")
                return self.call(tree, name, args, depth)
            case ast.Call(func=ast.Name(id=name)) if name in FUNCTIONS:
                self.wrong(tree, f"{name} takes no named arguments")
            case ast.Call(func=ast.Name(id=name)):
                self.wrong(tree, f"{name} is no function here; there are: {', '.join(FUNCTIONS)}")
        known = f"numbers, names, + - * / **, one comparison, and the functions {', '.join(FUNCTIONS)}"
        self.wrong(tree, f"not in the language: {known}")

    def value(self, tree: ast.expr, depth: int) -> Node:
        """A node that is no truth value."""
        node = self.node(tree, depth + 1)
        if node.truth:
            self.wrong(tree, "a truth value is no number; use where(condition, a, b)")
        return node

    def tensor(self, tree: ast.expr, depth: int, name: str) -> Node:
        node = self.value(tree, depth)
        if node.number:
            self.wrong(tree, f"{name} takes a tensor, and this is a number")
        return node

    def power(self, tree: ast.expr, base: Node, exponent: Node) -> Node:
        rule = _POWERS.get(exponent.value) if exponent.kind == "constant" else None
        if rule is None:
            self.wrong(
                tree, "the exponent is one of 2, 3, 4, -1, -2, 0.5 and -0.5; write others as exp(log(x) * p)"
            )
        if base.number:
            rule = rule.replace("rsqrt(x)", "1 / sqrt(x)")
        return derived(self.graph, rule, {"x": base})

    def call(self, tree: ast.expr, name: str, args: list[ast.expr], depth: int) -> Node:
        if name == "matmul":
            return self.matmul(tree, args)
        if name == "cast":
            return self.cast(tree, args, depth)
        if name == "where":
            condition = self.node(args[0], depth + 1)
            if not condition.truth:
                self.wrong(args[0], "where's first argument is a comparison or an input of bool")
            return self.make(tree, "where", condition, self.value(args[1], depth), self.value(args[2], depth))
        if name == "clamp":
            x, low, high = (self.value(a, depth) for a in args)
            return self.make(tree, "min", self.make(tree, "max", x, low), high)
        if name in ("min", "max") and len(args) == 2:
            return self.make(tree, name, self.value(args[0], depth), self.value(args[1], depth))
        if name in (*REDUCTIONS, *ROTATIONS, "softmax"):
            return self.along_rows(tree, name, self.tensor(args[0], depth, name))
        of_numbers = name in ("sqrt", "exp", "log", "tanh")
        x = self.value(args[0], depth) if of_numbers else self.tensor(args[0], depth, name)
        return self.make(tree, name, x)

    def along_rows(self, tree: ast.expr, name: str, x: Node) -> Node:
        assert x.shape is not None
        if x.shape[-1] == 1:
            self.wrong(tree, f"{name} works along the last axis, and {shown(x.shape)} has only 1 there")
        if name in ROTATIONS and isinstance(x.shape[-1], int) and x.shape[-1] % 2:
            self.wrong(tree, f"{name} pairs the elements of the last axis, and {x.shape[-1]} is odd")
        return self.make(tree, name, x)

    def cast(self, tree: ast.expr, args: list[ast.expr], depth: int) -> Node:
        match args[1]:
            case ast.Name(id=dtype) if dtype in _DTYPES:
                return self.make(tree, "cast", self.tensor(args[0], depth, "cast"), value=dtype)
        self.wrong(args[1], f"cast's second argument is one of {', '.join(_DTYPES)}")

    def matmul(self, tree: ast.expr, args: list[ast.expr]) -> Node:
        sides = []
        for arg in args:
            side = self.names.get(arg.id) if isinstance(arg, ast.Name) else None
            if side is None or side.kind != "input" or side.truth:
                self.wrong(
                    arg, "matmul takes two inputs by name; what is done to them first is another operator"
                )
            sides.append(side)
        a, b = (side.shape or () for side in sides)
        if len(a) < 2 or len(b) != 2 or a[-1] != b[0] or ANY in b:
            self.wrong(tree, f"matmul takes [..., M, K] and [K, N], got {shown(a)} and {shown(b)}")
        node = Node("matmul", tuple(sides), None, (*a[:-1], b[1]))
        return self.graph._keep(node)
