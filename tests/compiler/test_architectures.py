"""Architectures of Hugging Face whose spelling of an operator is their own, and graphs that cannot be read at all."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import opsmith
from opsmith.compiler import session
from opsmith.compiler.program import graph
from opsmith.measure.pool import tensors_of
from tests.compiler.chatglm import ChatGLM
from tests.compiler.models import UNTIMED, WHOLE_MODEL, Feed, Truth, ids, numbers, padding, seeded

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
GPT2 = {"n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 64}
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 1, "num_heads": 4, "decoder_start_token_id": 0}
BART = {
    **{
        f"{side}_{what}": n
        for side in ("encoder", "decoder")
        for what, n in (("layers", 1), ("ffn_dim", 128))
    },
    **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
    "d_model": 64,
}
GROUPED = ("num_key_value_heads", "head_dim")  # which those with as many keys as queries do not have
SDPA = {"attention": 1, "embedding": 1}
LLAMA = SDPA | {"rms_norm": 3, "rope_qk": 1, "silu_mul": 1, "linear": 8}
# What is particular to each family, and all that is found in one layer of it.
DECODERS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "llama": ({}, LLAMA),
    # All features are rotated, and the none that are left are joined to them; packed products.
    "phi3": ({}, LLAMA | {"linear": 5}),
    # A norm of what was rotated: its addition is the rotation's own.
    "hunyuan_v1_dense": ({}, LLAMA | {"rms_norm": 5}),
    # Norms of queries and keys, before they are rotated.
    "qwen3": ({}, LLAMA | {"rms_norm": 5}),
    # Half of each head is rotated, neighbor by neighbor; a norm behind each block, too.
    "glm4": ({}, LLAMA | {"rms_norm": 5, "linear": 7}),
    # One norm for attention and feed-forward; only the sliding layer is rotated.
    "cohere2": (
        {"num_hidden_layers": 2, "sliding_window": 4}
        | {"layer_types": ["sliding_attention", "full_attention"]},
        {"layer_norm": 3, "attention": 2, "rope_qk": 1, "silu_mul": 2, "linear": 15, "embedding": 1},
    ),
    # Scores between -softcap and softcap, written out.
    "gemma2": (
        {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0, "sliding_window": 4},
        SDPA | {"rms_norm": 5, "rope_qk": 1, "gelu_mul": 1, "linear": 8},
    ),
    # Norms of weights that are kept less one, of queries and keys too.
    "gemma3_text": (
        {"query_pre_attn_scalar": 16, "sliding_window": 4},
        SDPA | {"rms_norm": 7, "rope_qk": 1, "gelu_mul": 1, "linear": 8},
    ),
    # A layer norm whose weight is kept less one.
    "nemotron": ({}, SDPA | {"layer_norm": 3, "rope_qk": 1, "linear": 7}),
    "starcoder2": ({}, SDPA | {"layer_norm": 3, "rope_qk": 1, "linear": 7}),
    # A quarter of each head is rotated; queries, keys and values of a head lie side by side.
    "gpt_neox": ({}, SDPA | {"layer_norm": 3, "rope_qk": 1, "linear": 5}),
    # Weights that lie the other way round.
    "gpt2": (GPT2, {"layer_norm": 3, "attention": 1, "linear": 5, "embedding": 2}),
    # One head of keys and values, copied for each of the queries'.
    "gpt_bigcode": (GPT2, {"layer_norm": 3, "attention": 1, "linear": 5, "embedding": 2}),
    # Neighbors are rotated, and heads are behind tokens.
    "gptj": (GPT2 | {"rotary_dim": 8}, SDPA | {"layer_norm": 2, "rope_qk": 1, "linear": 7}),
    # Queries are scaled before their heads are told apart.
    "opt": (
        {"ffn_dim": 128, "word_embed_proj_dim": 64},
        {"layer_norm": 3, "attention": 1, "linear": 7, "embedding": 2},
    ),
    # One head of keys and values, broadcast over those of the queries.
    "falcon": ({}, SDPA | {"layer_norm": 2, "rope_qk": 1, "linear": 5}),
    # Biases by distance, added as a mask.
    "mpt": (
        {"d_model": 64, "n_heads": 4, "n_layers": 1, "max_seq_len": 64},
        SDPA | {"layer_norm": 3, "linear": 5},
    ),
    # The same, with heads folded into the batch: what a product is added to.
    "bloom": ({"n_head": 4, "n_layer": 1}, SDPA | {"layer_norm": 4, "linear": 5}),
    # Convolutions beside attention.
    "lfm2": (
        {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
        SDPA | {"rms_norm": 7, "rope_qk": 1, "silu_mul": 2, "linear": 13},
    ),
}
ENCODERS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "bert": ({}, {"layer_norm": 3, "attention": 1, "linear": 7, "embedding": 3}),
    # Scores of content and position are added to those of the content alone, over merged heads.
    "deberta-v2": (
        {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 16},
        {"layer_norm": 3, "attention": 1, "linear": 8, "embedding": 2},
    ),
    # Gate and up are halves of one product.
    "modernbert": (
        {"local_attention": 8, "cls_token_id": 1},
        SDPA | {"layer_norm": 3, "rope_qk": 1, "gelu_mul": 1, "linear": 4},
    ),
}
BOTH: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    # Scores are not scaled, and have biases by distance.
    "t5": (T5, {"rms_norm": 7, "attention": 3, "linear": 17, "embedding": 4}),
    "bart": (BART, {"layer_norm": 7, "attention": 3, "linear": 17, "embedding": 4}),
}


@pytest.mark.parametrize("name", [*DECODERS, *ENCODERS, *BOTH])
def test_a_family_is_found_and_says_the_same(name: str) -> None:
    import transformers

    particular, expected = (DECODERS | ENCODERS | BOTH)[name]
    config = transformers.AutoConfig.for_model(name)
    sizes = {k: v for k, v in SIZES.items() if k not in GROUPED or hasattr(config, k)}
    if name == "falcon":  # its size of heads is computed
        del sizes["head_dim"]
    auto = transformers.AutoModelForCausalLM
    if name not in DECODERS:
        auto = transformers.AutoModel if name in ENCODERS else transformers.AutoModelForSeq2SeqLM
    config = transformers.AutoConfig.for_model(name, **sizes | particular)
    model: Any = seeded(lambda: auto.from_config(config))
    truth = Truth(model)
    mask = padding(2, 9).long()
    inputs = {"input_ids": ids(2, 9), "attention_mask": mask.flip(1) if name in DECODERS else mask}
    fixed = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6}
    before: Any = truth.eager
    said = None if name in ENCODERS else before.generate(**inputs, **fixed)
    call = inputs | ({"decoder_input_ids": ids(2, 5)} if name in BOTH else {})
    opsmith.optimize(model, call, config=UNTIMED)
    report = model.opsmith.report
    assert report.found == expected, report
    assert report.rolled_back == []
    kept = inputs["attention_mask"].bool() if name not in BOTH else ...
    with torch.no_grad():
        got, eager, exact = (m(**call)[0][kept] for m in (model, truth.eager, truth.exact))
    verdict = WHOLE_MODEL.check(got, eager, exact)
    assert verdict.ok, verdict.why
    if said is not None:
        assert torch.equal(model.generate(**inputs, **fixed), said)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_every_output_that_is_asked_for_is_eagers(name: str) -> None:
    """What transformers' own tests ask of each model (`make hf-tests`), of two: hidden states break its graph."""
    import transformers

    config = transformers.AutoConfig.for_model(name)
    sizes = {k: v for k, v in SIZES.items() if k not in GROUPED or hasattr(config, k)}
    config = transformers.AutoConfig.for_model(name, **sizes)
    model: Any = seeded(lambda: transformers.AutoModel.from_config(config, attn_implementation="eager"))
    eager = copy.deepcopy(model)
    opsmith.optimize(model, config=UNTIMED)
    inputs = {"input_ids": ids(3, 7), "attention_mask": padding(3, 7).long()}
    for asked, form in (
        ({}, True),
        ({"output_hidden_states": True}, False),
        ({"output_attentions": True}, True),
    ):
        with torch.no_grad():
            got, said = (m(**inputs, **asked, return_dict=form) for m in (model, eager))
        assert type(got) is type(said)
        if form:
            assert list(got) == list(said)
            got, said = got.to_tuple(), said.to_tuple()
        torch.testing.assert_close(list(tensors_of(got)), list(tensors_of(said)), atol=1e-5, rtol=1e-4)
    assert not model.opsmith.unread


