"""One repetition of a phase: plain, timed by the profiler, or watched with its shapes; and what watching costs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from opsmith import measure
from opsmith.compiler.reasons import one_line
from opsmith.profiler.collect import Watched, names_of, preorder, repetition, session, settle, watched
from opsmith.profiler.composites import CallSequence, of_sites, trace
from opsmith.profiler.data import Phase
from opsmith.profiler.marks import Marks, Modules, Run
from opsmith.profiler.phases import Work

CERTAIN = 0.02  # how exactly repetitions must tell the overhead for it to be theirs
WARM = 3  # a compiled model may compile again at the second sizes that it sees


def watch_shapes(
    work: Work, marks: Marks, modules: Modules, follow: bool, found: Phase
) -> list[CallSequence]:
    """One repetition with shapes, which `work` keeps, and the sequences of calls that it is read by."""
    work.ready()
    try:
        for _ in range(WARM if marks.session is not None or hasattr(work.traced, "_orig_mod") else 1):
            once(work)
        marks.keep_calls = True
        _watch(work, marks, modules if follow else None)
    except (Exception, KeyboardInterrupt, SystemExit):
        if work.shaped is None:
            # What it did until it stopped, at the second try: the first was a warm-up that nobody watched.
            with suppress(Exception, KeyboardInterrupt, SystemExit):
                _watch(work, marks, modules if follow else None)
        raise
    marks.keep_calls = False
    if marks.session is not None:
        # What the compiler left to PyTorch, because that is faster or more accurate, is still the operator it is.
        graphs = marks.session.graphs
        return [of_sites(g.original.graph, [known.site for known in g.sites.values()]) for g in graphs]
    learns = any(op.backward for op in preorder(work.shaped.ops if work.shaped is not None else ()))
    if not (learns and modules.runs):  # gradients are not traced, only the calls that they are of
        kwargs = {**work.kwargs, **(work.fresh() if work.fresh is not None else {})}
        traced = _traced(work.traced, work.args, kwargs, [] if modules.runs else found.notes)
        if traced is not None:
            modules.runs.clear()
            return [traced]
    return traced_runs(modules.runs, found)


def _traced(call: Any, args: Any, kwargs: Any, notes: list[str]) -> CallSequence | None:
    """The sequence of a call; None, with a note, where PyTorch can't trace it."""
    try:
        if isinstance(call, Exception):
            raise call
        return trace(call, args, kwargs)
    except Exception as error:  # a model may do anything while it is traced; classes come from its calls then
        notes.append(f"operators written as several calls were not recognized: {one_line(error)}")
        return None


def traced_runs(runs: Sequence[Run], found: Phase) -> list[CallSequence]:
    """The sequences of modules' calls, each run again on its copy, which is gone after that."""
    guides = []
    for i, one in enumerate(runs):
        copied, one.copied = one.copied, None
        call, args, kwargs = copied if isinstance(copied, tuple) else (copied, (), {})
        calls = _traced(call, args, kwargs, found.notes)
        if calls is not None:
            guides.append(replace(calls, run=i))
    return guides


def once(work: Work) -> float:
    work.before()
    try:
        with measure.no_collection():
            start = time.perf_counter()
            work.run()
            settle()
            return time.perf_counter() - start
    finally:
        work.after()


def _watch(work: Work, marks: Marks, modules: Modules | None) -> None:
    """One repetition with shapes, warm; kept also where it stops half way."""
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
            seen = watched(ops(), marks.known, marks.calls)
            work.shaped = seen[0] if seen else None
            work.after()


def block(work: Work, marks: Marks, count: int) -> list[Watched]:
    """Repetitions in one recording of names and times."""
    with measure.no_collection(), session(shapes=False) as ops, marks.watched():
        for _ in range(count):
            work.before()
            with repetition():
                work.run()
                settle()
            work.after()
    return watched(ops())


def overhead(
    found: Phase, run: Watched, plain: Sequence[Sequence[float]], recorded: Sequence[Sequence[float]]
) -> None:
    """What recording added: measured on repetitions in turn, or by its calls where these agree on nothing else.

    The machine drifts by more than a recording costs, so neighbors are compared, and the median of that counts. Where a
    step takes 150 ms in one repetition and 200 in the next, ten of them cannot tell a hundredth.
    """
    ratios = [median(r) / median(p) - 1 for r, p in zip(recorded, plain, strict=False)]
    counted = estimated(run, shapes=not ratios)
    if len(ratios) > 1:
        middle = median(ratios)
        # The standard error of a median, by the median of what the ratios are from it.
        error = 1.86 * median([abs(r - middle) for r in ratios]) / len(ratios) ** 0.5
        if error <= CERTAIN or abs(middle - counted) > 2 * error:
            found.overhead, found.overhead_error = middle, error
            return
        found.notes.append(
            f"the overhead is {len(names_of(run))} calls times the cost of recording one: repetitions in turn tell it "
            f"as {middle:+.1%} ±{error:.1%} only"
        )
    found.overhead, found.overhead_from = counted, "estimated"


def estimated(run: Watched, shapes: bool) -> float:
    """What recording costs by its calls: how many there were, times a call's recording, measured here."""
    calls = [torch.zeros(1).neg] * 200
    differences = []
    for _ in range(7):
        without = measure.by_clock(calls)
        with session(shapes=shapes):
            calls[0]()
            differences.append(measure.by_clock(calls) - without)
    extra = max(median(differences) / len(calls), 0.0) * len(names_of(run))
    return extra / max(run.seconds - extra, 1e-9)
