"""Times an operator on its workloads, forward and backward: verified first, against baselines, beside the roofs."""

from __future__ import annotations

import heapq
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from opsmith import measure
from opsmith.call.arguments import short
from opsmith.measure.pool import tensors_of
from opsmith.operator import Cost, Implementation, Make, Operator, Sample
from opsmith.proof.baselines import Baseline, choose
from opsmith.proof.conduct import conduct
from opsmith.proof.passes import Backward, Calls, Forward, Pass, cold_data
from opsmith.proof.verify import Finding, verify

AGAINST = ("eager", "compile")
OURS = "opsmith"  # the public function
_LARGEST = 2  # samples that stand in for workloads where a card names none
# Smaller inputs would have to be too many for their rotation to leave the caches: those are flushed instead.
_LEAST_SHARE_OF_POOL = {"cpu": 1 / 256, "cuda": 1 / 4096}
# Outputs of this size may be fresh pages at every call, unless the memory of earlier ones is kept: glibc gives the
# end of its heap back once that has grown.
_FRESH_PAGES = 1 << 20
# And from here on they are: glibc asks the system for each.
_ALWAYS_FRESH = 32 << 20
# How much of it is kept, in peaks of a call.
_SPARE, _SPARE_AT_MOST = 3, 2 << 30
# Above so many operations a byte, the matmul rate may be the roof; no operator bound by memory comes near it.
_MATMUL_INTENSITY = 16.0
# An operator whose outputs are a smaller part of its bytes only reads, as far as roofs are concerned.
_WRITES = 1 / 16
# Who took this many times the best in two rounds is left out of all but the last ones, where time is short: a baseline
# of 80 ms would leave three samples of a call of half a millisecond, each of them right after it.
_HOPELESS = 10.0
# What float64 may take to check a workload, as a part of the memory.
_CHECK_SHARE = 4
_SECONDS = 0.5


@dataclass(frozen=True)
class Benchmark:
    """One workload in one dtype and one direction: its comparisons by column, and what became of each contestant.

    Columns: "cold" (nothing in cache; on a CPU, large outputs on fresh pages), "reused" (the same, in memory that
    earlier outputs have left), "warm" (everything in cache, where it fits) and "graph" (cold, replayed by a CUDA
    graph).
    """

    operator: str
    workload: str
    dtype: str
    device: str
    direction: str  # "forward", "backward", or "forward + backward"
    cost: Cost
    columns: Mapping[str, measure.Comparison]
    # By column, then contestant; missing where no roof of the dtype is known.
    roof: Mapping[str, Mapping[str, float]]
    # Bytes beyond the inputs; of forward and backward together, where it is a backward.
    peak: Mapping[str, int]
    ours: tuple[str, ...]
    baselines: tuple[str, ...]
    notes: tuple[str, ...]
    faults: tuple[str, ...]  # times that the roofs do not allow: no records, but errors of formula or timer

    @property
    def deciding(self) -> str:
        """The column whose ratios are shown: the one in which all contestants have memory alike."""
        return "reused" if "reused" in self.columns else "cold"

    def best(self, column: str) -> str | None:
        """The fastest contestant of ours in a column."""
        return min(self._there(self.ours, column), key=self.columns[column].median, default=None)

    def ratio(self, column: str, name: str, base: str) -> measure.Ratio | None:
        """The time of one over that of another, None where one of them has none."""
        both = self._there((name, base), column) if column in self.columns else []
        return self.columns[column].ratio(name, base) if len(set(both)) == 2 else None

    def _there(self, names: Sequence[str], column: str) -> list[str]:
        return [name for name in names if name in self.columns[column].names]

    def to_json(self) -> dict[str, Any]:
        """Everything, samples included, as plain values."""
        ratios = {
            column: {
                f"{name} / {base}": ratio.to_json()
                for base in self.baselines
                for name in compared.names
                if (ratio := self.ratio(column, name, base)) is not None
            }
            for column, compared in self.columns.items()
        }
        return {
            "operator": self.operator,
            "workload": self.workload,
            "dtype": self.dtype,
            "device": self.device,
            "direction": self.direction,
            "flops": self.cost.flops,
            "min_bytes": self.cost.min_bytes,
            "peak_bytes": dict(self.peak),
            "roof_fraction": {column: dict(found) for column, found in self.roof.items()},
            "ratios": ratios,
            "notes": list(self.notes),
            "faults": list(self.faults),
            "columns": {column: compared.to_json() for column, compared in self.columns.items()},
        }


def workloads(card: Operator, make: Make) -> list[Sample]:
    """What a benchmark runs: the card's workloads, or its largest samples where it names none."""
    if card.workloads is not None:
        return list(card.workloads(make))
    return heapq.nlargest(_LARGEST, card.samples(make), key=lambda s: card.cost_of(s).min_bytes)


