"""Interleaved timing, the only one there is: benchmarks, autotuning, profiler and authoring all come here.

Contestants run in random order within each round, in one process, on the same threads, all warmed up, each
checked for correctness first; ratios are paired by round.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from .checks import Tolerance, WrongResult, compare_outputs
from .comparison import ALONE, Comparison, spread_messages
from .contestants import Prepared, Repeated
from .machine import describe
from .pool import Inputs, Pool
from .roofs import KINDS, Probe, RoofProbes, Roofs

# One sample is at least this long, so that neither the clock's grain nor its call shows.
_MIN_TIME = 200e-6
_MAX_INNER = 1 << 14
_MAX_PREPARED = 64  # what is prepared takes memory until it is called

Clock = Callable[[], float]
Stopwatch = Callable[[Sequence[Callable[[], object]]], float]  # seconds that calls take one after the other


def by_clock(calls: Sequence[Callable[[], object]], clock: Clock = time.perf_counter) -> float:
    """Seconds by a clock, which may be one that a test controls."""
    start = clock()
    for call in calls:
        call()
    return clock() - start


def by_events(calls: Sequence[Callable[[], object]], cuda: Any = torch.cuda) -> float:
    """Seconds between two events on the device's stream, so that the time to launch is not what is measured."""
    start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
    # Earlier work still in the queue would otherwise run between the events.
    cuda.synchronize()
    start.record()
    for call in calls:
        call()
    end.record()
    cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e-3  # elapsed_time is in milliseconds


def once(call: Callable[..., object], device: str | torch.device = "cpu") -> float:
    """Seconds of one call, by the device's own time."""
    stopwatch = by_events if torch.device(device).type == "cuda" else by_clock
    return stopwatch([call]) / (call.times if isinstance(call, Repeated) else 1)


class _Runner:
    """One contestant: how many calls make a sample, and where their inputs come from."""

    def __init__(
        self,
        call: Callable[..., object],
        stopwatch: Stopwatch,
        inputs: Callable[[], Inputs],
        flush: Callable[[], object] | None,
    ) -> None:
        self.call, self.inner = call, 1
        self._times = call.times if isinstance(call, Repeated) else 1
        self._most = _MAX_PREPARED if isinstance(call, Prepared) else _MAX_INNER
        self._stopwatch, self._inputs, self._flush = stopwatch, inputs, flush
        self._after = call.after if isinstance(call, Probe) else None

    def _bound(self) -> Callable[[], object]:
        if isinstance(self.call, Prepared):
            return self.call.prepare(*self._inputs())
        return functools.partial(self.call, *self._inputs())

    def sample(self) -> float:
        # Bound before the clock starts; preparation, and the rotation itself, are not part of the work.
        calls = [self._bound() for _ in range(self.inner)]
        if self._flush is not None:
            self._flush()
        seconds = self._stopwatch(calls)
        if self._after is not None:
            self._after()
        return seconds / (self.inner * self._times)

    def settle(self, min_time: float) -> float:
        """Finds how many calls make a sample, and returns the first of that many: seconds per call."""
        seconds = self.sample()
        # After a flush the second call would be warm, so there a sample is one call, however short.
        while (
            self._flush is None and seconds * self._times * self.inner < min_time and self.inner < self._most
        ):
            wanted = math.ceil(1.2 * min_time / (seconds * self._times)) if seconds > 0 else self._most
            self.inner = min(max(wanted, self.inner + 1), 10 * self.inner, self._most)
            seconds = self.sample()
        return seconds


