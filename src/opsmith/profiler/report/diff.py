"""Two profiles side by side, by class; what lies within the noise of either is called so."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import fmean

from opsmith import measure
from opsmith.profiler.data import CLASSES, Findings

LEAST_BAND = 0.02  # of a class's time: two runs of one program differ by as much on a quiet machine


@dataclass
class Change:
    """One class (or the whole) of one phase, before and after; `clear` where the change is above the noise."""

    phase: str
    kind: str
    before: float
    after: float
    band: float
    clear: bool


@dataclass
class Diff:
    """The changes between two profiles, phase by phase, the whole first."""

    changes: list[Change]
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        head = f"{'phase':<10} {'class':<18} {'before ms':>10} {'after ms':>10} {'change':>8}  verdict"
        lines = [head if self.changes else "nothing is compared: no phase is in both"]
        for c in self.changes:
            ratio = f"{c.after / c.before - 1:+.0%}" if c.before else "new"
            verdict = ("less" if c.after < c.before else "more") if c.clear else "within the noise"
            lines.append(
                f"{c.phase:<10} {c.kind:<18} {c.before * 1e3:>10.3f} {c.after * 1e3:>10.3f} {ratio:>8}  "
                f"{verdict} (±{c.band * 1e3:.3f} ms)"
            )
        return "\n".join([*lines, *self.notes])


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
            then, now = earlier.by_kind.get(kind, []), phase.by_kind.get(kind, [])
            if any(then) or any(now):
                means = fmean(then or [0.0]), fmean(now or [0.0])
                changes.append(_change(phase.name, kind, *means, then, now))
    notes += [f"{name} is in the earlier profile only" for name in old]
    return Diff(changes, notes)


def _change(phase: str, kind: str, a: float, b: float, before: list[float], after: list[float]) -> Change:
    """The band is what both spread by: half the interquartile range of each, in quadrature."""
    noise = math.hypot(
        *(max(measure.spread(times) / 2, LEAST_BAND) * t for times, t in ((before, a), (after, b)))
    )
    return Change(phase, kind, a, b, noise, abs(b - a) > noise)
