"""What is near a node, and a form of it that is the same wherever in a model, or in another graph, that is alike.

An operator is small: a root is read through so many nodes, and what stands behind them is taken as it is. So what is
found at a root follows from what is near it, and layers that are alike have the same forms.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from opsmith.compiler.algebra.canon import is_readable, read_by, shape_of_value
from opsmith.kernels.compiler import fingerprint

MAX_READ = 64  # a size that no operator reaches


@dataclass(frozen=True)
class Window:
    """The nodes near a root."""

    read: dict[Node, None]  # those whose formulas are read, nearest first
    nodes: list[Node]  # these, what they are called with, and what that is called with
    form: str  # equal where the nodes are alike, one by one; empty where some are changed in place

    def apart_from(self, explained: Collection[Node]) -> list[Node]:
        """The nodes that are read from the root through none of these, nearest first."""
        reached = {next(iter(self.read))}
        for node in self.read:
            if node in reached:
                reached.update(n for n in read_by(node) if n not in explained)
        return [n for n in self.read if n in reached]


class Windows:
    """The windows of one graph, whose `opaque` nodes are not what their formulas say."""

    def __init__(self, opaque: Collection[Node]):
        self._opaque = opaque
        self._described = cache(_described)

    def of(self, root: Node, explained: Collection[Node]) -> Window:
        """What is near a root; where forms are equal, the same nodes are explained."""
        read, queue = {root: None}, [root]
        for node in queue:
            for source in read_by(node):
                if len(read) < MAX_READ and source not in self._opaque and is_readable(source):
                    if source not in read:
                        queue.append(source)
                    read[source] = None
        numbers = {node: i for i, node in enumerate(read)}
        for _ in range(2):
            for node in list(numbers):
                for source in self._described(node)[1]:
                    numbers.setdefault(source, len(numbers))
        if not numbers.keys().isdisjoint(self._opaque):
            return Window(read, [*numbers], "")
        what = ((node, *self._described(node)) for node in numbers)
        lines = [(text, *map(numbers.get, given), node in explained) for node, text, given in what]
        return Window(read, [*numbers], fingerprint([repr((len(read), lines))]))


def _described(node: Node) -> tuple[str, list[Node]]:
    """What a node computes, but of which nodes, and these nodes in their order."""
    given: list[Node] = []
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: given.append(n) or "%")  # type: ignore[func-returns-value]
    what = (node.target, args, kwargs) if node.op == "call_function" else node.meta.get("constant")
    return f"{node.op} {what} {_kind(node.meta.get('val'))}", given


def _kind(value: Any) -> Any:
    """A tensor by what it is and not what is in it; anything else by its value."""
    if isinstance(value, tuple | list):
        return [*map(_kind, value)]
    return f"{value.dtype} {shape_of_value(value)}" if isinstance(value, Tensor) else str(value)
