"""Multi-head latent attention inside Hugging Face's models: found, proved, generating what eager generates."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch

import opsmith
from opsmith.compiler import Config
from opsmith.compiler.modules.latent.find import candidates
from tests.compiler.models import VOCABULARY, WHOLE_MODEL, Truth, seeded

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": 0,
    "kv_lora_rank": 32,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 16,
    "head_dim": 16,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "V2": ("deepseek_v2", {}),
    "V2 without q_lora": ("deepseek_v2", {"q_lora_rank": None}),
    "V3": ("deepseek_v3", {}),
    "V3, ranks alike": (
        "deepseek_v3",
        {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "head_dim": 8, "v_head_dim": 8},
    ),
}
GREEDY = {"do_sample": False, "max_new_tokens": 32}


def deepseek(name: str = "V3", **changes: Any) -> Any:
    """A tiny DeepSeek whose weights are large enough that its tokens differ; its second layer is a mixture."""
    kind, own = MODELS[name]

    def make() -> Any:
        config = transformers.AutoConfig.for_model(kind, **{**SIZES, **own, **changes})
        model = transformers.AutoModelForCausalLM.from_config(config)
        for p in model.parameters():
            if p.dim() > 1:
                p.data.mul_(6)
        return model

    return seeded(make)


def prompts(batch: int, length: int, padded: bool = True) -> dict[str, torch.Tensor]:
    """Prompts of different lengths, padded at the left."""
    tokens = torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    for i in range(batch if padded else 0):
        mask[i, :i] = tokens[i, :i] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def rewritten(model: Any, **options: Any) -> Any:
    """The model, optimized without a clock."""
    return opsmith.optimize(
        model, config=Config(**{"tune": False, "inductor": False, "mla_block": 5} | options)
    )


@pytest.mark.parametrize("name", MODELS)
def test_it_generates_what_eager_generates(name: str) -> None:
    model, inputs = deepseek(name), prompts(10, 12)
    kind, keys, truth = type(model), list(model.state_dict()), Truth(model)
    truth.exact.config._experts_implementation = "eager"  # the grouped one takes no float64
    want = model.generate(**inputs, **GREEDY)
    assert (
        len({tuple(row) for row in want[:, 12:].tolist()}) > 5
    )  # ten prompts, not ten times the same answer
    rewritten(model)
    assert torch.equal(model.generate(**inputs, **GREEDY), want)
    report = model.opsmith.report
    assert [layer.status for layer in report.latent] == ["kept", "kept"]
    assert report.found["mla_attention"] == 2
    assert report.found["rms_norm"] >= 5
    assert report.found["silu_mul"] >= 2  # the dense layer's and the shared experts'
    assert report.fallbacks == {}
    assert type(model) is kind
    assert list(model.state_dict()) == keys
    with torch.no_grad():
        got = model(**inputs).logits
        eager, exact = (m(**inputs).logits for m in (truth.eager, truth.exact))
    some = inputs["attention_mask"].bool()
    verdict = WHOLE_MODEL.check(got[some], eager[some], exact[some])
    assert verdict.ok, verdict.why


def test_the_graph_of_a_decoding_step_serves_every_length() -> None:
    model = rewritten(deepseek())
    model.generate(**prompts(2, 6), **GREEDY)
    assert len(model.opsmith.plan.shapes) == 2  # the prompt's, and one for all steps
    r = model.opsmith.latent.sites[0].reading
    values, plain = r.kv_lora + r.rope, r.heads * (r.nope + r.rope + r.value)
    text = model.opsmith.plan.table()
    assert f"{values} values ({4 * values} bytes) a token and layer instead of {plain}" in text
    assert f"{values} values" in str(model.opsmith.report)


@pytest.mark.parametrize("mode", ["joint", "tiled", "int8_tiled"])
def test_every_mode_of_the_cache(mode: str) -> None:
    model, inputs = deepseek(), prompts(3, 9)
    options = GREEDY | {"max_new_tokens": 6, "output_logits": True, "return_dict_in_generate": True}
    want = model.generate(**inputs, **options)
    rewritten(model, mla_cache=mode)
    got = model.generate(**inputs, **options)
    assert [layer.mode for layer in model.opsmith.report.latent] == [mode, mode]
    if mode != "int8_tiled":
        assert torch.equal(got.sequences, want.sequences)
        return
    lost = [layer.lost for layer in model.opsmith.report.latent]
    assert all(0 < error < 0.05 for error in lost)
    # Rows of eight bits: the first step's logits are eager's but for what rounding took.
    difference = (got.logits[0] - want.logits[0]).norm() / want.logits[0].norm()
    assert difference < 0.1


def test_weights_in_eight_bits() -> None:
    model, inputs = deepseek(num_hidden_layers=1), prompts(2, 6)
    with torch.no_grad():
        want = model(**inputs).logits[:, -1]
        rewritten(model, quantize="int8")
        got = model(**inputs).logits[:, -1]
    report = model.opsmith.report
    assert [layer.weights for layer in report.latent] == ["weight_int8"]
    assert not any("kv_b_proj" in layer.name for layer in report.quantized)
    assert any("o_proj" in layer.name for layer in report.quantized)
    assert 0 < (got - want).norm() / want.norm() < 0.1


def test_beams_share_their_blocks() -> None:
    model, inputs = deepseek(), prompts(2, 7)
    options = {"num_beams": 3, "do_sample": False, "max_new_tokens": 9}
    want = model.generate(**inputs, **options)
    rewritten(model)
    assert torch.equal(model.generate(**inputs, **options), want)
    assert model.opsmith.report.fallbacks == {}


def test_gradients_and_training_run_the_original_attention() -> None:
    model = deepseek(num_hidden_layers=1)
    eager, tokens = copy.deepcopy(model), prompts(2, 6, padded=False)["input_ids"]
    rewritten(model)
    with torch.no_grad():
        model(tokens)
    for m in (eager, model):
        m(tokens, labels=tokens).loss.backward()
    assert model.opsmith.report.fallbacks == {"gradients are recorded": 1}
    for (name, mine), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
        if theirs.grad is not None:
            assert mine.grad is not None, name
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-5)
    assert "original attention in 1 calls: gradients are recorded" in str(model.opsmith.report)


def test_calls_it_cannot_serve_run_the_original_attention() -> None:
    model, inputs = deepseek(num_hidden_layers=1), prompts(2, 6)
    holes = {**inputs, "attention_mask": inputs["attention_mask"].clone()}
    holes["attention_mask"][:, 3] = 0
    with torch.no_grad():
        want = model(**holes).logits
        static = model.generate(**inputs, **GREEDY | {"max_new_tokens": 3}, cache_implementation="static")
        rewritten(model)
        model(**inputs)
        some = holes["attention_mask"].bool()
        torch.testing.assert_close(model(**holes).logits[some], want[some], rtol=1e-4, atol=1e-4)
    got = model.generate(**inputs, **GREEDY | {"max_new_tokens": 3}, cache_implementation="static")
    assert torch.equal(got, static)
    reasons = model.opsmith.report.fallbacks
    assert reasons["the mask hides other columns than those of the padding at the left"] == 1
    assert reasons["a StaticCache is not a DynamicCache"] >= 1


@pytest.mark.parametrize("name", ["V2", "V3"])
def test_the_first_call_may_come_with_a_cache(name: str) -> None:
    """Layers are proved on the inputs of the first call, whose mask speaks of the cache's columns too."""
    model, inputs = deepseek(name, num_hidden_layers=1), prompts(2, 9)
    static = GREEDY | {"max_new_tokens": 4, "cache_implementation": "static"}
    want = model.generate(**inputs, **static)
    first, second = rewritten(copy.deepcopy(model)), rewritten(copy.deepcopy(model))
    assert torch.equal(first.generate(**inputs, **static), want)
    assert set(first.opsmith.report.fallbacks) == {"a StaticCache is not a DynamicCache"}
    tokens, mask = prompts(2, 9, padded=False).values()
    whole = model(tokens).logits
    cache = model(tokens[:, :6]).past_key_values  # recorded by autograd
    with torch.no_grad():
        rest = second(tokens[:, 6:], attention_mask=mask, past_key_values=cache)
    torch.testing.assert_close(rest.logits, whole[:, 6:], rtol=1e-4, atol=1e-4)
    assert rest.past_key_values.get_seq_length() == 9
    for optimized in (first, second):
        assert [layer.status for layer in optimized.opsmith.report.latent] == ["kept"]
    assert second.opsmith.report.fallbacks == {}


