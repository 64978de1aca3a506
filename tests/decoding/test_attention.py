"""`set_attn_implementation("opsmith")`: the tokens, logits and gradients of eager attention, with any cache."""

from __future__ import annotations

import copy
import importlib
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch

import opsmith
from tests.decoding.models import MODELS, WINDOW, decoder, prompts

transformers = pytest.importorskip("transformers")
opsmith.PagedCache  # noqa: B018  transformers, imported after opsmith, learns of its attention

# Of logits of some hundreds of products in float32; another key in a softmax moves them by 1e-3 and more.
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def generated(
    model: Any, inputs: dict[str, torch.Tensor], attention: str, cache: Any = None, **how: Any
) -> Any:
    model.set_attn_implementation(attention)
    how = {"max_new_tokens": 2 * WINDOW, "do_sample": False} | how
    return model.generate(**inputs, past_key_values=cache, **how)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("batch", [1, 3])
def test_greedy_tokens_are_eagers(kind: str, batch: int) -> None:
    model = decoder(kind)
    inputs = prompts(batch, 9, padded=True)
    expected = generated(model, inputs, "eager")
    caches = (None, opsmith.PagedCache(model), opsmith.PagedCache(model, block_size=4))
    for cache in caches:
        assert torch.equal(generated(model, inputs, "opsmith", cache), expected)
    if kind not in ("gemma2", "gpt_oss"):  # which PyTorch's attention does not serve
        assert torch.equal(generated(model, inputs, "sdpa", opsmith.PagedCache(model)), expected)
    assert torch.equal(generated(model, inputs, "eager", opsmith.PagedCache(model)), expected)


def test_it_may_be_registered_again() -> None:
    from opsmith.decoding import NAME, register

    importlib.import_module("opsmith.decoding.attention")  # which is an attribute of its package then
    register(wanted=True)
    assert callable(transformers.AttentionInterface()[NAME])


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
@pytest.mark.parametrize(
    "how",
    [
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 2},
        {"do_sample": True, "top_k": 20},
        {"prompt_lookup_num_tokens": 3},
        {"cache_implementation": "static"},
    ],
    ids=lambda how: next(iter(how)),
)
def test_every_way_to_generate(kind: str, how: dict[str, Any]) -> None:
    model = decoder(kind)
    inputs = prompts(1 if "prompt_lookup_num_tokens" in how else 2, 15, padded=True)
    results = []
    for attention in ("eager", "opsmith"):
        ours = attention == "opsmith" and "cache_implementation" not in how
        torch.manual_seed(3)
        results.append(
            generated(model, inputs, attention, opsmith.PagedCache(model) if ours else None, **how)
        )
    assert torch.equal(*results)


def test_assisted_decoding() -> None:
    model, small = decoder("gemma3_text"), decoder("llama")
    inputs = prompts(1, 15, padded=False)
    expected = generated(model, inputs, "eager")
    small.set_attn_implementation("opsmith")
    got = generated(model, inputs, "opsmith", opsmith.PagedCache(model), assistant_model=small)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_a_chat_goes_on(kind: str) -> None:
    model = decoder(kind)
    caches = {"eager": transformers.DynamicCache(config=model.config), "opsmith": opsmith.PagedCache(model)}
    for turn in (14, 40, 3):  # the second turn is longer than what reads the blocks where they lie
        ids = prompts(2, turn, padded=False)["input_ids"]
        logits = {}
        for attention, cache in caches.items():
            model.set_attn_implementation(attention)
            with torch.no_grad():
                logits[attention] = model(ids, past_key_values=cache).logits
        torch.testing.assert_close(logits["opsmith"], logits["eager"], **CLOSE)


def test_a_prefix_is_shared_by_copies() -> None:
    model = decoder("gemma3_text")
    inputs = prompts(1, 20, padded=False)
    cache = opsmith.PagedCache(model)
    model.set_attn_implementation("opsmith")
    with torch.no_grad():
        model(inputs["input_ids"][:, :-1], past_key_values=cache)
    expected = generated(model, inputs, "eager")
    for _ in range(2):
        assert torch.equal(generated(model, inputs, "opsmith", copy.deepcopy(cache)), expected)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gemma2"])
@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_logits_with_padding_anywhere(kind: str, side: str) -> None:
    model = decoder(kind)
    inputs = prompts(3, 24, padded=side != "right")
    if side != "left":
        inputs["attention_mask"][1, 20:] = 0
        inputs["attention_mask"][0, 16:] = 0
    keep = inputs["attention_mask"].bool()
    logits = []
    for attention, cache in (("eager", None), ("opsmith", None), ("opsmith", opsmith.PagedCache(model))):
        model.set_attn_implementation(attention)
        with torch.no_grad():
            logits.append(model(**inputs, past_key_values=cache, use_cache=cache is not None).logits[keep])
    torch.testing.assert_close(logits[1], logits[0], **CLOSE)
    torch.testing.assert_close(logits[2], logits[0], **CLOSE)


def test_a_mask_with_holes_behind_a_prompt() -> None:
    model = decoder("gemma3_text")
    inputs = prompts(2, 30, padded=True)
    inputs["attention_mask"][0, 10:13] = 0
    logits = []
    for attention in ("eager", "opsmith"):
        model.set_attn_implementation(attention)
        cache = opsmith.PagedCache(model)
        with torch.no_grad():
            for some in (slice(0, 20), slice(20, 29), slice(29, 30)):
                result = model(
                    inputs["input_ids"][:, some],
                    attention_mask=inputs["attention_mask"][:, : some.stop],
                    past_key_values=cache,
                )
        logits.append(result.logits)
    torch.testing.assert_close(logits[1], logits[0], **CLOSE)


