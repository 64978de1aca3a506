"""Whether a program as a whole is faster than the graph as it was captured: measured once, and eager keeps a tie."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from opsmith import measure
from opsmith.compiler.choose.select import Selector
from opsmith.compiler.plan import PlanStep


@dataclass(frozen=True)
class Worth:
    """Whether a program runs, and why."""

    used: bool
    note: str


def worth(
    selector: Selector,
    code: str,
    steps: Sequence[PlanStep],
    ours: Callable[[], object],
    eager: Callable[[], object],
) -> Worth:
    """What a saved plan says of these very steps, what was measured of this graph with them, or else a measurement."""
    choices, saved = _choices(steps), selector.saved
    if saved is not None and saved.machine == measure.describe().fingerprint():
        for shape in saved.shapes:
            if _choices(shape.steps) == choices:
                return Worth(shape.used, shape.note)
    key = f"program {hashlib.sha256(repr((code, choices)).encode()).hexdigest()}"
    times = selector.cache.get(key) or {}
    if not {"opsmith", "eager"} <= times.keys():
        times = selector.cache.settled(key, *_measure(ours, eager))
    mine, theirs = times["opsmith"], times["eager"]
    note = f"opsmith {mine * 1e3:.3f} ms, eager {theirs * 1e3:.3f} ms"
    faster = mine <= theirs
    return Worth(faster, f"{note}: {theirs / mine:.2f}x" if faster else f"{note}: eager is faster and runs")


def _choices(steps: Sequence[PlanStep]) -> list[tuple[str, str, str]]:
    return [(s.site, s.signature, s.implementation) for s in steps]


def _measure(ours: Callable[[], object], eager: Callable[[], object]) -> tuple[dict[str, float], bool]:
    best = {"opsmith": math.inf, "eager": math.inf}
    for _ in range(2):
        # Both have just run, so they are warm; the fastest sample is what other work disturbed least.
        result = measure.quick({"opsmith": ours, "eager": eager}, budget_s=0.15, warmup=0, min_rounds=1)
        best = {name: min(t, *result.samples[name]) for name, t in best.items()}
        if best["opsmith"] <= best["eager"]:
            break  # a large model's prompt takes seconds: only one that seems to lose is timed again
    return best, all(result.spread(name) <= measure.CONCLUDES_NOTHING for name in best)
