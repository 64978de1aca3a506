"""Two sequences of calls, one of which a program made and the other of which says what they are."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


def align(events: Sequence[str], calls: Sequence[str]) -> list[int | None]:
    """For each event the place of its call in a sequence; None for one that the sequence does not have.

    >>> align(["aten::mm", "aten::empty", "aten::add"], ["aten::mm", "aten::add"])
    [0, None, 1]
    """
    found: list[int | None] = [None] * len(events)
    head = 0
    while head < min(len(events), len(calls)) and events[head] == calls[head]:
        found[head] = head
        head += 1
    tail = 0
    while tail < min(len(events), len(calls)) - head and events[-1 - tail] == calls[-1 - tail]:
        found[len(events) - 1 - tail] = len(calls) - 1 - tail
        tail += 1
    middle = events[head : len(events) - tail], calls[head : len(calls) - tail]
    if all(middle):
        for block in difflib.SequenceMatcher(None, *middle, autojunk=False).get_matching_blocks():
            for k in range(block.size):
                found[head + block.a + k] = head + block.b + k
    return found