def bench(
    card: Operator,
    dtype: torch.dtype,
    *,
    against: Sequence[str] = AGAINST,
    device: str = "cpu",
    backward: bool = True,
    seconds: float = _SECONDS,
    thorough: bool = False,
    sample: Sample | None = None,
    verified: bool = False,
) -> Iterator[Benchmark]:
    """Verify an operator in one dtype, then time its workloads; a wrong result prints no time.

    Args:
        card: the operator.
        dtype: of the inputs.
        against: baselines, of `opsmith.proof.baselines.BASELINES`.
        device: "cpu" or "cuda".
        backward: time the gradients too, where the operator has any.
        seconds: for the comparison that counts, cold; the others get less. Warm-up aside.
        thorough: verify not values and gradients only, but how the operator behaves: races, schemas, torch.compile.
        sample: what is timed in the place of the workloads.
        verified: the card has just been held to its samples; what is timed is checked in any case.

    Raises:
        WrongResult: a check of the card failed; nothing was timed.
        ValueError: a baseline that does not exist, or cannot run on this device.
    """
    baselines = choose(against, device)
    if not verified:
        refuse([*verify(card, [dtype], device), *(conduct(card, dtype, device) if thorough else ())])
    with measure.reused_memory():
        pass  # from here on the allocator's own thresholds stand still, so that all workloads see the same
    for one in workloads(card, Make(dtype, device)) if sample is None else [sample]:
        run = _Run(card, one, dtype, device, baselines, seconds)
        yield run.forward()
        if backward and card.differentiable:
            yield run.backward()


def refuse(findings: Iterable[Finding]) -> None:
    """Raise WrongResult for the failure on the smallest sample, where there is one: what is wrong has no speed."""
    red = min((f for f in findings if not f.ok), key=lambda f: f.elements, default=None)
    if red is not None:
        name = f"{red.operator} {red.implementation}"
        raise measure.WrongResult(name, red.place, red.why, red.error, red.bound)


