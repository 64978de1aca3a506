"""The intermediate form of a formula: a graph of typed nodes with symbolic shapes, the same for every back end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from opsmith.authoring.formula.shapes import Shape, broadcast

# What each does to one element of each argument: how many arguments, and whether it gives a truth value.
ELEMENTWISE: dict[str, tuple[int, bool]] = {
    **dict.fromkeys(("neg", "exp", "log", "sqrt", "rsqrt", "tanh", "sigmoid", "silu", "gelu"), (1, False)),
    **dict.fromkeys(("gelu_tanh", "erf", "abs", "relu"), (1, False)),
    **dict.fromkeys(("silu_slope", "gelu_slope", "gelu_tanh_slope"), (1, False)),  # for backward only
    **dict.fromkeys(("add", "sub", "mul", "div", "min", "max"), (2, False)),
    **dict.fromkeys(("lt", "le", "gt", "ge", "eq", "ne"), (2, True)),
    "where": (3, False),
    "cast": (1, False),
}
REDUCTIONS = ("sum", "mean", "max", "min", "var")  # over the last axis, which stays with size 1
ROTATIONS = ("rotate_half", "rotate_interleaved")  # of the last axis
_FOLD: dict[str, Callable[..., float]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "neg": lambda a: -a,
    "sqrt": math.sqrt,
    "exp": math.exp,
    "log": math.log,
    "tanh": math.tanh,
}


@dataclass(frozen=True, eq=False)
class Node:
    """One value. `kind` says what makes it, `args` of what; `value` is a name, a constant, or a dtype to cast to."""

    kind: str  # input, attribute, constant, size (of the last axis), matmul, softmax, or one of the tables above
    args: tuple[Node, ...] = ()
    value: str | float | None = None
    shape: Shape | None = None  # None: a number, not a tensor
    truth: bool = False

    @property
    def number(self) -> bool:
        """Known before any tensor is: a constant, an attribute, or what is computed from these."""
        return self.shape is None

    @property
    def reduces(self) -> bool:
        """A reduction along rows; max and min of two values are none."""
        return self.kind in REDUCTIONS and len(self.args) == 1


def walk(roots: Iterable[Node]) -> Iterator[Node]:
    """All nodes below and these, each once, arguments first; what a matmul multiplies is not looked into."""
    seen: set[int] = set()
    stack = [(root, False) for root in reversed([*roots])]
    while stack:
        node, ready = stack.pop()
        if ready:
            yield node
        elif id(node) not in seen:
            seen.add(id(node))
            stack.append((node, True))
            if node.kind != "matmul":
                stack.extend((a, False) for a in reversed(node.args))


@dataclass
class Graph:
    """Makes nodes, each different one once, simplified where that changes no value."""

    _known: dict[tuple[object, ...], Node] = field(default_factory=dict)

    def make(self, kind: str, *args: Node, value: str | float | None = None) -> Node:
        """A node of arguments that are checked already.

        Raises:
            ValueError: their shapes do not broadcast.
        """
        if (simpler := self._simplify(kind, args)) is not None:
            return simpler
        shape: Shape | None = None
        for a in args:
            if a.shape is not None:
                fits = a.shape if shape is None else broadcast(shape, a.shape)
                if fits is None:
                    raise ValueError(f"shapes {shape} and {a.shape} do not broadcast")
                shape = fits
        if kind in REDUCTIONS and len(args) == 1 and shape is not None:
            shape = (*shape[:-1], 1)
        return self._keep(Node(kind, args, value, shape, ELEMENTWISE.get(kind, (0, False))[1]))

    def leaf(
        self, kind: str, value: str | float | None, shape: Shape | None = None, truth: bool = False
    ) -> Node:
        """An input, an attribute, a constant, a product of matrices."""
        return self._keep(Node(kind, (), value, shape, truth))

    def constant(self, value: float) -> Node:
        return self.leaf("constant", float(value))

    def _keep(self, node: Node) -> Node:
        key = (node.kind, *map(id, node.args), repr(node.value), node.shape)
        return self._known.setdefault(key, node)

    def _simplify(self, kind: str, args: Sequence[Node]) -> Node | None:
        if kind in _FOLD and all(a.kind == "constant" for a in args):
            try:
                return self.constant(_FOLD[kind](*(a.value for a in args)))
            except (ValueError, ZeroDivisionError, OverflowError):
                return None
        if kind == "neg" and args[0].kind == "neg":
            return args[0].args[0]
        if len(args) != 2:
            return None
        a, b = args
        if (kind in ("mul", "div") and _is(b, 1)) or (kind in ("add", "sub") and _is(b, 0)):
            return a
        for one, other in ((a, b), (b, a)):
            if (kind == "mul" and _is(one, 1)) or (kind == "add" and _is(one, 0)):
                return other
            if kind == "mul" and _is(one, -1):
                return self.make("neg", other)
        return None


def _is(node: Node, value: float) -> bool:
    return node.kind == "constant" and node.value == value


@dataclass(frozen=True)
class Formula:
    """What an operator computes: its outputs, as nodes over its inputs and attributes."""

    inputs: Mapping[str, Shape]
    attributes: Mapping[str, float | int | bool | None]  # name to default; None where the caller must say
    outputs: Mapping[str, Node]
    shapes: Mapping[str, Shape]  # of the outputs, as declared: a reduction's last axis may be dropped
    text: Mapping[str, str]
    graph: Graph
    truths: frozenset[str] = frozenset()  # inputs of truth values

    @property
    def nodes(self) -> list[Node]:
        """All nodes, each once, arguments first."""
        return list(walk(self.outputs.values()))

    @property
    def product(self) -> Node | None:
        """The leading matmul, where there is one."""
        return next((n for n in self.nodes if n.kind == "matmul"), None)
