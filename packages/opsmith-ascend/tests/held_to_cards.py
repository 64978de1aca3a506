"""Holds a kernel to its card: every sample, several numbers of cores, results within the card's tolerance."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

import opsmith.ops  # noqa: F401  registers the cards
from opsmith.measure.pool import tensors_of
from opsmith.operator import Make, Sample, registry
from opsmith_ascend.emulation import Emulation
from opsmith_ascend.launches import Launch

CORES = (48, 1, 7)  # taken in turn by the samples


def poisoned(launch: Launch) -> Launch:
    """The same launch with NaN, or 99, wherever it is to write."""
    given = {id(t) for t in launch.inputs.values()}
    for t in launch.outputs.values():
        if t is not None and id(t) not in given:
            t.fill_(math.nan if t.is_floating_point() else 99)
    return launch


def check(card: str, sample: Sample, launch: Launch, cores: int = 48) -> Emulation | None:
    """Run a launch emulated and hold its results to the tolerance of the card."""
    operator = registry()[card]
    done = poisoned(launch).emulated(cores)
    with torch.no_grad():
        wide = sample.cast(torch.float64)
        exact = list(tensors_of(operator.reference(*wide.args, **wide.kwargs)))
        eager = list(tensors_of(operator.eager(*sample.args, **sample.kwargs)))
    got = list(tensors_of(launch.result))
    assert len(got) == len(exact)
    for mine, theirs, truth in zip(got, eager, exact, strict=True):
        verdict = operator.tolerance.check(mine, theirs, truth)
        assert verdict.ok, f"{card}, {sample.name}, {cores} cores: {verdict.why}"
    return done


def check_samples(
    card: str, launch: Callable[..., Launch], dtype: torch.dtype, skip: Iterable[str] = ()
) -> None:
    """`check` over the samples of a card."""
    samples: list[Any] = [s for s in registry()[card].samples(Make(dtype)) if s.name not in set(skip)]
    assert samples
    for i, sample in enumerate(samples):
        check(card, sample, launch(*sample.args, **sample.kwargs), CORES[i % len(CORES)])