def test_a_mask_of_the_callers_own() -> None:
    model = decoder("llama")
    ids = prompts(2, 12, padded=False)["input_ids"]
    own = torch.rand(2, 1, 12, 12) < 0.7
    own |= torch.eye(12, dtype=torch.bool)
    logits = []
    for attention in ("sdpa", "opsmith"):
        model.set_attn_implementation(attention)
        with torch.no_grad():
            logits.append(model(ids, attention_mask=own).logits)
    torch.testing.assert_close(logits[1], logits[0], **CLOSE)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gemma2", "gpt_oss"])
def test_gradients(kind: str) -> None:
    model = decoder(kind).train()
    inputs = prompts(2, 20, padded=True)
    # What is predicted from padding has no meaning, and no two attentions agree on it.
    seen = inputs["attention_mask"].bool()
    labels = inputs["input_ids"].masked_fill(~(seen & seen.roll(1, 1)), -100)
    gradients = []
    for attention in ("eager", "opsmith"):
        model.set_attn_implementation(attention)
        model.zero_grad()
        loss = model(**inputs, labels=labels, use_cache=False).loss
        loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, expected in gradients[0].items():
        close = {"rtol": 1e-3, "atol": 1e-4 * float(expected.abs().max())}
        torch.testing.assert_close(gradients[1][name], expected, msg=name, **close)


def test_dropout_is_the_librarys() -> None:
    model = decoder("llama", attention_dropout=0.5).train()
    inputs = prompts(1, 12, padded=False)
    losses = []
    for attention in ("sdpa", "opsmith"):
        model.set_attn_implementation(attention)
        torch.manual_seed(0)
        losses.append(model(**inputs, labels=inputs["input_ids"]).loss)
    assert torch.equal(*losses)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_are_as_close_as_eager(dtype: torch.dtype) -> None:
    exact = decoder("gemma3_text")
    model = copy.deepcopy(exact).to(dtype)
    exact.load_state_dict({name: t.float() for name, t in model.state_dict().items()})
    inputs = prompts(2, 30, padded=False)

    def logits(model: Any, attention: str) -> torch.Tensor:
        model.set_attn_implementation(attention)
        cache = opsmith.PagedCache(model)
        with torch.no_grad():
            parts = [
                model(inputs["input_ids"][:, some], past_key_values=cache).logits
                for some in (slice(0, 25), slice(25, 29), slice(29, 30))
            ]
        return torch.cat(parts, 1).float()

    truth = logits(exact, "eager")
    errors = {name: (logits(model, name) - truth).abs().max() for name in ("eager", "opsmith")}
    assert errors["opsmith"] <= 2 * errors["eager"] + torch.finfo(dtype).eps * truth.abs().max()


def test_weights_of_attention_are_refused() -> None:
    model = decoder("llama")
    model.set_attn_implementation("opsmith")
    with pytest.raises(ValueError, match=r'set_attn_implementation\("eager"\)'):
        model(**prompts(1, 4, padded=False), output_attentions=True)


def test_a_cache_serves_one_model() -> None:
    model, other = decoder("llama"), decoder("llama")
    cache = opsmith.PagedCache(model)
    ids = prompts(1, 6, padded=False)["input_ids"]
    for one in (model, other):
        one.set_attn_implementation("opsmith")
    with torch.no_grad():
        model(ids, past_key_values=cache)
        with pytest.raises(ValueError, match="came from another model"):
            other(ids, past_key_values=cache)
        cache.reset()
        other(ids, past_key_values=cache)


def test_threads_have_caches_of_their_own() -> None:
    model = decoder("gemma3_text")
    inputs = [prompts(1, n, padded=False) for n in (9, 12, 15, 20)]
    expected = [generated(model, one, "eager") for one in inputs]
    model.set_attn_implementation("opsmith")
    found: dict[int, Any] = {}

    def run(i: int) -> None:
        how = {"max_new_tokens": 2 * WINDOW, "do_sample": False}
        found[i] = model.generate(**inputs[i], past_key_values=opsmith.PagedCache(model), **how)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, tokens in enumerate(expected):
        assert torch.equal(found[i], tokens)


def test_torch_compile_runs_it() -> None:
    model = decoder("llama")
    inputs = prompts(2, 10, padded=True)
    with torch.no_grad():
        expected = model(**inputs).logits
        model.set_attn_implementation("opsmith")
        compiled = torch.compile(model, backend="eager")
        cache = opsmith.PagedCache(model)
        got = compiled(**inputs, past_key_values=cache).logits
    torch.testing.assert_close(got, expected, **CLOSE)
    assert cache.get_seq_length() == 10


IMPORTS = {
    "after transformers": "import transformers; import opsmith",
    "before it, and used": "import opsmith; import transformers; opsmith.ops",
    "before it, with a cache": "import opsmith; opsmith.PagedCache; import transformers",
}


@pytest.mark.parametrize("order", IMPORTS)
def test_it_is_registered(order: str) -> None:
    code = f"""{IMPORTS[order]}
assert "opsmith" in transformers.AttentionInterface().valid_keys()
assert "opsmith" in transformers.AttentionMaskInterface().valid_keys()"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_opsmith_starts_without_transformers() -> None:
    code = "import opsmith, sys; assert not {'torch', 'transformers'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_sinks_go_with_no_dropout() -> None:
    model = decoder("gpt_oss", attention_dropout=0.5).train()
    model.set_attn_implementation("opsmith")
    with pytest.raises(ValueError, match="sinks go with neither dropout"):
        model(**prompts(1, 6, padded=False), use_cache=False)
