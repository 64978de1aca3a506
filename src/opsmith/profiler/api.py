"""`opsmith.profile`: a model, a function or a block of code, phase by phase."""

from __future__ import annotations

import gc
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

import opsmith.ops  # noqa: F401  the cards register themselves
from opsmith import measure
from opsmith.compiler import Session
from opsmith.profiler import advise, chains
from opsmith.profiler.attribute import Guide, attribute, names_of
from opsmith.profiler.collect import Op, Watched, repetition, session, settle, watched
from opsmith.profiler.composites import CallSequence, of_sites, trace
from opsmith.profiler.data import Phase, Profile
from opsmith.profiler.marks import Marks, Modules
from opsmith.profiler.phases import PHASES, Work, bytes_of, phase_of
from opsmith.profiler.roofline import Roofs, judge, stamp

BLOCKS = 6  # profiled repetitions take turns with others in this many blocks
MOST = 10  # repetitions in a block
WARM = 3  # a compiled model may compile again at the second sizes that it sees
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
    args, kwargs = _call(example_inputs)
    result = _fresh(name or _name(model))
    result.optimized = isinstance(getattr(model, "opsmith", None), Session)
    roofs = Roofs(_device(model, args, kwargs))
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
            result.partial = f"{one}: {_line(error)}"
            break
    roofs.measure(_dtypes(model))
    return _finished(result, roofs)


class Recording:
    """A block of code under the profiler; `.profile` afterwards. An exception passes through, and is noted."""

    def __init__(self, name: str):
        self._name = name
        self._stack = ExitStack()
        self._modules = Modules(keep_runs=4)
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
            result.partial = _line(error)
        run = watched(self._ops(), [])[0]
        found = Phase("program", run.seconds, samples=[run.seconds], overhead_from="estimated")
        found.overhead = _estimated(run)
        guides = []
        for i, one in enumerate(self._modules.runs):
            calls = _traced(one.module, one.args, one.kwargs, found)
            if calls is not None:
                guides.append(Guide(calls, i))
        roofs = Roofs()
        roofs.measure(_dtypes(*(r.module for r in self._modules.runs)))
        _fill(found, run, [run], guides)
        result.phases.append(found)
        self._profile = _finished(result, roofs)


def _fresh(name: str) -> Profile:
    from opsmith import __version__

    return Profile(
        name,
        machine=json.loads(json.dumps(measure.describe().to_json())),  # as it comes back from a file
        versions={"torch": torch.__version__, "opsmith": __version__},
        taken=stamp(),
    )


def _finished(result: Profile, roofs: Roofs) -> Profile:
    result.roofs = dict(roofs.rates)
    for phase in result.phases:
        judge(phase.rows, roofs)
        phase.rows.sort(key=lambda row: -row.lost)
        for chain in phase.chains:
            band = roofs.bandwidth(1 << 40)
            chain.gain = min(chain.gain, chain.bytes_saved / band) if band else 0.0
        phase.chains.sort(key=lambda c: -c.gain)
        phase.advice = advise.advise(result, phase, roofs)
    return result


@dataclass
class _Timed:
    run: Watched
    names: tuple[str, ...]


def _phase(result: Profile, work: Work, model: Any, roofs: Roofs, budget_s: float) -> None:
    found = Phase(work.name, 0.0, tokens=work.tokens, facts=dict(work.facts))
    if isinstance(model, nn.Module):
        found.weight_bytes = bytes_of([*model.parameters()])
    marks = Marks(model)
    root = model if isinstance(model, nn.Module) else None
    follow = root is not None and marks.session is None and not hasattr(model, "_orig_mod")
    timed: list[_Timed] = []
    plain: list[float] = []
    shaped: Watched | None = None
    calls: list[CallSequence] = []
    try:
        shaped, calls = _shapes(work, marks, Modules(root), follow, found)
        work.ready()
        seconds = _once(work)
        count = int(min(max(budget_s / (2 * BLOCKS * max(seconds, 1e-6)), 1), MOST))
        for _ in range(BLOCKS):
            plain += [_once(work) for _ in range(count)]
            timed += _block(work, marks, count)
        plain += [_once(work) for _ in range(count)]
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        if shaped is None:
            shaped = work.left
        if shaped is None:
            raise
        result.partial = f"{work.name}: {_line(error)}"
    finally:
        work.close()
    found.cache_bytes = work.cache_bytes
    wanted = names_of(shaped)
    same = [t.run for t in timed if t.names == wanted]
    if same:
        usual = float(np.median([r.seconds for r in same]))
        same = [r for r in same if r.seconds <= OUTLIER * usual]
    else:
        found.notes.append(
            "the program did not repeat itself: times are those of the run that recorded shapes"
        )
        same = [shaped]
    found.samples = [r.seconds for r in same]
    if plain and timed:
        found.plain = float(np.median(plain))
        # What else the machine does only ever adds: the faster quarter of both has seen the least of it.
        quiet = [float(np.quantile(times, 0.25)) for times in ([t.run.seconds for t in timed], plain)]
        found.overhead = quiet[0] / quiet[1] - 1
    else:
        found.overhead_from, found.overhead = "estimated", _estimated(shaped)
    _fill(found, shaped, same, [Guide(c) for c in calls])
    result.phases.append(found)


