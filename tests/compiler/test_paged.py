"""`optimize` on decoders: `generate` runs on pages, with the tokens of eager, and one graph for all lengths."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import opsmith
from opsmith.compiler import Config
from opsmith.compiler.modules.paged import Paged
from tests.decoding.models import MODELS, VOCABULARY, WINDOW, decoder, prompts

transformers = pytest.importorskip("transformers")

GREEDY: dict[str, Any] = {"max_new_tokens": 2 * WINDOW, "do_sample": False}
# Sites have tests of their own; here it is about calls.
QUICK = Config(tune=False, inductor=False, verify=False)


def optimized(kind: str, config: Config = QUICK, **more: Any) -> tuple[Any, Any]:
    """A decoder, and a copy of it that is optimized."""
    model = decoder(kind, **more)
    return model, opsmith.optimize(copy.deepcopy(model), config=config)


@pytest.fixture(autouse=True)
def forget_graphs() -> None:
    """Nothing: what is captured of a model serves all of its tests."""


@pytest.fixture(scope="module")
def pairs() -> Iterator[Callable[[str], tuple[Any, Any]]]:
    """A decoder and its optimized copy, for tests that ask neither what was captured nor what was not served."""
    yield functools.cache(optimized)
    torch._dynamo.reset()


def on_pages(model: Any) -> bool:
    """Whether the model is served from pages."""
    return any("paged_attention" in line for line in model.opsmith.plan.latent)


@pytest.mark.parametrize("kind", MODELS)
def test_greedy_tokens_are_eagers(kind: str) -> None:
    plain, model = optimized(kind, Config(tune=False, inductor=False))
    for inputs in (prompts(3, 9, padded=True), prompts(1, 20, padded=False)):
        assert torch.equal(model.generate(**inputs, **GREEDY), plain.generate(**inputs, **GREEDY))
    assert on_pages(model)
    assert not model.opsmith.report.fallbacks
    assert model.opsmith.report.found["paged_attention"] == plain.config.num_hidden_layers


def test_a_step_is_one_graph_for_all_lengths() -> None:
    plain, model = optimized("gemma3_text")
    inputs = prompts(1, 9, padded=False)
    model.generate(**inputs, **GREEDY | {"max_new_tokens": 3})
    graphs = len(model.opsmith.graphs)
    assert graphs == 2  # a prompt, a token: studied apart
    assert len(model.opsmith.parts) == 1  # and captured as one
    recorded = len(model.opsmith.plan.shapes)
    got = model.generate(**inputs, **GREEDY | {"max_new_tokens": 60})
    assert torch.equal(got, plain.generate(**inputs, **GREEDY | {"max_new_tokens": 60}))
    assert len(model.opsmith.graphs) == graphs
    assert len(model.opsmith.plan.shapes) == recorded


def test_beams_first_are_one_capture_too() -> None:
    """Their positions are a view at the prompt, and are none at a token."""
    plain, model = optimized("llama")
    inputs = prompts(2, 7, padded=False)
    beams = GREEDY | {"num_beams": 3}
    assert torch.equal(model.generate(**inputs, **beams), plain.generate(**inputs, **beams))
    assert len(model.opsmith.parts) == 1


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_a_chat_goes_on_with_what_was_returned(kind: str, pairs: Any) -> None:
    plain, model = pairs(kind)
    caches: list[Any] = [None, None]
    with torch.no_grad():
        for turn in (14, 1, 40, 3):
            ids = prompts(2, turn, padded=False)["input_ids"]
            logits = []
            for i, each in enumerate((plain, model)):
                result = each(ids, past_key_values=caches[i], use_cache=True)
                caches[i] = result.past_key_values
                logits.append(result.logits)
            assert type(caches[1]) is transformers.DynamicCache
            assert caches[1].get_seq_length() == caches[0].get_seq_length()
            torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-5)
        # The library's own attention goes on with it, too.
        restored = opsmith.restore(copy.deepcopy(model))
        expected = plain(ids, past_key_values=caches[0]).logits
        got = restored(ids, past_key_values=caches[1]).logits
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_a_cache_of_the_callers_own(pairs: Any) -> None:
    plain, model = pairs("gemma3_text")
    inputs = prompts(2, 15, padded=True)
    want = plain.generate(**inputs, **GREEDY)
    for cache in (
        opsmith.PagedCache(plain),
        opsmith.PagedCache(plain, block_size=4, max_tokens=64),
        transformers.DynamicCache(config=plain.config),
        transformers.DynamicCache(),
    ):
        assert torch.equal(model.generate(**inputs, **GREEDY, past_key_values=cache), want)
    assert not model.opsmith.report.fallbacks
    static = transformers.StaticCache(config=plain.config, max_cache_len=64)
    assert torch.equal(model.generate(**inputs, **GREEDY, past_key_values=static), want)
    calls = model.opsmith.report.fallbacks["a StaticCache is not a DynamicCache"]
    said = f"the model's own cache in {calls} calls: a StaticCache is not a DynamicCache"
    assert said in str(model.opsmith.report)


def test_an_encoder_decoder_keeps_its_own_cache_and_says_so() -> None:
    sizes = {f"{s}_{w}": n for s in ("encoder", "decoder") for w, n in (("layers", 1), ("ffn_dim", 32))}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=VOCABULARY, d_model=16, max_position_embeddings=32, **sizes, **heads
    )
    plain = transformers.BartForConditionalGeneration(config).eval()
    model = opsmith.optimize(copy.deepcopy(plain), config=QUICK)
    inputs = {"input_ids": torch.randint(3, VOCABULARY, (2, 6))}
    fixed = {"do_sample": False, "max_new_tokens": 4, "min_new_tokens": 4}
    assert torch.equal(model.generate(**inputs, **fixed), plain.generate(**inputs, **fixed))
    report = model.opsmith.report
    assert report.found["attention"]
    assert report.fallbacks == {"a model of an encoder and a decoder keeps a cache of two attentions": 4}
    assert "the model's own cache in 4 calls: a model of an encoder" in str(report)


def test_what_pages_do_not_serve_runs_as_it_was() -> None:
    plain, model = optimized("llama")
    inputs = prompts(2, 12, padded=True)
    holes = inputs | {"attention_mask": inputs["attention_mask"].clone()}
    holes["attention_mask"][0, 5] = 0
    seen = holes["attention_mask"].bool()
    with torch.no_grad():
        for each in (inputs, holes):
            got = model(**each, use_cache=True).logits
            torch.testing.assert_close(
                got[seen], plain(**each, use_cache=True).logits[seen], rtol=1e-4, atol=1e-5
            )
    assert list(model.opsmith.report.fallbacks) == [
        "the mask hides other columns than those of the padding at the left"
    ]
    loss = model(**inputs, labels=inputs["input_ids"], use_cache=True).loss
    loss.backward()
    assert "gradients are recorded" in model.opsmith.report.fallbacks
    assert model.config._attn_implementation == plain.config._attn_implementation


def test_a_call_without_pages_waits_for_one_on_them(pairs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which exchanges the model's attention, for all threads."""
    plain, model = pairs("llama")
    inputs, begun, through = prompts(1, 9, padded=False), threading.Event(), threading.Event()
    holes = inputs["attention_mask"].clone()
    holes[0, 4] = 0
    calls: list[dict[str, Any]] = [{"use_cache": False}, {"attention_mask": holes}]
    model.generate(**inputs, **GREEDY)
    with torch.no_grad():
        want = [plain(**inputs | call).logits for call in calls]
        for call in calls:
            model(**inputs | call)
    run = Paged._on_pages

    def slowly(self: Any, model: Any, call: Any, then: Any) -> Any:
        def waits(**given: Any) -> Any:
            begun.set()
            through.wait(0.3)
            return then(**given)

        return run(self, model, call, waits)

    monkeypatch.setattr(Paged, "_on_pages", slowly)
    other = threading.Thread(target=lambda: model.generate(**inputs, **GREEDY | {"max_new_tokens": 8}))
    other.start()
    with torch.no_grad():
        for call, logits in zip(calls, want, strict=True):
            begun.clear()
            assert begun.wait(60)
            torch.testing.assert_close(model(**inputs | call).logits, logits)
    through.set()
    other.join()


