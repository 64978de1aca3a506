"""Two profiles side by side, by class; what lies within the noise of either is called so."""

from __future__ import annotations

import math

from opsmith import measure
from opsmith.profiler.data import CLASSES, Change, Diff, Findings, Phase

LEAST_BAND = 0.02  # of a class's time: two runs of one program differ by as much on a quiet machine


def compare(before: Findings, after: Findings) -> Diff:
    """What changed from one profile to the other, phase by phase, the whole of each first."""
    changes: list[Change] = []
    notes: list[str] = []
    if before.machine.get("fingerprint") != after.machine.get("fingerprint"):
        notes.append("the two were taken on different machines, thread counts or versions")
    old = {phase.name: phase for phase in before.phases}
    for phase in after.phases:
        if phase.name not in old:
            notes.append(f"{phase.name} is in the later profile only")
            continue
        earlier = old.pop(phase.name)
        changes.append(_change(phase.name, "all", earlier.wall, phase.wall, earlier.samples, phase.samples))
        for kind in CLASSES:
            a, b = _mean(earlier, kind), _mean(phase, kind)
            if a or b:
                changes.append(
                    _change(
                        phase.name, kind, a, b, earlier.by_kind.get(kind, []), phase.by_kind.get(kind, [])
                    )
                )
    notes += [f"{name} is in the earlier profile only" for name in old]
    return Diff(changes, notes)


def _mean(phase: Phase, kind: str) -> float:
    times = phase.by_kind.get(kind, [])
    return math.fsum(times) / len(times) if times else 0.0


def _change(phase: str, kind: str, a: float, b: float, before: list[float], after: list[float]) -> Change:
    """The band is what both spread by: half the interquartile range of each, in quadrature."""
    noise = math.hypot(
        max(measure.spread(before) / 2, LEAST_BAND) * a, max(measure.spread(after) / 2, LEAST_BAND) * b
    )
    return Change(phase, kind, a, b, noise, abs(b - a) > noise)
