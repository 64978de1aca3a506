"""What recording costs: told by repetitions in turn where they agree, else by the number of calls."""

from __future__ import annotations

import pytest

from opsmith.profiler.collect import Op, Watched
from opsmith.profiler.data import Phase
from opsmith.profiler.repeat import CERTAIN, overhead

RUN = Watched(0, 100_000_000, [Op("aten::neg", 1000 * i, 1000 * i + 900) for i in range(500)])


def _overhead(plain: list[float], recorded: list[float]) -> Phase:
    phase = Phase("forward", 0.1)
    overhead(phase, RUN, [[p] for p in plain], [[r] for r in recorded])
    return phase


def test_repetitions_that_agree_tell_the_overhead() -> None:
    phase = _overhead([0.100, 0.120, 0.100, 0.110], [0.104, 0.126, 0.105, 0.114])
    assert phase.overhead_from == "measured"
    assert phase.overhead == pytest.approx(0.045, abs=0.005)
    assert 0 < phase.overhead_error <= CERTAIN
    assert not phase.notes


def test_uneven_repetitions_do_not() -> None:
    phase = _overhead([0.150, 0.200, 0.150, 0.200, 0.150, 0.200], [0.200, 0.150, 0.200, 0.150, 0.200, 0.210])
    assert phase.overhead_from == "estimated"
    assert 0 <= phase.overhead < 0.02  # 500 calls in 100 ms
    assert any("repetitions in turn" in note for note in phase.notes)


def test_what_calls_cannot_explain_is_not_hidden() -> None:
    phase = _overhead([0.100, 0.100, 0.110, 0.100], [0.150, 0.160, 0.150, 0.145])
    assert phase.overhead_from == "measured"
    assert phase.overhead > 0.4


def test_a_program_that_runs_once_is_estimated() -> None:
    phase = _overhead([], [])
    assert phase.overhead_from == "estimated"
    assert phase.overhead_error == 0


def test_what_an_error_says_ends_with_a_word() -> None:
    from opsmith.compiler.reasons import one_line, raised

    error = ValueError("attribute " * 40 + "\nmore")
    for said in (raised(error), one_line(error)):
        assert said.endswith("attribute ...")
        assert len(said) <= 240 + len("raised ")
    assert one_line(KeyboardInterrupt()) == "interrupted"
    assert one_line(ValueError("short\nmore")) == "ValueError: short"
