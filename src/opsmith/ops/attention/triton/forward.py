"""Attention, dense and over packed sequences: a program a tile of queries, which meets one tile of keys after another.

The tiles are `scores.py`, the backward pass `gradients.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from opsmith.kernels.triton.common import dot, launch, narrow
from opsmith.ops.attention.triton.scores import (
    Sequences,
    against,
    biased,
    blocks,
    key_range,
    load_rows,
    mask_arguments,
    masked,
    options,
    place,
    saturate,
    store_rows,
    strides,
    visible,
    weight,
)


@triton.jit
def _forward(
    q, k, v, mask, y, sums, q_starts, k_starts, sequences, sinks, alibi, queries, keys, H,
    q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l, m_b, m_h, m_l, m_s, y_b, y_h, y_l, s_b, s_h, s_l,
    D, DV, scale, window, softcap,
    GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr,
    PLAIN: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    # The last tiles first: under the causal rule they are the longest.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    b = (tl.program_id(1) // H).to(tl.int64)
    h = (tl.program_id(1) % H).to(tl.int64)
    first, q0, n, k0, m = place(
        q_starts, k_starts, sequences, queries, keys, tile, BM, False, q_starts is not None
    )
    if first >= n:
        return
    k += b * k_b + h // GROUP * k_h + k0 * k_l
    v += b * v_b + h // GROUP * v_h + k0 * v_l
    if MASK:
        mask += b * m_b + h * m_h
    i = first + tl.arange(0, BM).to(tl.int64)
    lanes = tl.arange(0, BD)
    value_lanes = tl.arange(0, BDV)
    block = load_rows(q + b * q_b + h * q_h + q0 * q_l, i, q_l, n, lanes, D, EVEN)
    acc = tl.zeros((BM, BDV), tl.float32)
    largest = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    if alibi is not None:
        slope = tl.load(alibi + h).to(tl.float32)
    begin, end = key_range(first, n, m, window, BM, CAUSAL, WINDOW)
    begin = begin // BN * BN
    # In the middle every query of the tile sees every key: no comparison is needed there.
    whole = begin
    if WINDOW:
        here = tl.minimum(first + BM, n) - 1 + (m - n)
        whole = tl.maximum(begin, (tl.maximum(here - window + 1, 0) + BN - 1) // BN * BN)
    until = m
    if CAUSAL:
        until = tl.minimum(m, first + (m - n) + 1)
    elif WINDOW:
        until = tl.minimum(m, first + (m - n) + window)
    until = tl.maximum(until, 0) // BN * BN
    whole = tl.minimum(whole, (tl.maximum(end, begin) + BN - 1) // BN * BN)
    until = tl.maximum(until, whole)
    # Three stretches of keys; without a window there is none before those that all queries see.
    for stretch in tl.static_range(0 if WINDOW else 1, 3):
        low = begin
        high = tl.minimum(whole, end)
        if stretch == 1:
            low = whole
            high = tl.minimum(until, end)
        if stretch == 2:
            low = until
            high = end
        for key in range(low, high, BN):
            j = key + tl.arange(0, BN).to(tl.int64)
            s = against(block, load_rows(k, j, k_l, m, lanes, D, EVEN))
            c = 1.0
            if PLAIN:  # the scale is part of the exponent
                c = scale
            else:
                s *= scale
                if SOFTCAP:
                    s = softcap * saturate(s / softcap)
                if alibi is not None:
                    s = biased(s, slope, i[:, None], j[None, :], n, m)
                s = masked(s, mask, i[:, None], j[None, :], n, m, m_l, m_s, MASK)
            if stretch != 1:
                seen = visible(i[:, None], j[None, :], n, m, window, CAUSAL, WINDOW)
                s = tl.where(seen, s, float("-inf"))
            # A NaN among the scores must come out as one, and `max` may drop it: the weights keep it.
            grown = tl.maximum(largest, tl.max(s, 1))
            base = tl.where(grown == float("-inf"), 0.0, grown)
            p = weight(s - base[:, None], c, block)
            shrink = weight(largest - base, c, block)
            total = total * shrink + tl.sum(p, 1)
            values = load_rows(v, j, v_l, m, value_lanes, DV, EVEN)
            acc = dot(narrow(p, values), values, acc * shrink[:, None])
            largest = grown
    # A key without a value, the last one: until here exponents count from the scores' largest.
    if sinks is not None:
        sink = tl.load(sinks + h).to(tl.float32)
        c = 1.0
        if PLAIN:
            c = scale
            sink /= scale
        grown = tl.maximum(largest, sink)
        base = tl.where(grown == float("-inf"), 0.0, grown)
        shrink = weight(largest - base, c, block)
        total = total * shrink + weight(sink - base, c, block)
        acc *= shrink[:, None]
        largest = grown
    acc = tl.where((total == 0.0)[:, None], 0.0, tl.div_rn(acc, tl.where(total == 0.0, 1.0, total)[:, None]))
    store_rows(y + b * y_b + h * y_h + q0 * y_l, i, y_l, n, value_lanes, DV, acc)
    if sums is not None:
        kept = sums + b * s_b + h * s_h + (q0 + i) * s_l
        tl.store(kept, largest, mask=i < n)
        tl.store(kept + 1, total, mask=i < n)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    sinks: Tensor | None,
    alibi: Tensor | None,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
    *,
    y: Tensor,
    row_sums: Tensor | None = None,
) -> None:
    sequences = Sequences(cu_seqlens_q, cu_seqlens_k)
    q, k, v, y, row_sums = map(sequences.dense, (q, k, v, y, row_sums))
    batch, heads, queries, dim = q.shape
    if not heads:
        return
    sizes = blocks(q, v, backward=False)
    memory, mask_strides = mask_arguments(mask, q, k)
    launch(
        _forward,
        (sequences.tiles(queries, sizes["BM"]), batch * heads),
        *(q, k, v, memory, y, row_sums, *sequences.arguments, sinks, alibi),
        *(queries, k.shape[2], heads),
        *(*strides(q, k, v), *mask_strides, *strides(y, row_sums)),
        *(dim, v.shape[3], scale, window, softcap),
        GROUP=heads // max(k.shape[1], 1),
        **options(q, v, mask, alibi, scale, causal, window, softcap),
        **sizes,
    )


KERNELS = {"attention": attention}
