"""From samples to a statement: spread, paired ratios, and the interval that decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

Verdict = Literal["faster", "slower", "no difference", "inconclusive"]

WARNS = 0.10
CONCLUDES_NOTHING = 0.25

_RESAMPLES = 1000
_CONFIDENCE = 0.95
# With fewer pairs resampling cannot reach 95 %, and the range of what was seen stands in; two say nothing.
_FEWEST_TO_RESAMPLE = 6
_FEWEST = 3


def spread(samples: Sequence[float]) -> float:
    """Interquartile range over median: how far apart the middle half of the samples lies.

    >>> spread([1.0, 1.0, 1.0])
    0.0
    """
    if len(samples) < 2:
        return 0.0
    low, middle, high = np.percentile(np.asarray(samples, dtype=np.float64), [25, 50, 75])
    return float((high - low) / middle) if middle > 0 else 0.0


@dataclass(frozen=True)
class Ratio:
    """Time of `a` over time of `b`: the median of paired ratios, its interval, and what that allows to say.

    `verdict` is about `a`: "faster", "slower", "no difference" when the interval holds 1, and "inconclusive"
    when the ratios spread by more than a quarter, or are fewer than three. `unanimous` says that every
    single round fell on the same side of 1.
    """

    a: str
    b: str
    median: float
    lo: float
    hi: float
    spread: float
    pairs: int
    unanimous: bool
    verdict: Verdict

    @property
    def speedup(self) -> float:
        """How many times faster `a` is than `b`: one over the median ratio."""
        return 1.0 / self.median

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain values, with the speedup and its interval."""
        return {**asdict(self), "speedup": self.speedup, "speedup_lo": 1 / self.hi, "speedup_hi": 1 / self.lo}

    def __str__(self) -> str:
        return f"{self.a}: {self.median:.3f} [{self.lo:.3f}, {self.hi:.3f}] × {self.b}, {self.verdict}"


def paired_ratio(a: str, b: str, times_a: Sequence[float], times_b: Sequence[float], seed: int = 0) -> Ratio:
    """Compares two series of times taken round by round.

    Pairing cancels what both saw alike, such as a neighbor on a shared machine; the interval is that of a
    bootstrap of the median (Efron, 1979), seeded, so the same samples give the same interval.

    >>> paired_ratio("ours", "eager", [1.0] * 8, [2.0] * 8).verdict
    'faster'

    Args:
        a: name of the first contestant.
        b: name of the second.
        times_a: seconds of each round, positive.
        times_b: seconds of the same rounds, as many.
        seed: seed of the resampling.

    Raises:
        ValueError: when the series differ in length or are empty.
    """
    if len(times_a) != len(times_b) or not times_a:
        raise ValueError(
            f"paired_ratio: expected two series of the same rounds, got {len(times_a)} times of {a!r} and "
            f"{len(times_b)} of {b!r}; compare contestants that ran in the same rounds"
        )
    ratios = np.asarray(times_a, dtype=np.float64) / np.asarray(times_b, dtype=np.float64)
    median = float(np.median(ratios))
    lo, hi = _interval(ratios, seed)
    scatter = spread(ratios.tolist())
    unanimous = bool((ratios < 1).all() or (ratios > 1).all())
    verdict: Verdict
    if len(ratios) < _FEWEST or scatter > CONCLUDES_NOTHING:
        verdict = "inconclusive"
    elif lo <= 1.0 <= hi:
        verdict = "no difference"
    else:
        verdict = "faster" if hi < 1.0 else "slower"
    return Ratio(a, b, median, lo, hi, scatter, len(ratios), unanimous, verdict)


def _interval(ratios: np.ndarray[Any, np.dtype[np.float64]], seed: int) -> tuple[float, float]:
    if len(ratios) < _FEWEST_TO_RESAMPLE:
        return float(ratios.min()), float(ratios.max())
    picks = np.random.default_rng(seed).integers(0, len(ratios), (_RESAMPLES, len(ratios)))
    medians = np.median(ratios[picks], axis=1)
    tail = 50 * (1 - _CONFIDENCE)
    lo, hi = np.percentile(medians, [tail, 100 - tail])
    return float(lo), float(hi)