def test_the_modeling_of_chatglm_is_found_and_says_the_same() -> None:
    model: Any = seeded(lambda: ChatGLM(layers=1))
    truth = Truth(model)
    prompt = ids(2, 9)
    opsmith.optimize(model, {"ids": prompt}, config=UNTIMED)
    expected = {"rms_norm": 3, "rope_qk": 1, "attention": 1, "silu_mul": 1, "linear": 5, "embedding": 1}
    assert model.opsmith.report.found == expected
    sites = [s for s in model.opsmith.graphs[0].sites.values() if s.site.card.name == "attention"]
    assert all(
        s.site.arguments["k"].shape[1] == 2 for s in sites
    )  # as many heads as there are, not copies of them
    with torch.no_grad():
        truth.check(model(prompt), prompt)
        assert greedy(model, prompt) == greedy(truth.eager, prompt)


def greedy(model: Any, prompt: torch.Tensor, tokens: int = 6) -> list[list[int]]:
    """So many tokens of ChatGLM, with its cache."""
    (logits, past), said = model(prompt), []
    for at in range(prompt.shape[1], prompt.shape[1] + tokens):
        said.append(logits[:, -1:].argmax(-1))
        logits, past = model(said[-1], positions=torch.full_like(said[-1], at), past=past)
    result: list[list[int]] = torch.cat(said, 1).tolist()
    return result


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
    [(session, "capture"), (session, "recognize"), (graph, "rewrite")],
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


class Overlaid(Feed):
    """Attention whose mask is made entry by entry, as transformers does where images see all of themselves."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        at = torch.arange(x.shape[1])
        seen = torch.vmap(torch.vmap(lambda q, k: (k <= q) | (k // 3 == q // 3), (None, 0)), (0, None))(
            at, at
        )
        heads = x.unflatten(2, (2, -1)).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=seen)


@pytest.mark.filterwarnings("error:opsmith")
def test_what_vmap_computes_leaves_the_rest_of_a_graph_optimized() -> None:
    model, x = seeded(Overlaid), numbers(3, 4, 32)
    truth, without = Truth(model), opsmith.optimize(seeded(Feed), x, config=UNTIMED)
    opsmith.optimize(model, x, config=UNTIMED)
    assert model.opsmith.report.found == without.opsmith.report.found | {"attention": 1}
    for size in (4, 7):
        x = numbers(2, size, 32)
        with torch.no_grad():
            truth.check(model(x), x)
    slopes = [torch.autograd.grad(m(x).square().sum(), [*m.parameters()]) for m in (model, seeded(Overlaid))]
    torch.testing.assert_close(*slopes)


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