def test_it_can_be_turned_off() -> None:
    plain, model = optimized("llama", QUICK.model_copy(update={"cache": "off"}))
    inputs = prompts(2, 9, padded=True)
    assert torch.equal(model.generate(**inputs, **GREEDY), plain.generate(**inputs, **GREEDY))
    assert not on_pages(model)


def test_int8_pages() -> None:
    plain, model = optimized("llama", QUICK.model_copy(update={"cache": "paged_int8"}))
    ids = prompts(2, 30, padded=False)["input_ids"]
    with torch.no_grad():
        cache = model(ids[:, :-1], use_cache=True).past_key_values
        got = model(ids[:, -1:], past_key_values=cache).logits
        want = plain(ids).logits[:, -1:]
    assert cache.layers[0].pool.dtype == torch.int8
    # Each key and value is off by at most 1 / 254 of the largest in its row.
    assert 0 < float((got - want).abs().max()) < 0.02 * float(want.abs().max())


def test_a_frozen_model() -> None:
    plain, model = optimized("llama", QUICK.model_copy(update={"frozen": True}))
    inputs = prompts(2, 9, padded=True)
    for _ in range(2):
        assert torch.equal(model.generate(**inputs, **GREEDY), plain.generate(**inputs, **GREEDY))
        with torch.no_grad():
            got, want = (each(**inputs, use_cache=False).logits for each in (model, plain))
        seen = inputs["attention_mask"].bool()
        torch.testing.assert_close(got[seen], want[seen], rtol=1e-4, atol=1e-5)


