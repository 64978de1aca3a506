"""Whether a graph as a whole is faster than it was when it was captured: measured once, and eager keeps a tie."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith import measure
from opsmith.compiler.choose.select import Selector, device_of
from opsmith.compiler.choose.settle import with_gradients
from opsmith.compiler.plan import PlanStep
from opsmith.compiler.reasons import raised

Run = Callable[..., Any]

_ROUNDS = 5  # of ranks together
_FAR, _FAR_S = 3.0, 0.5  # times ours and seconds: farther than operators by themselves are from a whole


@dataclass(frozen=True)
class Worth:
    """Whether a program runs, and why."""

    used: bool
    note: str


def worth(
    selector: Selector, code: str, steps: Sequence[PlanStep], ours: Run, eager: Run, device: torch.device
) -> Worth:
    """What a saved plan says of these very steps, what was measured of this graph with them, or else a measurement."""
    choices, saved = _choices(steps), selector.saved
    if selector.ranks is not None:
        return _timed(selector, (code, choices), ours, eager, device)
    if saved is not None and saved.machine == measure.describe().fingerprint():
        for shape in saved.shapes:
            if _choices(shape.steps) == choices:
                return Worth(shape.used, shape.note)
    # What eager takes for the sites alone: a model whose products take seconds need not run for that.
    least = sum(step.microseconds.get("eager", 0.0) for step in steps) * 1e-6
    if least > _FAR_S and least > _FAR * (mine := measure.once(ours, device)):
        note = f"opsmith {mine * 1e3:.3f} ms, eager at least {least * 1e3:.3f} ms by its operators alone"
        return Worth(True, f"{note}: {least / mine:.2f}x")
    return _timed(selector, (code, choices), ours, eager, device)


def learning_worth(selector: Selector, code: str, args: Sequence[Any], ours: Run, eager: Run) -> Worth:
    """The same of forward and backward on these inputs, where a model learns."""
    sizes = [(a.shape, a.dtype, a.requires_grad) if isinstance(a, Tensor) else a for a in args]
    try:
        found = _timed(selector, (code, sizes), _step(ours, args), _step(eager, args), device_of(args))
    # Not every graph can be run by itself: one that writes into what has a gradient, say.
    except Exception as error:
        return Worth(True, f"forward and backward were not timed: {raised(error)}")
    return Worth(found.used, f"forward and backward: {found.note}")


def _step(run: Run, args: Sequence[Any]) -> Callable[[], object]:
    """A run of a graph and its gradients, of which its inputs notice nothing."""
    given = [a.detach().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a for a in args]
    leaves = [a for a in given if isinstance(a, Tensor) and a.requires_grad]
    return with_gradients(partial(run, *given), leaves)


def _timed(selector: Selector, what: object, ours: Run, eager: Run, device: torch.device) -> Worth:
    key = f"program {hashlib.sha256(repr(what).encode()).hexdigest()}"
    times = selector.cache.get(key) or {}
    if not {"opsmith", "eager"} <= times.keys():
        measured = _in_step(ours, eager) if selector.ranks is not None else _measure(ours, eager, device)
        times = selector.cache.settled(key, *measured)
    mine, theirs = times["opsmith"], times["eager"]
    note = f"opsmith {mine * 1e3:.3f} ms, eager {theirs * 1e3:.3f} ms"
    faster = mine <= theirs
    return Worth(faster, f"{note}: {theirs / mine:.2f}x" if faster else f"{note}: eager is faster and runs")


def _choices(steps: Sequence[PlanStep]) -> list[tuple[str, str, str]]:
    return [(s.site, s.signature, s.implementation) for s in steps]


def _in_step(ours: Callable[[], object], eager: Callable[[], object]) -> tuple[dict[str, float], bool]:
    """As often on every rank, for each run waits for the others' parts of its sums."""
    times = [(measure.by_clock([ours]), measure.by_clock([eager])) for _ in range(_ROUNDS)]
    mine, theirs = map(min, zip(*times, strict=True))
    return {"opsmith": mine, "eager": theirs}, True


def _measure(
    ours: Callable[[], object], eager: Callable[[], object], device: torch.device
) -> tuple[dict[str, float], bool]:
    best = {"opsmith": math.inf, "eager": math.inf}
    runs = {n: measure.as_replayed(run, device) for n, run in (("opsmith", ours), ("eager", eager))}
    for _ in range(2):
        # Both have just run, so they are warm; the fastest sample is what other work disturbed least.
        result = measure.quick(runs, budget_s=0.15, warmup=0, min_rounds=1, device=device)
        best = {name: min(t, *result.samples[name]) for name, t in best.items()}
        if best["opsmith"] <= best["eager"]:
            break  # a large model's prompt takes seconds: only one that seems to lose is timed again
    return best, not result.disturbed and all(result.spread(n) <= measure.CONCLUDES_NOTHING for n in best)
