"""Holds a project's kernels for a device that is not here to their card, as far as their back end emulates it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from opsmith.authoring.project import Kernels
from opsmith.backends import Backend
from opsmith.call.arguments import short
from opsmith.kernels.compiler import BuildError
from opsmith.operator import Make, Operator, Sample
from opsmith.proof.verify import Finding, elements_of, examine, finding_of, forward

__all__ = ["findings", "standing_in"]


@contextmanager
def standing_in(kernels: Kernels, backend: str, run: Callable[..., Any]) -> Iterator[None]:
    """Let a function answer for a back end, so that the project's own code calls it as it would call the device."""

    def quiet(*args: Any, **outputs: torch.Tensor) -> None:
        run(*args, **outputs)

    kernels.stand_ins[backend] = quiet
    try:
        yield
    finally:
        del kernels.stand_ins[backend]


def findings(
    backend: Backend, kernels: Kernels, card: Operator, dtypes: Sequence[torch.dtype], *, quick: bool = False
) -> Iterator[Finding]:
    """Every sample in every dtype, and whether all emulations agree; nothing where the back end has none."""
    emulations = backend.emulations(kernels)
    if not emulations:
        return
    name, usual = f"{backend.name}, emulated", list(emulations.values())[-1]
    fn = card.implementation(backend.name).fn
    for dtype in dtypes:
        try:
            backend.compile(kernels, [dtype])
        except BuildError as error:
            why = str(error).partition("\n")[0]
            yield Finding(card.name, name, short(dtype), "", 0, "compiles", False, math.inf, 0.0, why)
            return
        with standing_in(kernels, backend.name, usual):
            for sample in card.samples(Make(dtype)):
                yield examine(card, short(dtype), sample, name, "values", partial(forward, fn))
    if not quick and len(emulations) > 1:
        largest = max(card.samples(Make(dtypes[0])), key=elements_of)
        differs = partial(_differs, backend.name, kernels, emulations, fn, largest)
        yield finding_of(card, name, short(dtypes[0]), largest, "cores", differs)


def _differs(
    backend: str, kernels: Kernels, emulations: Mapping[str, Any], fn: Callable[..., Any], sample: Sample
) -> str:
    """How results depend on the emulation."""
    results = []
    for run in emulations.values():
        with standing_in(kernels, backend, run):
            results.append(forward(fn, sample.args, dict(sample.kwargs)))
    same = all(torch.equal(a, b) for others in results[1:] for a, b in zip(results[0], others, strict=True))
    return "" if same else f"{' and '.join(emulations)} give different bits"
