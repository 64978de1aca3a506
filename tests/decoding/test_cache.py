"""`PagedCache` beside the library's own cache: the same keys and values after the same calls, in fewer moves."""

from __future__ import annotations

import copy
import functools
import operator
from typing import Any

import pytest
import torch

import opsmith
from tests.decoding.models import WINDOW, decoder

transformers = pytest.importorskip("transformers")

LAYERS, BATCH, HEADS, WIDTH = 3, 3, 1, 16  # two layers see a window, and the last one all


@pytest.fixture(scope="module")
def config() -> Any:
    types = ["sliding_attention", "sliding_attention", "full_attention"]
    return decoder("gemma3_text", num_hidden_layers=LAYERS, layer_types=types).config


def fill(caches: list[Any], tokens: int, batch: int = BATCH, dtype: torch.dtype = torch.float32) -> None:
    """Give all caches the same new keys and values, and compare what they give back."""
    for layer in range(LAYERS):
        key, value = torch.randn(2, batch, HEADS, tokens, WIDTH).to(dtype)
        back = [cache.update(key, value, layer) for cache in caches]
        for other in back[1:]:
            for mine, its in zip(back[0], other, strict=True):
                assert mine.shape == its.shape
                assert mine.dtype == its.dtype
                torch.testing.assert_close(mine + 0, its + 0, rtol=0, atol=0)


def same(mine: Any, its: Any) -> None:
    """The same keys, values, lengths and sizes of masks."""
    for layer in range(LAYERS):
        assert mine.get_seq_length(layer) == its.get_seq_length(layer)
        assert mine.get_mask_sizes(3, layer) == its.get_mask_sizes(3, layer)
        for name in ("keys", "values"):
            got, expected = getattr(mine.layers[layer], name), getattr(its.layers[layer], name)
            torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_it_holds_what_a_dynamic_cache_holds(config: Any, block_size: int) -> None:
    mine = opsmith.PagedCache(config, block_size=block_size)
    its = transformers.DynamicCache(config=config)
    assert len(mine) == len(its)
    assert mine.is_sliding == its.is_sliding
    for tokens in (5, 1, 1, 9, 1, 30, 1, 2):
        fill([mine, its], tokens)
        same(mine, its)
    mine.reset()
    assert mine.get_seq_length() == 0
    assert mine.layers[0].keys is None
    fresh = transformers.DynamicCache(config=config)
    fill([mine, fresh], 40, batch=2)  # another batch, and a prompt longer than the window
    same(mine, fresh)


def test_sequences_are_reordered_repeated_and_selected(config: Any) -> None:
    mine, its = opsmith.PagedCache(config, block_size=4), transformers.DynamicCache(config=config)
    fill([mine, its], 10)
    for change in (
        lambda c: c.reorder_cache(torch.tensor([2, 2, 0])),
        lambda c: c.batch_repeat_interleave(2),
        lambda c: c.batch_select_indices(torch.tensor([5, 0, 1])),
        lambda c: c.batch_select_indices(torch.tensor([True, False, True])),
        lambda c: c.reorder_cache(torch.tensor([1, 1])),
    ):
        for cache in (mine, its):
            change(cache)
        same(mine, its)
        # What is written now must not show in the others that share a block.
        fill([mine, its], 1, batch=len(its.layers[0].keys))
        same(mine, its)
    mine.reorder(torch.tensor([1, 0]))
    its.reorder_cache(torch.tensor([1, 0]))
    same(mine, its)
    with pytest.raises(IndexError, match="batch of 2"):
        mine.reorder_cache(torch.tensor([0, 2]))


def test_beams_share_blocks(config: Any) -> None:
    cache = opsmith.PagedCache(config, block_size=4)
    fill([cache], 40)
    pages = cache.layers[2].pages  # the layer that sees all
    assert pages.window is None
    assert pages.capacity == BATCH * 10
    cache.reorder_cache(torch.tensor([1, 1, 1]))
    fill([cache], 1)
    assert pages.capacity == BATCH * 10  # those that nobody holds any more are used again
    assert len({*functools.reduce(operator.iadd, pages.blocks, [])}) == 10 + BATCH


