"""`opsmith.evaluate`: against a direct computation in float64, on plain and optimized models, and what it refuses."""

from __future__ import annotations

import copy
import json
import math
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import opsmith
from opsmith import evaluation
from tests.compiler.models import UNTIMED, VOCABULARY, ids, llama, seeded

TOKENS = ids(1, 83)[0]


def model(seed: int = 0) -> Any:
    """A small Llama whose predictions differ from each other: with its first random weights all are alike."""
    made = seeded(llama, seed)
    made.config.max_position_embeddings = 128
    with torch.no_grad():
        made.lm_head.weight.mul_(30)
    return made


@torch.no_grad()
def direct(of: Any, against: Any, tokens: torch.Tensor, window: int) -> tuple[float, float, float]:
    """Perplexity, divergence and agreement, written down once more, in float64."""
    likelihood, divergence, same = [], [], []
    for first in range(0, len(tokens), window):
        part = tokens[first : first + window][None]
        own, other = (m.double()(input_ids=part).logits[0].log_softmax(-1) for m in (of, against))
        for at in range(part.shape[1] - 1):
            likelihood.append(float(own[at, part[0, at + 1]]))
            divergence.append(float((other[at].exp() * (other[at] - own[at])).sum()))
            same.append(float(own[at].argmax() == other[at].argmax()))
    count = len(likelihood)
    return math.exp(-sum(likelihood) / count), sum(divergence) / count, sum(same) / count


@pytest.mark.parametrize("window", [16, 83, 500])
def test_the_numbers_are_those_of_a_direct_computation(window: int) -> None:
    one, other = model(0), model(1)
    found = opsmith.evaluate(one, TOKENS, against=other, window=window)
    perplexity, kl, agreement = direct(copy.deepcopy(one), copy.deepcopy(other), TOKENS, window)
    original, _, _ = direct(copy.deepcopy(other), copy.deepcopy(other), TOKENS, window)
    assert found.perplexity == pytest.approx(perplexity, rel=1e-5)
    assert found.kl == pytest.approx(kl, rel=1e-4)
    assert found.agreement == pytest.approx(agreement, abs=1e-9)
    assert found.ratio == pytest.approx(perplexity / original, rel=1e-5)
    assert found.predictions == 83 - math.ceil(83 / window)


def test_a_model_is_at_no_distance_from_itself() -> None:
    one = model()
    found = opsmith.evaluate(one, TOKENS, against=one, window=10)
    assert (found.kl, found.agreement, found.ratio) == (0.0, 1.0, 1.0)
    assert found.kl is not None
    assert (found.kl.low, found.kl.high) == (0.0, 0.0)


def test_without_another_model_there_is_perplexity_alone() -> None:
    found = opsmith.evaluate(model(), TOKENS, window=10)
    assert (found.kl, found.agreement, found.ratio) == (None, None, None)
    assert found.perplexity == opsmith.evaluate(model(), TOKENS, against=model(1), window=10).perplexity
    assert "KL" not in found.table()


def test_uniform_predictions_are_as_perplexing_as_the_vocabulary_is_large() -> None:
    one = model()
    one.lm_head.weight.data.zero_()
    found = opsmith.evaluate(one, TOKENS, window=8)
    assert found.perplexity == pytest.approx(VOCABULARY, rel=1e-6)
    assert found.perplexity.low == pytest.approx(VOCABULARY, rel=1e-6)
    assert found.perplexity.high == pytest.approx(VOCABULARY, rel=1e-6)


def test_intervals_hold_what_they_are_of_and_narrow_with_the_text() -> None:
    one, other = model(0), model(1)
    long = torch.randint(0, VOCABULARY, (4000,), generator=torch.Generator().manual_seed(3))
    short = opsmith.evaluate(one, long[:400], against=other, window=20)
    found = opsmith.evaluate(one, long, against=other, window=20)
    for name in ("perplexity", "kl", "agreement", "ratio"):
        few, many = getattr(short, name), getattr(found, name)
        assert few.low < few < few.high
        assert many.low < many < many.high
        assert many.high - many.low < 0.6 * (few.high - few.low)
    assert opsmith.evaluate(one, long, against=other, window=20) == found  # resampled from a seed