def compare(
    contestants: Mapping[str, Callable[..., object]],
    *,
    pool: Pool | None = None,
    warm: bool = False,
    flush: Callable[[], object] | Mapping[str, Callable[[], object]] | None = None,
    check: object = None,
    tolerance: Tolerance | None = None,
    roofs: RoofProbes | None = None,
    rounds: int = 25,
    min_rounds: int = 5,
    min_time: float = _MIN_TIME,
    warmup: int = 3,
    budget_s: float | None = None,
    drop: float | None = None,
    drop_rounds: int = 2,
    seed: int = 0,
    device: str | torch.device = "cpu",
    clock: Clock | None = None,
    notes: Mapping[str, str] | None = None,
) -> Comparison:
    """Times contestants against each other.

    >>> x = torch.randn(64)
    >>> result = compare({"exp": lambda: x.exp(), "sin": lambda: x.sin()}, rounds=5)
    >>> len(result.samples["exp"])
    5

    Args:
        contestants: callables by name; called with the pool's inputs, or with nothing when there is no pool.
            `Prepared` ones are timed in part, `Repeated` ones count as several calls.
        pool: sets of inputs, rotated call by call over all contestants: cold.
        warm: use the pool's first set in every call instead.
        flush: evict the caches before each sample, which is then one call; or what does so, by contestant.
        check: the expected tensor(s) for the pool's first set, or `check(output, *inputs)`, which returns
            None or True when right, or else False or what is wrong.
        tolerance: largest absolute error against expected tensors; see `compare_outputs`.
        roofs: probes that run interleaved with the contestants, unchecked.
        rounds: samples of each contestant, at most.
        min_rounds: samples of each, whatever the budget.
        min_time: seconds that one sample lasts at least, by repeating short calls.
        warmup: calls before anything is timed.
        budget_s: seconds after which no further round starts.
        drop: stop measuring a contestant that in the first two rounds took this many times the best, when the
            budget cannot hold all rounds; a single one left has won.
        drop_rounds: samples of such a contestant: what two lack is taken at the end, in rounds of all.
        seed: of the order of the contestants and the bootstrap.
        device: "cuda" times by device events.
        clock: returns seconds; replaces the stopwatch, for tests.
        notes: what a reader must know, such as {"outputs": "reused"}; kept in the JSON.

    Returns:
        Comparison: all samples, medians, ratios with intervals, roofs.

    Raises:
        WrongResult: a contestant computed something else; nothing was timed.
        ValueError: no contestants, or a combination of options that contradict each other.
    """
    if not contestants and roofs is None:
        raise ValueError("compare: expected at least one contestant, got none; pass {'name': callable}")
    if rounds < 1:
        raise ValueError(f"compare: expected rounds >= 1, got {rounds}")
    if warm and flush is not None:
        raise ValueError("compare: warm=True and flush contradict each other; choose one")
    if warm and pool is None:
        raise ValueError("compare: warm=True takes its inputs from a pool, got none; pass pool=Pool(make)")
    if reserved := [name for name in contestants if name.startswith("roof: ")]:
        raise ValueError(
            f"compare: names that start with 'roof: ' are the probes' own, got {reserved}; rename them"
        )
    now = clock or time.perf_counter
    started = now()
    threads = torch.get_num_threads()
    if check is not None:
        for name, call in contestants.items():
            _check(name, call, pool, check, tolerance)
    by_device = clock is None and torch.device(device).type == "cuda"
    stopwatch = by_events if by_device else functools.partial(by_clock, clock=now)
    everyone: dict[str, Callable[..., object]] = {**contestants, **(roofs.contestants() if roofs else {})}
    inputs = tuple if pool is None else functools.partial(pool.__getitem__, 0) if warm else pool.take
    flushes = flush if isinstance(flush, Mapping) else dict.fromkeys(everyone, flush)
    runners = {name: _Runner(call, stopwatch, inputs, flushes[name]) for name, call in everyone.items()}
    generator = np.random.default_rng(seed)
    samples: dict[str, list[float]] = {name: [] for name in runners}
    orders: list[list[str]] = []
    dropped: list[str] = []
    with no_collection():
        for runner in runners.values():
            for _ in range(warmup):
                runner.call(*inputs())
        ran, began = time.thread_time(), now()
        active = list(runners)

        def once() -> None:
            order = [active[i] for i in generator.permutation(len(active))]
            for name in order:
                runner = runners[name]
                samples[name].append(runner.sample() if orders else runner.settle(min_time))
            orders.append(order)

        while len(orders) < rounds:
            round_started = now()
            once()
            ended = now()
            if budget_s is None:
                continue
            spare = budget_s - (ended - started)
            if len(orders) == 2 and drop is not None and (ended - round_started) * (rounds - 2) > spare:
                dropped = _too_slow(contestants, samples, drop)
                active = [name for name in active if name not in dropped]
                if len(active) == 1 < len(runners):
                    break
            if spare < ended - round_started and len(orders) >= min_rounds:
                break
        active = list(runners)
        for _ in range(drop_rounds - 2 if dropped else 0):
            once()
    share = (time.thread_time() - ran) / (now() - began) if clock is None and not by_device else 1.0
    messages = spread_messages(samples)
    if share < ALONE:
        messages.append(f"the calling thread ran {share:.0%} of the time: other work ran, or it slept")
    if pool is not None and not warm and not pool.cold:
        messages.append(
            f"the pool of {pool.bytes} bytes is too small for the caches: these times are not cold"
        )
    if torch.get_num_threads() != threads:
        messages.append(
            f"a contestant changed the number of threads from {threads} to {torch.get_num_threads()}"
        )
    return Comparison(
        column=_column(pool, warm, flush),
        samples=samples,
        inner={name: runner.inner for name, runner in runners.items()},
        orders=orders,
        dropped=dropped,
        checked=check is not None,
        seed=seed,
        min_time=min_time,
        stopwatch="device events" if by_device else "wall clock",
        taken=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        machine=describe(),
        roofs=roofs.roofs(samples) if roofs else None,
        notes=dict(notes or {}),
        messages=messages,
        share=share,
    )