def test_inference_mode_and_beams_after_it(pairs: Any) -> None:
    plain, model = pairs("gemma3_text")
    inputs = prompts(2, 15, padded=False)
    with torch.inference_mode():
        cache = model(**inputs, use_cache=True).past_key_values
    with torch.no_grad():
        theirs = plain(**inputs, use_cache=True).past_key_values
        for each in (cache, theirs):
            each.reorder_cache(torch.tensor([1, 1]))
        ids = prompts(2, 4, padded=False)["input_ids"]
        got, want = model(ids, past_key_values=cache).logits, plain(ids, past_key_values=theirs).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_wrong_calls_are_clear_and_write_nothing(pairs: Any) -> None:
    plain, model = pairs("llama")
    ids = prompts(2, 9, padded=False)["input_ids"]
    with torch.no_grad():
        cache = opsmith.PagedCache(plain, max_tokens=10)
        model(ids, past_key_values=cache)
        before = [layer.keys.clone() for layer in cache.layers]
        for wrong, message in ((ids[:1, :1], "batch of 2"), (ids[:, :2], "max_tokens=10")):
            with pytest.raises(ValueError, match=message):
                model(wrong, past_key_values=cache)
        other = opsmith.optimize(decoder("llama"), config=QUICK)
        with pytest.raises(ValueError, match="came from another model"):
            other(ids[:, :1], past_key_values=cache)
    for layer, keys in zip(cache.layers, before, strict=True):
        assert layer.get_seq_length() == 9
        assert torch.equal(layer.keys, keys)


def test_a_first_call_that_fails_says_nothing_of_the_next() -> None:
    plain, model = optimized("llama")
    inputs = prompts(2, 9, padded=True)
    with pytest.raises(IndexError):
        model.generate(inputs["input_ids"] + VOCABULARY, **GREEDY)
    assert torch.equal(model.generate(**inputs, **GREEDY), plain.generate(**inputs, **GREEDY))
    assert on_pages(model)


def test_positions_that_are_not_there_are_refused_and_nothing_is_written() -> None:
    """Of a model that learned its positions: a prompt that is too long, and a token behind the last one."""
    plain, model = optimized("gpt2", max_position_embeddings=16)
    ids = prompts(2, 17, padded=False)["input_ids"]
    cache = opsmith.PagedCache(plain)
    with torch.no_grad():
        logits = model(ids[:, :16], past_key_values=cache).logits
        torch.testing.assert_close(logits, plain(ids[:, :16]).logits, rtol=1e-4, atol=1e-5)
        before = [layer.keys.clone() for layer in cache.layers]
        for wrong, past in ((ids, opsmith.PagedCache(plain)), (ids[:, 16:], cache)):
            with pytest.raises((IndexError, RuntimeError), match=r"out of range|must lie in|outside"):
                model(wrong, past_key_values=past)
    for layer, keys in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys)


