"""What is timed of a contestant with preparations, of one that repeats itself, and of a graph."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.measure.test_timing import Clock

from opsmith.measure import CacheFlush, Pool, Prepared, Repeated, captured, compare


def test_preparation_is_off_the_clock() -> None:
    clock = Clock()

    def prepare(*_: object) -> Callable[[], object]:
        clock.contestant("forward", 5.0)()
        return clock.contestant("backward", 2.0)

    result = compare({"both": Prepared(prepare)}, rounds=3, warmup=0, clock=clock)
    assert list(result.samples["both"]) == [2.0] * 3
    assert clock.calls == ["forward", "backward"] * 3


def test_the_caches_are_flushed_after_the_preparation(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    flush = CacheFlush(total_bytes=64)
    monkeypatch.setattr(CacheFlush, "__call__", lambda self: clock.calls.append("flush"))

    def prepare() -> Callable[[], object]:
        clock.calls.append("forward")
        return clock.contestant("backward", 2.0)

    compare({"both": Prepared(prepare)}, rounds=1, warmup=0, clock=clock, flush=flush)
    assert clock.calls == ["forward", "flush", "backward"]


def test_few_preparations_wait_at_a_time() -> None:
    clock = Clock()
    short = Prepared(lambda: clock.contestant("backward", 1e-9))
    result = compare({"both": short, "plain": clock.contestant("plain", 1e-9)}, rounds=1, clock=clock)
    assert result.inner["both"] == 64 < result.inner["plain"]


def test_a_repeated_call_counts_as_often_as_it_works() -> None:
    clock = Clock()
    result = compare({"four": Repeated(clock.contestant("run", 4.0), 4)}, rounds=3, warmup=0, clock=clock)
    assert list(result.samples["four"]) == [1.0] * 3


class Cuda:
    """Stands in for torch.cuda, and keeps what happened on it."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.kept: list[Callable[[], object]] = []

    def Stream(self) -> "Cuda.Side":
        return self.Side(self.events, "aside")

    def current_stream(self) -> "Cuda.Side":
        return self.Side(self.events, "here")

    class Side:
        def __init__(self, events: list[str], name: str) -> None:
            self.events, self.name = events, name

        def wait_stream(self, other: "Cuda.Side") -> None:
            self.events.append(f"{self.name} waits for {other.name}")

    @contextlib.contextmanager
    def stream(self, side: Any) -> Iterator[None]:
        self.events.append(f"on {side.name}")
        yield

    def CUDAGraph(self) -> Any:
        cuda = self

        class Graph:
            def replay(self) -> None:
                cuda.events.append("replay")

        return Graph()

    @contextlib.contextmanager
    def graph(self, graph: Any) -> Iterator[None]:
        self.events.append("capture")
        yield
        self.events.append("captured")


def test_a_graph_holds_a_call_for_every_set_after_a_warm_up_aside() -> None:
    cuda = Cuda()
    pool = [("a",), ("b",), ("c",)]
    graph = captured(lambda name: cuda.events.append(name), pool, cuda=cuda, warmup=2)
    assert cuda.events == [
        *("aside waits for here", "on aside", "a", "a", "here waits for aside"),
        *("capture", "a", "b", "c", "captured"),
    ]
    assert graph.times == 3
    graph()
    assert cuda.events[-1] == "replay"


def test_a_pool_serves_prepared_calls_in_turn() -> None:
    import torch

    pool = Pool(lambda i: (torch.full((4,), float(i)),), total_bytes=32)
    seen: list[float] = []

    def prepare(x: torch.Tensor) -> Callable[[], object]:
        seen.append(float(x[0]))
        return lambda: None

    compare({"x": Prepared(prepare)}, pool=pool, rounds=2, warmup=1, clock=iter(range(1000)).__next__)
    assert seen == [0.0, 1.0, 2.0]
