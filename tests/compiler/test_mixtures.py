"""`optimize` on mixtures of experts of transformers: opsmith's implementation, proved, and theirs again."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers as hf

import opsmith
from opsmith.compiler.modules import mixtures


def model(**more: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2}
    config = hf.MixtralConfig(**{**sizes, **heads, "num_local_experts": 4, **more})
    made = hf.AutoModelForCausalLM.from_config(config)
    for name, weight in made.named_parameters():
        if "experts" in name:
            torch.nn.init.normal_(weight, 0, 0.3)
    return made.eval()


def taken(made: Any, verify: bool = True) -> mixtures.Mixtures:
    found = mixtures.Mixtures()
    found.take(made, verify)
    return found


def test_a_mixture_is_one_graph_and_given_back() -> None:
    made, ids = model(), torch.randint(0, 60, (2, 9))
    before = made.config._experts_implementation
    with torch.no_grad():
        expected = made(ids, use_cache=False).logits
        opsmith.optimize(made, {"input_ids": ids, "use_cache": False}, config=opsmith.Config(tune=False))
        torch.testing.assert_close(made(ids, use_cache=False).logits, expected, rtol=1e-4, atol=1e-5)
    assert made.config._experts_implementation == "opsmith"
    assert "experts: 1 mixtures in one kernel each" in str(made.opsmith.report)
    opsmith.restore(made)
    assert made.config._experts_implementation == before


def test_a_mixture_learns_as_before() -> None:
    made = model()
    eager, ids = copy.deepcopy(made), torch.randint(0, 60, (2, 7))
    opsmith.optimize(made, config=opsmith.Config(tune=False, inductor=False))
    for each in (eager, made):
        each(ids, labels=ids).loss.backward()
    for (name, mine), theirs in zip(made.named_parameters(), eager.parameters(), strict=True):
        assert mine.grad is not None, name
        assert theirs.grad is not None
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-6)


def test_what_somebody_has_asked_for_stays() -> None:
    made = model()
    made.config._experts_implementation_internal = "sonicmoe"
    assert taken(made).lines() == []
    assert made.config._experts_implementation == "sonicmoe"


def test_another_form_is_left_and_said() -> None:
    made = model(hidden_act="relu")
    before = made.config._experts_implementation
    (line,) = taken(made).lines()
    assert line.startswith("experts: 1 mixtures are left to transformers: their gate is none of ours")
    assert made.config._experts_implementation == before


def test_experts_that_compute_something_else_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    from opsmith.decoding import experts

    right = experts.mixed
    monkeypatch.setattr(experts, "mixed", lambda *given: 1.001 * right(*given))
    made = model()
    (line,) = taken(made).lines()
    assert "in float64 they differ" in line
    assert made.config._experts_implementation != "opsmith"
    assert taken(made, verify=False).lines() == ["experts: 1 mixtures in one kernel each"]
