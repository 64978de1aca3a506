"""Decoding on caches in blocks: a program takes a piece of the keys of one key head, for all its rows; another merges.

And what fills the blocks, after a look at all slots: one out of range and nothing is written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from opsmith.kernels.triton import INTERPRETED
from opsmith.kernels.triton.common import (
    check,
    dot,
    exponential,
    flag,
    integers_like,
    launch,
    narrow,
    processors,
    rounded,
)
from opsmith.ops.attention.triton.scores import against, saturate, weight
from opsmith.ops.rope.triton import integers, sizes

_LEAST = tl.constexpr(1e-30)


@triton.jit
def _pieces(
    q, k, v, table, lengths, k_scale, v_scale, alibi, parts, kept, blocks, size, most, queries, rows, pieces,
    q_b, q_l, q_h, k_b, k_s, k_h, v_b, v_s, v_h, t_b, t_i, n_b, ks_b, ks_s, ks_h, vs_b, vs_s, vs_h,
    D, DV, scale, window, softcap,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1).to(tl.int64)
    piece = tl.program_id(2)
    # Lengths on a GPU are not validated, so they are held to the table here.
    n = tl.minimum(tl.maximum(tl.load(lengths + b * n_b).to(tl.int64), 0), most)
    begin = n * 0
    if WINDOW:
        begin = tl.maximum(begin, n - queries - window + 1)
    share = ((n - begin + pieces - 1) // pieces + BN - 1) // BN * BN
    begin += piece * share
    end = tl.minimum(n, begin + share)
    i = tl.arange(0, BM)
    d = tl.arange(0, BD)
    dv = tl.arange(0, BDV)
    group = rows // queries
    here = (n - queries + i % queries)[:, None]
    mine = (i < rows)[:, None]
    at = (i % queries) * q_l + (h * group + i // queries) * q_h
    x = tl.load(q + b * q_b + at[:, None] + d[None, :], mask=mine & (d < D)[None, :], other=0.0)
    slope = tl.zeros((BM,), tl.float32)[:, None]
    if alibi is not None:
        slope = tl.load(alibi + h * group + i // queries, mask=i < rows, other=0.0).to(tl.float32)[:, None]
    acc = tl.zeros((BM, BDV), tl.float32)
    largest = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    for first in range(begin, end, BN):
        j = first + tl.arange(0, BN)
        block = tl.load(table + b * t_b + j // size * t_i, mask=j < end, other=-1).to(tl.int64)
        there = (block >= 0) & (block < blocks)
        slot = j % size
        rows_k = k + block * k_b + slot * k_s + h * k_h
        rows_v = v + block * v_b + slot * v_s + h * v_h
        keys = tl.load(rows_k[:, None] + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0)
        values = tl.load(rows_v[:, None] + dv[None, :], mask=there[:, None] & (dv < DV)[None, :], other=0)
        if k_scale is not None:
            keys = integers_like(keys, x)
            values = integers_like(values, x)
        s = against(x, keys) * scale
        if k_scale is not None:
            s *= tl.load(k_scale + block * ks_b + slot * ks_s + h * ks_h, mask=there, other=0.0)[None, :]
        if SOFTCAP:
            s = softcap * saturate(s / softcap)
        if alibi is not None:
            s += slope * (j[None, :] - here).to(tl.float32)
        seen = (j < end)[None, :] & (j[None, :] <= here)
        if WINDOW:
            seen &= here - j[None, :] < window
        s = tl.where(seen, s, float("-inf"))
        grown = tl.maximum(largest, tl.max(s, 1))
        base = tl.where(grown == float("-inf"), 0.0, grown)
        shrink = weight(largest - base, 1.0, x)
        p = weight(s - base[:, None], 1.0, x)
        total = total * shrink + tl.sum(p, 1)
        if k_scale is not None:
            p *= tl.load(v_scale + block * vs_b + slot * vs_s + h * vs_h, mask=there, other=0.0)[None, :]
        acc = acc * shrink[:, None] + dot(narrow(p, x), values)
        largest = grown
    row = ((b * tl.num_programs(1) + h) * pieces + piece) * rows + i
    tl.store(parts + row[:, None] * DV + dv[None, :], acc, mask=mine & (dv < DV)[None, :])
    tl.store(kept + row * 2, largest, mask=i < rows)
    tl.store(kept + row * 2 + 1, total, mask=i < rows)


@triton.jit
def _merge(
    parts, kept, sinks, y, queries, rows, pieces, y_b, y_l, y_h, DV, PIECES: tl.constexpr, BDV: tl.constexpr
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1).to(tl.int64)
    i = tl.program_id(2)
    dv = tl.arange(0, BDV)
    piece = tl.arange(0, PIECES)
    row = ((b * tl.num_programs(1) + h) * pieces + piece) * rows + i
    largest = tl.load(kept + row * 2, mask=piece < pieces, other=float("-inf"))
    most = tl.max(largest, 0)
    head = h * (rows // queries) + i // queries
    sink = float("-inf")
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32)
        most = tl.maximum(most, sink)
    factor = exponential(largest - tl.where(most == float("-inf"), 0.0, most))
    total = tl.sum(factor * tl.load(kept + row * 2 + 1, mask=piece < pieces, other=0.0), 0)
    if sinks is not None:  # a key more, without a value
        total += tl.where(sink == float("-inf"), 0.0, exponential(sink - most))
    there = (piece < pieces)[:, None] & (dv < DV)[None, :]
    acc = tl.load(parts + row[:, None] * DV + dv[None, :], mask=there, other=0.0)
    value = tl.sum(acc * factor[:, None], 0)
    value = tl.div_rn(value, tl.where(total == 0.0, 1.0, total))
    to = y + b * y_b + i % queries * y_l + head * y_h
    tl.store(to + dv, rounded(value, y), mask=dv < DV)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    sinks: Tensor | None,
    alibi: Tensor | None,
    scale: float | None,
    window: int,
    softcap: float,
    *,
    y: Tensor,
) -> None:
    if q.dim() == 3:
        q, y = q.unsqueeze(1), y.unsqueeze(1)
    batch, queries, heads, dim = q.shape
    blocks, size, kv_heads, _ = k_cache.shape
    value_dim = v_cache.shape[3]
    if not y.numel() or not kv_heads:
        return
    rows, most = heads // kv_heads * queries, block_tables.shape[1] * size
    wide, wide_values = (max(triton.next_power_of_2(n), 16) for n in (dim, value_dim))
    keys = 128 if INTERPRETED else 32 if q.dtype == torch.float32 or wide > 128 else 64
    # Enough programs for all processors, and pieces worth a program of their own.
    pieces = max(1, min(-(-4 * processors(q) // (batch * kv_heads)), most // keys, 2 if INTERPRETED else 64))
    parts = torch.empty(batch * kv_heads * pieces * rows * value_dim, dtype=torch.float32, device=q.device)
    kept = torch.empty(batch * kv_heads * pieces * rows * 2, dtype=torch.float32, device=q.device)
    steps = [s for t in (k_scale, v_scale) for s in ((0, 0, 0) if t is None else t.stride())]
    launch(
        _pieces,
        (batch, kv_heads, pieces),
        *(q, k_cache, v_cache, block_tables, seq_lens, k_scale, v_scale, alibi, parts, kept),
        *(blocks, max(size, 1), most, queries, rows, pieces),
        *(*q.stride()[:3], *k_cache.stride()[:3], *v_cache.stride()[:3]),
        *(*block_tables.stride(), seq_lens.stride(0), *steps),
        *(dim, value_dim, max(dim, 1) ** -0.5 if scale is None else scale, window, softcap),
        BM=max(triton.next_power_of_2(rows), 16),
        BN=keys,
        BD=wide,
        BDV=wide_values,
        WINDOW=window > 0,
        SOFTCAP=softcap > 0,
        num_warps=8 if q.dtype == torch.float32 else 4,  # whose four sums would not fit into fewer registers
        num_stages=2,
    )
    launch(
        _merge,
        (batch, kv_heads, rows),
        *(parts, kept, sinks, y, queries, rows, pieces, *y.stride()[:3], value_dim),
        PIECES=max(triton.next_power_of_2(pieces), 2),
        BDV=wide_values,
        num_warps=4,
    )


@triton.jit
def _look(slots, bad, tokens, end, step, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + at * step, mask=at < tokens, other=-1).to(tl.int64)
    wrong = tl.where((slot < -1) | (slot >= end), at, tokens)
    tl.atomic_min(bad, tl.min(wrong, 0))


@triton.jit
def _write(
    x, slots, bad, cache, scale, tokens, size, step,
    x_t, x_h, c_b, c_s, c_h, s_b, s_s, s_h,
    D,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + token * step).to(tl.int64)
    keep = tl.where(tl.load(bad) >= tokens, slot, -1) >= 0
    block, place = slot // size, slot % size
    d = tl.arange(0, BLOCK)
    value = tl.load(x + token * x_t + h * x_h + d, mask=d < D, other=0.0)
    to = cache + block * c_b + place * c_s + h * c_h + d
    if scale is not None:
        value = value.to(tl.float32)
        most = tl.max(sizes(value, d < D), 0)
        inverse = tl.where(most > _LEAST, tl.div_rn(tl.full((), 127.0, tl.float32), most), 0.0)
        tl.store(to, integers(value * inverse), mask=d < tl.where(keep, D, 0))
        tl.store(scale + block * s_b + place * s_s + h * s_h, tl.div_rn(most, 127.0), mask=keep)
    else:
        tl.store(to, value, mask=d < tl.where(keep, D, 0))


def reshape_and_cache(
    k: Tensor,
    v: Tensor,
    slot_mapping: Tensor,
    *,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    tokens, heads = k.shape[:2]
    blocks, size = k_cache.shape[:2]
    bad, step = flag(slot_mapping), slot_mapping.stride(0)
    given = (slot_mapping, bad, tokens, blocks * size, step)
    launch(_look, (triton.cdiv(tokens, 256),), *given, BLOCK=256, num_warps=4)
    for x, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        launch(
            _write,
            (tokens, heads),
            *(x, slot_mapping, bad, cache, scale, tokens, max(size, 1), step),
            *(*x.stride()[:2], *cache.stride()[:3]),
            *(*((0, 0, 0) if scale is None else scale.stride()), x.shape[2]),
            BLOCK=max(triton.next_power_of_2(x.shape[2]), 16),
            num_warps=1,
            enable_fp_fusion=False,
        )
    check(bad, "reshape_and_cache", slot_mapping, blocks * size, "slot_mapping")


KERNELS = {"paged_attention": paged_attention, "reshape_and_cache": reshape_and_cache}
