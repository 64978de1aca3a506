"""Fusion opportunities: operators bound by memory that hand each other what one kernel would keep in registers."""

from __future__ import annotations

from collections.abc import Sequence

from opsmith.profiler.composites import CallSequence
from opsmith.profiler.costs import bare, moves_nothing
from opsmith.profiler.data import ACTIVATION, NORM, OTHER, ROPE, SOFTMAX, Chain, Row, sums
from opsmith.profiler.entries import kind_of

_FUSIBLE = {NORM, ACTIVATION, OTHER, ROPE, SOFTMAX}
_LEAST_BYTES = 1 << 12  # of what is handed on: less than that is a statistic, not a tensor


def chains(rows: Sequence[Row], sequences: Sequence[CallSequence]) -> list[Chain]:
    """The chains of all sequences, equal ones together; what one gains is less than its operators took."""
    spent = sums(rows, "operator")
    merged: dict[tuple[str, ...], Chain] = {}
    for sequence in sequences:
        for names, saved, ours in _of(sequence):
            chain = merged.setdefault(
                names, Chain(list(names), 0, 0.0, sum(spent.get(n, 0.0) for n in set(names)), ours)
            )
            chain.count += 1
            chain.implementation = chain.implementation or ours
            chain.bytes_saved += saved
    return list(merged.values())


def _of(sequence: CallSequence) -> list[tuple[tuple[str, ...], float, str]]:
    """(operators, bytes that would not move, the operator of ours that is all of them) for each chain."""

    def sources(call: int) -> set[int]:
        """The calls whose results a call reads, through views."""
        found: set[int] = set()
        for source in sequence.reads[call] if sequence.reads else ():
            view = sequence.owners[source] is None and moves_nothing(sequence.names[source])
            found |= sources(source) if view else {source}
        return found

    readers: dict[int, set[int]] = {}
    handed: dict[tuple[int, int], int] = {}
    for call in range(len(sequence.names)):
        for source in sources(call):
            a, b = sequence.group(source), sequence.group(call)
            if a != b:
                readers.setdefault(a, set()).add(b)
                handed[a, b] = max(handed.get((a, b), 0), sequence.outputs[source])
    follows: dict[int, int] = {}
    taken: set[int] = set()
    for (a, b), size in sorted(handed.items(), key=lambda item: -item[1]):
        if size < _LEAST_BYTES or not (_fusible(sequence, a) and _fusible(sequence, b)):
            continue
        if a not in follows and b not in taken:
            follows[a] = b
            taken.add(b)
    found = []
    for start in (g for g in follows if g not in taken):
        line, saved = [start], 0.0
        while line[-1] in follows and len(line) < 16:
            a, b = line[-1], follows[line[-1]]
            saved += handed[a, b] * (2 if len(readers[a]) == 1 else 1)
            line.append(b)
        names = [sequence.found[g].row.operator if g >= 0 else bare(sequence.names[~g]) for g in line]
        found.append((tuple(names), saved, _ours(sequence, line)))
    return found


def _fusible(sequence: CallSequence, group: int) -> bool:
    if group >= 0:
        return sequence.found[group].row.kind in _FUSIBLE
    return kind_of(sequence.names[~group]) in _FUSIBLE


def _ours(sequence: CallSequence, line: list[int]) -> str:
    """The operator of ours that takes in the whole chain, as the compiler has found it."""
    wanted = set(line)
    return next((name for name, places in sequence.grown if wanted <= {*map(sequence.group, places)}), "")
