"""The quantized table: what quantization may lose, the cache and its threads, and every way to ask wrongly."""

from __future__ import annotations

import copy
import math
import pickle
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file, save_file

from opsmith.call.dispatch import SMALL, native, small_up_to
from opsmith.ops import QuantizedEmbedding, quantized_embedding
from opsmith.ops.embedding import IdError
from opsmith.ops.embedding.quantized import CARD
from opsmith.ops.embedding.row_cache import RowCache

reference = CARD.reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
VALUES = [0.0, -0.0, 1e-45, 1e-38, 0.003, 1.0, 3e38, math.inf, -math.inf, math.nan]

uses_kernel = pytest.mark.skipif(
    native(torch.empty(1), "quantized_embedding") is not True, reason="the cache is the kernel's"
)


def zipf(rows: int, *shape: int) -> torch.Tensor:
    weights = 1 / torch.arange(1, rows + 1).double()
    return torch.multinomial(weights, math.prod(shape), replacement=True).view(shape)


@given(
    shape=st.lists(st.integers(0, 5), max_size=3),
    rows=st.integers(1, 40),
    width=st.integers(0, 70),
    id_dtype=st.sampled_from([torch.int32, torch.int64]),
    dtype=st.sampled_from(DTYPES),
    scales=st.lists(st.sampled_from(VALUES), min_size=1, max_size=8),
    prefetch=st.integers(0, 9),
    strided=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_any_shape_and_any_scale(
    shape, rows, width, id_dtype, dtype, scales, prefetch, strided, seed
) -> None:
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(-128, 128, (rows, 2 * width), dtype=torch.int8, generator=generator)
    table = table[:, :width] if strided else table[:, :width].contiguous()
    scale = torch.tensor(scales).repeat(rows)[:rows]
    ids = torch.randint(0, rows, shape, generator=generator).to(id_dtype)
    got = quantized_embedding(ids, table, scale, dtype=dtype, prefetch=prefetch)
    assert got.dtype == dtype
    # One multiplication, rounded once to float32 and once to dtype, in the same order: not a bit may differ.
    assert torch.equal(got.nan_to_num(7.0), reference(ids, table, scale, dtype=dtype).nan_to_num(7.0))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_quantization_is_within_half_a_step_and_reported(dtype: torch.dtype) -> None:
    table = torch.randn(300, 65).to(dtype)
    table[7] = 0
    table[8] *= 1e-30
    made = QuantizedEmbedding.from_float(table)
    assert made.dtype == dtype
    wide = table.double()
    step = wide.abs().amax(1, keepdim=True) / 127
    stored = made.table.double() * made.scale.double()[:, None]
    assert bool(((stored - wide).abs() <= step * (0.5 + 1e-4) + 1e-38).all())
    assert int(made.table[7].count_nonzero()) == 0
    assert made.error is not None
    assert made.error.relative == pytest.approx(float((stored - wide).norm() / wide.norm()), rel=1e-4)
    assert torch.equal(made(torch.arange(300)), made.dequantize())


def test_memory_is_a_quarter_of_float32() -> None:
    table = torch.randn(100, 1024)
    assert QuantizedEmbedding.from_float(table).nbytes == table.nbytes / 4 + 100 * 4


def test_from_an_embedding_and_as_a_module() -> None:
    layer = torch.nn.Embedding(20, 6)
    made = QuantizedEmbedding.from_float(layer, dtype=torch.bfloat16)
    ids = torch.tensor([[1, 2], [3, 19]])
    assert made(ids).dtype == torch.bfloat16
    assert made(ids, dtype=torch.float32).dtype == torch.float32
    torch.testing.assert_close(made(ids, dtype=torch.float32), layer(ids).detach(), atol=0.02, rtol=0)
    assert not made(ids).requires_grad
    assert "20, 6, bits=8, dtype=bfloat16, cache_rows=0, prefetch=0" in repr(made)


def test_a_dtype_is_the_results_and_never_the_scales() -> None:
    made = QuantizedEmbedding.from_float(torch.randn(9, 5), cache_rows=4)
    scale = made.scale.clone()
    for cast in (made.half(), made.to(torch.bfloat16), made.float()):
        assert torch.equal(cast.scale, scale)
        assert cast(torch.tensor([1])).dtype == cast.dtype
    assert made.to("meta")(torch.empty(3, dtype=torch.long, device="meta")).shape == (3, 5)


@uses_kernel
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_cache_changes_no_bit_and_holds_what_is_asked_for_most(dtype: torch.dtype) -> None:
    made = QuantizedEmbedding.from_float(torch.randn(500, 33), cache_rows=50, prefetch=2, dtype=dtype)
    exact = made.dequantize()
    for _ in range(12):
        ids = zipf(500, 4, 50)
        assert torch.equal(made(ids), exact[ids])
    info = made.cache_info()
    assert info.lookups == 12 * 200
    assert 0 < info.hits < info.lookups
    assert made.hit_rate == info.hits / info.lookups
    assert info.rows == info.capacity == made.cache_rows == 50
    assert info.nbytes >= 50 * 33 * dtype.itemsize
    held = made._cache._snapshot.chosen.tolist()
    assert {0, 1, 2, 3} <= set(held)  # by Zipf's law these come most often
    before = made.cache_info().hits
    made(torch.tensor([held[0], held[1]]))
    assert made.cache_info().hits == before + 2
    other = torch.float16 if dtype != torch.float16 else torch.float32
    assert torch.equal(made(ids, dtype=other), reference(ids, made.table, made.scale, dtype=other))


@uses_kernel
def test_what_was_popular_once_gives_way() -> None:
    made = QuantizedEmbedding.from_float(torch.randn(40, 8), cache_rows=4)
    for popular in (range(4), range(20, 24)):
        for _ in range(40):
            made(torch.tensor(list(popular)))
        for _ in range(6):
            made._cache.refresh(made.table, made.scale, made.dtype)
            made(torch.tensor(list(popular)))
        made._cache.refresh(made.table, made.scale, made.dtype)
        assert made._cache._snapshot.chosen.tolist() == list(popular)


@uses_kernel
def test_two_threads_at_once() -> None:
    made = QuantizedEmbedding.from_float(torch.randn(400, 40), cache_rows=20)
    exact = made.dequantize()
    wrong: list[str] = []

    def ask(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(150):
            ids = (torch.rand(64, generator=generator) ** 3 * 400).long()
            if not torch.equal(made(ids), exact[ids]):
                wrong.append("a row differs")

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert made.cache_info().lookups == 3 * 150 * 64
    assert made.cache_info().hits > 0


@uses_kernel
def test_the_cache_works_in_and_out_of_inference_mode() -> None:
    made = QuantizedEmbedding.from_float(torch.randn(30, 8), cache_rows=3)
    ids = torch.arange(3).repeat(10)
    with torch.inference_mode():
        first = made(ids)
        assert torch.equal(made(ids), first)
    assert torch.equal(made(ids), first)
    assert made.cache_info().hits > 0


def test_the_state_goes_through_safetensors(tmp_path: Path) -> None:
    made = QuantizedEmbedding.from_float(torch.randn(50, 12), cache_rows=8)
    save_file(made.state_dict(), tmp_path / "table.safetensors")
    other = QuantizedEmbedding(50, 12, cache_rows=8)
    ids = zipf(50, 100)
    other(ids)  # its cache holds rows of zeros now
    other.load_state_dict(load_file(tmp_path / "table.safetensors"))
    for _ in range(3):
        assert torch.equal(other(ids), made(ids))
    assert set(made.state_dict()) == {"table", "scale"}
    assert other.error is None


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_is_independent_and_starts_cold(duplicate) -> None:
    made = QuantizedEmbedding.from_float(torch.randn(50, 12), cache_rows=8, prefetch=3)
    ids = zipf(50, 100)
    made(ids)
    twin = duplicate(made)
    assert twin.cache_info().lookups == 0
    assert (twin.cache_rows, twin.prefetch, twin.error) == (8, 3, made.error)
    before = made(ids)
    twin.table.zero_()
    assert torch.equal(made(ids), before)


def test_a_compiled_module_equals_itself() -> None:
    made = QuantizedEmbedding.from_float(torch.randn(50, 12), cache_rows=8)
    ids = zipf(50, 20)
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(ids), made(ids))


def test_autotune_leaves_a_setting_that_was_measured() -> None:
    made = QuantizedEmbedding.from_float(torch.randn(200, 16))
    found = made.autotune(zipf(200, 4, 32), cache_rows=(8, 1000), budget_s=0.1)
    assert set(found.seconds) == {
        "neither",
        *(f"prefetch={n}" for n in (2, 4, 8, 16)),
        "cache_rows=8",
        "cache_rows=200",
    }
    assert (made.prefetch, made.cache_rows) == (found.prefetch, found.cache_rows)
    assert found.cache_rows in (0, 8, 200)
    assert all(seconds > 0 for seconds in found.seconds.values())


def test_prefetching_rows_changes_nothing_and_checks_ids() -> None:
    made = QuantizedEmbedding.from_float(torch.randn(20, 300))
    ids = torch.tensor([[1, 2], [3, 4]])
    before = made(ids)
    assert made.prefetch_rows(ids) is None
    assert made.prefetch_rows(torch.empty(0, dtype=torch.int32)) is None
    assert torch.equal(made(ids), before)
    with pytest.raises(TypeError, match="ids must be int64 or int32, got float32"):
        made.prefetch_rows(torch.tensor([1.0]))


@uses_kernel
def test_prefetching_a_row_that_does_not_exist_is_an_error() -> None:
    made = QuantizedEmbedding.from_float(torch.randn(20, 300))
    with pytest.raises(IdError, match=r"next_ids must be in \[0, 20\) .* got 20 at position 1"):
        made.prefetch_rows(torch.tensor([3, 20]))


@pytest.mark.parametrize("small", [-1, SMALL])
@pytest.mark.parametrize("cache_rows", [0, 2])
@pytest.mark.parametrize("bad", [-1, 10, 2**40])
def test_an_id_outside_the_table_is_named(bad: int, cache_rows: int, small: int) -> None:
    made = QuantizedEmbedding.from_float(torch.randn(10, 6), cache_rows=cache_rows)
    match = rf"ids must be in \[0, 10\) .* got {bad} at position \(0, 1\)"
    with small_up_to(small), pytest.raises(IdError, match=match):
        made(torch.tensor([[1, bad]]))


def test_an_empty_table_has_no_id() -> None:
    made = QuantizedEmbedding.from_float(torch.empty(0, 4))
    assert made(torch.empty(0, dtype=torch.long)).shape == (0, 4)
    with pytest.raises(IdError, match=r"in \[0, 0\)"):
        made(torch.tensor([0]))
    assert QuantizedEmbedding.from_float(torch.empty(3, 0))(torch.tensor([2])).shape == (1, 0)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda t: QuantizedEmbedding.from_float(t, bits=4), ValueError, "bits must be 8, got 4"),
        (lambda t: QuantizedEmbedding.from_float(t.long()), TypeError, "must be floating-point, got int64"),
        (lambda t: QuantizedEmbedding.from_float([1.0]), TypeError, "an nn.Embedding, got list"),
        (lambda t: QuantizedEmbedding.from_float(t[0]), ValueError, r"shape \[V, N\], got \(4,\)"),
        (
            lambda t: QuantizedEmbedding.from_float(t / torch.tensor([[1.0], [0.0], [1.0]])),
            ValueError,
            "row 1 holds NaN or an infinity; no scale represents it",
        ),
        (lambda t: QuantizedEmbedding.from_float(t, cache_rows=-1), ValueError, "cache_rows must be a whole"),
        (lambda t: QuantizedEmbedding.from_float(t, prefetch=1.5), ValueError, "prefetch must be a whole"),
        (lambda t: QuantizedEmbedding.from_float(t, dtype=torch.int8), TypeError, "dtype must be float32"),
        (
            lambda t: QuantizedEmbedding.from_float(torch.nn.Embedding(3, 4, max_norm=1.0)),
            ValueError,
            "max_norm changes its table",
        ),
        (
            lambda t: QuantizedEmbedding.from_float(t).autotune(torch.empty(0, dtype=torch.long)),
            ValueError,
            "expected ids as they will come, got none",
        ),
    ],
)
def test_the_module_names_what_is_wrong(call, error, message) -> None:
    with pytest.raises(error, match=f"QuantizedEmbedding.*{message}"):
        call(torch.randn(3, 4))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"ids": [1]}, TypeError, "ids must be a tensor, got list"),
        ({"ids": torch.tensor([1.0])}, TypeError, "ids must be int64 or int32, got float32; cast them"),
        ({"table": torch.ones(9, 4)}, TypeError, "table must be int8, got float32"),
        (
            {"table": torch.ones(9, dtype=torch.int8)},
            ValueError,
            r"table must have shape \[V, N\], got \(9,\)",
        ),
        ({"scale": 0.1}, TypeError, "scale must be a tensor, got float"),
        ({"scale": torch.ones(9).half()}, TypeError, "scale must be float32, got float16"),
        ({"scale": torch.ones(8)}, ValueError, r"scale must have shape \(9,\).*got \(8,\)"),
        ({"scale": torch.ones(9, device="meta")}, ValueError, "scale is on meta, table on cpu"),
        ({"dtype": torch.int8}, TypeError, "dtype must be float32, bfloat16 or float16, got torch.int8"),
        ({"prefetch": -1}, ValueError, "prefetch must be a number of tokens, 0 for none, got -1"),
        ({"next_ids": [1]}, TypeError, "next_ids must be a tensor, got list"),
        ({"next_ids": torch.tensor([9])}, IdError, r"next_ids must be in \[0, 9\)"),
    ],
)
def test_errors_name_what_was_expected_and_what_came(change, error, message) -> None:
    if (
        "next_ids" in change
        and error is IdError
        and native(torch.empty(1), "quantized_embedding") is not True
    ):
        pytest.skip("without a kernel, nothing is fetched ahead")
    inputs = {
        "ids": torch.tensor([1]),
        "table": torch.ones(9, 4, dtype=torch.int8),
        "scale": torch.ones(9),
        **change,
    }
    with pytest.raises(error, match=f"quantized_embedding: {message}"):
        quantized_embedding(**inputs)