def test_what_left_the_window_is_used_again(config: Any) -> None:
    cache = opsmith.PagedCache(config, block_size=4)
    fill([cache], 100)
    for _ in range(100):
        fill([cache], 1)
    window, whole = cache.layers[0].pages, cache.layers[2].pages
    assert whole.capacity == BATCH * 50
    assert window.window == WINDOW
    assert window.capacity <= BATCH * (WINDOW // 4 + 2)


def test_a_crop_forgets_the_last_tokens(config: Any) -> None:
    mine, its = opsmith.PagedCache(config, block_size=4), transformers.DynamicCache(config=config)
    fill([mine, its], 9)
    for cache in (mine, its):
        cache.crop(-4)
    same(mine, its)
    for cache in (mine, its):
        cache.activate_past_recording()
    for tokens, removed in ((30, 5), (7, 0), (6, 6), (1, 1)):
        fill([mine, its], tokens)
        for cache in (mine, its):
            cache.crop(-removed)
        same(mine, its)
    with pytest.raises(ValueError, match="negative number"):
        mine.crop(2)


def test_a_crop_that_needs_what_left_the_window_is_refused(config: Any) -> None:
    cache = opsmith.PagedCache(config, block_size=4)
    fill([cache], 40)
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        cache.crop(-1)


def test_a_copy_is_one_of_its_own(config: Any) -> None:
    mine, its = opsmith.PagedCache(config, block_size=4), transformers.DynamicCache(config=config)
    fill([mine, its], 10)
    twin = copy.deepcopy(mine)
    same(twin, its)
    fill([mine], 5)
    same(twin, its)
    fill([twin, its], 3)
    same(twin, its)


def test_memory_grows_by_pieces(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opsmith.decoding.pool._AHEAD", 8)
    mine, its = opsmith.PagedCache(config, block_size=4), transformers.DynamicCache(config=config)
    sizes = []
    for _ in range(40):
        fill([mine, its], 2)
        sizes.append(len(mine.layers[2].pool.parts["k_cache"]))
    same(mine, its)
    assert len({*sizes}) <= 6  # of 20 blocks for each of three sequences


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_is_within_half_a_step(config: Any, dtype: torch.dtype) -> None:
    mine = opsmith.PagedCache(config, int8=True)
    its = transformers.DynamicCache(config=config)
    for tokens in (8, 1):
        for layer in range(LAYERS):
            key, value = torch.randn(2, BATCH, HEADS, tokens, WIDTH).to(dtype)
            mine.update(key, value, layer)
            its.update(key, value, layer)
    for layer in range(LAYERS):
        for name in ("keys", "values"):
            got, expected = getattr(mine.layers[layer], name), getattr(its.layers[layer], name)
            assert got.dtype == dtype
            half = expected.float().abs().amax(-1, keepdim=True) / 254
            ulp = torch.finfo(dtype).eps * expected.float().abs()  # the result is rounded to dtype, too
            assert bool(((got.float() - expected.float()).abs() <= half * 1.001 + ulp).all())


def test_another_dtype_is_held_as_asked(config: Any) -> None:
    cache = opsmith.PagedCache(config, dtype=torch.bfloat16)
    key = torch.randn(BATCH, HEADS, 4, WIDTH)
    cache.update(key, key, 0)
    assert cache.layers[0].pool.parts["k_cache"].dtype == torch.bfloat16
    torch.testing.assert_close(cache.layers[0].keys, key.bfloat16().float(), rtol=0, atol=0)


def test_what_does_not_fit_is_refused_and_nothing_is_written(config: Any) -> None:
    cache = opsmith.PagedCache(config, block_size=4, max_tokens=20)
    fill([cache], 8)
    before = [(layer.keys, layer.values) for layer in cache.layers]
    row = torch.zeros(BATCH, HEADS, 1, WIDTH)
    for key, value, error, message in (
        (row[:2], row[:2], ValueError, "batch of 3 sequences, the input has 2"),
        (row.repeat(1, 2, 1, 1), row.repeat(1, 2, 1, 1), ValueError, "a cache serves one model"),
        (row[..., :8], row[..., :8], ValueError, "a cache serves one model"),
        (row, row.bfloat16(), TypeError, "one floating-point dtype"),
        (row.long(), row.long(), TypeError, "floating-point"),
        (row[0], row[0], ValueError, r"\[batch, heads, tokens, width\]"),
        (row.repeat(1, 1, 13, 1), row.repeat(1, 1, 13, 1), ValueError, "max_tokens=20"),
    ):
        with pytest.raises(error, match=message):
            cache.update(key, value, 0)
    for layer, (keys, values) in zip(cache.layers, before, strict=True):
        assert layer.get_seq_length() == 8
        assert torch.equal(layer.keys, keys)
        assert torch.equal(layer.values, values)
    fill([cache], 12)  # up to the limit


def test_a_call_that_stopped_half_way_is_noticed(config: Any) -> None:
    cache = opsmith.PagedCache(config)
    fill([cache], 4)
    row = torch.zeros(BATCH, HEADS, 1, WIDTH)
    cache.update(row, row, 2)  # the only layer of its kind
    cache.update(row, row, 0)
    cache.update(row, row, 0)
    with pytest.raises(ValueError, match="stopped half way"):
        cache.update(row, row, 1)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"block_size": 0}, ValueError),
        ({"block_size": 2.0}, ValueError),
        ({"max_tokens": -1}, ValueError),
        ({"dtype": torch.int32}, ValueError),
        ({"dtype": torch.bfloat16, "int8": True}, ValueError),
    ],
)
def test_options_that_are_none_are_refused(config: Any, options: dict[str, Any], error: type) -> None:
    with pytest.raises(error, match="PagedCache"):
        opsmith.PagedCache(config, **options)


def test_it_is_for_models_of_transformers() -> None:
    with pytest.raises(TypeError, match="a transformers model or its configuration, got Linear"):
        opsmith.PagedCache(torch.nn.Linear(2, 2))


def test_what_update_returns_is_read_only_when_it_is_used(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = opsmith.PagedCache(config)
    fill([cache], 4)
    row = torch.randn(BATCH, HEADS, 1, WIDTH)
    keys, _ = cache.update(row, row, 0)
    reads, read = [], cache.layers[0].pool.read
    monkeypatch.setattr(cache.layers[0].pool, "read", lambda *args: reads.append(1) or read(*args))
    assert keys.shape == (BATCH, HEADS, 5, WIDTH)
    assert keys.dtype == torch.float32
    assert not reads
    assert type(keys @ keys.transpose(-1, -2)) is torch.Tensor
    assert reads
    torch.testing.assert_close(keys[:, :, -1:], row, rtol=0, atol=0)
    torch.testing.assert_close(torch.cat([keys, row], 2)[:, :, 4:5], row, rtol=0, atol=0)
