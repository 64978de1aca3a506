"""Fusion opportunities: operators bound by memory that hand each other what one kernel would keep in registers."""

from __future__ import annotations

from collections.abc import Sequence

from opsmith.profiler.composites import CallSequence
from opsmith.profiler.costs import bare, moves_nothing
from opsmith.profiler.data import ACTIVATION, NORM, OTHER, ROPE, SOFTMAX, Chain, Row, sums
from opsmith.profiler.entries import kind_of

Group = tuple[str, int]  # a site of the sequence, or a call that belongs to none
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
    group: dict[int, Group] = {}
    for i, owner in enumerate(sequence.owners):
        group[i] = ("site", owner) if owner is not None else ("call", i)

    def sources(call: int, seen: set[int]) -> set[int]:
        """The calls whose results a call reads, through views."""
        found: set[int] = set()
        for source in sequence.reads[call] if sequence.reads else ():
            if (
                sequence.owners[source] is None
                and moves_nothing(sequence.names[source])
                and source not in seen
            ):
                found |= sources(source, seen | {source})
            else:
                found.add(source)
        return found

    readers: dict[Group, set[Group]] = {}
    handed: dict[tuple[Group, Group], int] = {}
    for call in range(len(sequence.names)):
        for source in sources(call, set()):
            a, b = group[source], group[call]
            if a != b:
                readers.setdefault(a, set()).add(b)
                handed[a, b] = max(handed.get((a, b), 0), sequence.outputs[source])
    follows: dict[Group, Group] = {}
    taken: set[Group] = set()
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
        found.append((tuple(_name(sequence, g) for g in line), saved, _ours(sequence, line, group)))
    return found


def _fusible(sequence: CallSequence, group: Group) -> bool:
    what, index = group
    if what == "site":
        return sequence.found[index].row.kind in _FUSIBLE
    kind = kind_of(sequence.names[index])
    return kind is not None and kind in _FUSIBLE and not moves_nothing(sequence.names[index])


def _name(sequence: CallSequence, group: Group) -> str:
    what, index = group
    return sequence.found[index].row.operator if what == "site" else bare(sequence.names[index])


def _ours(sequence: CallSequence, line: list[Group], group: dict[int, Group]) -> str:
    """The operator of ours that takes in the whole chain, as the compiler has found it."""
    wanted = set(line)
    for name, places in sequence.grown:
        if wanted <= {group[p] for p in places}:
            return name
    return ""
