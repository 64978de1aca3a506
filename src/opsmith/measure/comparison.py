"""What a comparison found: every sample, the ratios they allow, and who is best."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .machine import Machine
from .roofs import Roofs
from .stats import CONCLUDES_NOTHING, WARNS, Ratio, paired_ratio, spread

# A thread that nobody disturbs runs all but all of the time; one that shares a core with another, half of it.
ALONE = 0.9
# As many rounds that all agree leave chance at most one case in thirty-two.
_UNANIMOUS_ROUNDS = 5


@dataclass(frozen=True)
class Comparison:
    """The outcome of `compare`.

    Attributes:
        column: "cold", "cold, flushed", "warm", or "as called" when the contestants bring their own inputs.
        samples: seconds per call, one for each round, by contestant; roofs are named "roof: ...".
        inner: calls per sample, by contestant.
        orders: the order in which the contestants ran, round by round.
        dropped: contestants that left early for being far slower than the best; their samples are kept.
        checked: whether the results were held against a reference first.
        messages: warnings about spread, caches and threads.
        share: of the seconds that it took, those that the calling thread was running; with a device, 1.
    """

    column: str
    samples: Mapping[str, Sequence[float]]
    inner: Mapping[str, int]
    orders: Sequence[Sequence[str]]
    dropped: Sequence[str]
    checked: bool
    seed: int
    min_time: float
    stopwatch: str
    taken: str
    machine: Machine
    roofs: Roofs | None
    notes: Mapping[str, str]
    messages: Sequence[str]
    share: float = 1.0

    @property
    def disturbed(self) -> bool:
        """Whether other work took the processor: where it slows all samples alike, none of them spreads."""
        return self.share < ALONE

    @property
    def names(self) -> tuple[str, ...]:
        """The contestants, without the roofs."""
        return tuple(name for name in self.samples if not name.startswith("roof: "))

    @property
    def cold(self) -> bool:
        """Whether the contestants' data came from memory."""
        return self.column.startswith("cold")

    def _of(self, name: str) -> Sequence[float]:
        if name not in self.samples:
            raise ValueError(f"Comparison: expected one of {list(self.samples)}, got {name!r}")
        return self.samples[name]

    def median(self, name: str) -> float:
        """Median seconds per call.

        Raises:
            ValueError: for a name that did not run.
        """
        return statistics.median(self._of(name))

    def spread(self, name: str) -> float:
        """Interquartile range of the samples over their median; above 0.25 the time says nothing."""
        return spread(self._of(name))

    def ratio(self, a: str, b: str) -> Ratio:
        """Time of `a` over time of `b`, paired by round, with its bootstrap interval and verdict.

        Raises:
            ValueError: for a name that did not run.
        """
        # A contestant that was dropped ran in the first rounds and the last ones only.
        ran = {name: [i for i, order in enumerate(self.orders) if name in order] for name in (a, b)}
        first, second = (dict(zip(ran[name], self._of(name), strict=True)) for name in (a, b))
        both = sorted(first.keys() & second.keys())
        return paired_ratio(a, b, [first[i] for i in both], [second[i] for i in both], self.seed)

    def best(self, prefer: str | None = None) -> str:
        """The contestant to use: the fastest, or `prefer` unless the fastest is shown to be faster than it.

        Where the spread forbids a conclusion, at least five rounds that all agree still decide a choice.
        """
        running = [name for name in self.names if name not in self.dropped]
        fastest = min(running, key=self.median)
        if prefer is None or prefer in self.dropped or prefer == fastest:
            return fastest
        ratio = self.ratio(fastest, prefer)
        agreed = ratio.unanimous and ratio.median < 1 and ratio.pairs >= _UNANIMOUS_ROUNDS
        return fastest if ratio.verdict == "faster" or agreed else prefer

    def to_json(self) -> dict[str, Any]:
        """Everything, samples included, as plain values."""
        of_each = ("samples", "inner", "dropped")
        return {name: value for name, value in vars(self).items() if name not in of_each} | {
            "contestants": {
                name: {
                    "median": self.median(name),
                    "spread": self.spread(name),
                    "inner": self.inner[name],
                    "dropped": name in self.dropped,
                    "samples": list(samples),
                }
                for name, samples in self.samples.items()
            },
            "machine": self.machine.to_json(),
            "roofs": self.roofs.to_json() if self.roofs else None,
        }


def spread_messages(samples: Mapping[str, Sequence[float]]) -> list[str]:
    """One line for each contestant whose samples lie too far apart."""
    found = []
    for name, times in samples.items():
        scatter = spread(times)
        if scatter > CONCLUDES_NOTHING:
            found.append(f"{name}: samples spread by {scatter:.0%}, above 25 %: its time concludes nothing")
        elif scatter > WARNS:
            found.append(f"{name}: samples spread by {scatter:.0%}, above 10 %")
    return found
