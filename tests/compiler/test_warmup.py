"""`generate` finds everything captured after a warmup, and a budget ends the work without ending the model."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import opsmith
from opsmith.compiler.choose import select
from opsmith.compiler.progress import show
from opsmith.compiler.warmup import Warmup
from tests.compiler.models import UNTIMED, WIDTH, Encoder, Feed, Truth, ids, numbers, seeded


@pytest.fixture
def decoder() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        eos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config).eval()


def _generated(model: Any, batch: int, length: int, tokens: int) -> torch.Tensor:
    prompt = torch.randint(1, 60, (batch, length), generator=torch.Generator().manual_seed(length))
    found: torch.Tensor = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, do_sample=False
    )
    return found


def test_nothing_is_captured_after_a_warmup(decoder: Any) -> None:
    sizes = [(1, 6, 9), (3, 12, 5), (2, 4, 4)]
    expected = [_generated(decoder, *size) for size in sizes]
    opsmith.optimize(decoder, config=UNTIMED, warmup={"prompt": (2, 12), "batch": (1, 3), "new_tokens": 4})
    session = decoder.opsmith
    captured = len(session.graphs)
    assert 2 <= captured <= 4
    assert session.report.found["paged_attention"] == 2
    for size, tokens in zip(sizes, expected, strict=True):
        assert torch.equal(_generated(decoder, *size), tokens)
    assert len(session.graphs) == captured
    assert not session.selector.learning


def test_an_example_and_a_first_generate_are_three_graphs(decoder: Any) -> None:
    prompt = torch.randint(1, 60, (1, 9))
    example = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    opsmith.optimize(decoder, example, config=UNTIMED)
    assert len(decoder.opsmith.graphs) == 1
    _generated(decoder, 1, 9, 24)
    assert len(decoder.opsmith.graphs) <= 3  # the prompt with a cache, and the token


def test_sizes_are_the_ends_of_what_is_given_largest_first() -> None:
    warmup = Warmup.parse({"prompt": (1, 512), "batch": (1, 4)})
    assert warmup.calls() == [(4, 512), (1, 512), (4, 1), (1, 1)]
    assert warmup.new_tokens == 4
    assert Warmup.parse({"prompt": 7}).calls() == [(1, 7)]
    assert Warmup.parse({}).calls() == [(1, 512)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompts": 3}, "no field 'prompts'; the fields are prompt, batch, new_tokens"),
        ({"prompt": 0}, "prompt must be a number of at least 1, or the least and the most, got 0"),
        ({"prompt": (9, 3)}, r"got \(9, 3\)"),
        ({"batch": (1, 2, 3)}, r"batch must be .* got \(1, 2, 3\)"),
        ({"batch": 2.0}, "batch must be"),
        ({"new_tokens": True}, "new_tokens must be a number of at least 1, got True"),
        ("all", "warmup must be a dictionary"),
    ],
)
def test_a_warmup_that_is_none_is_refused(given: Any, message: str, decoder: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        opsmith.optimize(decoder, warmup=given)
    assert not hasattr(decoder, "opsmith")


def test_a_model_that_does_not_generate_has_no_warmup() -> None:
    with pytest.raises(
        ValueError, match="warmup is for models that generate, and Feed does not; give example"
    ):
        opsmith.optimize(seeded(Feed), warmup={"prompt": 4})


@pytest.mark.parametrize("budget", [0, -1.0, float("nan")])
def test_a_budget_is_above_zero(budget: float) -> None:
    with pytest.raises(ValueError, match="budget must be a number of seconds above 0"):
        opsmith.optimize(seeded(Feed), budget=budget)


def test_a_budget_that_is_spent_at_once_leaves_the_model_as_it_was() -> None:
    model, x = seeded(Feed), numbers(3, 4, WIDTH)
    truth = Truth(model)
    opsmith.optimize(model, x, config=UNTIMED, budget=1e-9)
    report = model.opsmith.report
    assert report.found == {}
    assert report.rolled_back == []
    assert "left as it was: a graph of" in str(report)
    assert "next: the budget was spent before a graph" in str(report)
    assert not any(shape.used for shape in model.opsmith.plan.shapes)
    with torch.no_grad():
        truth.check(model(x), x)


def test_a_budget_that_ends_between_sites_keeps_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        asked = 0.0

        def monotonic(self) -> float:
            self.asked += 1.0
            return self.asked

    model, tokens = seeded(Encoder), ids(3, 9)
    truth = Truth(model)
    clock = Clock()
    monkeypatch.setattr(select, "time", clock)
    monkeypatch.setattr("opsmith.compiler.api.time", clock)
    opsmith.optimize(model, tokens, config=UNTIMED, budget=12.5)
    report = model.opsmith.report
    status = [s.status for s in report.sites]
    assert status.count("kept") >= 3
    assert status.count("left") >= 3
    assert status == sorted(status)  # what came first is kept
    assert f"{status.count('left')} sites, which run as they were" in str(report)
    assert "left as it was: " in str(report)
    assert report.rolled_back == []
    with torch.no_grad():
        truth.check(model(tokens), tokens)
        truth.check(model(ids(2, 5)), ids(2, 5))


def test_a_warmup_ends_with_the_budget(decoder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def generate(self: Any, model: nn.Module, selector: Any) -> Iterator[str]:
        calls.append(selector.spent)
        yield from original(self, model, selector)

    original = Warmup.run
    monkeypatch.setattr(Warmup, "run", generate)
    opsmith.optimize(decoder, config=UNTIMED, warmup={"prompt": (2, 12)}, budget=1e-9)
    assert calls == [True]
    assert decoder.opsmith.skipped == ["a batch of 1 with a prompt of 12", "a batch of 1 with a prompt of 2"]
    assert "spent before 2 warmups" in str(decoder.opsmith.report)


@pytest.mark.parametrize("terminal", [True, False])
def test_what_takes_long_is_said_on_a_terminal_only(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    opsmith.optimize(seeded(Feed), numbers(3, 4, WIDTH), config=UNTIMED)
    said = capsys.readouterr().err
    for part in ("capturing the model", "looking for operators", "measuring and proving linear_0"):
        assert (part in said) == terminal
    if terminal:
        assert said.endswith(f"\r{'':<72}\r")  # nothing is left of it


@pytest.mark.parametrize("terminal", [True, False])
@torch.no_grad()
def test_a_call_that_captures_says_so(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logged: list[str] = []
    monkeypatch.setattr(logging.getLogger("opsmith"), "info", lambda text, *args: logged.append(text % args))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    model, x = opsmith.optimize(seeded(Feed), config=UNTIMED), numbers(3, 4, WIDTH)
    capsys.readouterr()
    model(x)
    said = capsys.readouterr().err
    assert ("capturing the model" in said) == terminal
    assert said.endswith(f"\r{'':<72}\r") == terminal
    assert [re.sub(r"[\d.]+ s$", "... s", line) for line in logged] == [
        "captured and studied a call of Feed on (3, 4, 32) in ... s"
    ]
    model(x)
    assert not capsys.readouterr().err
    assert len(logged) == 1


def test_a_line_is_as_wide_as_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    show("x" * 500)
    assert len(capsys.readouterr().err) == 73