def test_of_a_few_predictions_no_interval_is_told() -> None:
    found = opsmith.evaluate(model(), TOKENS[:20], window=10)
    assert math.isnan(found.perplexity.low)
    assert json.loads(found.to_json())["perplexity"]["low"] is None


def test_an_interval_of_95_percent_holds_the_truth_about_as_often() -> None:
    """Predictions of which neighbors are alike: numbers drawn for each 16 of them, whose mean is 3."""
    torch.manual_seed(0)
    hits = 0
    for _ in range(200):
        blocks = list((torch.randn(40, 4, 1).double() + 3).repeat_interleave(16, 1))
        found = evaluation._estimates(blocks, 64)
        hits += found.perplexity.low <= math.exp(3) <= found.perplexity.high
    assert 0.90 <= hits / 200 <= 0.985


def test_rows_of_ids_are_texts_of_their_own() -> None:
    one = model()
    apart = [opsmith.evaluate(one, row, window=9) for row in ids(2, 30)]
    found = opsmith.evaluate(one, ids(2, 30), window=9)
    mean = sum(math.log(e.perplexity) for e in apart) / 2
    assert found.perplexity == pytest.approx(math.exp(mean), rel=1e-6)
    assert opsmith.evaluate(one, ids(1, 30)[0].tolist(), window=9) == opsmith.evaluate(
        one, ids(1, 30), window=9
    )


