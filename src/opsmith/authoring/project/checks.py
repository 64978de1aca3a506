"""Holds a project to its card: every check, its Triton kernels by the interpreter where there is no GPU, and those of
back ends beyond the core's own emulated."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from opsmith.authoring.project import Kernels, answer_of, cards_of, kernels_of, load
from opsmith.backends import Backend, installed
from opsmith.call.arguments import short
from opsmith.kernels import triton
from opsmith.kernels.compiler import BuildError, find_compiler
from opsmith.operator import Make, Operator, Sample
from opsmith.proof.conduct import conduct
from opsmith.proof.verify import Finding, elements_of, examine, finding_of, forward, verify

_QUICK = "--quick"
_INTERPRETED = "interpreted"  # how their implementation is called in a report


def verify_project(folder: str | Path) -> Iterator[Finding]:
    """Yield a finding for every check of a project's operators, in every dtype of their cards.

    >>> all(finding.ok for finding in verify_project("examples/rope_custom"))  # doctest: +SKIP
    True
    """
    for card in cards_of(load(folder)):
        yield from verify(card)
        yield from conduct(card, card.dtypes[0])
    yield from unbuilt(folder)
    if needs_interpreter(folder):
        yield from interpreted(folder)
    yield from emulated(folder)


def unbuilt(folder: str | Path) -> Iterator[Finding]:
    """Yield a finding for every CPU kernel that the compiler here refuses: PyTorch answers for it, and is right."""
    for kernels in () if triton.INTERPRETED or find_compiler() is None else kernels_of(load(folder)):
        there = not kernels.source("cpu").exists() or kernels.offers("cpu")
        if there is not True:
            why = str(there).partition("\n")[0]
            yield Finding(kernels.name, "native", "", "", 0, "compiles", False, math.inf, 0.0, why)


def needs_interpreter(folder: str | Path) -> bool:
    """True where a project has Triton kernels and this machine has no GPU to run them."""
    here = triton.installed() is True and not triton.INTERPRETED and not torch.cuda.is_available()
    return here and any(kernels.source("triton").exists() for kernels in kernels_of(load(folder)))


def interpreted(
    folder: str | Path, dtypes: Sequence[torch.dtype] = (), *, quick: bool = False
) -> list[Finding]:
    """The findings of a project's Triton kernels in Triton's interpreter: in a process where these have the CPU."""
    words = [*map(short, dtypes), *([_QUICK] if quick else [])]
    found, said = answer_of(
        "opsmith.authoring.project.checks", str(Path(folder).resolve()), *words, triton_interprets=True
    )
    if found is None:
        tail = " ".join(said.strip().splitlines()[-2:])
        raise RuntimeError(f"{folder}: verification in Triton's interpreter ended without a result: {tail}")
    return [Finding(**one) for one in found]


def main(folder: str, *words: str) -> None:
    """The part of `interpreted` that runs in the other process."""
    found: list[Finding] = []
    names = [word for word in words if word != _QUICK]
    for card in cards_of(load(folder)):
        dtypes = [dtype for dtype in card.dtypes if not names or short(dtype) in names]
        found += verify(card, dtypes) if dtypes else ()
        found += conduct(card, dtypes[0]) if dtypes and _QUICK not in words else ()
    mine = [f for f in found if f.implementation not in ("native", "eager") and f.check != "gradcheck"]
    print(
        json.dumps([asdict(replace(f, implementation=f"{f.implementation}, {_INTERPRETED}")) for f in mine])
    )


def emulated(
    folder: str | Path, dtypes: Sequence[torch.dtype] = (), *, quick: bool = False
) -> Iterator[Finding]:
    """Yield the findings of a project's kernels for devices that back ends emulate."""
    module = load(folder)
    cards = {card.name: card for card in cards_of(module)}
    for kernels in () if triton.INTERPRETED else kernels_of(module):
        for backend in [installed()[name] for name in kernels.backends() if name in installed()]:
            if card := cards.get(kernels.name):
                yield from findings(backend, kernels, card, dtypes or card.dtypes, quick=quick)


@contextmanager
def standing_in(kernels: Kernels, backend: str, run: Callable[..., Any]) -> Iterator[None]:
    """Let a function answer for a back end, so that the project's own code calls it as it would call the device."""
    kernels.stand_ins[backend] = run
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


if __name__ == "__main__":
    main(*sys.argv[1:])
