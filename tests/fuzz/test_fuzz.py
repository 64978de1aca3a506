"""The fuzzers, a little of each and the same cases every time; `make fuzz` runs them at size. Each finds a fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase

from opsmith.operator import Operator, registry
from tests.fuzz import files, models, operators, states
from tests.fuzz.fuzzer import Fuzzer, StateFuzzer

# A model takes a second, and making one small takes hundreds of them; a planted fault needs no small case.
QUICK = (Phase.generate,)


def of(fuzzers: list[Any]) -> Any:
    return pytest.mark.parametrize("fuzzer", fuzzers, ids=[fuzzer.name for fuzzer in fuzzers])


@of(operators.fuzzers())
def test_operators_on_any_call(fuzzer: Fuzzer) -> None:
    fuzzer.run(30)


@of(states.fuzzers())
def test_what_remembers(fuzzer: StateFuzzer) -> None:
    fuzzer.run(15)


@pytest.mark.filterwarnings("ignore:var")  # of one token
def test_optimized_models_compute_what_they_did() -> None:
    models.fuzzers()[0].run(6, phases=QUICK)


@of(files.fuzzers())
def test_any_file_is_read_or_refused(fuzzer: Fuzzer) -> None:
    fuzzer.run(80)


def test_what_failed_is_tried_first_the_next_time(tmp_path: Path) -> None:
    tried: list[int] = []

    def check(case: int) -> None:
        tried.append(case)
        assert case < 1000

    fuzzer = Fuzzer("integers", st.integers(), check)
    for seed in (1, 2):
        tried.clear()
        with pytest.raises(AssertionError):
            fuzzer.run(200, seed, database=DirectoryBasedExampleDatabase(tmp_path))
    assert tried[0] == 1000


def elsewhere(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Writes its result one number further too."""

    def wrong(x: torch.Tensor, *args: Any, out: torch.Tensor | None = None, **more: Any) -> Any:
        if not isinstance(out, torch.Tensor):
            return fn(x, *args, out=out, **more)
        y = fn(x, *args, **more)
        if out.storage_offset() and out.numel():
            out.as_strided((1,), (1,), out.storage_offset() - 1).fill_(1.0)
        return out.copy_(y)

    return wrong


def flushing(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Takes numbers below 2^-60 for zero, as approximations of exponentials do that clamp their argument."""
    return lambda x, *args, **more: fn(torch.where(x.abs() < 2.0**-60, 0.0, x), *args, **more)


@pytest.mark.parametrize(
    ("name", "fault"), [("softmax", elsewhere), ("gelu", flushing), ("rms_norm", elsewhere)]
)
def test_a_fault_of_an_operator_is_found(name: str, fault: Callable[..., Any]) -> None:
    card: Operator = registry()[name]
    broken = replace(card, function=fault(card.function))
    with pytest.raises(AssertionError):
        Fuzzer(name, operators.cases(broken), partial(operators.judge, broken)).run(300, phases=QUICK)


def test_a_fault_of_the_compiler_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that keeps the example's sizes: every proof passes, and what has other sizes comes out wrong."""
    optimize = models.optimized

    def wrong(model: Any, *example: Any) -> None:
        optimize(model, *example)
        call = model._compiled_call_impl
        model._compiled_call_impl = lambda x, ids: tuple(
            t if x.shape[1] == 6 else t * 1.001 for t in call(x, ids)
        )

    monkeypatch.setattr(models, "optimized", wrong)
    with pytest.raises(AssertionError, match="3 x 5"):
        models.judge(models.Program(("v1 = torch.softmax(v0, dim=-1)",), (1,)))


def test_scores_as_low_as_what_hides_them_are_no_fault() -> None:
    """Where one number is large, the last token's only score is below what is filled in, so eager reads the hidden."""
    scores = "(heads(v0) @ heads(v0).mT * -100.0)"
    hidden = f"{scores}.masked_fill({models.CAUSAL.format(a='v0')}.tril(-1), -1e9)"
    models.judge(models.Program((f"v1 = merged({hidden}.softmax(-1) @ heads(v0))",), (1,)))


def test_a_fault_of_a_cache_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that are written one token further."""
    right = states.reshape_and_cache

    def wrong(k: Any, v: Any, k_cache: Any, v_cache: Any, slots: torch.Tensor, **more: Any) -> None:
        right(k, v, k_cache, v_cache, torch.where(slots == 5, 6, slots), **more)

    monkeypatch.setattr(states, "reshape_and_cache", wrong)
    with pytest.raises(Exception, match=r"another than went in|more than rounding|flaky"):
        states.fuzzers()[0].run(200, phases=QUICK)


def test_a_fault_of_a_reader_is_found() -> None:
    def careless(file: Path) -> None:
        files.json.loads(file.read_bytes())["schema"]

    kind = replace(next(k for k in files.kinds() if k.name == "plans"), read=careless)
    with pytest.raises(Exception, match=r"schema|subscriptable|recursion|sub-exceptions"):
        Fuzzer("plans", files.files(kind), partial(files.judge, kind)).run(300, phases=QUICK)
