"""MLA pre-processing over all sizes that models and serving ask for: pairwise, large D with few tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.mla_rungs import RUNGS
from tests.ops.mla.sizes import Sizes, as_specified, hold, row_of

from opsmith.ops import MLACache, MLAWeights, mla_preprocess

# tokens, heads, D, q_lora, form, mode, block size, dtype, changes. Every value of each column at least once, and the
# pairs that share code: regions of 64 tokens with every form, tails of rows and of tokens with every width of a tile,
# few tokens whose K is taken in pieces, and tokens in one to four vectors.
CASES: list[tuple[int, int, int, int | None, str | None, str, int, torch.dtype, dict[str, Any]]] = [
    (1, 128, 512, 96, None, "split", 128, torch.bfloat16, {"beta0": True, "bias1": True}),
    (1, 16, 7168, 64, "per_token", "joint", 1, torch.bfloat16, {}),
    (2, 77, 512, 33, "per_tensor", "tiled", 16, torch.float32, {"bias0": True, "interleaved": True}),
    (5, 1, 5120, 28, "weight_int8", "split", 256, torch.bfloat16, {"beta1": True}),
    (4, 2, 7168, 96, "per_token", "split", 16, torch.bfloat16, {}),
    (3, 1, 7169, 33, "per_tensor", "joint", 16, torch.float16, {"bias0": True, "bias1": True}),
    (6, 3, 5123, 70, None, "split", 16, torch.bfloat16, {"bias0": True}),
    (2, 2, 5120, 28, None, "split", 16, torch.float32, {}),
    (5, 16, 512, 96, "weight_int4", "joint", 16, torch.bfloat16, {"bias0": True, "bias1": True}),
    (31, 16, 512, None, "per_token", "int8_tiled", 128, torch.float16, {"interleaved": True}),
    (14, 3, 103, 70, "per_token", "split", 16, torch.bfloat16, {}),
    (16, 5, 101, 33, None, "split", 16, torch.bfloat16, {"bias0": True}),
    (32, 3, 101, 33, "per_token", "split", 16, torch.bfloat16, {}),
    (46, 5, 103, 70, "per_tensor", "split", 16, torch.bfloat16, {"bias0": True, "beta0": True}),
    (64, 2, 66, 29, "per_token", "tiled", 16, torch.float32, {}),
    (33, 1, 512, None, "weight_int4", "split", 1, torch.float32, {"gamma0": None}),
    (33, 77, 40, 28, "per_token", "split", 16, torch.bfloat16, {"beta0": True, "beta1": True}),
    (128, 16, 40, 31, "per_tensor", "int8_tiled", 16, torch.bfloat16, {"bias1": True}),
    (128, 2, 512, 96, "weight_int8", "tiled", 128, torch.float32, {"interleaved": True, "bias0": True}),
    (1025, 1, 24, 16, "per_token", "joint", 256, torch.float32, {}),
    (1025, 2, 24, None, "per_tensor", "tiled", 16, torch.float16, {"interleaved": True}),
    (5, 77, 7168, 96, None, "int8_tiled", 1, torch.float32, {"beta0": True, "interleaved": True}),
    (33, 16, 5120, 64, "weight_int4", "int8_tiled", 256, torch.float32, {"bias0": True}),
    (2, 128, 7168, None, "per_tensor", "joint", 16, torch.bfloat16, {"gamma0": None}),
    (0, 16, 512, 96, "per_token", "split", 16, torch.bfloat16, {}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c[:8])).replace("torch.", ""))
def test_every_form_at_every_size(case: Any) -> None:
    tokens, heads, hidden, q_lora, form, mode, block_size, dtype, changes = case
    sizes = Sizes(tokens=tokens, heads=heads, hidden=hidden, q_lora=q_lora)
    w = sizes.weights(dtype, **changes)
    if form is not None:
        w = w.quantize(form)
    x, cos, sin = sizes.inputs(dtype)
    if tokens > 2:
        x[2] = 0
    scales: dict[str, Any] = {}
    if mode == "int8_tiled":
        signs = torch.tensor([1.0, -1.0]).repeat(heads)[:heads]
        scales = {"ctkv_scale": -0.03, "q_nope_scale": 30.0 * signs}
    cache = sizes.cache(mode, block_size, dtype)
    slots = sizes.slots(cache)
    q_out, q_rope = mla_preprocess(x, w, cos, sin, slots, cache, **scales)
    if mode == "joint":
        q_out, q_rope = q_out[..., : sizes.kv_lora], q_out[..., sizes.kv_lora :]
    right = as_specified(w, x, cos, sin, **scales)
    integers = form in ("per_token", "per_tensor")
    eager = None
    if form is None and mode != "int8_tiled":
        eager = RUNGS["thirteen operators, PyTorch"](
            x, w, cos, sin, slots, sizes.cache(mode, block_size, dtype)
        )[0]
        eager = eager[..., : sizes.kv_lora]
    hold(q_out, right[0], integers, eager)
    hold(q_rope, right[1], integers)
    kept = slots >= 0
    for part, one in enumerate(right[2:]):
        rows = [row_of(cache, int(slot), sizes.kv_lora)[part] for slot in slots[kept]]
        hold(torch.tensor(np.array(rows)).to(one.dtype).view(one[kept].shape), one[kept], integers)
    if tokens > 2 and form != "per_tensor" and not changes.keys() & {"beta0", "beta1", "bias0", "bias1"}:
        assert not q_out[2].any()


@pytest.mark.parametrize("mode", ["joint", "split"])
def test_queries_written_past_the_cache_are_those_of_fewer_heads(mode: str) -> None:
    sizes = Sizes(tokens=3, hidden=64, heads=128, nope=128, rope=64, kv_lora=512, q_lora=512)
    w = sizes.weights(torch.bfloat16)  # 43 MB, half of the heads 22
    x, cos, sin = sizes.inputs(torch.bfloat16)
    cache = sizes.cache(mode, 16, torch.bfloat16)

    def queries(heads: slice) -> torch.Tensor:
        wuk, wuq = w.wuk[heads], w.wuq.unflatten(0, (128, -1))[heads].flatten(0, 1)
        gammas = {"gamma0": w.gamma0, "gamma1": w.gamma1, "gamma2": w.gamma2}
        ranks = {"nope": 128, "rope": 64, "kv_lora": 512, "q_lora": 512}
        some = MLAWeights(w.wdqkv, wuq, wuk, **gammas, heads=len(wuk), **ranks)
        return mla_preprocess(x, some, cos, sin, sizes.slots(cache, skip=False), cache)[0]

    halves = [queries(slice(64)), queries(slice(64, 128))]
    assert torch.equal(queries(slice(128)), torch.cat(halves, 1))


@pytest.mark.parametrize("mode", ["joint", "split", "tiled", "int8_tiled"])
def test_a_slice_of_a_pool_is_a_cache_and_its_neighbors_stay(mode: str) -> None:
    sizes = Sizes(tokens=70)  # two regions
    w = sizes.weights().quantize("per_token")
    x, cos, sin = sizes.inputs()
    scales: dict[str, Any] = {}
    if mode == "int8_tiled":
        scales = {"ctkv_scale": 0.03, "q_nope_scale": torch.full((3,), 20.0)}
    plain = sizes.cache(mode, 16)
    slots = sizes.slots(plain)
    right = mla_preprocess(x, w, cos, sin, slots, plain, **scales)
    tensors = [plain.latent] if plain.rope is None else [plain.latent, plain.rope]
    pools = [torch.full((3 * t.shape[0], *t.shape[1:]), 77, dtype=t.dtype) for t in tensors]
    cache = MLACache(mode, *(pool[1::3] for pool in pools))
    got = mla_preprocess(x, w, cos, sin, slots, cache, **scales)
    assert all(torch.equal(a, b) for a, b in zip(got, right, strict=True) if a is not None)
    for t in slots[slots >= 0].tolist():
        for mine, his in zip(row_of(cache, t, 32), row_of(plain, t, 32), strict=True):
            assert (mine == his).all()
    written = torch.zeros(cache.blocks * 16, dtype=torch.bool)
    written[slots[slots >= 0]] = True
    for pool in pools:
        assert (pool[0::3] == 77).all()
        assert (pool[2::3] == 77).all()
    for slot in (~written).nonzero().flatten().tolist():
        assert all((row == 77).all() for row in row_of(cache, slot, 32))


@pytest.mark.parametrize("bad", [3, 69])
def test_a_wrong_slot_in_any_region_writes_nothing(bad: int) -> None:
    sizes = Sizes(tokens=70)
    w = sizes.weights().quantize("per_token")
    x, cos, sin = sizes.inputs()
    cache = sizes.cache()
    slots = sizes.slots(cache)
    slots[bad] = cache.blocks * cache.block_size
    for some in (slice(None), slice(max(0, bad - 30), bad + 1)):
        with pytest.raises(
            ValueError, match=r"slot_mapping must lie in .* for token \d+; nothing was written"
        ):
            mla_preprocess(x[some], w, cos[some], sin[some], slots[some], cache)
    assert not cache.latent.any()


def test_tokens_without_a_slot_leave_the_cache_as_it_is() -> None:
    sizes = Sizes(tokens=5)
    x, cos, sin = sizes.inputs()
    cache = sizes.cache()
    cache.latent.fill_(3)
    q_out, _ = mla_preprocess(x, sizes.weights(), cos, sin, torch.full((5,), -1), cache)
    assert q_out.any()
    assert (cache.latent == 3).all()


def test_what_is_kept_between_calls_follows_the_weights() -> None:
    sizes = Sizes()
    x, cos, sin = sizes.inputs()
    w, other = sizes.weights(), sizes.weights(seed=9)

    def run(w: MLAWeights, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        cache = sizes.cache(dtype=dtype)
        return mla_preprocess(x.to(dtype), w, cos, sin, torch.arange(5), cache)[0]

    before, others = run(w), run(other)
    w.wdqkv.mul_(2.0)  # in place: the norms behind it take the factor away again
    assert torch.allclose(run(w), before, atol=1e-4)
    for name, t in other.state_dict().items():
        setattr(w, name, t)
    assert torch.equal(run(w), others)
    w.load_state_dict({name: t.clone() for name, t in sizes.weights().state_dict().items()})
    assert torch.equal(run(w), before)
    assert run(w.to(torch.bfloat16), torch.bfloat16).dtype == torch.bfloat16
    w.wdqkv = torch.randn(40, w.wdqkv.shape[0], dtype=torch.bfloat16).t()
    assert run(w, torch.bfloat16).isfinite().all()
