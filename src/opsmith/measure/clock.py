"""How one sample is timed: a wall clock on the CPU, device events on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

__all__ = ["Clock", "CudaStopwatch", "Stopwatch", "WallStopwatch", "stopwatch_for"]

Clock = Callable[[], float]
Call = Callable[[], object]


class Stopwatch(Protocol):
    """Times a sequence of calls."""

    kind: str

    def seconds(self, calls: Iterable[Call]) -> float:
        """Runs the calls one after the other and returns the seconds all of them took together."""
        ...


class WallStopwatch:
    """Wall-clock time; `clock` returns seconds and can be replaced by one that a test controls."""

    kind = "wall clock"

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock

    def seconds(self, calls: Iterable[Call]) -> float:
        """Runs the calls one after the other and returns the seconds all of them took together."""
        calls = list(calls)
        start = self._clock()
        for call in calls:
            call()
        return self._clock() - start


class CudaStopwatch:
    """Time between two events on the device's stream, so that the time to launch is not what is measured.

    `event` and `synchronize` default to torch.cuda's; a test puts its own in their place.
    """

    kind = "device events"

    def __init__(
        self, event: Callable[[], Any] | None = None, synchronize: Callable[[], object] | None = None
    ) -> None:
        self._event = event or (lambda: torch.cuda.Event(enable_timing=True))
        self._synchronize = synchronize or torch.cuda.synchronize

    def seconds(self, calls: Iterable[Call]) -> float:
        """Runs the calls one after the other and returns the seconds the device took for all of them."""
        calls = list(calls)
        start, end = self._event(), self._event()
        # Earlier work still in the queue would otherwise run between the events.
        self._synchronize()
        start.record()
        for call in calls:
            call()
        end.record()
        self._synchronize()
        return float(start.elapsed_time(end)) * 1e-3  # elapsed_time is in milliseconds


def stopwatch_for(device: str | torch.device, clock: Clock | None = None) -> Stopwatch:
    """The stopwatch of a device; a `clock` that was passed in always wins.

    >>> stopwatch_for("cpu").kind
    'wall clock'
    """
    if clock is not None:
        return WallStopwatch(clock)
    if torch.device(device).type == "cuda":
        return CudaStopwatch()
    return WallStopwatch()