def _shapes(
    work: Work, marks: Marks, modules: Modules, follow: bool, found: Phase
) -> tuple[Watched, list[CallSequence]]:
    """One repetition with shapes, and the sequences of calls that it is read by; warm before it counts."""
    try:
        work.ready()
        for _ in range(WARM if marks.session is not None or hasattr(work.traced, "_orig_mod") else 1):
            _once(work)
        marks.keep_calls = True
        shaped = _watch(work, marks, modules if follow else None)
    except (Exception, KeyboardInterrupt, SystemExit):
        if not isinstance(work.left, Watched):
            # What it did until it stopped, at the second try: the first was a warm-up that nobody watched.
            with suppress(Exception, KeyboardInterrupt, SystemExit):
                _watch(work, marks, modules if follow else None)
        raise
    marks.keep_calls = False
    marks.clear()
    if marks.session is not None:
        # What the compiler left to PyTorch, because that is faster or more accurate, is still the operator it is.
        calls = [of_sites(g.original.graph, list(g.sites.values())) for g in marks.session.graphs]
    else:
        traced = _traced(work.traced, work.args, work.kwargs, found, work.fresh)
        calls = [traced] if traced is not None else []
    return shaped, calls


def _traced(
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    found: Phase,
    fresh: Callable[[], dict[str, Any]] | None = None,
) -> CallSequence | None:
    """The sequence of a call; None, with a note, where PyTorch can't trace it."""
    try:
        return trace(call, args, {**kwargs, **(fresh() if fresh is not None else {})})
    except Exception as error:  # a model may do anything while it is traced; classes come from its calls then
        found.notes.append(f"operators written as several calls were not recognized: {_line(error)}")
        return None


def _once(work: Work) -> float:
    work.before()
    gc_was = gc.isenabled()
    gc.disable()
    try:
        start = time.perf_counter()
        work.run()
        settle()
        return time.perf_counter() - start
    finally:
        if gc_was:
            gc.enable()
        work.after()


def _watch(work: Work, marks: Marks, modules: Modules | None) -> Watched:
    """One repetition with shapes; `work.left` keeps it, were it to stop half way."""
    with ExitStack() as stack:
        ops = stack.enter_context(session(shapes=True))
        stack.enter_context(marks.watched())
        if modules is not None:
            stack.enter_context(modules.followed())
        try:
            work.before()
            with repetition():
                work.run()
                settle()
        finally:
            stack.close()
            seen = watched(ops(), marks.noted, marks.origins)
            work.left = seen[0] if seen else None
            work.after()
    assert work.left is not None
    return work.left


def _block(work: Work, marks: Marks, count: int) -> list[_Timed]:
    gc_was = gc.isenabled()
    gc.disable()
    stack = ExitStack()
    ops: Callable[[], list[Op]] = stack.enter_context(session(shapes=False))
    stack.enter_context(marks.watched())
    try:
        for _ in range(count):
            work.before()
            with repetition():
                work.run()
                settle()
            work.after()
    finally:
        stack.close()
        if gc_was:
            gc.enable()
    runs = watched(ops(), [])
    marks.clear()
    return [_Timed(run, names_of(run)) for run in runs]


def _fill(found: Phase, shaped: Watched, runs: list[Watched], guides: list[Guide]) -> None:
    """Everything that the repetitions say, but for the roofs."""
    attribution = attribute(shaped, guides)
    found.rows, series = attribution.rows(runs)
    found.wall = math.fsum(r.seconds for r in runs) / len(runs)
    for kind in dict.fromkeys(k for s in series for k in s):
        found.by_kind[kind] = [s.get(kind, 0.0) for s in series]
    found.noise = measure.spread(found.samples) / 2
    middle = sorted(runs, key=lambda r: r.seconds)[len(runs) // 2]
    found.events = attribution.events(middle)
    found.chains = chains.chains(found.rows, [g.calls for g in guides])


def _estimated(run: Watched) -> float:
    """What recording costs a program that ran once: its calls times a call's recording, measured here."""
    x = torch.zeros(1)
    count = 200

    def repeat() -> float:
        start = time.perf_counter()
        for _ in range(count):
            x.neg()
        return (time.perf_counter() - start) / count

    repeat()
    without = repeat()
    with session(shapes=True):
        repeat()
        recorded = repeat()
    extra = max(recorded - without, 0.0) * len(names_of(run))
    return extra / max(run.seconds - extra, 1e-9)


def _call(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if example_inputs is None:
        return (), {}
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, tuple):
        return example_inputs, {}
    if isinstance(example_inputs, torch.Tensor):
        return (example_inputs,), {}
    raise TypeError(
        f"profile: example_inputs must be a tensor, a tuple or a dictionary, got {type(example_inputs).__name__}"
    )


def _name(model: Any) -> str:
    if isinstance(model, nn.Module):
        return type(model).__name__
    return getattr(model, "__name__", type(model).__name__)


def _device(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    own = list(model.parameters())[:1] if isinstance(model, nn.Module) else []
    for value in (*own, *args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value.device.type
    return "cpu"


def _dtypes(*models: Any) -> list[str]:
    """Those that its parameters have, and the two whose comparison an advice needs."""
    found = {"float32", "bfloat16"}
    for model in models:
        if isinstance(model, nn.Module):
            found |= {str(p.dtype).removeprefix("torch.") for p in model.parameters()}
    return sorted(found)


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    what = {KeyboardInterrupt: "interrupted", SystemExit: "the program exited"}.get(type(error))
    return f"{what or type(error).__name__}" + (f": {lines[0][:200]}" if lines else "")


__all__ = ["Recording", "profile"]
