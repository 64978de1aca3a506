"""Which program serves which sizes: one for the sizes of an example, and one for many where they vary all the time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_symbols

from opsmith.compiler.choose.worth import Worth
from opsmith.compiler.plan import ShapePlan
from opsmith.compiler.program.program import Buffers, Program

MAX_PROGRAMS = 64
MAX_STRAYS = 8
OFTEN = 16  # calls of the same sizes before they get a program: recording takes two of them, and saves a tenth of one
UNSEEN: Any = object()
Key = tuple[Any, ...]  # the numbers that a graph is given; in a span, ranges of some of them


class Programs:
    """The programs of one graph by the numbers that it is given, and what they are worth; None where eager runs."""

    def __init__(self, placeholders: Sequence[Node]) -> None:
        self._at = [i for i, n in enumerate(placeholders) if not isinstance(n.meta.get("val"), Tensor)]
        self._numbers = [placeholders[i] for i in self._at]
        self._tensors = [val for n in placeholders if isinstance(val := n.meta.get("val"), Tensor)]
        self.plans: dict[Key, ShapePlan] = {}
        self.worths: dict[Key, Worth] = {}  # of those that were measured
        self.by_key: dict[Key, Program | None] = {}
        self.buffers: list[Buffers] = []  # that no call has taken; any program takes any
        self._spans: dict[Key, bool] = {}  # of programs for many sizes: whether they allocate most results
        self._served: dict[Key, int] = {}  # how often such a program has, by sizes
        self._varies: set[int] = set()  # the numbers of a key that such a program leaves open
        self._strays = 0

    def key(self, args: Sequence[Any]) -> Key:
        """The numbers among a call's arguments."""
        return tuple([args[i] for i in self._at])

    def find(self, key: Key) -> Any:
        """The program for these sizes, or `UNSEEN`."""
        program = self.by_key.get(key, UNSEEN)
        return self._spanning(key) if program is UNSEEN and self._spans else program

    def _spanning(self, key: Key) -> Any:
        """The program that serves these sizes among others, until they come so often that they deserve their own."""
        for sizes, fresh in list(self._spans.items()):  # another thread may record meanwhile
            if not differing(key, sizes):
                if fresh and len(self._served) < 1 << 16:
                    self._served[key] = self._served.get(key, 0) + 1
                own = self._often(key) and len(self.by_key) < MAX_PROGRAMS
                return UNSEEN if own else self.by_key.get(sizes, UNSEEN)
        return UNSEEN

    def _often(self, key: Key) -> bool:
        return self._served.get(key, 0) > OFTEN

    def span(self, key: Key, example: bool) -> tuple[Key, frozenset[Any]]:
        """The sizes to record a program for: those of an example alone, else with all that has been seen to vary.

        What varies may be anything between the same two powers of two; its symbols come with the sizes. What is no
        symbolic size stays as it is.
        """
        if example or self._often(key) or not self.by_key:
            return key, frozenset()
        new = differing(key, next(reversed(self.by_key))) - self._varies
        self._strays += bool(new)
        # What changes now and then (the size of a batch) has programs of its own, what does so all the time has not.
        if not self._varies or self._strays > MAX_STRAYS:
            self._varies, self._strays = self._varies | new, 0
        numbers = list(key)
        free: frozenset[Any] = frozenset()
        for i in self._varies:
            own = free_symbols(self._numbers[i].meta.get("val"))
            if type(key[i]) is int and key[i] > 0 and own:
                low = 1 << (key[i].bit_length() - 1)
                numbers[i], free = range(low, 2 * low), free.union(own)
        return tuple(numbers), free

    def keep(self, sizes: Key, program: Program | None, plan: ShapePlan) -> None:
        """Enter what runs at these sizes; the oldest gives way."""
        if len(self.by_key) >= MAX_PROGRAMS:
            oldest = next(iter(self.by_key))
            del self.by_key[oldest], self.plans[oldest]
            self._spans.pop(oldest, None)
        self.by_key[sizes], self.plans[sizes] = program, plan
        if any(type(size) is range for size in sizes):
            self._spans[sizes] = program is not None and program.fresh

    def clear(self) -> None:
        """Forget all programs; the plans stay."""
        self.by_key.clear()
        self._spans.clear()
        self.buffers.clear()

    def named(self, sizes: Key) -> str:
        """Sizes as people read them, of those inputs that have them: `4×512`, or `4×512 to 1023`."""
        known: dict[str, str] = {}
        for number, size in zip(self._numbers, sizes, strict=True):
            text = f"{size.start} to {size.stop - 1}" if type(size) is range else str(size)
            known[str(number.meta.get("val"))] = text
        varying = (t.shape for t in self._tensors if any(free_symbols(n) for n in t.shape))
        texts = ("×".join(known.get(str(n), str(n)) for n in shape) for shape in varying)
        return ", ".join(dict.fromkeys(texts))

    def worth(self, key: Key) -> Worth | None:
        """What was found at the nearest sizes measured: only an example is worth the time of measuring."""

        def distance(other: Key) -> float:
            return sum(abs(math.log(max(a, 1) / max(b, 1))) for a, b in zip(key, other, strict=True))

        nearest = min(self.worths, key=distance, default=None)
        if nearest is None:
            return None
        found = self.worths[nearest]
        return found if nearest == key else Worth(found.used, f"not measured, as at {self.named(nearest)}")


def differing(key: Key, sizes: Key) -> set[int]:
    """The positions at which a key is not one of these sizes, some of which may be ranges."""
    pairs = enumerate(zip(key, sizes, strict=True))
    return {i for i, (k, s) in pairs if (k not in s if type(s) is range else k != s)}
