"""What a profile holds: rows, phases and the roofs they are judged by. Every view derives from these."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from opsmith.operator import Cost, GradientCost

SCHEMA = 1

# The classes of the bill, in the order in which they are listed where no time orders them.
MATMUL, ATTENTION, NORM, ROPE = "MatMul", "Attention", "Norm", "RoPE"
EMBEDDING, SOFTMAX, ACTIVATION = "Embedding", "Softmax", "Activation"
COPIES, LOSS, OTHER, FRAMEWORK = "Cache and copies", "Loss and sampling", "Other", "Framework"
CLASSES = (MATMUL, ATTENTION, NORM, ROPE, EMBEDDING, SOFTMAX, ACTIVATION, COPIES, LOSS, OTHER, FRAMEWORK)
OVER_ROOF = 1.05  # a row that did more than this part of what the roofs allow is wrongly counted or timed


@dataclass
class Row:
    """One operator at one shape in one layer: everything per repetition of its phase.

    Attributes:
        kind: the class, one of `CLASSES`.
        operator: `rms_norm`, `linear`, `aten::add`; with " backward" behind it for its gradient.
        shape: what it was called with, as a person reads it.
        implementation: what computed it ("eager", "native", ...).
        composite: True where the model wrote it as several PyTorch calls.
        pieces: the PyTorch calls that one call of it was made of.
        seconds, calls, flops, bytes: sums over its calls; `bytes` is the least that can be moved.
        int8_ops: of the operations, products of int8 with int8.
        least: the least seconds that the roofs allow.
        known: False where there is no formula for its cost.
        classified: False for a PyTorch operator of which the profiler knows nothing.
        replay: what to type to time this operator by itself at this shape, or "".
        fault: what the operator's own formula for its cost raised, or "".
    """

    kind: str
    operator: str
    shape: str
    layer: str = ""
    implementation: str = "eager"
    composite: bool = False
    pieces: list[str] = field(default_factory=list)
    dtype: str = ""
    seconds: float = 0.0
    calls: float = 0.0
    flops: float = 0.0
    int8_ops: float = 0.0
    bytes: float = 0.0
    least: float = 0.0
    known: bool = True
    classified: bool = True
    bound: str = ""
    refused: dict[str, str] = field(default_factory=dict)
    reason: str = ""
    source: str = ""
    fault: str = ""
    replay: str = ""

    def charge(self, cost: Cost | None) -> None:
        """Add the cost of one more part; one of which nothing is known leaves the whole unknown."""
        if cost is None:
            self.known = False
            return
        self.flops += cost.flops
        self.int8_ops += cost.int8_ops
        self.bytes += cost.min_bytes

    @property
    def lost(self) -> float:
        """Seconds above the least that the roofs allow."""
        return max(self.seconds - self.least, 0.0)

    @property
    def of_roof(self) -> float | None:
        """The part of the roof that was reached; None without a cost or a roof."""
        return self.least / self.seconds if self.known and self.least > 0 and self.seconds > 0 else None


@dataclass
class Unit:
    """One call of one operator, and the places in the tree of the PyTorch calls that it is made of."""

    row: Row
    places: list[int] = field(default_factory=list)
    gradient: GradientCost | None = None  # what its card says, where it has one


@dataclass
class Event:
    """One stretch of the timeline of one repetition; times in seconds from its start."""

    name: str
    kind: str
    start: float
    seconds: float
    layer: str = ""
    shape: str = ""
    flops: float = 0.0
    bytes: float = 0.0


@dataclass
class Chain:
    """Operators bound by memory that follow each other: what one kernel in their place would not move."""

    operators: list[str]
    count: float
    bytes_saved: float
    gain: float
    implementation: str = ""  # the operator of ours that is all of them, or ""


@dataclass
class Advice:
    """One thing to do: why, what it is worth at most, what to type, how to see that it worked."""

    rule: str
    phase: str
    title: str
    evidence: str
    gain: float  # seconds per repetition, never more than was lost there
    speedup: float  # of the whole phase, by Amdahl's law
    action: str
    verify: str


@dataclass
class Phase:
    """One phase: what its time went to.

    Attributes:
        wall: seconds of a repetition under the profiler; the rows sum to it.
        plain: median seconds of a repetition without the profiler, interleaved with those with it; 0 if unknown.
        samples: seconds of every profiled repetition.
        overhead: what the profiler added, as a part of `plain`.
        overhead_from: "measured", or "estimated" by the number of calls where the program ran once, or too unevenly.
        overhead_error: the standard error of what was measured.
        noise: half the interquartile range of the samples over their median.
        by_kind: for each class, the seconds of every repetition: what a diff takes its noise from.
    """

    name: str
    wall: float
    plain: float = 0.0
    samples: list[float] = field(default_factory=list)
    overhead: float = 0.0
    overhead_from: str = "measured"
    overhead_error: float = 0.0
    noise: float = 0.0
    tokens: int = 0
    weight_bytes: int = 0
    cache_bytes: int = 0
    rows: list[Row] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    chains: list[Chain] = field(default_factory=list)
    advice: list[Advice] = field(default_factory=list)
    by_kind: dict[str, list[float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    facts: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """The sum of all rows."""
        return math.fsum(row.seconds for row in self.rows)

    @property
    def classified(self) -> float:
        """The part of the time whose class is known."""
        return self._share(lambda row: row.classified)

    @property
    def with_formula(self) -> float:
        """The part of the time of operators (not of the framework's) whose cost is known."""
        return self._share(lambda row: row.known, lambda row: row.kind != FRAMEWORK)

    def covered(self, *kinds: str) -> float:
        """The part of these classes' time that has a cost formula."""
        return self._share(lambda row: row.known, lambda row: row.kind in kinds)

    @property
    def over_roof(self) -> list[Row]:
        """Rows faster than the roofs allow: errors of a formula or of the clock."""
        return [row for row in self.rows if row.of_roof is not None and row.of_roof > OVER_ROOF]

    def _share(self, wanted: Callable[[Row], bool], among: Callable[[Row], bool] = lambda row: True) -> float:
        whole = math.fsum(row.seconds for row in self.rows if among(row))
        part = math.fsum(row.seconds for row in self.rows if among(row) and wanted(row))
        return part / whole if whole else 1.0


def sums(rows: Iterable[Row], by: str, of: str = "seconds") -> dict[str, float]:
    """What rows have of something, by one of their fields, the most first."""
    found: dict[str, float] = {}
    for row in rows:
        found[getattr(row, by)] = found.get(getattr(row, by), 0.0) + getattr(row, of)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


@dataclass
class Bill:
    """Rows added up, and what they have alike."""

    names: tuple[str, ...]
    rows: list[Row]
    seconds: float = 0.0
    calls: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0
    least: float = 0.0
    lost: float = 0.0

    def __post_init__(self) -> None:
        for name in ("seconds", "calls", "flops", "bytes", "least", "lost"):
            setattr(self, name, math.fsum(getattr(row, name) for row in self.rows))

    @property
    def name(self) -> str:
        """What they have alike first of all."""
        return self.names[0]

    @property
    def bound(self) -> str:
        """What bounds most of the time."""
        return next(iter(sums(self.rows, "bound")), "")

    @property
    def of_roof(self) -> float | None:
        """The part of the roof reached, over the rows that have a cost."""
        judged = [row for row in self.rows if row.of_roof is not None]
        seconds = math.fsum(row.seconds for row in judged)
        return math.fsum(row.least for row in judged) / seconds if seconds else None

    @property
    def implementation(self) -> str:
        """What computed it, the most used first."""
        return ", ".join(name for name in sums(self.rows, "implementation") if name)

    @property
    def fused(self) -> str:
        """Whether the model wrote these as one call, as several, or both."""
        kinds = {row.composite for row in self.rows if row.kind != FRAMEWORK}
        return "" if not kinds else "both" if len(kinds) == 2 else "composite" if True in kinds else "fused"


def bill(rows: Iterable[Row], *by: str) -> list[Bill]:
    """Rows added up by what they have alike in these fields, what lost most first."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(getattr(row, name) for name in by), []).append(row)
    return sorted((Bill(names, group) for names, group in groups.items()), key=lambda b: -b.lost)


def by_shape(phase: Phase) -> list[Bill]:
    """The operators of a phase, but for the framework's own, by shape, dtype and implementation."""
    rows = [row for row in phase.rows if row.kind != FRAMEWORK]
    return bill(rows, "operator", "shape", "dtype", "implementation")


@dataclass
class Findings:
    """What was found of a model, phase by phase; `Profile` shows it."""

    model: str
    phases: list[Phase] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=dict)
    roofs: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    taken: str = ""
    partial: str = ""  # why it is not whole, or ""
    optimized: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def advice(self) -> list[Advice]:
        """All advice, what gains most of its phase first."""
        return sorted((a for p in self.phases for a in p.advice), key=lambda a: -a.speedup)
