"""Architectures of Hugging Face whose spelling of an operator is their own, and graphs that cannot be read at all."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import opsmith
from opsmith.compiler import session
from opsmith.compiler.program import graph, sites
from tests.compiler.models import UNTIMED, Feed, Truth, ids, numbers, padding, seeded

SIZES = {
    "vocab_size": 61,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# What is particular to each, and what has to be found in one layer of it.
ARCHITECTURES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    # All features are rotated, and the none that are left are joined to them.
    "phi3": ({}, {"rms_norm": 3, "rope_qk": 1, "attention": 1, "silu_mul": 1, "linear": 5, "embedding": 1}),
    # A norm of what was rotated: its addition is the rotation's own.
    "hunyuan_v1_dense": ({}, {"rms_norm": 5, "rope_qk": 1, "attention": 1, "silu_mul": 1, "linear": 8}),
    # Queries are scaled before their heads are told apart.
    "opt": ({"ffn_dim": 128, "word_embed_proj_dim": 64}, {"layer_norm": 3, "attention": 1, "linear": 7}),
    # One head of keys and values, broadcast over those of the queries.
    "falcon": ({}, {"layer_norm": 2, "rope_qk": 1, "attention": 1, "linear": 5}),
    # Scores between -softcap and softcap, written out.
    "gemma2": (
        {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0, "sliding_window": 4},
        {"rms_norm": 5, "rope_qk": 1, "attention": 1, "gelu_mul": 1, "linear": 8},
    ),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_is_particular_to_an_architecture_is_read(name: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    particular, expected = ARCHITECTURES[name]
    sizes = {k: v for k, v in SIZES.items() if name != "falcon" or k != "head_dim"}  # it has none to set
    config = AutoConfig.for_model(name, **sizes | particular)
    model = seeded(lambda: AutoModelForCausalLM.from_config(config))
    truth = Truth(model)
    inputs = {"input_ids": ids(2, 9), "attention_mask": padding(2, 9).long()}
    opsmith.optimize(model, inputs, config=UNTIMED)
    report = model.opsmith.report
    assert report.found.items() >= expected.items(), report
    assert report.rolled_back == []
    with torch.no_grad():
        truth.check(model(**inputs), **inputs)


def test_a_soft_cap_is_read_as_what_it_is() -> None:
    class Capped(nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            scores = torch.tanh(q @ k.transpose(-1, -2) * 0.25 / 5.0) * 5.0
            return torch.softmax(scores, -1) @ v

    model = Capped()
    truth = Truth(model)
    q, k, v = numbers(2, 4, 7, 16), numbers(2, 4, 9, 16, seed=3), numbers(2, 4, 9, 16, seed=4)
    opsmith.optimize(model, (q, k, v), config=UNTIMED)
    (known,) = model.opsmith.graphs[0].sites.values()
    site = known.site
    assert site.card.name == "attention"
    assert site.arguments["softcap"] == pytest.approx(5.0)
    assert site.arguments["scale"] == pytest.approx(0.25)
    truth.check(model(q, k, v), q, k, v)


def _fails(*args: Any, **kwargs: Any) -> Any:
    raise RecursionError("deeper than expected")


@pytest.mark.parametrize(
    ("where", "what"),
    [(session, "capture"), (sites, "recognize"), (graph, "rewrite")],
    ids=["capture", "recognize", "rewrite"],
)
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_a_graph_that_cannot_be_studied_runs_as_it_was(
    where: Any, what: str, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of the compiler costs its speed, and neither the model's results nor its gradients."""
    model = seeded(Feed)
    eager = seeded(Feed)
    x = numbers(3, 4, 32)
    monkeypatch.setattr(where, what, _fails)
    with pytest.warns(UserWarning, match="runs as it was.*RecursionError: deeper than expected"):
        got = opsmith.optimize(model.train(training), None if training else x, config=UNTIMED)(x)
    want = eager.train(training)(x)
    assert torch.equal(got, want)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        assert torch.equal(model(x), want)
        assert torch.equal(model(numbers(5, 2, 32)), eager(numbers(5, 2, 32)))
    if training:
        got.sum().backward()
        want.sum().backward()
        for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
            assert torch.equal(mine.grad, theirs.grad)
    assert "left as it was" in str(model.opsmith.report)
    torch._dynamo.reset()


def test_sinks_are_a_column_of_the_scores_in_gpt_oss() -> None:
    """In a window and without one; in float32, as PyTorch's grouped products have no float64 to be proved against."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = SIZES | {"num_hidden_layers": 2, "num_local_experts": 2, "num_experts_per_tok": 1}
    config = AutoConfig.for_model("gpt_oss", **sizes, sliding_window=4, attn_implementation="eager")
    model = seeded(lambda: AutoModelForCausalLM.from_config(config))
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    inputs = {"input_ids": ids(2, 9), "attention_mask": padding(2, 9).long()}
    with torch.no_grad():
        expected = model(**inputs).logits
        opsmith.optimize(model, inputs, config=UNTIMED)
        got = model(**inputs).logits
    assert model.opsmith.report.found["attention"] == 2, model.opsmith.report
    shown = inputs["attention_mask"].bool()
    torch.testing.assert_close(got[shown], expected[shown], rtol=1e-5, atol=1e-5)
