"""MLACache: the four layouts, pools of which a cache is a slice, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.ops.mla.sizes import Sizes, row_of

from opsmith.ops import MLACache, mla_preprocess


@pytest.mark.parametrize(
    ("mode", "latent", "rope", "token_bytes"),
    [
        ("joint", (5, 16, 1, 576), None, 1152),
        ("split", (5, 16, 1, 512), (5, 16, 1, 64), 1152),
        ("int8_tiled", (5, 16, 16, 32), (5, 4, 16, 16), 640),
        ("tiled", (5, 32, 16, 16), (5, 4, 16, 16), 1152),
    ],
)
def test_layouts(mode: str, latent: tuple[int, ...], rope: Any, token_bytes: int) -> None:
    cache = MLACache.allocate(mode, 5, 16, kv_lora=512, rope=64, dtype=torch.bfloat16)
    assert cache.latent.shape == latent
    assert (None if cache.rope is None else tuple(cache.rope.shape)) == rope
    assert cache.latent.dtype == (torch.int8 if mode == "int8_tiled" else torch.bfloat16)
    assert (cache.blocks, cache.block_size, cache.kv_lora, cache.dtype) == (5, 16, 512, torch.bfloat16)
    assert cache.token_bytes == token_bytes
    assert cache.nbytes == 80 * token_bytes
    assert not cache.latent.any()
    assert mode in repr(cache)


@pytest.mark.parametrize("mode", ["joint", "split", "tiled", "int8_tiled"])
def test_a_slice_of_a_pool_is_written_and_its_neighbors_are_not(mode: str) -> None:
    sizes = Sizes()
    whole = sizes.cache(mode, 4)
    pools = [
        None if t is None else torch.full((t.shape[0], 3, *t.shape[1:]), 7, dtype=t.dtype)
        for t in (whole.latent, whole.rope)
    ]
    mine = [None if p is None else p[:, 1] for p in pools]
    cache = MLACache(mode, *mine)
    scales = {"ctkv_scale": 0.03, "q_nope_scale": torch.ones(3)} if mode == "int8_tiled" else {}
    x, cos, sin = sizes.inputs()
    slots = sizes.slots(cache)
    for one in (whole, cache):
        mla_preprocess(x, sizes.weights(), cos, sin, slots, one, **scales)
    for slot in slots[slots >= 0].tolist():
        for got, right in zip(row_of(cache, slot, 32), row_of(whole, slot, 32), strict=True):
            assert (got == right).all()
    for pool in pools:
        if pool is not None:
            assert (pool[:, [0, 2]] == 7).all()


def test_all_tokens_without_a_slot_write_nothing() -> None:
    sizes = Sizes()
    x, cos, sin = sizes.inputs()
    cache = sizes.cache()
    cache.latent.fill_(3.0)
    mla_preprocess(x, sizes.weights(), cos, sin, torch.full((5,), -1), cache)
    assert (cache.latent == 3.0).all()
    assert not cache.rope.any()


def test_int32_slots() -> None:
    sizes = Sizes()
    x, cos, sin = sizes.inputs()
    found = []
    for dtype in (torch.int32, torch.int64):
        cache = sizes.cache()
        mla_preprocess(x, sizes.weights(), cos, sin, sizes.slots(cache).to(dtype), cache)
        found.append(cache.latent)
    assert torch.equal(*found)


F = torch.zeros


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: MLACache("flat", F(1, 1, 1, 1)), ValueError, "mode must be one of joint, split"),
        (
            lambda: MLACache("joint", F(2, 4, 9)),
            ValueError,
            r"latent must have shape \[B, bs, 1, kv_lora \+ rope\]",
        ),
        (lambda: MLACache("joint", F(2, 4, 2, 9)), ValueError, r"latent must have shape.*got \(2, 4, 2, 9\)"),
        (lambda: MLACache("joint", F(2, 4, 1, 9), F(2, 4, 1, 3)), ValueError, "leave rope out"),
        (lambda: MLACache("split", F(2, 4, 1, 9)), TypeError, "rope must be a tensor.*got NoneType"),
        (
            lambda: MLACache("split", F(2, 4, 1, 9), F(2, 5, 1, 3)),
            ValueError,
            r"rope must.*got \(2, 5, 1, 3\)",
        ),
        (
            lambda: MLACache("split", F(2, 4, 1, 9), F(3, 4, 1, 3)),
            ValueError,
            r"rope must.*got \(3, 4, 1, 3\)",
        ),
        (lambda: MLACache("split", F(2, 300, 1, 9), F(2, 300, 1, 3)), ValueError, "1 to 256 tokens"),
        (
            lambda: MLACache("tiled", F(2, 2, 4, 32), F(2, 1, 4, 16)),
            ValueError,
            r"latent must.*got \(2, 2, 4, 32\)",
        ),
        (lambda: MLACache("int8_tiled", F(2, 2, 4, 32), F(2, 1, 4, 16)), TypeError, "latent must be int8"),
        (
            lambda: MLACache("joint", F(2, 9, 1, 4).transpose(1, 3)),
            ValueError,
            "strided in its first dimension only",
        ),
        (lambda: MLACache("joint", F(4, 1, 9).expand(2, 4, 1, 9)), ValueError, "blocks of latent overlap"),
        (lambda: MLACache("joint", F(2, 4, 1, 9).long()), TypeError, "latent must be floating-point"),
        (
            lambda: MLACache("split", F(2, 4, 1, 9), F(2, 4, 1, 3).half()),
            TypeError,
            "rope must be float32 like",
        ),
        (
            lambda: MLACache.allocate("tiled", 2, 4, kv_lora=40, rope=16, dtype=torch.float32),
            ValueError,
            "kv_lora in multiples of 16.*got 40",
        ),
        (
            lambda: MLACache.allocate("split", 2, 257, kv_lora=40, rope=16, dtype=torch.float32),
            ValueError,
            r"block_size in \[1, 256\]",
        ),
    ],
)
def test_another_layout_is_refused(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"MLACache: .*{message}"):
        make()
