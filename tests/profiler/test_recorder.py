"""The recorder sees what PyTorch's profiler sees, in the same order, and leaves nothing behind."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

from opsmith.profiler import collect, recorder
from opsmith.profiler.collect import Watched, light, names_of, repetition, session, watched
from opsmith.profiler.recorder import recording

MODEL = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))


@pytest.fixture(autouse=True)
def built() -> None:
    if not light():
        pytest.skip("no compiler here reads PyTorch's own headers")


def run(work: Callable[[], object], shapes: bool) -> Watched:
    with session(shapes=shapes) as ops, repetition():
        work()
    return watched(ops())[0]


def training() -> None:
    with torch.profiler.record_function("a step"):  # ends after the operator that it was begun in
        loss = MODEL(torch.ones(2, 8)).sum()
    loss.backward()


@pytest.mark.parametrize("work", [training, lambda: MODEL(torch.ones(1, 8))])
def test_the_order_is_that_of_pytorchs_profiler(work: Callable[[], object]) -> None:
    work()
    names = names_of(run(work, shapes=False))
    assert names == names_of(run(work, shapes=True))
    assert "aten::addmm" in names


def test_operators_lie_in_what_they_began_in() -> None:
    with recording() as found, torch.profiler.record_function("around"):
        MODEL(torch.ones(2, 8))
    assert found is not None
    when = {name: (start, end) for name, start, end in found}
    for outer, inner in (("around", "aten::linear"), ("aten::linear", "aten::addmm")):
        (start, end), (began, ended) = when[outer], when[inner]
        assert start <= began < ended <= end
    starts = [start for _, start, _ in found]
    assert starts == sorted(starts)


def test_times_are_those_of_the_wall() -> None:
    def waits() -> None:
        with torch.profiler.record_function("waiting"):
            threading.Event().wait(0.05)

    seen = run(waits, shapes=False)
    waiting = next(op for op in seen.ops if op.name == "waiting")
    assert 0.05 <= waiting.nanoseconds * 1e-9 <= seen.seconds
    assert abs(seen.end - run(waits, shapes=True).start) < 60e9  # of the same epoch


def test_what_raises_ends_with_the_recording() -> None:
    with pytest.raises(RuntimeError, match="shapes"), recording() as found:
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert found is not None
    assert "aten::matmul" in [name for name, *_ in found]
    with recording() as again:
        torch.ones(2)
    assert again is not None
    assert again[0][0] == "aten::ones"


def test_another_thread_is_not_recorded() -> None:
    x = torch.ones(2)
    with recording() as found:
        thread = threading.Thread(target=x.neg)
        thread.start()
        thread.join()
        x.abs()
    assert found is not None
    assert found[0][0] == "aten::abs"
    assert "aten::neg" not in [name for name, *_ in found]


def test_beside_another_profiler_there_is_none() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]), recording() as found:
        assert found is None
    with recording() as outer, recording() as inner:
        assert outer is not None
        assert inner is None


def test_pytorchs_profiler_serves_where_it_cannot_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    names = names_of(run(lambda: MODEL(torch.ones(1, 8)), shapes=False))
    for module in (recorder, collect):
        monkeypatch.setattr(module, "library", lambda: None)
    assert not light()
    assert names_of(run(lambda: MODEL(torch.ones(1, 8)), shapes=False)) == names
