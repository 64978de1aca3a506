"""From one token of a `generate` to the next Dynamo is not asked; whatever changed by then, the tokens are eager's."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor, LogitsProcessorList

import opsmith
from opsmith.compiler.bypass import Way
from tests.compiler.models import TINY, UNTIMED, ids, seeded

NEW = 8
Pair = tuple[Any, Any]  # eager, optimized


class Scaled(LlamaForCausalLM):
    """A decoder with an attribute that its forward reads, and one that it may write."""

    gain, keeps, kept = 1.0, False, None

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        use_cache: Any = None,
        **kwargs: Any,
    ) -> Any:
        result = super().forward(
            input_ids, attention_mask, position_ids, past_key_values, use_cache=use_cache, **kwargs
        )
        result.logits = result.logits * self.gain
        if self.keeps:
            self.kept = result.logits
        return result


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a way was taken, and how often it was refused."""
    counts: Counter[str] = Counter()
    call = Way.call

    def counted(self: Way, values: Any) -> Any:
        result = call(self, values)
        counts["refused" if result is None else "taken"] += 1
        return result

    monkeypatch.setattr(Way, "call", counted)
    return counts


def _pair(quantize: str | None = None, **attributes: Any) -> Pair:
    config = LlamaConfig(**TINY | {"eos_token_id": None, "num_hidden_layers": 1, "tie_word_embeddings": True})
    eager = seeded(lambda: Scaled(config))
    with torch.no_grad():
        # The largest logit is larger than the next one by more than what rounding changes.
        for weight in eager.parameters():
            if weight.dim() > 1:
                weight.mul_(6)
    for name, value in attributes.items():
        setattr(eager, name, value)
    fast = copy.deepcopy(eager)
    opsmith.optimize(fast, quantize=quantize, config=UNTIMED)
    return eager, fast


class At(LogitsProcessor):  # type: ignore[misc]  # transformers has no types
    """Changes a model behind so many tokens."""

    def __init__(self, model: Any, change: Any, token: int = 4) -> None:
        self.model, self.change, self.left = model, change, token

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            self.change(self.model)
        return scores


def _logits(model: Any, change: Any = None, length: int = 5, **options: Any) -> torch.Tensor:
    """The logits of each new token."""
    processors = LogitsProcessorList([At(model, change)] if change else [])
    result = model.generate(
        ids(2, length),
        attention_mask=torch.ones(2, length, dtype=torch.long),
        max_new_tokens=NEW,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        logits_processor=processors,
        **options,
    )
    return torch.stack(result.logits)


def _same(pair: Pair, change: Any = None, **options: Any) -> None:
    eager, fast = (_logits(model, change, **options) for model in pair)
    torch.testing.assert_close(fast, eager, rtol=2e-4, atol=2e-4)


def test_dynamo_is_asked_about_the_first_tokens_alone(taken: Counter[str]) -> None:
    pair = _pair()
    _same(pair)
    # The prompt; a token that is captured, two in which the way is learned.
    assert taken == {"taken": NEW - 4}
    _same(pair)
    assert taken == {"taken": NEW - 4 + NEW - 2}  # the prompt, and one token to be asked about


def test_packed_layers_are_found_and_go_with_their_model(taken: Counter[str]) -> None:
    """Dynamo keeps what it was ever given, so it is given nothing that leads to a way."""
    _, fast = _pair("int8")
    first, second = _logits(fast), _logits(fast)
    assert taken["taken"] == NEW - 4 + NEW - 2
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    packed = [t for m in fast.opsmith.packing.modules for t in m.forward.__self__.buffers()]
    held = [weakref.ref(one) for one in (fast, *fast.parameters(), *packed)]
    assert packed
    del fast, packed
    gc.collect()
    assert [one() for one in held] == [None] * len(held)


def test_beams_take_it_too(taken: Counter[str]) -> None:
    pair = _pair()
    texts = [
        model.generate(
            ids(1, 5), attention_mask=torch.ones(1, 5), max_new_tokens=NEW, num_beams=3, do_sample=False
        )
        for model in pair
    ]
    torch.testing.assert_close(texts[1], texts[0])
    assert taken["taken"] > 0


def _gain(model: Any) -> None:
    model.gain = 2.0


def _weight(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(-2)


def _parameter(model: Any) -> None:
    layer = model.model.layers[0].mlp.down_proj
    layer.weight = nn.Parameter(layer.weight.detach() * -2, requires_grad=False)


def _untied(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * -1, requires_grad=False)


@pytest.mark.parametrize("change", [_weight, _parameter, _untied])
def test_weights_are_looked_at_for_every_token(change: Any, taken: Counter[str]) -> None:
    pair = _pair()
    _same(pair)
    before = taken["taken"]
    _same(pair, change)
    assert taken["taken"] > before  # those of the same text before the change, and behind it


@pytest.mark.parametrize("change", [_gain, _untied])
def test_what_changes_between_two_texts_is_followed_there_and_back(change: Any) -> None:
    """A prompt of one token has the sizes of the last text's last call."""
    pair = _pair()
    for alter in (lambda model: None, change, lambda model: setattr(model, "gain", 1.0)):
        for model in pair:
            alter(model)
        for _ in range(2):
            _same(pair, length=1)


def test_a_loop_of_the_callers_own_is_asked_about_at_every_token(taken: Counter[str]) -> None:
    logits = []
    for model in _pair():
        cache, found = None, []
        for step in range(7):
            model.gain = 1.0 if step < 5 else 2.0
            with torch.no_grad():
                result = model(ids(1, 1, seed=step), past_key_values=cache, use_cache=True)
            cache = result.past_key_values
            found.append(result.logits)
        logits.append(torch.stack(found))
    torch.testing.assert_close(logits[1], logits[0], rtol=2e-4, atol=2e-4)
    assert not taken


def test_a_forward_that_keeps_what_it_made_still_does(taken: Counter[str]) -> None:
    eager, fast = pair = _pair(keeps=True)
    for _ in range(3):
        _same(pair)
        torch.testing.assert_close(fast.kept, eager.kept, rtol=2e-4, atol=2e-4)
    assert not taken["taken"]


def test_a_graph_that_breaks_has_no_way(taken: Counter[str]) -> None:
    """To collect hidden states transformers takes a lock."""
    pair = _pair()
    for _ in range(2):
        _same(pair, output_hidden_states=True)
    assert pair[1].opsmith.report.breaks
    assert not taken
