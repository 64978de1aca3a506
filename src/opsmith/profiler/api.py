"""`opsmith.profile`: a model, a function or a block of code, phase by phase."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn

import opsmith.ops  # noqa: F401  the cards register themselves
from opsmith import measure
from opsmith.compiler import Session
from opsmith.compiler.api import call_of
from opsmith.compiler.choose.select import device_of
from opsmith.compiler.reasons import one_line
from opsmith.profiler import advise, chains
from opsmith.profiler.attribute import attribute
from opsmith.profiler.collect import Watched, light, names_of, repetition, session, watched
from opsmith.profiler.composites import CallSequence
from opsmith.profiler.data import Phase
from opsmith.profiler.marks import Marks, Modules
from opsmith.profiler.phases import PHASES, Work, bytes_of, phase_of
from opsmith.profiler.repeat import block, once, overhead, traced_runs, watch_shapes
from opsmith.profiler.result import Profile
from opsmith.profiler.roofline import Roofs, judge
from opsmith.version import VERSION

LEAST, MOST = 10, 60  # repetitions that are recorded, each beside one that is not
BLOCKS = 6  # where a recording is not light, they come in this many blocks
OUTLIER = 1.5  # a repetition of more than this times the median was disturbed by something else


def profile(
    model: Any = None,
    example_inputs: Any = None,
    *,
    phase: str | Sequence[str] | None = None,
    budget_s: float = 4.0,
    name: str = "",
) -> Any:
    """Where a model's time goes: by operator class, against this machine's roofs, and what to do about it.

    `lost = seconds - max(flops / matmul rate, bytes / bandwidth)`, with both roofs measured in the same run. Operators
    are recognized by the compiler's patterns, so that an RMSNorm written as six PyTorch calls is one RMSNorm.

    >>> report = opsmith.profile(model, {"input_ids": ids}, phase=["prefill", "decode"])
    >>> print(report.table())
    >>> report.to_html("profile.html")

    Without a model it is a context manager for any PyTorch program; the block is one repetition:

    >>> with opsmith.profile() as recording:
    ...     train_one_epoch()
    >>> print(recording.profile.table())

    Args:
        model: an `nn.Module`, optimized or not, or a callable; None for a context manager.
        example_inputs: a dictionary of keyword arguments, a tuple of positional ones, or one tensor.
        phase: "forward" (the default), "prefill", "decode", "backward" or "train", or several of them.
        budget_s: seconds for the repetitions of one phase, about.
        name: what the report calls it; the model's class by default.

    Returns:
        Profile, or the context manager, whose `.profile` is one once it has ended.

    Raises:
        TypeError, ValueError: for what can't be called, or a phase that this model does not have.
        Exception: what the model raises, where nothing was gathered before; otherwise the profile says that it is
            partial, and why.
    """
    if model is None:
        if phase is not None or example_inputs is not None:
            raise TypeError(
                "profile: phase and example_inputs belong to a model; a block of code has neither"
            )
        return Recording(name or "program")
    if not callable(model):
        raise TypeError(f"profile: model must be a module or a callable, got {type(model).__name__}")
    names = [phase] if isinstance(phase, str) else list(phase or ["forward"])
    for one in names:
        if one not in PHASES:
            raise ValueError(f"profile: phase must be one of {', '.join(PHASES)}, got {one!r}")
    call = call_of(() if example_inputs is None else example_inputs)
    if call is None:
        raise TypeError(
            f"profile: example_inputs must be a tensor, a tuple or a dictionary, got {type(example_inputs).__name__}"
        )
    args, kwargs = call
    result = _fresh(name or getattr(model, "__name__", type(model).__name__))
    result.optimized = isinstance(getattr(model, "opsmith", None), Session)
    own = list(model.parameters())[:1] if isinstance(model, nn.Module) else []
    roofs = Roofs(device_of((*own, *args, *kwargs.values())).type)
    roofs.measure(_dtypes(model))
    for one in names:
        try:
            work = phase_of(one, model, args, kwargs)
            _phase(result, work, model, roofs, budget_s)
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            if not result.phases or (
                isinstance(error, TypeError | ValueError) and not result.phases[-1].rows
            ):
                raise
            result.partial = f"{one}: {one_line(error)}"
            break
    roofs.measure(_dtypes(model, phases=result.phases))
    return _finished(result, roofs)


class Recording:
    """A block of code under the profiler; `.profile` afterwards. An exception passes through, and is noted."""

    def __init__(self, name: str):
        self._name = name
        self._stack = ExitStack()
        self._modules = Modules()
        self._profile: Profile | None = None

    @property
    def profile(self) -> Profile:
        """What was found.

        Raises:
            ValueError: before the block has ended.
        """
        if self._profile is None:
            raise ValueError("profile: the block has not ended; read .profile behind it")
        return self._profile

    def __enter__(self) -> Recording:
        self._ops = self._stack.enter_context(session(shapes=True))
        self._stack.enter_context(self._modules.followed())
        self._stack.enter_context(repetition())
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace_: Any) -> None:
        self._stack.close()
        result = _fresh(self._name)
        if error is not None and not (isinstance(error, SystemExit) and error.code in (None, 0)):
            result.partial = one_line(error)
        run = watched(self._ops())[0]
        found = Phase("program", run.seconds, samples=[run.seconds])
        overhead(found, run, [], [])
        guides = traced_runs(self._modules.runs, found)
        roofs = Roofs()
        _fill(found, run, [run], guides)
        result.phases.append(found)
        roofs.measure(_dtypes(*(r.module for r in self._modules.runs), phases=result.phases))
        self._profile = _finished(result, roofs)


def _fresh(name: str) -> Profile:
    return Profile(
        name,
        machine=json.loads(json.dumps(measure.describe().to_json())),  # as it comes back from a file
        versions={"torch": torch.__version__, "opsmith": VERSION},
        taken=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )


def _finished(result: Profile, roofs: Roofs) -> Profile:
    result.roofs = dict(roofs.rates)
    for phase in result.phases:
        judge(phase.rows, roofs)
        phase.rows.sort(key=lambda row: -row.lost)
        for found in phase.chains:
            band = roofs.bandwidth(1 << 40)
            found.gain = min(found.gain, found.bytes_saved / band) if band else 0.0
        phase.chains.sort(key=lambda c: -c.gain)
        phase.advice = advise.advise(result, phase, roofs)
    return result


def _phase(result: Profile, work: Work, model: Any, roofs: Roofs, budget_s: float) -> None:
    found = Phase(work.name, 0.0, tokens=work.tokens, facts=dict(work.facts))
    if isinstance(model, nn.Module):
        found.weight_bytes = bytes_of([*model.parameters()])
    marks = Marks(model)
    root = model if isinstance(model, nn.Module) else None
    follow = marks.session is None and not hasattr(model, "_orig_mod")
    blocks: list[list[Watched]] = []
    plain: list[list[float]] = []
    calls: list[CallSequence] = []
    try:
        calls = watch_shapes(work, marks, Modules(root), follow, found)
        work.ready()
        seconds = once(work)
        count = int(min(max(budget_s / (2 * max(seconds, 1e-6)), LEAST), MOST))
        rounds = count if light() else BLOCKS
        for i in range(rounds):
            # Each goes first in every other round: what a recording leaves in the caches is in the way of both.
            recorded = block(work, marks, count // rounds) if i % 2 else []
            plain.append([once(work) for _ in range(count // rounds)])
            blocks.append(recorded or block(work, marks, count // rounds))
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        if work.shaped is None:
            raise
        result.partial = f"{work.name}: {one_line(error)}"
    finally:
        work.close()
    found.cache_bytes = work.cache_bytes
    shaped = work.shaped
    assert shaped is not None
    wanted = names_of(shaped)
    same = [run for run in chain.from_iterable(blocks) if names_of(run) == wanted]
    if same:
        usual = float(np.median([r.seconds for r in same]))
        same = [r for r in same if r.seconds <= OUTLIER * usual]
    else:
        found.notes.append(
            "the program did not repeat itself: times are those of the run that recorded shapes"
        )
        same = [shaped]
    found.samples = [r.seconds for r in same]
    if blocks:
        found.plain = float(np.median(list(chain.from_iterable(plain))))
    overhead(found, same[0], plain, [[run.seconds for run in b] for b in blocks])
    _fill(found, shaped, same, calls)
    result.phases.append(found)


def _fill(found: Phase, shaped: Watched, runs: list[Watched], guides: list[CallSequence]) -> None:
    """Everything that the repetitions say, but for the roofs."""
    attribution = attribute(shaped, guides)
    found.rows, series = attribution.rows(runs)
    found.wall = math.fsum(r.seconds for r in runs) / len(runs)
    for kind in dict.fromkeys(k for s in series for k in s):
        found.by_kind[kind] = [s.get(kind, 0.0) for s in series]
    found.noise = measure.spread(found.samples) / 2
    middle = sorted(runs, key=lambda r: r.seconds)[len(runs) // 2]
    found.events = attribution.events(middle)
    found.chains = chains.chains(found.rows, guides)


def _dtypes(*models: Any, phases: Iterable[Phase] = ()) -> list[str]:
    """Those that its parameters and products have, and the two whose comparison an advice needs."""
    found = {"float32", "bfloat16"}
    if any(row.int8_ops for phase in phases for row in phase.rows):
        found.add("int8")
    for model in models:
        if isinstance(model, nn.Module):
            found |= {str(p.dtype).removeprefix("torch.") for p in model.parameters()}
    return sorted(found)
