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
from inspect import signature
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from opsmith.authoring.project import Kernels, answer_of, cards_of, kernels_of, load
from opsmith.authoring.project.compile import compile_backend, tool_missing
from opsmith.backends import Backend, installed
from opsmith.call.arguments import short
from opsmith.kernels import triton
from opsmith.kernels.compiler import BuildError, find_compiler
from opsmith.operator import Make, Operator, Sample
from opsmith.proof.conduct import conduct
from opsmith.proof.verify import (
    FUNCTION,
    Finding,
    backward,
    elements_of,
    examine,
    finding_of,
    forward,
    verify,
)

_QUICK, _ALONE = "--quick", "--alone"
_INTERPRETED = "interpreted"  # how their implementation is called in a report


def verify_project(folder: str | Path) -> Iterator[Finding]:
    """Yield a finding for every check of a project's operators, in every dtype of their cards.

    >>> all(finding.ok for finding in verify_project("examples/rope_custom"))  # doctest: +SKIP
    True
    """
    for card in cards_of(load(folder)):
        yield from verify(card)
        yield from conduct(card, card.dtypes[0])
    yield from chain(*elsewhere(folder))


def elsewhere(
    folder: str | Path, dtypes: Sequence[torch.dtype] = (), *, quick: bool = False
) -> Iterator[list[Finding]]:
    """Yield the findings of a project's kernels that do not compile, or that this machine cannot run itself.

    Without a GPU, Triton's interpreter runs its Triton kernels; those for devices that are not here run emulated, where
    their back end can.
    """
    yield list(unbuilt(folder, dtypes))
    yield [] if quick else alone(folder, dtypes)
    yield interpreted(folder, dtypes, quick=quick) if needs_interpreter(folder) else []
    yield list(emulated(folder, dtypes, quick=quick))


def unbuilt(folder: str | Path, dtypes: Sequence[torch.dtype] = ()) -> Iterator[Finding]:
    """Yield a finding for every kernel that is missing, that the compilers here refuse or that no sample reaches, and
    for those of CUDA that they compile too.

    PyTorch answers for them, and is right. Where there is no GPU, no more than this is known of CUDA's.
    """
    module = load(folder)
    cards = {card.name: card for card in cards_of(module)}
    for kernels in () if triton.INTERPRETED else kernels_of(module):
        if why := kernels.misdeclared():
            yield _built(kernels.name, "card", why, check="sizes")
            continue
        for lost in kernels.lost():
            yield _built(kernels.name, lost, f"{kernels.source(lost)} is missing: PyTorch stands in")
        if find_compiler() and kernels.source("cpu").exists():
            if (there := kernels.offers("cpu")) is not True:
                yield _built(kernels.name, "native", str(there))
            elif kernels.name in cards:
                yield from _unreached(cards[kernels.name], dtypes)
        if kernels.source("cuda").exists() and not tool_missing("cuda"):
            why = ""
            try:
                compile_backend(kernels, "cuda")
            except BuildError as error:
                why = str(error)
            yield _built(kernels.name, "cuda", why)


def _unreached(card: Operator, dtypes: Sequence[torch.dtype]) -> Iterator[Finding]:
    """Yield a finding for every dtype in which the CPU's kernel takes no sample: nothing has been held to the card."""
    native = [one for one in card.implementations if one.name == "native"]
    for dtype in dtypes or card.dtypes:
        answers = [one.accepts(*s.args, **s.kwargs) for s in card.samples(Make(dtype)) for one in native]
        if native and True not in answers:
            first = next(iter(answers), "there is none")
            why = f"no sample reaches the kernel ({first}); correct `samples` or `dtypes` in operator.py"
            yield _built(card.name, "native", why, short(dtype), "values")


def _built(name: str, implementation: str, why: str, dtype: str = "", check: str = "compiles") -> Finding:
    error, why = math.inf if why else 0.0, why.partition("\n")[0]
    return Finding(name, implementation, dtype, "", 0, check, not why, error, 0.0, why)


