"""MLAWeights: forms, shapes, state, and the conversion of Hugging Face's DeepSeek."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ops.mla.sizes import Sizes
from torch import nn

from opsmith.ops import MLACache, MLAWeights, mla_attention, mla_preprocess

TOKENS = 7


def attention_module(version: int, q_lora: int | None, bias: bool, interleave: bool = True) -> Any:
    """A tiny attention layer of Hugging Face's DeepSeek, with seeded weights, and its rotary embedding."""
    pytest.importorskip("transformers")
    from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

    sizes: dict[str, Any] = {
        "hidden_size": 48,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "q_lora_rank": q_lora,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 16,
        "v_head_dim": 10,
        "attention_bias": bias,
        "max_position_embeddings": 64,
        "num_hidden_layers": 1,
    }
    if version == 2:
        config = v2.DeepseekV2Config(**sizes)
        module, rotary = v2.DeepseekV2Attention(config, 0), v2.DeepseekV2RotaryEmbedding(config)
    else:
        config = v3.DeepseekV3Config(**sizes, rope_interleave=interleave)
        module, rotary = v3.DeepseekV3Attention(config, 0), v3.DeepseekV3RotaryEmbedding(config)
    config._attn_implementation = "eager"
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(
                torch.randn(p.shape, generator=generator) * (0.3 if p.dim() == 1 else p.shape[-1] ** -0.5)
            )
            if p.dim() == 1:
                p.add_(1.0)
    return module.eval(), rotary


@pytest.mark.parametrize("mode", ["joint", "split", "tiled"])
@pytest.mark.parametrize(
    ("version", "q_lora", "bias", "interleave"),
    [
        (2, 24, False, True),
        (2, None, True, True),
        (3, 24, True, True),
        (3, 24, False, False),
        (3, None, False, True),
    ],
)
def test_deepseek_attention_from_latent_rows(
    version: int, q_lora: int | None, bias: bool, interleave: bool, mode: str
) -> None:
    module, rotary = attention_module(version, q_lora, bias, interleave)
    hidden = torch.randn(1, TOKENS, 48)
    position = torch.arange(TOKENS)[None]
    table = rotary(hidden, position)
    causal = torch.full((TOKENS, TOKENS), -1e9).triu(1)[None, None]
    with torch.no_grad():
        right = module(hidden, attention_mask=causal, position_embeddings=table)[0][0]
        if version == 2:  # complex exponentials, one for each pair
            cos, sin = table[0].real, table[0].imag
        else:
            cos, sin = table[0][0], table[1][0]
        w = MLAWeights.from_deepseek(module)
        assert not w.interleaved
        cache = MLACache.allocate(mode, 3, 4, kv_lora=32, rope=16, dtype=torch.float32)
        blocks = torch.tensor([[2, 0]])
        slots = blocks[0, torch.arange(TOKENS) // 4] * 4 + torch.arange(TOKENS) % 4
        q = mla_preprocess(hidden[0], w, cos, sin, slots, cache)
        out = mla_attention(*q, cache, blocks, torch.tensor([TOKENS]), scale=module.scaling, wuv=w.wuv)
        got = module.o_proj(out.flatten(1))
    torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-5)


def test_a_permuted_checkpoint_gives_the_same_scores_as_an_interleaved_one() -> None:
    sizes = Sizes()
    for quant in (None, "per_token", "per_tensor", "weight_int8", "weight_int4"):
        w = sizes.weights(interleaved=True, bias0=None if quant == "per_token" else True)
        w = w if quant is None else w.quantize(quant)
        x, cos, sin = sizes.inputs()
        rows = []
        for one in (w, w.deinterleaved()):
            cache = sizes.cache("split", 16)
            q_out, q_rope = mla_preprocess(x, one, cos, sin, torch.arange(5), cache)
            rows.append((q_out, q_rope, cache.rope[0, :5, 0]))
        (q0, r0, k0), (q1, r1, k1) = rows
        torch.testing.assert_close(q1, q0)
        half = torch.arange(16).view(-1, 2).t().reshape(-1)
        torch.testing.assert_close(r1, r0[..., half])
        torch.testing.assert_close(k1, k0[..., half])
        assert w.deinterleaved().deinterleaved().interleaved is False


