"""Events of a GPU, as PyTorch's profiler hands them over, put down to the operators that launched them.

No GPU is at hand where these tests run: the events are made up, in the form of `kineto_results`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._autograd import DeviceType

from opsmith.profiler.attribute import GAP, attribute
from opsmith.profiler.collect import REPETITION, tree, watched
from opsmith.profiler.data import MATMUL


@dataclass
class Event:
    """An operator in the tree; times in nanoseconds."""

    name: str
    start_time_ns: int
    duration_time_ns: int
    correlation_id: int
    children: list[Any] = field(default_factory=list)
    start_tid: int = 1

    @property
    def typed(self) -> tuple[str, Any]:
        return "_EventType.TorchOp", SimpleNamespace(scope="FUNCTION", inputs=[], sequence_number=-1)


@dataclass
class Activity:
    """What ran on a device, and for whom."""

    start: int
    end: int
    operator: int
    device: DeviceType = DeviceType.CUDA
    annotation: bool = False

    def name(self) -> str:
        return "kernel"

    def start_ns(self) -> int:
        return self.start

    def end_ns(self) -> int:
        return self.end

    def linked_correlation_id(self) -> int:
        return self.operator

    def device_type(self) -> DeviceType:
        return self.device

    def is_user_annotation(self) -> bool:
        return self.annotation


def results() -> Any:
    """A repetition of 100 µs: a linear layer that calls a product, which launches two kernels, and an addition."""
    product = Event("aten::addmm", 3_000, 6_000, 12)
    linear = Event("aten::linear", 2_000, 8_000, 11, [product])
    add = Event("aten::add", 12_000, 3_000, 13)
    whole = Event(REPETITION, 0, 100_000, 10, [linear, add])
    activities = [
        Activity(4_000, 5_000, 12, DeviceType.CPU),  # the launch itself
        Activity(20_000, 50_000, 12),
        Activity(50_000, 55_000, 12),
        Activity(60_000, 70_000, 13),
        Activity(0, 100_000, 10, annotation=True),  # our own, mirrored on the device's timeline
    ]
    return SimpleNamespace(events=lambda: activities, experimental_event_tree=lambda: [whole])


def test_an_operator_takes_what_its_kernels_take() -> None:
    run = watched(tree(results(), gpu=True))[0]
    attribution = attribute(run, [])
    rows, series = attribution.rows([run])
    seconds = {row.operator: row.seconds for row in rows}
    assert seconds["linear"] == pytest.approx(35e-6)
    assert seconds["add"] == pytest.approx(10e-6)
    assert seconds[GAP] == pytest.approx(55e-6)  # the GPU had nothing to do: rows sum to the wall time
    assert sum(seconds.values()) == pytest.approx(run.seconds)
    assert series[0][MATMUL] == pytest.approx(35e-6)


def test_the_timeline_shows_when_the_gpu_was_at_work() -> None:
    run = watched(tree(results(), gpu=True))[0]
    events = {e.name: e for e in attribute(run, []).events(run)}
    assert events["linear"].start == pytest.approx(20e-6)
    assert events["add"].start == pytest.approx(60e-6)


def test_without_a_gpu_an_operator_takes_what_its_call_takes() -> None:
    run = watched(tree(results()))[0]
    seconds = {row.operator: row.seconds for row in attribute(run, []).rows([run])[0]}
    assert seconds["linear"] == pytest.approx(8e-6)
    assert seconds[GAP] == pytest.approx(89e-6)
