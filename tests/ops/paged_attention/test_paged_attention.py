"""What is particular to caches in blocks: where a key lies, what is not looked at, what is refused before a write."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from opsmith.call.dispatch import always_native, native_library
from opsmith.kernels import triton
from opsmith.operator import Tolerance
from opsmith.ops import attention, paged_attention, reshape_and_cache
from opsmith.ops.attention import CARD as ATTENTION
from opsmith.ops.paged_attention import CARD

reference, eager = CARD.reference, CARD.eager


def cache_of(k: torch.Tensor, v: torch.Tensor, size: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Keys and values [B, Hkv, S, D] in blocks in no order, NaN wherever nothing was written; and tables."""
    batch, heads, keys, _ = k.shape
    per = -(-keys // size)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(batch * per + 3, generator=generator)[: batch * per].view(batch, per)
    caches = [torch.full((batch * per + 3, size, heads, t.shape[3]), math.nan, dtype=t.dtype) for t in (k, v)]
    at = torch.arange(keys)
    slots = (ids[:, at // size] * size + at % size).flatten()
    rows = [t.transpose(1, 2).flatten(0, 1).contiguous() for t in (k, v)]
    reshape_and_cache(*rows, *caches, slots)
    return (*caches, ids.to(torch.int32))


def close(got: torch.Tensor, near: torch.Tensor, exact: torch.Tensor) -> None:
    verdict = Tolerance().check(got, near, exact)
    assert verdict.ok, verdict.why


@pytest.mark.parametrize("size", [1, 16, 128, 256])
@pytest.mark.parametrize("window", [None, 7])
def test_it_is_attention_of_the_last_tokens(size: int, window: int | None) -> None:
    generator = torch.Generator().manual_seed(size)
    q, k, v = (torch.randn(3, h, 140, d, generator=generator) for h, d in ((6, 32), (2, 32), (2, 48)))
    k_cache, v_cache, tables = cache_of(k, v, size)
    for new in (1, 4):
        last = q[:, :, -new:]
        got = paged_attention(
            last.transpose(1, 2).contiguous(), k_cache, v_cache, tables, torch.full((3,), 140), window=window
        )
        wide = (t.double() for t in (last, k, v))
        exact = attention(*wide, causal=True, window=window).transpose(1, 2)
        torch.testing.assert_close(got, exact.float(), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("group", "kv_heads", "dim"), [(71, 1, 64), (7, 2, 192), (3, 3, 256), (4, 8, 80)])
def test_head_counts_and_sizes_that_models_have(
    group: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(dim)
    shapes = (group * kv_heads, 1, dim), (kv_heads, 300, dim), (kv_heads, 300, dim)
    q, k, v = (torch.randn(2, *shape, generator=generator).to(dtype) for shape in shapes)
    k_cache, v_cache, tables = cache_of(k, v, 16)
    args = q[:, :, 0], k_cache, v_cache, tables, torch.tensor([300, 77])
    exact = reference(*(t.double() if t.is_floating_point() else t for t in args))
    close(paged_attention(*args), eager(*args), exact)


def test_one_query_may_leave_its_length_out() -> None:
    q, k, v = torch.randn(2, 4, 16), torch.randn(2, 2, 9, 16), torch.randn(2, 2, 9, 16)
    k_cache, v_cache, tables = cache_of(k, v, 4)
    one = paged_attention(q, k_cache, v_cache, tables, torch.tensor([9, 5]))
    assert one.shape == (2, 4, 16)
    assert torch.equal(one, paged_attention(q[:, None], k_cache, v_cache, tables, torch.tensor([9, 5]))[:, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_long_sequence_is_merged_from_its_pieces(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, h, 3000, 64, generator=generator).to(dtype) for h in (8, 4, 4))
    k_cache, v_cache, tables = cache_of(k, v, 16)
    args = q[:, :, -1].contiguous() * 4, k_cache, v_cache, tables, torch.tensor([3000])
    exact = reference(*(t.double() if t.is_floating_point() else t for t in args))
    close(paged_attention(*args), eager(*args), exact)


def test_what_no_query_sees_is_not_looked_at() -> None:
    """NaN beyond a sequence's end, blocks freed behind the window, entries behind the last block."""
    q = torch.randn(2, 4, 16)
    k, v = torch.randn(2, 2, 40, 16), torch.randn(2, 2, 40, 16)
    k_cache, v_cache, tables = cache_of(k, v, 8)
    lengths = torch.tensor([35, 8])
    right = paged_attention(q, k_cache, v_cache, tables, lengths, window=10)
    assert right.isfinite().all()
    freed = tables.clone()
    freed[0, :3] = -1
    freed[1, 1:] = 999
    assert torch.equal(paged_attention(q, k_cache, v_cache, freed, lengths, window=10), right)
    assert torch.equal(reference(q, k_cache, v_cache, freed, lengths, window=10).isfinite(), right.isfinite())


def test_empty_sequences_and_queries_before_the_first_key_give_zeros() -> None:
    k_cache, v_cache = torch.randn(2, 4, 8, 2, 16)
    tables = torch.tensor([[0, 1], [2, 3]])
    with always_native():
        y = paged_attention(torch.randn(2, 3, 4, 16), k_cache, v_cache, tables, torch.tensor([0, 2]))
    assert not y[0].any()
    assert not y[1, 0].any()
    assert y[1, 1:].abs().amin() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_int8_caches_may_hold_any_byte_and_any_scale(dtype: torch.dtype, sign: float) -> None:
    """-128, scales of both signs and zero, q whose numbers lie far apart, a query of zeros."""
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(2, 16, 128, generator=generator) * torch.tensor([1.0, 1e-3]).repeat(64)
    q[0, 5] = 0
    caches = [torch.randint(-128, 128, (20, 16, 4, 128), generator=generator, dtype=torch.int8) for _ in "kv"]
    scales = [torch.randn(20, 16, 4, generator=generator) * 0.02 for _ in "kv"]
    scales[1][:10] = scales[1][:10].abs() * sign
    scales[1][3] = 0
    tables = torch.arange(20, dtype=torch.int32).view(2, 10)
    args = q.to(dtype), *caches, tables, torch.tensor([150, 99])
    options = {"k_scale": scales[0], "v_scale": scales[1]}
    wide = {name: t.double() for name, t in options.items()}
    exact = reference(args[0].double(), *args[1:], **wide)
    with always_native():
        close(paged_attention(*args, **options), eager(*args, **options), exact)


@pytest.mark.parametrize("where", ["q", "k_scale", "v_scale"])
def test_nan_beside_int8_caches_reaches_the_rows_that_see_it(where: str) -> None:
    q = torch.randn(2, 16, 64, dtype=torch.bfloat16)
    caches = [torch.randint(-127, 128, (10, 16, 4, 64), dtype=torch.int8) for _ in "kv"]
    scales = {"k_scale": torch.rand(10, 16, 4), "v_scale": torch.rand(10, 16, 4)}
    tables = torch.arange(10, dtype=torch.int32).view(2, 5)
    if where == "q":
        q[0, 5, 3] = math.nan
    else:
        scales[where][2, 7, 1] = math.nan
    with always_native():
        y = paged_attention(q, *caches, tables, torch.tensor([80, 80]), **scales)
    dead = torch.zeros(2, 16, dtype=torch.bool)
    dead[0, 5 if where == "q" else slice(4, 8)] = True
    assert torch.equal(y.isnan().all(-1), dead)
    assert torch.equal(y.isnan().any(-1), dead)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_int8_caches_are_rounded_by_what_writes_them(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    k, v = (torch.randn(20, 2, d, generator=generator).to(dtype) for d in (33, 40))
    k[3] = 0
    caches = [torch.full((4, 8, 2, d), 99, dtype=torch.int8) for d in (33, 40)]
    scales = [torch.full((4, 8, 2), math.nan) for _ in caches]
    slots = torch.randperm(32, generator=generator)[:20]
    reshape_and_cache(k, v, *caches, slots, k_scale=scales[0], v_scale=scales[1])
    for x, cache, scale in zip((k, v), caches, scales, strict=True):
        held, factor = cache.flatten(0, 1)[slots], scale.flatten(0, 1)[slots]
        most = x.float().abs().amax(-1)
        assert torch.equal(factor, most / 127)
        assert ((held.float() * factor[..., None] - x.float()).abs() <= most[..., None] / 253).all()
        others = torch.ones(32, dtype=torch.bool).index_fill(0, slots, False)
        assert (cache.flatten(0, 1)[others] == 99).all()
        assert scale.flatten(0, 1)[others].isnan().all()


def test_minus_one_is_skipped_and_neighbors_in_a_pool_are_not_touched() -> None:
    pool = torch.full((3, 2, 4, 2, 8), 7.0)
    k_cache, v_cache = pool[:, 0], pool[:, 1]
    k, v = torch.randn(2, 3, 2, 8)
    reshape_and_cache(k, v, k_cache, v_cache, torch.tensor([5, -1, 0]))
    assert torch.equal(k_cache[1, 1], k[0])
    assert torch.equal(v_cache[0, 0], v[2])
    assert int((pool != 7).sum()) == 4 * 16


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("bad", [-2, 12, 2**31])
def test_a_slot_that_is_not_there_is_an_error_before_anything_is_written(bad: int, compiled: bool) -> None:
    k_cache, v_cache = torch.zeros(2, 3, 4, 2, 8)
    k, v = torch.randn(2, 3, 2, 8)
    call: Any = torch.compile(reshape_and_cache, backend="eager") if compiled else reshape_and_cache
    with pytest.raises((ValueError, RuntimeError), match="slot_mapping must lie in"):
        call(k, v, k_cache, v_cache, torch.tensor([1, 2, bad]))
    assert not k_cache.any()
    assert not v_cache.any()


@pytest.mark.parametrize("compiled", [False, True])
def test_one_memory_for_keys_and_values_is_refused(compiled: bool) -> None:
    pool = torch.zeros(3, 4, 2, 16)
    call: Any = torch.compile(reshape_and_cache, backend="eager") if compiled else reshape_and_cache
    k, slots = torch.ones(2, 2, 8), torch.tensor([0, 1])
    cache = pool[..., :8]
    for other in (cache, pool[..., :8]):
        with pytest.raises((ValueError, RuntimeError), match=r"share memory|one cache for k and v"):
            call(k, k, cache, other, slots)
    if not compiled:  # in PyTorch's operators, which look closer
        wide = pool.double()
        with pytest.raises(ValueError, match="reshape_and_cache: k_cache and v_cache share memory"):
            call(k.double(), k.double(), wide[..., :8], wide[..., 7:15], slots)
        call(k.double(), k.double(), wide[..., :8], wide[..., 8:], slots)
        assert wide[0, :2].all()
    assert not pool.any()


@pytest.mark.parametrize("bad", [-1, 5])
def test_a_block_that_is_not_there_is_named(bad: int) -> None:
    k_cache, v_cache = torch.zeros(2, 5, 4, 2, 8)
    tables = torch.tensor([[0, 1, 2], [3, bad, 4]])
    q = torch.zeros(2, 2, 8)
    with pytest.raises(ValueError, match=rf"\[0, 5\).*got {bad} for block 1 of sequence 1"):
        paged_attention(q, k_cache, v_cache, tables, torch.tensor([9, 5]))
    assert not paged_attention(q, k_cache, v_cache, tables, torch.tensor([9, 4])).any()


def test_a_length_beyond_the_table_is_named() -> None:
    k_cache, v_cache = torch.zeros(2, 5, 4, 2, 8)
    for bad in (13, -1):
        with pytest.raises(ValueError, match=rf"\[0, 12\].*got {bad} for sequence 1"):
            paged_attention(
                torch.zeros(2, 2, 8),
                k_cache,
                v_cache,
                torch.zeros(2, 3, dtype=torch.int32),
                torch.tensor([9, bad]),
            )


_Q, _K, _T, _N = torch.zeros(2, 4, 8), torch.zeros(5, 4, 2, 8), torch.zeros(2, 3).int(), torch.ones(2).int()
_BYTES, _SCALE = _K.to(torch.int8), torch.ones(5, 4, 2)


@pytest.mark.parametrize(
    ("args", "options", "error", "match"),
    [
        (([1], _K, _K, _T, _N), {}, TypeError, "q must be a tensor"),
        ((_Q[0], _K, _K, _T, _N), {}, ValueError, r"q must have shape \[B, L, H, D\], got \(4, 8\)"),
        (
            (_Q, _K[0], _K, _T, _N),
            {},
            ValueError,
            r"k_cache must have shape \[blocks, block_size, Hkv, 8\] to fit q",
        ),
        (
            (_Q, _K.half(), _K.half(), _T, _N),
            {},
            TypeError,
            "k_cache must be float32 like q or int8, got float16",
        ),
        ((_Q, _K, _K[:4], _T, _N), {}, ValueError, r"v_cache must have shape \[5, 4, 2, Dv\]"),
        ((_Q[..., :4], _K, _K, _T, _N), {}, ValueError, r"k_cache must have shape .* 4\] to fit q"),
        ((_Q[:, :3], _K, _K, _T, _N), {}, ValueError, "3 heads must be a multiple of the 2"),
        ((_Q, _K, _K, _T.float(), _N), {}, TypeError, "block_tables must be int32 or int64"),
        ((_Q, _K, _K, _T[:1], _N), {}, ValueError, "block_tables must have shape"),
        ((_Q, _K, _K, _T, _N[:1]), {}, ValueError, r"seq_lens must have shape \[2\]"),
        ((_Q, _K, _K, _T, None), {}, TypeError, "seq_lens must be a tensor"),
        ((_Q, _K, _K, _T, _N), {"window": 0}, ValueError, "window must be at least 1"),
        ((_Q, _K, _K, _T, _N), {"softcap": -1.0}, ValueError, "softcap must be positive"),
        ((_Q, _K, _K, _T, _N), {"k_scale": _SCALE}, ValueError, "k_scale is for int8 caches"),
        ((_Q, _BYTES, _BYTES, _T, _N), {"k_scale": _SCALE}, TypeError, "int8 caches need v_scale"),
        (
            (_Q, _BYTES, _BYTES, _T, _N),
            {"k_scale": _SCALE, "v_scale": _SCALE[:3]},
            ValueError,
            "v_scale must have shape",
        ),
        (
            (_Q, _BYTES, _BYTES, _T, _N),
            {"k_scale": _SCALE.half(), "v_scale": _SCALE},
            TypeError,
            "k_scale must be float32",
        ),
    ],
)
def test_errors_name_what_came(args: Any, options: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=f"paged_attention: .*{match}"):
        paged_attention(*args, **options)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"k": 1}, TypeError, "k must be a tensor"),
        ({"k": _BYTES[0]}, TypeError, "k must be a floating-point tensor, got int8"),
        ({"v": torch.zeros(4, 2)}, ValueError, r"v must have shape \[4, 2, Dv\] to fit k, got \(4, 2\)"),
        (
            {"v": torch.zeros(3, 2, 8)},
            ValueError,
            r"v must have shape \[4, 2, Dv\] to fit k, got \(3, 2, 8\)",
        ),
        ({"k_cache": torch.zeros(5, 4, 2, 9)}, ValueError, r"k_cache must have shape .* 2, 8\] to fit k"),
        ({"k_cache": _K.double(), "v_cache": _K.double()}, TypeError, "k_cache must be float32 like k"),
        ({"slot_mapping": torch.zeros(3).long()}, ValueError, r"slot_mapping must have shape \[4\]"),
        ({"slot_mapping": torch.zeros(4)}, TypeError, "slot_mapping must be int32 or int64"),
        ({"k_scale": _SCALE}, ValueError, "k_scale is for int8 caches"),
    ],
)
def test_errors_of_what_is_written(change: dict[str, Any], error: Any, match: str) -> None:
    args = {
        "k": torch.zeros(4, 2, 8),
        "v": torch.zeros(4, 2, 8),
        "k_cache": _K.clone(),
        "v_cache": _K.clone(),
    }
    with pytest.raises(error, match=f"reshape_and_cache: .*{match}"):
        reshape_and_cache(**{**args, "slot_mapping": torch.arange(4), **change})


@pytest.mark.skipif(not native_library() or triton.INTERPRETED, reason="C++ kernels are not what runs here")
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("int8", [False, True])
def test_a_layers_step_writes_and_attends_as_the_two_operators_do(tokens: int, int8: bool) -> None:
    generator = torch.Generator().manual_seed(tokens)
    q, k, v = (torch.randn(2, tokens, h, d, generator=generator) for h, d in ((6, 24), (2, 24), (2, 40)))
    shape, dtype = (5, 16, 2), torch.int8 if int8 else torch.float32
    parts = {f"{n}_cache": torch.zeros(*shape, d, dtype=dtype) for n, d in (("k", 24), ("v", 40))}
    parts |= {f"{n}_scale": torch.zeros(shape) for n in "kv" if int8}
    twins = {name: t.clone() for name, t in parts.items()}
    tables, lens = torch.tensor([[3, 1], [0, 4]], dtype=torch.int32), torch.tensor([20, 9], dtype=torch.int32)
    slots = torch.cat([16 + torch.arange(4 - tokens, 4), torch.arange(9 - tokens, 9)])
    sinks, y = torch.randn(6, generator=generator), torch.empty(2, tokens, 6, 40)

    reshape_and_cache(k.flatten(0, 1), v.flatten(0, 1), slot_mapping=slots, **twins)
    wanted = paged_attention(q, block_tables=tables, seq_lens=lens, sinks=sinks, window=11, **twins)
    rows = [t.transpose(1, 2) for t in (q, k, v)]
    step = torch.ops.opsmith.paged_step.default
    given = *rows, slots, tables, lens, sinks, 24**-0.5, 11, 0.0
    step(*given, y=y, **parts)
    torch.testing.assert_close(y, wanted, rtol=0, atol=0)
    for name, t in parts.items():
        assert t.equal(twins[name]), name
    torch.library.opcheck(step, given, {"y": y, **parts})

    before = {name: t.clone() for name, t in parts.items()}
    for wrong in (
        {0: slots + 80},
        {0: slots[1:]},
        {1: tables + 5},
        {2: lens + 99},
        {2: lens[:1]},
        {3: sinks[:5]},
    ):
        other = [wrong.get(i, t) for i, t in enumerate(given[3:7])]
        with pytest.raises(RuntimeError, match="paged_step"):
            step(*rows, *other, *given[7:], y=y, **parts)
    for name, t in parts.items():
        assert t.equal(before[name]), name


def test_gradients_come_from_the_definition() -> None:
    q = torch.randn(2, 4, 8, dtype=torch.float64, requires_grad=True)
    caches = torch.randn(2, 5, 4, 2, 8, dtype=torch.float64)
    tables, lengths = torch.tensor([[0, 1], [2, 3]]), torch.tensor([7, 3])
    assert torch.autograd.gradcheck(lambda q: paged_attention(q, caches[0], caches[1], tables, lengths), (q,))
    y = paged_attention(q.detach().float().requires_grad_(), *caches.float(), tables, lengths)
    assert y.requires_grad


@settings(max_examples=8 if triton.INTERPRETED else 60, deadline=None)
@given(data=st.data())
def test_any_sizes_hold_the_tolerance(data: st.DataObject) -> None:
    draw = data.draw
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    dim, value_dim = draw(st.integers(1, 140)), draw(st.integers(1, 140))
    size, new = draw(st.sampled_from([1, 3, 16, 40])), draw(st.integers(1, 3))
    lengths = draw(st.lists(st.integers(0, 150), min_size=1, max_size=4))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    options = draw(
        st.sampled_from(
            [{}, {"window": 13}, {"softcap": 3.0}, {"scale": -0.1}, {"window": 1, "softcap": 9.0}]
        )
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    most = max(1, -(-max(lengths) // size))
    blocks = len(lengths) * most
    q = torch.randn(len(lengths), new, kv_heads * group, dim, generator=generator).to(dtype)
    k, v = (torch.randn(blocks, size, kv_heads, d, generator=generator).to(dtype) for d in (dim, value_dim))
    tables = torch.randperm(blocks, generator=generator).view(len(lengths), most)
    args = q, k, v, tables, torch.tensor(lengths)
    exact = reference(*(t.double() if t.is_floating_point() else t for t in args), **options)
    with always_native():
        got = paged_attention(*args, **options)
    # Single draws may differ from eager's by chance: its error is taken at the dtype's own scale at least.
    verdict = Tolerance().check(got, eager(*args, **options), exact)
    assert verdict.ok, verdict.why


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads_inside", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True, "window": 700}, {"window": 3, "causal": False}, {"softcap": 4.0}]
)
def test_dense_attention_of_one_query_takes_the_same_kernel(
    dtype: torch.dtype, heads_inside: bool, options: dict[str, Any]
) -> None:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (
        torch.randn(2, n, h, d, generator=generator).to(dtype).transpose(1, 2)
        for n, h, d in ((1, 6, 40), (1500, 3, 40), (1500, 3, 56))
    )
    if not heads_inside:
        k, v = k.contiguous(), v.contiguous()
    exact = attention(*(t.double() for t in (q, k, v)), **options)
    close(attention(q, k, v, **options), ATTENTION.eager(q, k, v, **options), exact)


def test_a_cache_of_empty_blocks_holds_nothing() -> None:
    empty = torch.zeros(2, 0, 2, 8)
    tables = torch.zeros(1, 1, dtype=torch.int32)
    assert not paged_attention(torch.ones(1, 4, 8), empty, empty, tables, torch.tensor([0])).any()


def biased_weights(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, alibi: torch.Tensor, **how: Any
) -> torch.Tensor:
    """One query a head, at the last key, head by head, in float64; q [H, D], k and v [S, Hkv, D]."""
    group, at = q.shape[0] // k.shape[1], torch.arange(k.shape[0])
    found = []
    for h in range(q.shape[0]):
        s = k[:, h // group].double() @ q[h].double() / math.sqrt(q.shape[1])
        s = s + float(alibi[h]) * (at - k.shape[0] + 1)
        if how.get("window"):
            s = s[-how["window"] :]
        p = torch.cat((s, sinks[h : h + 1].double())).softmax(0)[:-1]
        found.append(p @ v[-len(p) :, h // group].double())
    return torch.stack(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(("kv_heads", "dim"), [(1, 32), (2, 64), (4, 128), (8, 24)])
def test_sinks_and_alibi_count_from_each_sequences_own_end(
    kv_heads: int, dim: int, window: int | None, dtype: torch.dtype
) -> None:
    """Pieces of many threads, of one vector lane and of several: a sink counts once."""
    lengths = torch.tensor([700, 3, 161])
    q = torch.randn(3, 8, dim).to(dtype)
    k, v = (torch.randn(3, kv_heads, 700, dim).to(dtype) for _ in range(2))
    k_cache, v_cache, tables = cache_of(k, v, 16)
    sinks, alibi = torch.linspace(-4, 8, 8).to(dtype), torch.linspace(-0.02, 0.3, 8)
    got = paged_attention(q, k_cache, v_cache, tables, lengths, sinks=sinks, alibi=alibi, window=window)
    for b, n in enumerate(lengths.tolist()):
        rows = (t[b, :, :n].transpose(0, 1) for t in (k, v))
        exact = biased_weights(q[b], *rows, sinks, alibi, window=window)
        torch.testing.assert_close(got[b].double(), exact, rtol=0.0, atol=8 * torch.finfo(dtype).eps)


def test_sinks_of_minus_infinity_are_none_and_nan_spoils_its_own_head() -> None:
    q, k, v = torch.randn(2, 8, 32), *(torch.randn(2, 2, 300, 32) for _ in range(2))
    k_cache, v_cache, tables = cache_of(k, v, 16)
    lengths = torch.tensor([300, 70])
    plain = paged_attention(q, k_cache, v_cache, tables, lengths)
    none = paged_attention(q, k_cache, v_cache, tables, lengths, sinks=torch.full((8,), -torch.inf))
    torch.testing.assert_close(none, plain)
    sinks = torch.full((8,), -torch.inf)
    sinks[3], sinks[5] = torch.nan, torch.inf
    y = paged_attention(q, k_cache, v_cache, tables, lengths, sinks=sinks)
    assert y[:, [3, 5]].isnan().all()
    torch.testing.assert_close(y[:, [0, 1, 2, 4, 6, 7]], plain[:, [0, 1, 2, 4, 6, 7]])


@pytest.mark.parametrize("name", ["sinks", "alibi"])
def test_what_is_no_number_for_each_head(name: str) -> None:
    q, k, v = torch.randn(1, 4, 8), *(torch.randn(1, 2, 5, 8) for _ in range(2))
    k_cache, v_cache, tables = cache_of(k, v, 16)
    for wrong, error, message in (
        (torch.randn(2), ValueError, r"must have shape \[4\] to fit q, got \(2,\)"),
        (torch.randn(4).half(), TypeError, "must be float32 like q, got float16; cast it first"),
        (torch.empty(4, device="meta"), ValueError, "is on meta, q on cpu; move one of them"),
    ):
        with pytest.raises(error, match=f"paged_attention: {name} {message}"):
            paged_attention(q, k_cache, v_cache, tables, torch.tensor([5]), **{name: wrong})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scores_of_billions_have_the_weights_that_they_should(dtype: torch.dtype) -> None:
    """As float16 can make them of two rows of 64: their products with log2(e) are rounded by more than 2^127 allows."""
    torch.manual_seed(0)
    q, k = torch.full((1, 4, 3, 64), 3e4, dtype=dtype), torch.full((1, 4, 40, 64), 3e4, dtype=dtype)
    k[:, :, ::3] *= 0.5
    v = torch.randn(1, 4, 40, 64, dtype=dtype)
    right = attention(q.double(), k.double(), v.double())
    blocks = [t[0].transpose(0, 1).reshape(5, 8, 4, 64).contiguous() for t in (k, v)]
    lengths, table = torch.tensor([40]), torch.arange(5)[None]
    with always_native():
        whole, one = attention(q, k, v), paged_attention(q[:, :, 0], *blocks, table, lengths)
    unit = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(whole.double(), right, rtol=0, atol=unit)
    torch.testing.assert_close(one.double(), right[:, :, 0], rtol=0, atol=unit)