def test_what_is_no_latent_attention_is_refused() -> None:
    with pytest.raises(
        TypeError, match="from_deepseek: Linear is no multi-head latent attention, it lacks kv_a_proj"
    ):
        MLAWeights.from_deepseek(nn.Linear(3, 4))


@pytest.mark.parametrize("quant", [None, "per_tensor", "per_token", "weight_int8", "weight_int4"])
def test_state_dict_goes_round(quant: str | None, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    sizes = Sizes()
    one, other = (sizes.weights(seed=seed, beta0=True) for seed in (0, 1))
    if quant is not None:
        one, other = one.quantize(quant), other.quantize(quant)
    x, cos, sin = sizes.inputs()
    results = [mla_preprocess(x, w, cos, sin, torch.arange(5), sizes.cache())[0] for w in (one, other)]
    assert not torch.equal(*results)
    save_file(one.state_dict(), tmp_path / "w.safetensors")
    other.load_state_dict(load_file(tmp_path / "w.safetensors"))
    assert torch.equal(mla_preprocess(x, other, cos, sin, torch.arange(5), sizes.cache())[0], results[0])


def test_moving_to_a_dtype_leaves_scales_in_float32() -> None:
    w = Sizes().weights().quantize("per_tensor").to(torch.bfloat16)
    assert w.wuk.dtype == torch.bfloat16
    assert w.wdqkv.dtype == torch.int8
    state = w.state_dict()
    assert all(state[name].dtype == torch.float32 for name in ("descale0", "scale0", "offset1"))
    x, cos, sin = Sizes().inputs(torch.bfloat16)
    copied = copy.deepcopy(w)
    caches = [Sizes().cache(dtype=torch.bfloat16) for _ in range(2)]
    results = [
        mla_preprocess(x, v, cos, sin, torch.arange(5), c)[0]
        for v, c in zip((w, copied), caches, strict=True)
    ]
    assert torch.equal(*results)


def test_parameters_stay_parameters_and_everything_else_buffers() -> None:
    state = Sizes().weights().state_dict()
    options = {"heads": 3, "nope": 8, "rope": 16, "kv_lora": 32, "q_lora": 28}
    w = MLAWeights(
        nn.Parameter(state["wdqkv"]),
        state["wuq"],
        state["wuk"],
        gamma1=state["gamma1"],
        gamma2=state["gamma2"],
        **options,
    )
    assert [name for name, _ in w.named_parameters()] == ["wdqkv"]
    assert set(w.state_dict()) == {"wdqkv", "wuq", "wuk", "gamma1", "gamma2"}


def test_int8_checkpoints_per_tensor_and_per_token() -> None:
    sizes = Sizes()
    for quant in ("per_tensor", "per_token"):
        w = sizes.weights().quantize(quant)
        s = w.state_dict()
        scales = {n: s.get(n) for n in ("scale0", "offset0", "scale1", "offset1", "bias0", "bias1")}
        again = MLAWeights.quantized(
            s["wdqkv"],
            s["wuq"],
            s["wuk"],
            descale0=s["descale0"],
            descale1=s["descale1"],
            **scales,
            gamma0=s["gamma0"],
            gamma1=s["gamma1"],
            gamma2=s["gamma2"],
            heads=3,
            nope=8,
            rope=16,
            kv_lora=32,
            q_lora=28,
        )
        assert again.quant == quant
        x, cos, sin = sizes.inputs()
        found = [mla_preprocess(x, v, cos, sin, torch.arange(5), sizes.cache())[0] for v in (w, again)]
        assert torch.equal(*found)


@pytest.mark.parametrize("bad", [0.0, float("nan"), torch.tensor(float("inf"))])
def test_a_scale_that_nothing_can_be_divided_by_is_refused(bad: Any) -> None:
    w = Sizes().weights().quantize("per_tensor")
    s = w.state_dict()
    norms = {name: s[name] for name in ("gamma0", "gamma1", "gamma2")}
    sizes = {"heads": 3, "nope": 8, "rope": 16, "kv_lora": 32, "q_lora": 28}
    descales = {"descale0": s["descale0"], "descale1": s["descale1"]}
    with pytest.raises(ValueError, match="MLAWeights: scale1 must be finite and not 0, got"):
        MLAWeights.quantized(
            s["wdqkv"], s["wuq"], s["wuk"], scale0=-0.1, scale1=bad, **descales, **norms, **sizes
        )


def test_calibration_gives_the_static_scales() -> None:
    sizes = Sizes(tokens=64)
    x, _, _ = sizes.inputs()
    w = sizes.weights(gamma0=None)
    low, high = float(x.min()), float(x.max())
    for calibration in (x, [x[:20], x[20:]], x.view(4, 16, 40)):
        state = w.quantize("per_tensor", calibration).state_dict()
        step = (high - low) / 255
        assert float(state["scale0"]) == pytest.approx(step)
        assert float(state["offset0"]) == round(-128 - low / step)
    wider = w.quantize("per_tensor", 3 * x).state_dict()
    assert float(wider["scale0"]) == pytest.approx(3 * step)
    assert float(w.quantize("per_tensor").state_dict()["scale0"]) > 0


def edited(**changes: Any) -> Any:
    sizes = Sizes()
    state = sizes.weights().state_dict()
    names = ("wdqkv", "wuq", "wuk")
    options = {"heads": 3, "nope": 8, "rope": 16, "kv_lora": 32, "q_lora": 28, "gamma0": None}
    options |= {name: state[name] for name in ("gamma1", "gamma2")}
    tensors = {name: changes.pop(name, state[name]) for name in names}
    return MLAWeights(*tensors.values(), **{**options, **changes})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"wdqkv": torch.zeros(75, 40)}, ValueError, r"wdqkv must have shape \(76, 40\).*got \(75, 40\)"),
        ({"wdqkv": torch.zeros(76)}, ValueError, r"wdqkv must be a tensor \[kv_lora \+ rope \+ q_lora, D\]"),
        ({"wdqkv": torch.zeros(76, 40, dtype=torch.int8)}, TypeError, "MLAWeights.quantized takes quantized"),
        ({"wuq": torch.zeros(72, 27)}, ValueError, r"wuq must have shape \(72, 28\).*got \(72, 27\)"),
        ({"wuk": torch.zeros(3, 32, 8)}, ValueError, r"wuk must have shape \(3, 8, 32\).*got \(3, 32, 8\)"),
        ({"wuk": torch.zeros(3, 8, 32).double()}, TypeError, "must be float64"),
        ({"gamma1": None}, TypeError, r"gamma1 must be a tensor \(28,\)"),
        ({"gamma2": torch.ones(31)}, ValueError, r"gamma2 must have shape \(32,\)"),
        ({"gamma0": torch.ones(41)}, ValueError, r"gamma0 must have shape \(40,\)"),
        ({"beta0": torch.ones(40)}, ValueError, "beta0 belongs to the norm of gamma0"),
        ({"bias1": torch.ones(71)}, ValueError, r"bias1 must have shape \(72,\)"),
        ({"q_lora": None}, ValueError, "gamma1 must be None without q_lora"),
        ({"rope": 15}, ValueError, "rope must be even"),
        ({"heads": 0}, ValueError, "heads must be positive, got 0"),
        ({"wuv": torch.ones(3, 10, 31)}, ValueError, r"wuv must have shape \(3, 10, 32\)"),
    ],
)
def test_wrong_weights_are_named(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"MLAWeights: .*{message}"):
        edited(**changes)


def test_quantization_is_refused_where_it_makes_no_sense() -> None:
    w = Sizes().weights()
    with pytest.raises(ValueError, match="the form must be one of per_tensor, per_token"):
        w.quantize("int8")
    with pytest.raises(ValueError, match="these weights are per_token already"):
        w.quantize("per_token").quantize("per_tensor")
    with pytest.raises(ValueError, match='"per_token" has no bias'):
        Sizes().weights(bias0=True).quantize("per_token")
    with pytest.raises(ValueError, match=r"calibration must be hidden states \[..., 40\]"):
        w.quantize("per_tensor", torch.ones(3, 41))
    w.wuq[3, 3] = torch.nan
    with pytest.raises(ValueError, match="every weight must be finite"):
        w.quantize("weight_int8")
