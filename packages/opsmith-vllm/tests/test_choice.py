"""The faster of two calls is taken, once for each size, unless the part was named."""

import time
from collections.abc import Callable

import pytest

from opsmith_vllm import choice


def waits(seconds: float) -> Callable[[], None]:
    return lambda: time.sleep(seconds)


@pytest.mark.parametrize(
    ("cases", "wanted"),
    [
        ([(0.002, 0.001)], True),
        ([(0.001, 0.002)], False),
        ([(0.001, 0.002), (0.008, 0.001)], True),  # together
    ],
)
def test_the_faster_is_taken(
    monkeypatch: pytest.MonkeyPatch, cases: list[tuple[float, float]], wanted: bool
) -> None:
    monkeypatch.setenv("OPSMITH_VLLM", "auto")
    asked: list[int] = []

    def made() -> list[tuple[Callable[[], None], Callable[[], None]]]:
        asked.append(1)
        return [(waits(own), waits(mine)) for own, mine in cases]

    for _ in range(2):
        assert choice.ours(f"a layer of {cases}", made) is wanted
    assert len(asked) == 1


def test_what_was_named_is_taken_unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPSMITH_VLLM", "norms")
    assert choice.ours("a norm", lambda: pytest.fail("it was measured"))