def alone(folder: str | Path, dtypes: Sequence[torch.dtype] = ()) -> list[Finding]:
    """The findings of gradients that are asked for one at a time, as where a model's other tensors are frozen.

    In a process of its own, which a kernel ends that writes all of them.
    """
    several = _several(folder)
    if triton.INTERPRETED or all(kernels.offers("cpu") is not True for kernels in several.values()):
        return []
    found, said = answer_of(__name__, str(Path(folder).resolve()), _ALONE, *map(short, dtypes))
    if found is not None:
        return [Finding(**one) for one in found]
    why = f"the process ended at {said.strip().splitlines()[-1]}"
    return [_built(next(iter(several)), FUNCTION, why, check="one gradient")]


def _several(folder: str | Path) -> dict[str, Kernels]:
    """Those that write more than one gradient, by their names."""
    return {one.name: one for one in kernels_of(load(folder)) if len(one.signature.gradients) > 1}


def _alone(card: Operator, dtype: torch.dtype) -> Iterator[Finding]:
    sample = max(card.samples(Make(dtype)), key=elements_of)
    for at, (name, t) in enumerate(zip(signature(card.function).parameters, sample.args, strict=False)):
        if isinstance(t, torch.Tensor) and t.is_floating_point():
            asks = t.detach().requires_grad_()
            one = replace(sample, args=(*sample.args[:at], asks, *sample.args[at + 1 :]))
            # What is said last, where a kernel ends the process.
            why = "others are written too; in C++, `defined()` says if one is wanted"
            print(f"the gradient of {name}, asked for alone: {why}", file=sys.stderr)
            slopes = partial(backward, card.function)
            yield examine(card, short(dtype), one, FUNCTION, "one gradient", slopes, differentiated=True)


def needs_interpreter(folder: str | Path) -> bool:
    """True where a project has Triton kernels and this machine has no GPU to run them."""
    here = triton.installed() is True and not triton.INTERPRETED and not torch.cuda.is_available()
    return here and any(kernels.source("triton").exists() for kernels in kernels_of(load(folder)))


def interpreted(
    folder: str | Path, dtypes: Sequence[torch.dtype] = (), *, quick: bool = False
) -> list[Finding]:
    """The findings of a project's Triton kernels in Triton's interpreter: in a process where these have the CPU."""
    words = [*map(short, dtypes), *([_QUICK] if quick else [])]
    found, said = answer_of(__name__, str(Path(folder).resolve()), *words, triton_interprets=True)
    if found is None:
        tail = " ".join(said.strip().splitlines()[-2:])
        raise RuntimeError(f"{folder}: verification in Triton's interpreter ended without a result: {tail}")
    return [Finding(**one) for one in found]


def main(folder: str, *words: str) -> None:
    """The part of `interpreted` and of `alone` that runs in the other process."""
    found: list[Finding] = []
    names, several = [word for word in words if word not in (_QUICK, _ALONE)], _several(folder)
    for card in cards_of(load(folder)):
        dtypes = [dtype for dtype in card.dtypes if not names or short(dtype) in names]
        quick = _QUICK in words or not dtypes
        if _ALONE not in words:
            found += verify(card, dtypes) if dtypes else ()
            found += () if quick else conduct(card, dtypes[0])
        found += () if quick or card.name not in several else _alone(card, dtypes[0])
    mine = [
        f for f in found if f.implementation not in ("native", "eager", "card") and f.check != "gradcheck"
    ]
    how = "" if _ALONE in words else f", {_INTERPRETED}"
    print(json.dumps([asdict(replace(f, implementation=f"{f.implementation}{how}")) for f in mine]))


def emulated(
    folder: str | Path, dtypes: Sequence[torch.dtype] = (), *, quick: bool = False
) -> Iterator[Finding]:
    """Yield the findings of a project's kernels for devices that back ends emulate."""
    module = load(folder)
    cards = {card.name: card for card in cards_of(module)}
    for kernels in () if triton.INTERPRETED else kernels_of(module):
        for backend in [installed()[name] for name in kernels.backends() if name in installed()]:
            if (card := cards.get(kernels.name)) and not kernels.misdeclared():
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
            yield _built(card.name, name, str(error), short(dtype))
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
