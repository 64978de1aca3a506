"""Pages of a latent cache: blocks shared, copied, grown, given back; what a sequence has read is what it wrote."""

from __future__ import annotations

import pytest
import torch

from opsmith.compiler.modules.latent.pages import LatentPages
from opsmith.ops import MLACache

KV, ROPE, BLOCK = 32, 16, 4


def pages(batch: int, mode: str = "split", layers: int = 2, starts: list[int] | None = None) -> LatentPages:
    pools = [
        MLACache.allocate(mode, 1, BLOCK, kv_lora=KV, rope=ROPE, dtype=torch.float32) for _ in range(layers)
    ]
    return LatentPages(pools, BLOCK, batch, torch.device("cpu"), starts)


def write(p: LatentPages, values: torch.Tensor) -> None:
    """One number a token, [batch, n], in every row of every layer; the layer's own number is added."""
    step = p.begin(values.shape[1])
    for layer, pool in enumerate(p.caches):
        rows = values.reshape(-1, 1) + 1000 * layer
        pool.write(step.slots, rows.expand(-1, KV).contiguous(), rows.expand(-1, ROPE).contiguous())
    p.commit(values.shape[1])


def read(p: LatentPages, layer: int = 0) -> torch.Tensor:
    """[batch, columns]: the numbers, 0 where there is padding."""
    nope, rope = p.read(layer, p.columns)
    assert torch.equal(nope[..., :1].expand_as(nope), nope)
    assert torch.equal(rope[..., 0], nope[..., 0])
    return nope[..., 0] - 1000 * layer * (nope[..., 0] != 0)


def numbers(batch: int, n: int, start: int = 1) -> torch.Tensor:
    return torch.arange(start, start + batch * n, dtype=torch.float32).view(batch, n)


@pytest.mark.parametrize("mode", ["split", "joint", "tiled"])
def test_rows_come_back_as_the_batch_grows_beyond_its_blocks(mode: str) -> None:
    p = pages(3, mode)
    written = [numbers(3, n, 1 + 100 * i) for i, n in enumerate((5, 1, 1, 9))]
    for values in written:
        write(p, values)
    for layer in range(2):
        assert torch.equal(read(p, layer), torch.cat(written, 1))
    held = [b for row in p.blocks for b in row]
    assert len(set(held)) == len(held) <= p.caches[0].blocks


def test_padding_takes_no_slot() -> None:
    p = pages(3, starts=[0, 3, 6])
    values = numbers(3, 6)
    step = p.begin(6)
    assert (step.slots.view(3, 6) >= 0).sum(1).tolist() == [6, 3, 0]
    assert step.lens.tolist() == [6, 3, 0]
    write(p, values)
    hidden = torch.arange(6) < torch.tensor(p.starts)[:, None]
    assert torch.equal(read(p), values.masked_fill(hidden, 0))
    assert [len(b) for b in p.blocks] == [2, 1, 0]
    write(p, numbers(3, 1, 50))
    assert read(p)[:, 6].tolist() == [50, 51, 52]


def test_a_step_that_runs_again_writes_the_same_rows() -> None:
    p = pages(2)
    write(p, numbers(2, 3))
    first, second = p.begin(2), p.begin(2)
    assert torch.equal(first.slots, second.slots)
    assert p.columns == 3


def test_beams_share_blocks_until_one_of_them_writes() -> None:
    p = pages(2)
    write(p, numbers(2, 6))
    before = read(p).clone()
    p.select([1, 1, 0])
    assert torch.equal(read(p), before[[1, 1, 0]])
    assert p.blocks[0] == p.blocks[1]
    write(p, numbers(3, 1, 90))
    assert p.blocks[0][0] == p.blocks[1][0]  # full, and shared still
    assert p.blocks[0][1] != p.blocks[1][1]
    for layer in range(2):
        assert torch.equal(read(p, layer), torch.cat((before[[1, 1, 0]], numbers(3, 1, 90)), 1))


def test_what_nobody_uses_is_given_back() -> None:
    p = pages(3)
    write(p, numbers(3, 7))
    blocks = p.caches[0].blocks
    p.select([2])
    assert [len(b) for b in p.blocks] == [2]
    p.crop(3)
    assert p.columns == 3
    assert [len(b) for b in p.blocks] == [1]
    assert torch.equal(read(p), numbers(3, 7)[2:, :3])
    more = BLOCK * blocks - 3
    write(p, numbers(1, more, 70))
    assert torch.equal(read(p)[:, 3:], numbers(1, more, 70))
    assert p.caches[0].blocks == blocks  # all of them were free
    p.reset(1, p.device)
    assert (p.columns, p.blocks) == (0, [[]])
    write(p, numbers(1, BLOCK * blocks))
    assert p.caches[0].blocks == blocks


def test_the_library_sees_its_own_layout_and_refuses_keys_of_heads() -> None:
    pytest.importorskip("transformers")
    from opsmith.compiler.modules.conventions import new_cache
    from opsmith.compiler.modules.latent.cache import LatentLayer, unfit

    order = torch.arange(ROPE).view(-1, 2).t().reshape(-1)
    p = pages(2)
    cache = new_cache()
    cache.layers = [LatentLayer(p, i, order) for i in range(2)]
    assert unfit(cache) is None
    keys, values = torch.randn(2, 1, 5, KV), torch.randn(2, 1, 5, ROPE)
    for i in range(2):
        got = cache.update(keys + i, values + i, i)
        assert torch.equal(got[0], keys + i)
        assert torch.equal(got[1], values + i)
    assert (cache.get_seq_length(), cache.get_mask_sizes(1, 0)) == (5, (6, 0))
    assert torch.equal(p.read(0, 5)[1], values[:, 0][..., order])
    cache.reorder_cache(torch.tensor([1, 1]))
    assert torch.equal(cache.layers[1].keys, (keys + 1)[[1, 1]])
    cache.batch_select_indices(torch.tensor([0]))
    cache.crop(-2)
    assert torch.equal(cache.layers[0].values, values[1:, :, :3])
    cache.batch_repeat_interleave(3)
    assert cache.layers[0].keys.shape == (3, 1, 3, KV)
    with pytest.raises(ValueError, match="keys of heads"):
        cache.update(torch.randn(3, 4, 1, KV), torch.randn(3, 4, 1, ROPE), 0)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.layers[0].keys is None
    assert "DynamicCache" in str(unfit([]))
