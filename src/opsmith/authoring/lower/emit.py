"""From nodes to the text of a language: infix arithmetic with few brackets, and a name for what is used twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from opsmith.authoring.formula.nodes import ELEMENTWISE, Node

_INFIX = {"add": ("+", 4), "sub": ("-", 4), "mul": ("*", 5), "div": ("/", 5)}
_INFIX |= {"lt": ("<", 3), "le": ("<=", 3), "gt": (">", 3), "ge": (">=", 3), "eq": ("==", 3), "ne": ("!=", 3)}
_UNARY, _ATOM = 6, 9

Text = tuple[str, int]  # and how tightly it binds


def float_text(value: float) -> str:
    """A float32 literal: the shortest decimal that gives the same number."""
    text = f"{value:.9g}"
    return text if any(c in text for c in ".en") else text + ".0"


class Emitter:
    """Writes the nodes of one block of code, at one or two places of a row (an element and its twin).

    `leaf(node, place)` gives the text of what is no function of other nodes in this block; `call(name, texts)` a call;
    `define(text, node, place)` adds a statement that names a value, and answers the name.
    """

    def __init__(
        self,
        leaf: Callable[[Node, int], str | None],
        call: Callable[[Node, list[str]], str],
        define: Callable[[str, Node, int], str],
        number: Callable[[float], str] = float_text,
        rotate: Callable[[str, str, int], Text] | None = None,
    ) -> None:
        self._leaf, self._call, self._define, self._number, self._rotate = leaf, call, define, number, rotate
        self._done: dict[tuple[int, int], Text] = {}
        self._uses: Counter[tuple[int, int]] = Counter()

    def count(self, roots: Iterable[Node], places: Iterable[int] = (0,)) -> None:
        """Learn how often each node is used in the block, before its text is asked for at these places."""
        stack = [(root, place if root.shape is not None else 0) for root in roots for place in places]
        seen: set[tuple[int, int]] = set()
        while stack:
            node, place = stack.pop()
            self._uses[id(node), place] += 1
            if (id(node), place) not in seen:
                seen.add((id(node), place))
                stack += self._below(node, place)

    def _below(self, node: Node, place: int) -> list[tuple[Node, int]]:
        if node.kind not in ELEMENTWISE and not node.kind.startswith("rotate"):
            return []
        if self._leaf(node, place) is not None:
            return []
        if (turned := _turned(node)) is not None:
            return [(turned, 1 - place)]
        return [(a, place if a.shape is not None else 0) for a in node.args]

    def text(self, node: Node, place: int = 0) -> str:
        """The expression for a node's value at a place, after the statements that it needs."""
        return self._text(node, place)[0]

    def _text(self, node: Node, place: int) -> Text:
        place = place if node.shape is not None else 0
        key = (id(node), place)
        if key not in self._done:
            value = self._make(node, place)
            named = node.kind in ELEMENTWISE or node.kind.startswith("rotate") or "(" in value[0]
            if self._uses[key] > 1 and named and not value[0].isidentifier():
                value = (self._define(value[0], node, place), _ATOM)
            self._done[key] = value
        return self._done[key]

    def _make(self, node: Node, place: int) -> Text:
        leaf = self._leaf(node, place)
        if leaf is not None:
            return leaf, _ATOM
        if node.kind == "constant":
            text = self._number(float(node.value or 0.0))
            return text, _UNARY if text.startswith("-") else _ATOM
        if (turned := _turned(node)) is not None:
            assert self._rotate is not None
            text, tight = self._text(turned, 1 - place)
            back = node.kind == "neg"  # the transposed rotation
            return self._rotate(
                turned.kind, f"({text})" if tight <= _UNARY else text, 1 - place if back else place
            )
        texts = [self._text(a, place) for a in node.args]
        if node.kind in _INFIX:
            sign, binds = _INFIX[node.kind]
            (left, tight), (right, tighter) = texts
            a = f"({left})" if tight < binds or binds == 3 == tight else left
            # a * (b / c) is not a * b / c, and a + (b - c) is not a + b - c
            b = f"({right})" if tighter <= binds else right
            return f"{a} {sign} {b}", binds
        if node.kind == "neg":
            text, tight = texts[0]
            return f"-{text}" if tight > _UNARY else f"-({text})", _UNARY
        return self._call(node, [t for t, _ in texts]), _ATOM


def _turned(node: Node) -> Node | None:
    """What is rotated, where this is a rotation or its negative."""
    if node.kind == "neg":
        node = node.args[0]
    return node.args[0] if node.kind.startswith("rotate") else None