def test_the_first_call_may_go_through_a_model_that_names_no_argument() -> None:
    class Wrapper(torch.nn.Module):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.model(*args, **kwargs).logits

    model, (tokens, mask) = deepseek(num_hidden_layers=1), prompts(2, 9).values()
    want = model(tokens, mask).logits
    optimized = rewritten(Wrapper(model))
    with torch.no_grad():
        torch.testing.assert_close(optimized(tokens, mask), want, rtol=1e-4, atol=1e-4)
    assert [layer.status for layer in optimized.opsmith.report.latent] == ["kept"]


def there_and_back(model: Any) -> Any:
    """A copy that was rewritten, after a cache of the model went to it and back and every token was right."""
    other, tokens = rewritten(copy.deepcopy(model)), prompts(2, 9, padded=False)["input_ids"]
    with torch.no_grad():
        want = model(tokens).logits
        cache = model(tokens[:, :3]).past_key_values
        first = other(tokens[:, 3:6], past_key_values=cache)
        second = model(tokens[:, 6:], past_key_values=first.past_key_values).logits
    assert type(cache.layers[0]).__name__ == "LatentLayer"
    assert other.opsmith.report.fallbacks == {}
    torch.testing.assert_close(first.logits, want[:, 3:6], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(second, want[:, 6:], rtol=1e-4, atol=1e-4)
    return other


@pytest.mark.parametrize("name", ["V2", "V3"])
def test_a_cache_goes_from_the_original_to_the_rewritten_model_and_back(name: str) -> None:
    there_and_back(deepseek(name))


def test_an_attention_that_computes_something_else_is_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = deepseek()
    module = model.model.layers[1].self_attn
    original = type(module).forward

    class Other(type(module)):  # type: ignore[misc]
        def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return original(self, hidden_states * 1.01, *args, **kwargs)

    # The names of the call are the original's: the arithmetic alone is another.
    Other.forward.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    module.__class__ = Other
    inputs = prompts(2, 6)
    want = model.generate(**inputs, **GREEDY | {"max_new_tokens": 5})
    rewritten(model)
    assert torch.equal(model.generate(**inputs, **GREEDY | {"max_new_tokens": 5}), want)
    assert [layer.status for layer in model.opsmith.report.latent] == ["kept", "rolled back"]
    assert any("model.layers.1.self_attn" in line for line in model.opsmith.report.rolled_back)


def test_names_are_not_read() -> None:
    model = deepseek("V2 without q_lora")
    module = model.model.layers[0].self_attn
    for old, new in (("kv_b_proj", "up"), ("kv_a_layernorm", "n"), ("q_proj", "first"), ("o_proj", "last")):
        module._modules[new] = module._modules.pop(old)
    found = {name: readings for name, _, readings in candidates(model)}
    first, second = found.values()
    sizes = {(r.heads, r.nope, r.rope, r.value, r.kv_lora) for r in first}
    assert (4, 8, 16, 12, 32) in sizes
    assert sizes == {(r.heads, r.nope, r.rope, r.value, r.kv_lora) for r in second}


def test_weights_that_change_are_noticed_and_restore_gives_the_model_back() -> None:
    model, tokens = deepseek(num_hidden_layers=1), prompts(2, 6, padded=False)["input_ids"]
    other = deepseek(num_hidden_layers=1, rope_theta=10000.0)
    changed = {name: t * 0.9 if "self_attn" in name else t for name, t in model.state_dict().items()}
    other.load_state_dict(changed)
    rewritten(model)
    with torch.no_grad():
        before = model(tokens).logits
        model.load_state_dict(changed)
        after, want = model(tokens).logits, other(tokens).logits
    assert not torch.allclose(before, after, atol=1e-3)
    torch.testing.assert_close(after, want, rtol=1e-4, atol=1e-4)
    with pytest.raises(TypeError, match="restore"):
        pickle.dumps(model)
    opsmith.restore(model)
    assert not any("forward" in vars(m) for m in model.modules())
    assert pickle.loads(pickle.dumps(model)) is not None
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, want)