def test_logits_come_in_parts_where_all_would_be_many(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = model(0), model(1)
    whole = opsmith.evaluate(one, TOKENS, against=other, window=40)
    monkeypatch.setattr(evaluation, "_AT_ONCE", 4 * VOCABULARY * 7)
    most = 0

    def look(module: Any, args: Any, kwargs: Any, out: Any) -> None:
        nonlocal most
        most = max(most, out.logits.shape[1])

    one.register_forward_hook(look, with_kwargs=True)
    parts = opsmith.evaluate(one, TOKENS, against=other, window=40)
    assert most == 7
    for name in ("perplexity", "kl", "agreement", "ratio"):
        assert getattr(parts, name) == pytest.approx(getattr(whole, name), rel=1e-5)


@pytest.mark.parametrize(("format", "most"), [("int8", 0.01), ("int4", 0.5)])
def test_an_optimized_model_is_held_against_its_original(format: str, most: float) -> None:
    original, fast = model(), model()
    config = UNTIMED.model_copy(update={"verify": False})
    opsmith.optimize(fast, quantize=format, config=config)
    found = opsmith.evaluate(fast, TOKENS, against=original, window=40)
    assert found.kl is not None
    assert 0 < found.kl < most
    opsmith.restore(fast)
    assert opsmith.evaluate(fast, TOKENS, against=original, window=40).kl == 0


def test_bfloat16_is_widened_before_it_is_summed() -> None:
    half = model().bfloat16()
    found = opsmith.evaluate(half, TOKENS, against=model(), window=83)
    with torch.no_grad():
        logits = half(input_ids=TOKENS[None]).logits[0].double()
    expected = float(nn.functional.cross_entropy(logits[:-1], TOKENS[1:]).exp())
    assert found.perplexity == pytest.approx(expected, rel=1e-5)
    assert found.kl is not None
    assert found.kl > 0


class Letters:
    """A tokenizer: a letter is a token, and a text begins with token 1."""

    def __call__(self, text: str) -> Any:
        return SimpleNamespace(input_ids=[1, *(ord(c) % VOCABULARY for c in text)])


def test_each_window_of_a_text_begins_as_a_text_does() -> None:
    one, text = model(), "the quick brown fox jumps over the lazy dog"
    found = opsmith.evaluate(one, text, window=12, tokenizer=Letters())
    letters = torch.tensor([ord(c) % VOCABULARY for c in text])
    rows = [torch.cat((torch.tensor([1]), part)) for part in letters.split(11)]
    sums = [math.log(opsmith.evaluate(one, row).perplexity) * (len(row) - 1) for row in rows]
    assert found.predictions == len(text)
    assert found.perplexity == pytest.approx(math.exp(sum(sums) / len(text)), rel=1e-6)


def smaller() -> nn.Module:
    """A model of fewer tokens, which says so."""
    one = Plain()
    one.config = SimpleNamespace(vocab_size=20)  # type: ignore[assignment]
    return one


class Plain(nn.Module):
    """A model without a configuration that is called with a tensor and gives one."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.table(x))
        return y


def test_any_module_that_gives_logits_will_do() -> None:
    one, tokens = seeded(Plain), torch.arange(18)
    with torch.no_grad():
        expected = nn.functional.cross_entropy(one(tokens[None])[0, :-1], tokens[1:]).exp()
    assert opsmith.evaluate(one, tokens).perplexity == pytest.approx(float(expected), rel=1e-6)


def test_it_runs_in_evaluation_mode_and_leaves_the_mode_as_it_was() -> None:
    one = nn.Sequential(nn.Embedding(20, 8), nn.Dropout(0.5), nn.Linear(8, 20))
    one[2].eval()
    found = opsmith.evaluate(one, torch.arange(18))
    assert [m.training for m in one.modules()] == [True, True, True, False]
    assert found == opsmith.evaluate(one.eval(), torch.arange(18))


def test_an_estimate_is_a_number_and_survives_pickling() -> None:
    found = opsmith.evaluate(model(), TOKENS, window=8)
    again = pickle.loads(pickle.dumps(found))
    assert again == found
    assert (again.perplexity.low, again.perplexity.high) == (found.perplexity.low, found.perplexity.high)
    assert found.perplexity - found.perplexity == 0
    data = json.loads(found.to_json())
    assert data["perplexity"] == {
        "value": float(found.perplexity),
        "low": found.perplexity.low,
        "high": found.perplexity.high,
    }


class NotFinite(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / 0


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (TypeError, r"model must be a torch\.nn\.Module, got int", lambda m: (3, TOKENS, {})),
        (TypeError, r"against must be a torch\.nn\.Module, got str", lambda m: (m, TOKENS, {"against": "x"})),
        (
            ValueError,
            "window must be a number of tokens, 2 or more, got 1",
            lambda m: (m, TOKENS, {"window": 1}),
        ),
        (
            ValueError,
            "window must be 128 at most, .*got 130",
            lambda m: (m, TOKENS.repeat(2), {"window": 130}),
        ),
        (TypeError, r"ids must be integers .*got torch\.float32", lambda m: (m, TOKENS.float(), {})),
        (TypeError, "expected a text or ids, got object", lambda m: (m, object(), {})),
        (ValueError, "ids must be from 0 to 60.*got 61", lambda m: (m, torch.tensor([1, 61]), {})),
        (ValueError, "a text of at least two tokens is needed", lambda m: (m, TOKENS[:1], {})),
        (ValueError, "a text of at least two tokens is needed", lambda m: (m, [], {})),
        (ValueError, "does not say where its tokenizer is; give tokenizer=", lambda m: (m, "a text", {})),
        (ValueError, "vocabularies differ, 61 and 20", lambda m: (m, TOKENS % 20, {"against": Plain()})),
        (ValueError, "vocabularies differ, 61 and 20", lambda m: (m, TOKENS, {"against": smaller()})),
        (ValueError, "logits are not finite", lambda m: (NotFinite(), TOKENS % 20, {})),
        (ValueError, r"Flatten must give logits \[1, 18, ", lambda m: (nn.Flatten(), TOKENS[:18], {})),
    ],
)
def test_what_makes_no_sense_is_refused(error: type[Exception], message: str, call: Any) -> None:
    one, tokens, options = call(model())
    with pytest.raises(error, match=f"evaluate: .*{message}"):
        opsmith.evaluate(one, tokens, **options)