@dataclass(frozen=True)
class _Run:
    card: Operator
    sample: Sample
    dtype: torch.dtype
    device: str
    baselines: Sequence[Baseline]
    seconds: float

    def forward(self) -> Benchmark:
        """The operator without gradients: the public function, and every implementation that takes the sample.

        Implementations alone would not do: what the card calls binds arguments and makes results in Python, which takes
        ten times as long as a call of one row by the public function. Both are timed with and without `out=`.
        """
        with torch.no_grad():
            notes: list[str] = []
            one = Forward(self.card, self.sample)
            there = self.card.candidates(*self.sample.args, **self.sample.kwargs)[0]
            public = Implementation(OURS, self.card.function, takes_out=any(i.takes_out for i in there))
            ours = [i for i in (public, *there) if i.name != "eager"]
            mine = {i.name: partial(_call, i.fn) for i in ours}
            into = {f"{i.name}, out=": partial(_call_into, i) for i in ours if i.takes_out}
            theirs = {title: partial(_call, fn) for title, fn in self._peers(notes)}
            return self._measure(one, mine, into, theirs, notes)

    def backward(self) -> Benchmark:
        """The gradients of all inputs, from a forward that ran off the clock; of a loss, both together."""
        notes: list[str] = []
        one = Backward(self.card, self.sample)
        mine = {OURS: one.contestant(self.card.function)}
        theirs = {title: one.contestant(fn) for title, fn in self._peers(notes)}
        return self._measure(one, mine, {}, theirs, notes)

    def _peers(self, notes: list[str]) -> Iterator[tuple[str, Callable[..., Any]]]:
        for baseline in self.baselines:
            found = baseline.of(self.card)
            if isinstance(found, str):
                notes.append(f"{baseline.title} takes no part: {found}")
            else:
                yield baseline.title, found

    def _measure(self, one: Pass, mine: Calls, into: Calls, theirs: Calls, notes: list[str]) -> Benchmark:
        peak = {name: self._peak(one, call) for name, call in (*mine.items(), *into.items())}
        for title, call in theirs.items():
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    peak[title] = self._peak(one, call)  # its first call: here it compiles, or cannot
            except Exception as error:
                reason = (str(error) or "no reason given").splitlines()[0]
                notes.append(f"{title} takes no part: {type(error).__name__}: {reason}")
        theirs = {title: call for title, call in theirs.items() if title in peak}
        everyone = {**mine, **into, **theirs}
        limit = measure.describe().memory_bytes // _CHECK_SHARE or 1 << 40
        right, found = one.check(everyone, theirs, limit if self.device == "cpu" else 1 << 62, peak)
        theirs = {title: call for title, call in theirs.items() if title in right}
        notes += found
        columns = self._columns(one, mine, into, theirs, peak, notes)
        cost = one.cost()
        roof: dict[str, dict[str, float]] = {}
        memory: Literal["copy", "read"] = "copy" if one.largest_output >= _WRITES * cost.min_bytes else "read"
        faults = []
        for column, compared in columns.items():
            if compared.roofs is None or not self._judged(cost):
                continue
            roof[column] = {}
            for name in compared.names:
                try:
                    roof[column][name] = compared.roofs.fraction(
                        compared.median(name),
                        flops=cost.flops,
                        bytes=cost.min_bytes,
                        dtype=self.dtype if cost.intensity > _MATMUL_INTENSITY else None,
                        int8_ops=cost.int8_ops,
                        memory=memory,
                        cold=compared.cold,
                    )
                except measure.ImpossibleTime as error:
                    faults.append(
                        f"{self.card.name} {self.sample.name}, {one.direction}, {column}, {name}: {error}"
                    )
        return Benchmark(
            self.card.name,
            self.sample.name,
            short(self.dtype),
            self.device,
            one.direction,
            cost,
            columns,
            roof,
            peak,
            (*mine, *into),
            tuple(theirs),
            tuple(dict.fromkeys((*notes, *(m for c in columns.values() for m in c.messages)))),
            tuple(faults),
        )

    def _peak(self, one: Pass, call: Callable[..., Any]) -> int:
        return measure.peak_bytes(partial(call, *one.inputs()), self.device)

    def _columns(
        self, one: Pass, mine: Calls, into: Calls, theirs: Calls, peak: Mapping[str, int], notes: list[str]
    ) -> dict[str, measure.Comparison]:
        fresh, everyone = {**mine, **theirs}, {**mine, **into, **theirs}
        size = sum(t.nbytes for t in tensors_of(one.inputs()))
        prepared = isinstance(one, Backward)  # its forward has just touched the inputs: always flushed
        small = size < _LEAST_SHARE_OF_POOL[self.device] * measure.cold_bytes(self.device)
        large = self.device == "cpu" and one.largest_output >= _FRESH_PAGES and measure.can_reuse_memory()
        # Two sets and a flush, or as many sets as leave the caches.
        flushed = small or prepared
        pool = measure.Pool(lambda i: one.inputs(), total_bytes=size if flushed else None, device=self.device)
        flush = measure.CacheFlush(device=self.device) if flushed else None
        timed = partial(measure.compare, warmup=1, device=self.device)  # everyone has been called by now
        cold = partial(
            timed,
            pool=pool,
            flush=cold_data(flush) if flush is not None and prepared else flush,
            roofs=measure.RoofProbes(self._roofs(one.cost()), device=self.device),
            budget_s=self.seconds,
            min_rounds=5,
            drop=_HOPELESS,
            drop_rounds=5,
        )
        # Like with like: what writes into memory of its own is compared where the others' memory is there already too.
        fresh_pages = large and one.largest_output >= _ALWAYS_FRESH
        outputs = "on fresh pages" if fresh_pages else "as the allocator gives them"
        found = {"cold": cold(fresh if large else everyone, notes={"outputs": outputs})}
        if large:
            with measure.reused_memory(min(_SPARE * max(peak.values()), _SPARE_AT_MOST)):
                found["reused"] = cold(everyone, notes={"outputs": "in memory of earlier ones"})
        if size + one.largest_output <= measure.describe().last_level_cache or not large:
            found["warm"] = timed(everyone, pool=pool, warm=True, budget_s=self.seconds / 3, min_rounds=3)
        if self.device == "cuda" and not prepared:
            found |= self._graphs(one, everyone, pool, notes, timed)
        return found

    def _graphs(
        self, one: Pass, everyone: Calls, pool: Any, notes: list[str], timed: Callable[..., Any]
    ) -> dict[str, measure.Comparison]:
        """Every contestant as a CUDA graph over the whole pool; those that cannot be captured are named."""
        sets = [pool[i] for i in range(len(pool))]
        graphs: dict[str, Callable[..., object]] = {}
        for name, call in everyone.items():
            try:
                graphs[name] = measure.captured(call, sets)
            except RuntimeError as error:
                notes.append(f"{name} cannot be captured in a CUDA graph: {str(error).splitlines()[0]}")
        if not graphs:
            return {}
        roofs = measure.RoofProbes(self._roofs(one.cost()), device=self.device)
        return {"graph": timed(graphs, roofs=roofs, budget_s=self.seconds, min_rounds=3)}

    def _judged(self, cost: Cost) -> bool:
        return cost.intensity <= _MATMUL_INTENSITY or f"matmul {short(self.dtype)}" in measure.KINDS

    def _roofs(self, cost: Cost) -> tuple[str, ...]:
        memory = ("read", "copy", "update")
        matmul = cost.intensity > _MATMUL_INTENSITY and self._judged(cost)
        if not matmul:
            return memory
        return (*memory, f"matmul {short(self.dtype)}", *(("matmul int8",) if cost.int8_ops else ()))


def _call(fn: Callable[..., Any], args: Any, kwargs: Any, outs: Any) -> Any:
    return fn(*args, **kwargs)


def _call_into(implementation: Implementation, args: Any, kwargs: Any, outs: Any) -> Any:
    return implementation.fn(*args, **kwargs, out=outs)