def test_a_cache_that_the_sizes_do_not_fit_is_refused() -> None:
    model = deepseek(kv_lora_rank=24)
    with pytest.raises(ValueError, match="multiples of 16"):
        rewritten(model, mla_cache="tiled")
    assert not hasattr(model, "opsmith")
    assert rewritten(model, mla_cache="off").opsmith.report.latent == []


def test_one_layer_at_the_real_sizes_decodes_with_the_same_output() -> None:
    """Hidden 7168, 128 heads, ranks 1536 and 512, in bfloat16."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    from opsmith.compiler.modules.conventions import HUGGING_FACE, new_cache
    from opsmith.compiler.modules.latent import prove as latent_prove
    from opsmith.compiler.modules.latent.pages import LatentPages
    from opsmith.compiler.modules.latent.site import LatentSite, Switch

    config = transformers.DeepseekV3Config(num_hidden_layers=1)
    config._attn_implementation = "sdpa"
    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        module = DeepseekV3Attention(config, 0)
    module = module.to(torch.bfloat16).to_empty(device="cpu").eval()
    for p in module.parameters():
        p.requires_grad_(False)
        if p.dim() == 1:
            p.fill_(1.0)
        else:
            p.normal_(0, p.shape[1] ** -0.5, generator=generator)
    tokens = 12
    x = torch.randn(1, tokens, 7168, generator=generator).to(torch.bfloat16)
    angle = torch.arange(tokens)[:, None] * 10000.0 ** (-torch.arange(0, 64, 2) / 64)
    table = torch.cat((angle, angle), -1)[None]
    cos, sin = table.cos().to(torch.bfloat16), table.sin().to(torch.bfloat16)
    ((name, _, readings),) = candidates(module)
    given = {"hidden_states": x, "position_embeddings": (cos, sin)}
    site = LatentSite(name, module, readings, Switch())
    verdict = latent_prove.identify(site, latent_prove.seen(HUGGING_FACE, given))
    assert verdict.ok, verdict.why
    r = site.reading
    assert (r.heads, r.nope, r.rope, r.value, r.kv_lora) == (128, 128, 64, 128, 512)
    # The prompt, then token by token, the output projection included.
    mine = LatentPages([site.cache("split", 1, 8)], 8, 1, x.device)
    theirs = new_cache()
    with torch.no_grad():
        for some in (slice(0, 9), slice(9, 10), slice(10, 11), slice(11, 12)):
            n = some.stop - some.start
            mask = torch.ones(n, some.stop, dtype=torch.bool).tril(some.start)[None, None]
            want = module(
                hidden_states=x[:, some],
                position_embeddings=(cos[:, some], sin[:, some]),
                attention_mask=mask,
                past_key_values=theirs,
            )[0]
            got = r.out(site.compute(x[:, some], cos[:, some], sin[:, some], mine, mine.begin(n)))
            mine.commit(n)
            assert (got.float() - want.float()).norm() < 0.01 * want.float().norm()


class _Attention(torch.nn.Module):
    """Latent attention in words of its own: no Hugging Face, no cache but what it returns."""

    def __init__(self, table: str, returned: str) -> None:
        super().__init__()
        self.heads, self.plain, self.turned, self.rank, self.own = 4, 8, 16, 32, 12
        self.table, self.returned = table, returned
        self.first = torch.nn.Linear(32, self.heads * (self.plain + self.turned), bias=False)
        self.down = torch.nn.Linear(32, self.rank + self.turned, bias=False)
        self.between = torch.nn.RMSNorm(self.rank, eps=1e-6)
        self.up = torch.nn.Linear(self.rank, self.heads * (self.plain + self.own), bias=False)
        self.last = torch.nn.Linear(self.heads * self.own, 32, bias=False)

    def forward(
        self, states: torch.Tensor, *, turns: Any = None, waves: Any = None, scale: float = 1.0
    ) -> Any:
        n = states.shape[1]
        cos, sin = (turns, waves) if waves is not None else turns
        q = self.first(states * scale).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        latent, k = self.down(states).split((self.rank, self.turned), -1)
        kv = self.up(self.between(latent)).unflatten(-1, (self.heads, -1)).transpose(1, 2)

        def turn(t: torch.Tensor) -> torch.Tensor:
            a, b = t.chunk(2, -1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

        k = turn(k.unsqueeze(1))
        scores = q[..., : self.plain] @ kv[..., : self.plain].transpose(-1, -2)
        scores = (scores + turn(q[..., self.plain :]) @ k.transpose(-1, -2)) * (
            self.plain + self.turned
        ) ** -0.5
        scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), float("-inf"))
        out = self.last((scores.softmax(-1) @ kv[..., self.plain :]).transpose(1, 2).flatten(2))
        return (out, (latent, k)) if self.returned == "rows" else out


class _Foreign(torch.nn.Module):
    def __init__(self, table: str = "pair", returned: str = "rows") -> None:
        super().__init__()
        self.words = torch.nn.Embedding(VOCABULARY, 32)
        self.blocks = torch.nn.ModuleList([_Attention(table, returned) for _ in range(2)])
        self.table = table

    def forward(self, sentence: torch.Tensor) -> torch.Tensor:
        x = self.words(sentence)
        angles = torch.arange(x.shape[1])[:, None] * 100.0 ** (-torch.arange(8) / 8)
        table = {"turns": (angles.cos(), angles.sin())}
        if self.table == "two":
            table = {"turns": angles.cos(), "waves": angles.sin()}
        for block in self.blocks:
            y = block(x, **table)
            x = x + (y[0] if isinstance(y, tuple) else y)
        return x


@pytest.mark.parametrize(("table", "returned"), [("pair", "rows"), ("two", "output")])
def test_an_attention_with_other_names_is_found(table: str, returned: str) -> None:
    model = seeded(lambda: _Foreign(table, returned))
    tokens = prompts(2, 9)["input_ids"]
    with torch.no_grad():
        want = model(tokens)
        rewritten(model)
        torch.testing.assert_close(model(tokens), want)
    report = model.opsmith.report
    assert [layer.status for layer in report.latent] == ["kept", "kept"], report
    assert [layer.values for layer in report.latent] == [48, 48]
    assert report.fallbacks == {"the model's call takes no past_key_values": 1}


def test_what_has_only_the_shapes_is_no_latent_attention() -> None:
    model = seeded(_Foreign)
    model.blocks[0].forward.__func__.__kwdefaults__["scale"] = 1.5
    try:
        with torch.no_grad():
            rewritten(model)(prompts(2, 9)["input_ids"])
    finally:
        model.blocks[0].forward.__func__.__kwdefaults__["scale"] = 1.0
    assert [layer.status for layer in model.opsmith.report.latent] == ["rolled back"] * 2


class _Inside(torch.nn.Module):
    """Hugging Face's call around an attention with other names."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(
        self,
        hidden_states: Any,
        position_embeddings: Any,
        attention_mask: Any,
        past_key_values: Any,
        **_: Any,
    ) -> Any:
        return self.inner(hidden_states, position_embeddings, attention_mask, past_key_values)


@pytest.mark.parametrize("name", ["V2", "V3"])
def test_an_attention_with_other_names_is_served_where_the_cache_is_known(name: str) -> None:
    model, inputs = deepseek(name), prompts(3, 9)
    original: Any = type(model.model.layers[0].self_attn)

    class Renamed(original):  # type: ignore[misc]
        def forward(self, states: Any, turns: Any, hidden: Any, kept: Any) -> Any:
            return original.forward(
                self,
                hidden_states=states,
                position_embeddings=turns,
                attention_mask=hidden,
                past_key_values=kept,
            )

    for layer in model.model.layers:
        layer.self_attn.__class__ = Renamed
        layer.self_attn = _Inside(layer.self_attn)
    want = model.generate(**inputs, **GREEDY)
    rewritten(model)
    assert torch.equal(model.generate(**inputs, **GREEDY), want)
    assert [layer.status for layer in model.opsmith.report.latent] == ["kept", "kept"]
    assert model.opsmith.report.fallbacks == {}