def quick(
    contestants: Mapping[str, Callable[..., object]],
    *,
    budget_s: float = 0.15,
    min_rounds: int = 3,
    warmup: int = 1,
    drop: float = 2.5,
    **options: Any,
) -> Comparison:
    """`compare` for autotuning: the same rules within a small budget, the hopeless dropped after two rounds.

    The budget is kept to within the warm-up and `min_rounds` rounds of those that are not dropped.
    Choose with `.best(prefer=...)`. Arguments, result and errors are those of `compare`.

    >>> x = torch.randn(64)
    >>> quick({"exp": lambda: x.exp(), "same": lambda: x.exp()}, budget_s=0.01).best() in ("exp", "same")
    True
    """
    options |= {"budget_s": budget_s, "min_rounds": min_rounds, "warmup": warmup, "drop": drop}
    return compare(contestants, **options)


def measure_roofs(
    quick: bool = True, *, device: str | torch.device = "cpu", kinds: tuple[str, ...] = ()
) -> Roofs:
    """Measures all roofs of this machine, for a report; a benchmark passes `roofs=` to `compare` instead.

    Args:
        quick: within three seconds on common machines; otherwise more rounds and larger matmuls.
        device: "cpu" or "cuda".
        kinds: which roofs, of `KINDS`; all by default.

    Returns:
        Roofs: the best rate found for each kind, and by which library call.
    """
    sizes = (512,) if quick and torch.device(device).type == "cpu" else None
    probes = RoofProbes(kinds or KINDS, sizes=sizes, device=device)
    found = compare(
        {},
        roofs=probes,
        rounds=15 if quick else 50,
        min_rounds=3,
        warmup=1,
        budget_s=1.5 if quick else 20.0,
        device=device,
    )
    assert found.roofs is not None
    return found.roofs


def _check(
    name: str, call: Callable[..., object], pool: Pool | None, check: object, tolerance: Tolerance | None
) -> None:
    inputs = pool[0] if pool is not None else ()
    output = call(*inputs)
    if not callable(check):
        compare_outputs(name, output, check, tolerance)
        return
    said = check(output, *inputs)
    if said is not None and said is not True:
        raise WrongResult(name, "wrong value", str(said) if said else "the check said no", math.inf, 0.0)


def _too_slow(contestants: Collection[str], samples: Mapping[str, list[float]], drop: float) -> list[str]:
    """Those that all rounds found `drop` times slower than the best: one alone may have been an accident."""
    least = [min(times) for times in zip(*(samples[n] for n in contestants), strict=True)]
    return [n for n in contestants if all(t > drop * best for t, best in zip(samples[n], least, strict=True))]


def _column(pool: Pool | None, warm: bool, flush: object) -> str:
    if flush is not None:
        return "cold, flushed"
    if pool is None:
        return "as called"
    return "warm" if warm else "cold"


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Python's garbage collector waits until this is over."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