@uses_kernel
def test_a_cache_that_points_anywhere_reads_nothing_outside_it() -> None:
    """Whatever stands in the slots, a row that the cache does not have comes from the table."""
    table, scale = torch.randint(-127, 128, (6, 16), dtype=torch.int8), torch.rand(6)
    slots = torch.tensor([0, -1, 1, 2**31 - 1, -(2**31), 7], dtype=torch.int32)
    y = torch.empty(6, 16)
    cached = reference(torch.tensor([0, 2]), table, scale)
    op = torch.ops.opsmith.quantized_embedding.default
    op(torch.arange(6), table, scale, 0, None, slots, cached, y=y)
    assert torch.equal(y, reference(torch.arange(6), table, scale))


def test_a_table_without_rows_has_no_ids() -> None:
    for table in (torch.ones(0, 4, dtype=torch.int8), torch.ones(0, 8, dtype=torch.int8)[:, ::2]):
        with pytest.raises(IdError, match="for a table of 0 rows"):
            quantized_embedding(torch.tensor([0]), table, torch.ones(0))
        assert quantized_embedding(torch.empty(0, dtype=torch.long), table, torch.ones(0)).shape == (0, 4)


def test_a_copied_cache_is_as_large_as_the_first() -> None:
    assert copy.deepcopy(RowCache(7)).capacity == 7