class Odd(nn.Module):
    """A decoder whose logits are something else, by the cache that it is given."""

    def __init__(self, inner: Any, change: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.inner, self.config, self.change = inner, inner.config, change

    def forward(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        use_cache: Any = None,
    ) -> Any:
        given = {"attention_mask": attention_mask, "position_ids": position_ids, "use_cache": use_cache}
        result = self.inner(input_ids, past_key_values=past_key_values, **given)
        result.logits = self.change(result.logits, past_key_values)
        return result


def test_a_model_that_asks_more_of_its_cache_is_left_alone() -> None:
    def longer(logits: Any, cache: Any) -> Any:
        return logits if cache is None else logits + cache.get_seq_length()

    model = opsmith.optimize(Odd(decoder("llama"), longer).eval(), config=QUICK)
    ids = torch.randint(2, VOCABULARY, (2, 6))
    with torch.no_grad():
        for _ in range(3):
            model(ids, use_cache=True)
        model(ids)
    assert not on_pages(model)
    ((why, calls),) = model.opsmith.report.fallbacks.items()
    assert "asks its cache" in why
    assert calls == 3


def test_a_mask_that_is_more_than_a_window_is_left_alone() -> None:
    from opsmith.compiler.modules.paged.prove import study

    ids = prompts(2, 9, padded=False)["input_ids"]
    windows = [WINDOW, None]
    assert isinstance(study(decoder("gemma3_text"), ids, windows, verify=True), nn.Module)
    why = study(decoder("gemma3_text", use_bidirectional_attention=True), ids, windows, verify=True)
    assert why == "the mask of layer 0 is more than causality, a window and padding"
    # A window that the model has and the cache has not is none of the cache's business, the other way round it is.
    assert isinstance(study(decoder("llama"), ids, [None] * 2, verify=True), nn.Module)
    assert "sees all tokens" in str(study(decoder("llama"), ids, [None, WINDOW], verify=True))


def test_pages_may_be_as_far_from_a_model_as_its_roundings() -> None:
    from opsmith.compiler.modules.paged import prove
    from opsmith.decoding.step import Stateless

    ids = prompts(2, 40, padded=False)["input_ids"]
    rough = Odd(decoder("llama").bfloat16(), lambda logits, cache: (256 * logits).sin())
    assert isinstance(prove.study(rough, ids, [None] * 2, verify=True), nn.Module)

    def wrong(logits: Any, cache: Any) -> Any:
        return logits * (1 + 1e-3 * isinstance(cache, Stateless))

    model, before = Odd(decoder("llama"), wrong), torch.get_rng_state()
    why = prove.study(model, ids, [None] * 2, verify=True)
    assert why == "without its mask and with another cache it computes something else"
    assert prove._watching.roundings is None
    assert torch.equal(before, torch.get_rng_state())  # the caller samples as ever


def test_eagers_luck_in_one_layer_is_no_fault_of_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    from opsmith.compiler.modules.paged import prove

    module = nn.Module()
    module.num_key_value_groups, module.is_causal = 1, True  # type: ignore[assignment]
    monkeypatch.setattr(prove._watching, "name", "sdpa")

    def seen(tokens: int) -> prove.Seen:
        q, k, v = torch.rand(3, 1, 2, tokens, 16) + 1
        mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool).tril()
        return prove.Seen(module, 8 * q, 8 * k, v, mask, True, None, {"scaling": 1.0})

    lucky, usual = seen(1), seen(40)  # of a single key's value nothing is rounded at all
    by_pages, unit = prove._by_pages, torch.finfo(torch.float32).eps

    def off(units: float) -> str:
        def made(one: prove.Seen, window: int | None) -> torch.Tensor:
            return by_pages(usual, None) if one is usual else one.value.transpose(1, 2) + units * unit

        monkeypatch.setattr(prove, "_by_pages", made)
        return prove._wrong({0: (usual, None), 1: (lucky, None)})

    assert off(2) == ""
    assert "layer 1: error" in off(1000)
    with monkeypatch.context() as patch:  # nor does one layer speak for itself
        patch.setattr(prove, "_by_pages", lambda one, window: one.value.transpose(1, 2) + 2 * unit)
        assert "layer 0: error" in prove._wrong({0: (lucky, None)})
