"""MLA pre-processing against its formulas: every form, layout and skip."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.mla_rungs import thirteen_in_pytorch
from tests.ops.mla.sizes import Sizes, as_specified, double, hold, row_of, spelled_out
from torch._dynamo.testing import AotEagerAndRecordGraphs

from opsmith.kernels import libraries, triton
from opsmith.operator import Make, registry
from opsmith.ops import MLACache, MLAWeights, mla_preprocess, mla_q_epilogue

MODES = ("joint", "split", "tiled", "int8_tiled")
SCALES: dict[str, Any] = {"ctkv_scale": 0.03, "q_nope_scale": torch.tensor([20.0, -31.0, 45.0])}


def scales_for(mode: str) -> dict[str, Any]:
    return SCALES if mode == "int8_tiled" else {}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("quant", [None, "per_tensor", "per_token"])
def test_every_mode_and_form_is_what_the_formulas_say(mode: str, quant: str | None) -> None:
    sizes = Sizes(tokens=6)
    w = sizes.weights()
    w = double(w if quant is None else w.quantize(quant))
    x, cos, sin = sizes.inputs(torch.float64)
    cache = sizes.cache(mode, 4, torch.float64)
    slots = sizes.slots(cache)
    q_out, q_rope = mla_preprocess(x, w, cos, sin, slots, cache, **scales_for(mode))
    if mode == "joint":
        assert q_rope is None
        q_out, q_rope = q_out[..., :32], q_out[..., 32:]
    assert q_out.dtype == (torch.int8 if mode == "int8_tiled" else torch.float64)
    for t in range(6):
        right = spelled_out(w, x, cos, sin, t, **scales_for(mode))
        np.testing.assert_allclose(q_out[t].double().numpy(), right.q_out, rtol=0, atol=1e-12)
        np.testing.assert_allclose(q_rope[t].numpy(), right.q_rope, rtol=0, atol=1e-12)
        if int(slots[t]) >= 0:
            k_nope, k_rope = row_of(cache, int(slots[t]), 32)
            np.testing.assert_allclose(k_nope, right.k_nope, rtol=0, atol=1e-12)
            np.testing.assert_allclose(k_rope, right.k_rope, rtol=0, atol=1e-12)
    kept = set(slots.tolist()) - {-1}
    for slot in set(range(cache.blocks * cache.block_size)) - kept:
        assert not np.concatenate(row_of(cache, slot, 32)).any(), f"slot {slot} was written"


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({"beta0": True, "beta1": True}, {}),
        ({"bias0": True, "bias1": True}, {}),
        ({"gamma0": None}, {}),
        ({"interleaved": True}, {}),
        ({"interleaved": True, "beta0": True, "bias1": True}, {"eps": 1e-2}),
        ({}, {"eps": 0.1}),
    ],
    ids=["betas", "biases", "normalized already", "interleaved", "mixed", "eps"],
)
@pytest.mark.parametrize("q_lora", [28, None])
def test_betas_biases_and_both_rotations(changes: dict[str, Any], options: Any, q_lora: int | None) -> None:
    sizes = Sizes(tokens=4, q_lora=q_lora)
    changes = {k: v for k, v in changes.items() if q_lora is not None or k not in ("beta1", "gamma1")}
    w = sizes.weights(torch.float64, **changes)
    x, cos, sin = sizes.inputs(torch.float64)
    cache = sizes.cache(dtype=torch.float64)
    slots = sizes.slots(cache, skip=False)
    results = mla_preprocess(x, w, cos, sin, slots, cache, return_latent_q=q_lora is not None, **options)
    for t in range(4):
        right = spelled_out(w, x, cos, sin, t, **options)
        np.testing.assert_allclose(results[0][t].numpy(), right.q_out, rtol=0, atol=1e-12)
        np.testing.assert_allclose(results[1][t].numpy(), right.q_rope, rtol=0, atol=1e-12)
        for got, one in zip(row_of(cache, int(slots[t]), 32), (right.k_nope, right.k_rope), strict=True):
            np.testing.assert_allclose(got, one, rtol=0, atol=1e-12)
        if q_lora is not None:
            np.testing.assert_allclose(results[2][t].numpy(), right.latent_q, rtol=0, atol=1e-12)


def test_without_a_table_nothing_is_rotated() -> None:
    sizes = Sizes()
    w = sizes.weights(torch.float64)
    x, _, _ = sizes.inputs(torch.float64)
    cache = sizes.cache(dtype=torch.float64)
    slots = sizes.slots(cache, skip=False)
    _, q_rope = mla_preprocess(x, w, None, None, slots, cache)
    right = spelled_out(w, x, None, None, 1)
    np.testing.assert_allclose(q_rope[1].numpy(), right.q_rope, rtol=0, atol=1e-12)
    np.testing.assert_allclose(row_of(cache, int(slots[1]), 32)[1], right.k_rope, rtol=0, atol=1e-12)


def test_half_a_table_serves_both_columns_of_a_pair() -> None:
    sizes = Sizes()
    w = sizes.weights()
    x, cos, sin = sizes.inputs()
    cos, sin = cos[:, :8], sin[:, :8]
    found = []
    for table in ((cos, sin), (torch.cat((cos, cos), 1), torch.cat((sin, sin), 1))):
        cache = sizes.cache()
        found.append((*mla_preprocess(x, w, *table, sizes.slots(cache), cache), cache.rope))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("block_size", [1, 16, 128, 256])
@pytest.mark.parametrize("mode", MODES)
def test_block_sizes(block_size: int, mode: str) -> None:
    sizes = Sizes(tokens=7)
    w = sizes.weights()
    x, cos, sin = sizes.inputs()
    cache = sizes.cache(mode, block_size)
    slots = sizes.slots(cache)
    slots[0] = cache.blocks * cache.block_size - 1
    mla_preprocess(x, w, cos, sin, slots, cache, **scales_for(mode))
    other = sizes.cache("split" if mode != "int8_tiled" else mode, 16)
    mla_preprocess(x, w, cos, sin, torch.arange(7), other, **scales_for(mode))
    for t in range(7):
        if int(slots[t]) >= 0:
            mine, right = row_of(cache, int(slots[t]), 32), row_of(other, t, 32)
            for got, one in zip(mine, right, strict=True):
                np.testing.assert_array_equal(got, one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize("quant", ["per_tensor", "per_token"])
def test_int8_results_are_those_of_the_formulas_in_float32(quant: str, dtype: torch.dtype) -> None:
    sizes = Sizes(tokens=128, hidden=512, q_lora=96)
    w = sizes.weights(dtype).quantize(quant)
    x, cos, sin = sizes.inputs(dtype)
    cache = sizes.cache("int8_tiled", 16, dtype)
    q_out, _ = mla_preprocess(x, w, cos, sin, torch.arange(128), cache, **SCALES)
    k_nope = torch.stack([torch.from_numpy(row_of(cache, t, 32)[0]) for t in range(128)])
    right = as_specified(w, x, cos, sin, **SCALES)
    for got, one in ((q_out, right[0]), (k_nope.to(torch.int8), right[2])):
        hold(got, one, True)


@pytest.mark.parametrize("quant", [None, "per_token", "weight_int4"])
@pytest.mark.parametrize("tokens", [1, 33])
def test_all_rows_of_a_projection_may_be_one(tokens: int, quant: str | None) -> None:
    """As `expand` makes them: where a row ends says nothing of where the next one begins."""
    sizes = Sizes(tokens=tokens, hidden=64, q_lora=32)
    w = sizes.weights(torch.bfloat16)
    w = w if quant is None else w.quantize(quant)
    x, cos, sin = sizes.inputs(torch.bfloat16)
    ones = [t[:1].expand_as(t) for t in (w.wdqkv, w.wuq)]
    results = []
    for wdqkv, wuq in (ones, [t.contiguous() for t in ones]):
        cache = sizes.cache("split", 16, torch.bfloat16)
        w.wdqkv, w.wuq = wdqkv, wuq
        results.append(mla_preprocess(x, w, cos, sin, torch.arange(tokens), cache))
    for got, right in zip(*results, strict=True):
        assert got.equal(right)


@pytest.mark.parametrize("quant", ["per_tensor", "per_token", "weight_int8", "weight_int4"])
def test_quantized_weights_come_close_to_their_originals(quant: str) -> None:
    sizes = Sizes(tokens=16, hidden=256, q_lora=128)
    original = sizes.weights(bias0=None if quant == "per_token" else True)
    x, cos, sin = sizes.inputs()
    w = original.quantize(quant, calibration=x)
    q = [mla_preprocess(x, v, cos, sin, torch.arange(16), sizes.cache())[0] for v in (w, original)]
    assert w.error is not None
    bits4 = quant == "weight_int4"
    assert all(0 < e < (0.13 if bits4 else 0.01) for e in w.error.values())
    assert float((q[0] - q[1]).norm() / q[1].norm()) < (0.2 if bits4 else 0.025)


def test_rows_of_zeros_and_negative_scales() -> None:
    sizes = Sizes(tokens=3)
    w = sizes.weights().quantize("per_token")
    x, cos, sin = sizes.inputs()
    x[1] = 0
    cache = sizes.cache("int8_tiled")
    q_out, q_rope = mla_preprocess(
        x, w, cos, sin, torch.arange(3), cache, ctkv_scale=-0.03, q_nope_scale=-SCALES["q_nope_scale"]
    )
    assert not q_out[1].any()
    assert not q_rope[1].any()
    assert not np.concatenate(row_of(cache, 1, 32)[:1]).any()
    plain = sizes.cache("int8_tiled")
    mirrored, _ = mla_preprocess(x, w, cos, sin, torch.arange(3), plain, **SCALES)
    edge = (q_out == -128) | (mirrored == -128)
    assert torch.equal(q_out[~edge], -mirrored[~edge])


def test_the_npu_kernels_float16_is_within_a_step() -> None:
    """It passes through float16 before it rounds; ours does not."""
    y = torch.linspace(-3.9, 3.9, 200_001)
    exact = (y / 0.031).clamp(-128, 127).round()
    npu = (y / 0.031).half().float().clamp(-128, 127).round()
    assert (exact - npu).abs().max() == 1


@pytest.mark.parametrize("mode", ["joint", "split", "tiled"])
def test_gradients_reach_all_weights_also_through_the_cache(mode: str) -> None:
    sizes = Sizes(tokens=3, hidden=12, heads=2, nope=4, rope=16, kv_lora=16, q_lora=6)
    x, cos, sin = sizes.inputs(torch.float64)
    names = ("wdqkv", "wuq", "wuk", "gamma0", "gamma1", "gamma2")
    held = sizes.weights(torch.float64).state_dict()

    def run(x: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        options = {"heads": 2, "nope": 4, "rope": 16, "kv_lora": 16, "q_lora": 6}
        w = MLAWeights(*tensors[:3], **dict(zip(names[3:], tensors[3:], strict=True)), **options)
        cache = sizes.cache(mode, 4, torch.float64, spare=0)
        out = mla_preprocess(x, w, cos, sin, torch.tensor([2, -1, 1]), cache)
        return tuple(t for t in (*out, cache.latent, cache.rope) if t is not None)

    leaves = [t.clone().requires_grad_() for t in (x, *(held[name] for name in names))]
    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


def test_the_quantized_form_says_that_it_is_inference_only() -> None:
    sizes = Sizes()
    x, cos, sin = sizes.inputs()
    x.requires_grad_()
    cache = sizes.cache()
    args = x, sizes.weights().quantize("per_token"), cos, sin, sizes.slots(cache), cache
    with pytest.raises(ValueError, match="mla_preprocess: the quantized form is inference only"):
        mla_preprocess(*args)
    with torch.no_grad():
        assert mla_preprocess(*args)[0].isfinite().all()
    int8 = sizes.cache("int8_tiled")
    with pytest.raises(ValueError, match="inference only"):
        mla_preprocess(x, sizes.weights(), cos, sin, sizes.slots(int8), int8, **SCALES)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.zeros(5, 41)}, ValueError, r"x must have shape \[T, 40\].*got \(5, 41\)"),
        ({"x": torch.zeros(5, 40).double()}, TypeError, "x must be float32 like the weights, got float64"),
        ({"x": torch.zeros(40)}, ValueError, "x must have at least 2"),
        ({"w": 3}, TypeError, "w must be MLAWeights, got int"),
        ({"eps": -1e-6}, ValueError, "eps must be from 0"),
        ({"eps": torch.inf}, ValueError, "eps must be from 0"),
        ({"cache": torch.zeros(3)}, TypeError, "cache must be an MLACache, got Tensor"),
        ({"cos": None}, TypeError, "cos must be a tensor"),
        ({"sin": torch.zeros(4, 16)}, ValueError, r"sin must have shape \[5, 16\] to fit x, got \(4, 16\)"),
        ({"slots": torch.arange(4)}, ValueError, r"slot_mapping must have shape \(5,\).*got \(4,\)"),
        ({"slots": torch.zeros(5)}, TypeError, "slot_mapping must be int64 or int32, got float32"),
        (
            {"slots": torch.tensor([0, 1, -2, 3, 4])},
            ValueError,
            r"\[0, 48\).*got -2 for token 2; nothing was",
        ),
        (
            {"slots": torch.tensor([0, 1, 2, 48, 4])},
            ValueError,
            r"\[0, 48\).*got 48 for token 3; nothing was",
        ),
        ({"ctkv_scale": 1.0}, ValueError, 'ctkv_scale is for cache mode "int8_tiled", this one is "split"'),
        ({"cache": "int8"}, ValueError, 'cache mode "int8_tiled" needs ctkv_scale'),
        (
            {"cache": "int8", "ctkv_scale": "0.1", "q_nope_scale": torch.ones(3)},
            TypeError,
            "ctkv_scale must be a tensor or a number, got '0.1'",
        ),
        (
            {"cache": MLACache.allocate("split", 3, 16, kv_lora=33, rope=16, dtype=torch.float32)},
            ValueError,
            r"cache.latent must have shape \(3, 16, 1, 32\).*got \(3, 16, 1, 33\)",
        ),
        (
            {"cache": MLACache.allocate("joint", 3, 16, kv_lora=32, rope=8, dtype=torch.float32)},
            ValueError,
            r"cache.latent must have shape \(3, 16, 1, 48\).*got \(3, 16, 1, 40\)",
        ),
        (
            {"cache": MLACache.allocate("tiled", 3, 16, kv_lora=32, rope=32, dtype=torch.float32)},
            ValueError,
            r"cache.rope must have shape \(3, 1, 16, 16\).*got \(3, 2, 16, 16\)",
        ),
        (
            {"cache": MLACache.allocate("split", 3, 16, kv_lora=32, rope=16, dtype=torch.bfloat16)},
            TypeError,
            "cache.latent must be float32 like the input, got bfloat16",
        ),
    ],
)
def test_wrong_arguments_are_named_and_nothing_is_written(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    sizes = Sizes()
    x, cos, sin = sizes.inputs()
    cache = sizes.cache()
    call = {"x": x, "w": sizes.weights(), "cos": cos, "sin": sin, "slots": torch.arange(5), "cache": cache}
    extra = {k: v for k, v in change.items() if k not in call}
    call |= {k: v for k, v in change.items() if k in call}
    if isinstance(call["cache"], str):
        call["cache"] = sizes.cache("int8_tiled")
    for rung in (mla_preprocess, thirteen_in_pytorch):
        if rung is thirteen_in_pytorch and not isinstance(call["w"], MLAWeights):
            continue
        if rung is thirteen_in_pytorch and not isinstance(call["cache"], MLACache):
            continue
        with pytest.raises(error, match=f"mla_preprocess: .*{message}"):
            rung(*call.values(), **extra)
    assert not cache.latent.any()


def test_int4_rows_that_are_too_short_are_refused() -> None:
    card = registry()["mla_preprocess_int8"]
    sample = next(s for s in card.samples(Make(torch.float32, "cpu")) if s.name == "int4 weights")
    x, wdqkv, wuq, *rest = sample.args
    with pytest.raises(ValueError, match=r"wuq must have 16 bytes a row, or .*, for two numbers .* got 15"):
        card.function(x, wdqkv, wuq[:, :15].contiguous(), *rest, **sample.kwargs)


def test_no_latent_queries_without_q_lora() -> None:
    sizes = Sizes(q_lora=None)
    x, cos, sin = sizes.inputs()
    cache = sizes.cache()
    with pytest.raises(ValueError, match="these weights have no q_lora"):
        mla_preprocess(x, sizes.weights(), cos, sin, sizes.slots(cache), cache, return_latent_q=True)


def test_sizes_of_nothing_are_refused() -> None:
    """A product over nothing would leave a result as its memory was."""
    q = torch.randn(5, 3, 8)
    for wuk in (torch.randn(3, 0, 16), torch.randn(3, 4, 0)):
        with pytest.raises(ValueError, match="none of them 0"):
            mla_q_epilogue(q, wuk, None, None)


@pytest.mark.parametrize(
    ("quant", "mode"),
    [(None, "joint"), (None, "split"), ("per_token", "tiled"), ("weight_int4", "int8_tiled")],
)
def test_it_is_compiled_as_one_graph_of_one_kernel(quant: str | None, mode: str) -> None:
    sizes = Sizes()
    w = sizes.weights() if quant is None else sizes.weights().quantize(quant)
    x, cos, sin = sizes.inputs()
    caches = [sizes.cache(mode), sizes.cache(mode)]
    slots = sizes.slots(caches[0])

    def run(slots: torch.Tensor, cache: MLACache) -> Any:
        return mla_preprocess(x, w, cos, sin, slots, cache, return_latent_q=True, **scales_for(mode))

    backend = AotEagerAndRecordGraphs()
    compiled = torch.compile(run, backend=backend, fullgraph=True)
    with torch.no_grad():
        expected, got = run(slots, caches[0]), compiled(slots, caches[1])
    found = [
        (*result, cache.latent, cache.rope) for result, cache in zip((got, expected), caches, strict=True)
    ]
    for a, b in zip(*found, strict=True):
        assert a is b is None or torch.equal(a, b)
    if libraries.load("mla_preprocess") and not triton.INTERPRETED:
        (graph,) = backend.graphs
        kernels = [node.target for node in graph.graph.nodes if "opsmith" in str(node.target)]
        assert kernels == [torch.ops.opsmith.mla_preprocess.default]
        with torch.no_grad(), pytest.raises(RuntimeError, match="slot"):  # the kernel looks at slots itself
            compiled(slots + 1000, caches[1])
        assert torch.equal(caches[1].latent, caches[0].latent)
