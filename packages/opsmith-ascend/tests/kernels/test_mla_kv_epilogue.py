"""mla_kv_epilogue in Ascend C, emulated."""

import pytest
import torch
from held_to_cards import check_samples

from opsmith.operator import Make
from opsmith.ops import MLACache
from opsmith.ops.mla.call import Rotation
from opsmith.ops.mla.cards import table
from opsmith.ops.mla.reference import keys
from opsmith.ops.pages import some_slots
from opsmith_ascend.launches import mla_kv_epilogue as launch
from opsmith_ascend.library import kv_form

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


@DTYPES
def test_every_sample_of_the_card(dtype: torch.dtype) -> None:
    check_samples("mla_kv_epilogue", kv_form, dtype)


@pytest.mark.parametrize("mode", ["joint", "split", "int8_tiled", "tiled"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_every_layout_within_a_pool_and_no_byte_beside_its_slots(mode: str, interleaved: bool) -> None:
    make, tokens, kv_lora, rope, size = Make(torch.bfloat16), 45, 96, 32, 7
    a, gamma = make(tokens, kv_lora + rope + 3), make(kv_lora, scale=0.3, shift=1.0)
    cos, sin = table(make, tokens, rope)
    slots = some_slots(make, tokens, 9 * size)
    scale = torch.tensor(0.02) if mode == "int8_tiled" else None
    sizes = {"kv_lora": kv_lora, "rope": rope, "dtype": torch.bfloat16}
    pool = MLACache.allocate(mode, 18, size, **sizes)
    for t in (pool.latent, pool.rope):
        if t is not None:
            t.fill_(9)
    # Every other block of a pool: the first dimension is strided, and what lies between belongs to somebody else.
    cache = MLACache(mode, pool.latent[::2], None if pool.rope is None else pool.rope[::2])
    expected = MLACache.allocate(mode, 9, size, **sizes)
    for t in (expected.latent, expected.rope):
        if t is not None:
            t.fill_(9)
    k = keys(a, gamma, Rotation(cos, sin, interleaved), rope, latent_scale=scale)
    kept = slots >= 0
    expected.write(slots[kept], *(part[kept] for part in k))
    done = launch(a, gamma, cos, sin, slots, cache, interleaved=interleaved, ctkv_scale=scale).emulated(5)
    assert done is not None
    assert done.blocks == 5
    for mine, theirs in ((cache.latent, expected.latent), (cache.rope, expected.rope)):
        if mine is not None and theirs is not None:
            torch.testing.assert_close(
                mine.float(), theirs.float(), rtol=2**-7, atol=1.0 if scale is not None else 1e-6
            )
            assert (mine == theirs).float().mean() > 0.99
    for t in (pool.latent, pool.rope):
        assert t is None or bool((t[1::2] == 9).all())
    rows = tokens * (kv_lora + rope) * 2
    tables = 2 * tokens * rope * 2 + 8 * tokens
    written = int(kept.sum()) * (kv_lora * cache.latent.element_size() + rope * 2)
    assert done.written == written
    assert done.read == rows + tables + done.blocks * (kv_lora * 2 + (4 if scale is not None else 0))


@pytest.mark.parametrize("cores", [1, 48])
def test_the_sizes_of_a_model_and_int32_slots(cores: int) -> None:
    make, tokens = Make(torch.bfloat16), 70
    a, gamma = make(tokens, 2112), make(512, scale=0.3, shift=1.0).float()
    cos, sin = (t.float() for t in table(make, tokens, 64))
    slots = some_slots(make, tokens, 128).int()
    got, want = (
        MLACache.allocate("tiled", 1, 128, kv_lora=512, rope=64, dtype=torch.bfloat16) for _ in range(2)
    )
    done = launch(a, gamma, cos, sin, slots, got).emulated(cores)
    assert done is not None
    kept = slots >= 0
    k = keys(a, gamma, Rotation(cos, sin), 64)
    want.write(slots[kept], *(part[kept] for part in k))
    torch.testing.assert_close(got.latent.float(), want.latent.float(), rtol=2**-7, atol=1e-6)
    torch.testing.assert_close(got.rope.float(), want.rope.float(), rtol=2**-7, atol=1e-6)
    assert done.local_peak > 100_000 or cores > 1
