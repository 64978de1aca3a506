"""The kernels of attention's gradients: the weights are made again from what the forward pass kept of each row.

One kernel goes over tiles of keys and sums dk and dv over all queries, one over tiles of queries and sums dq over
all keys. Both make the scores again, which costs less than adding to shared sums would, and gives the same bits
every time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from opsmith.kernels.triton.common import dot, inner, launch, narrow
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
def deltas(
    dout, out, delta, queries, H, g_b, g_h, g_l, y_b, y_h, y_l, DV, BM: tl.constexpr, BDV: tl.constexpr
):  # fmt: skip
    """delta = dout . out of every row.

    In float32 it is the diagonal of a product, added up in the order in which dout . v is: where a row sees one key,
    and out is v, the difference of the two must be zero.
    """
    b = (tl.program_id(1) // H).to(tl.int64)
    h = (tl.program_id(1) % H).to(tl.int64)
    i = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM).to(tl.int64)
    lanes = tl.arange(0, BDV)
    g = load_rows(dout + b * g_b + h * g_h, i, g_l, queries, lanes, DV, False)
    y = load_rows(out + b * y_b + h * y_h, i, y_l, queries, lanes, DV, False)
    if g.dtype == tl.float32:
        total = tl.sum(tl.where(i[:, None] == i[None, :], against(g, y), 0.0), 1)
    else:
        total = tl.sum(g.to(tl.float32) * y.to(tl.float32), 1)
    tl.store(delta + (b * H + h) * queries + i, total, mask=i < queries)


@inner
def _weights(
    s, dp, largest, total, delta, mask, i, j, n, m,
    m_l, m_s,
    scale, window, softcap, alibi, like,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr,
    PLAIN: tl.constexpr,
):  # fmt: skip
    """The weights p and the scores' gradient, before its scale, from the products q.k and dout.v of a tile.

    Rows i, keys j and what is known of the rows are broadcast against each other: the tile may be transposed.
    """
    c = 1.0
    slope = 1.0
    if PLAIN:
        c = scale
    else:
        s *= scale
        if SOFTCAP:
            t = saturate(s / softcap)
            slope = 1.0 - t * t
            s = softcap * t
        if alibi is not None:
            s = biased(s, tl.load(alibi).to(tl.float32), i, j, n, m)
        s = masked(s, mask, i, j, n, m, m_l, m_s, MASK)
    s = tl.where(visible(i, j, n, m, window, CAUSAL, WINDOW), s, float("-inf"))
    base = tl.where(largest == float("-inf"), 0.0, largest)
    inverse = tl.div_rn(tl.where(total == 0.0, 0.0, 1.0), tl.where(total == 0.0, 1.0, total))
    p = weight(s - base, c, like) * inverse
    return p, p * (dp - delta) * slope


@triton.jit
def of_keys(
    dout, q, k, v, mask, sums, delta, dk, dv, q_starts, k_starts, sequences, alibi, queries, keys, H,
    g_b, g_h, g_l, q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l, m_b, m_h, m_l, m_s, s_b, s_h, s_l,
    dk_b, dk_h, dk_l, dv_b, dv_h, dv_l,
    D, DV, scale, window, softcap,
    GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr,
    PLAIN: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    heads = H // GROUP
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = (tl.program_id(1) % heads).to(tl.int64)
    first, q0, n, k0, m = place(
        q_starts, k_starts, sequences, queries, keys, tl.program_id(0), BN, True, q_starts is not None
    )
    if first >= m:
        return
    lanes = tl.arange(0, BD)
    value_lanes = tl.arange(0, BDV)
    j = first + tl.arange(0, BN).to(tl.int64)
    block = load_rows(k + b * k_b + h * k_h + k0 * k_l, j, k_l, m, lanes, D, EVEN)
    values = load_rows(v + b * v_b + h * v_h + k0 * v_l, j, v_l, m, value_lanes, DV, EVEN)
    dk_sum = tl.zeros((BN, BD), tl.float32)
    dv_sum = tl.zeros((BN, BDV), tl.float32)
    # The queries that see a key of this tile stand at positions i + m - n.
    begin = n * 0
    end = n
    if CAUSAL:
        begin = tl.maximum(begin, first - (m - n))
    if WINDOW:
        end = tl.minimum(n, tl.minimum(first + BN, m) - 1 + window - (m - n))
        if not CAUSAL:
            begin = tl.maximum(begin, first - window + 1 - (m - n))
    begin = begin // BM * BM
    for member in range(GROUP):
        head = h * GROUP + member
        rows = q + b * q_b + head * q_h + q0 * q_l
        grads = dout + b * g_b + head * g_h + q0 * g_l
        kept = sums + b * s_b + head * s_h + q0 * s_l
        deltas = delta + (b * H + head) * queries + q0
        shown = mask
        if MASK:
            shown += b * m_b + head * m_h
        slope = alibi
        if alibi is not None:
            slope += head
        for row in range(begin, end, BM):
            i = row + tl.arange(0, BM).to(tl.int64)
            x = load_rows(rows, i, q_l, n, lanes, D, EVEN)
            g = load_rows(grads, i, g_l, n, value_lanes, DV, EVEN)
            p, ds = _weights(
                against(block, x),
                against(values, g),
                tl.load(kept + i * s_l, mask=i < n, other=0.0)[None, :],
                tl.load(kept + i * s_l + 1, mask=i < n, other=0.0)[None, :],
                tl.load(deltas + i, mask=i < n, other=0.0)[None, :],
                shown, i[None, :], j[:, None], n, m, m_l, m_s, scale, window, softcap, slope, x,
                CAUSAL, WINDOW, SOFTCAP, MASK, PLAIN,
            )  # fmt: skip
            dv_sum = dot(narrow(p, g), g, dv_sum)
            dk_sum = dot(narrow(ds, x), x, dk_sum)
    store_rows(dk + b * dk_b + h * dk_h + k0 * dk_l, j, dk_l, m, lanes, D, dk_sum * scale)
    store_rows(dv + b * dv_b + h * dv_h + k0 * dv_l, j, dv_l, m, value_lanes, DV, dv_sum)


@triton.jit
def of_queries(
    dout, q, k, v, mask, sums, delta, weighted, dq, q_starts, k_starts, sequences, alibi, queries, keys, H,
    g_b, g_h, g_l, q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l, m_b, m_h, m_l, m_s, s_b, s_h, s_l,
    dq_b, dq_h, dq_l,
    D, DV, scale, window, softcap,
    GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr,
    PLAIN: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    b = (tl.program_id(1) // H).to(tl.int64)
    h = (tl.program_id(1) % H).to(tl.int64)
    first, q0, n, k0, m = place(
        q_starts, k_starts, sequences, queries, keys, tile, BM, False, q_starts is not None
    )
    if first >= n:
        return
    lanes = tl.arange(0, BD)
    value_lanes = tl.arange(0, BDV)
    k += b * k_b + h // GROUP * k_h + k0 * k_l
    v += b * v_b + h // GROUP * v_h + k0 * v_l
    if MASK:
        mask += b * m_b + h * m_h
    slope = alibi
    if alibi is not None:
        slope += h
    i = first + tl.arange(0, BM).to(tl.int64)
    x = load_rows(q + b * q_b + h * q_h + q0 * q_l, i, q_l, n, lanes, D, EVEN)
    g = load_rows(dout + b * g_b + h * g_h + q0 * g_l, i, g_l, n, value_lanes, DV, EVEN)
    kept = sums + b * s_b + h * s_h + (q0 + i) * s_l
    largest = tl.load(kept, mask=i < n, other=0.0)[:, None]
    total = tl.load(kept + 1, mask=i < n, other=0.0)[:, None]
    row_delta = tl.load(delta + (b * H + h) * queries + q0 + i, mask=i < n, other=0.0)[:, None]
    dq_sum = tl.zeros((BM, BD), tl.float32)
    row_weighted = tl.zeros((BM,), tl.float32)
    begin, end = key_range(first, n, m, window, BM, CAUSAL, WINDOW)
    for key in range(begin // BN * BN, end, BN):
        j = key + tl.arange(0, BN).to(tl.int64)
        block = load_rows(k, j, k_l, m, lanes, D, EVEN)
        values = load_rows(v, j, v_l, m, value_lanes, DV, EVEN)
        dp = against(g, values)
        p, ds = _weights(
            against(x, block), dp, largest, total, row_delta,
            mask, i[:, None], j[None, :], n, m, m_l, m_s, scale, window, softcap, slope, x,
            CAUSAL, WINDOW, SOFTCAP, MASK, PLAIN,
        )  # fmt: skip
        dq_sum = dot(narrow(ds, block), block, dq_sum)
        if weighted is not None:
            row_weighted += tl.sum(p * dp, 1)
    if weighted is not None:  # delta, but not of a rounded out
        tl.store(weighted + (b * H + h) * queries + q0 + i, row_weighted, mask=i < n)
    store_rows(dq + b * dq_b + h * dq_h + q0 * dq_l, i, dq_l, n, lanes, D, dq_sum * scale)


def _of_sinks(sinks: Tensor, sums: Tensor, weighted: Tensor, scale: float, dsinks: Tensor) -> None:
    """Each row's sink loses what its weight takes from the others; it has no value of its own."""
    largest, total = sums.unbind(-1)  # [B, H, L], the largest as scores are before `scale`
    share = torch.exp(sinks.double()[:, None] - largest.double() * scale) / total
    share = share.where(total != 0, 0.0)  # a row with neither key nor sink
    dsinks.copy_(-(share * weighted).sum((0, 2)))


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    row_sums: Tensor,
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
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dsinks: Tensor | None = None,
) -> None:
    sequences = Sequences(cu_seqlens_q, cu_seqlens_k)
    dout, q, k, v, out, row_sums = map(sequences.dense, (dout, q, k, v, out, row_sums))
    dq, dk, dv = map(sequences.dense, (dq, dk, dv))
    batch, heads, queries, dim = q.shape
    kv_heads, keys, value_dim = v.shape[1:]
    if not heads or not queries:
        for made in (dk, dv, dsinks):
            if made is not None:
                made.zero_()
        return
    special = options(q, v, mask, alibi, scale, causal, window, softcap)
    sizes = blocks(q, v, backward=True)
    delta = torch.empty((batch, heads, queries), dtype=torch.float32, device=q.device)
    rows = 16 if q.dtype == torch.float32 else sizes["BM"]  # of a product whose diagonal alone is wanted
    launch(
        deltas,
        (triton.cdiv(queries, rows), batch * heads),
        *(dout, out, delta, queries, heads, *strides(dout, out), value_dim),
        BM=rows,
        BDV=special["BDV"],
    )
    memory, mask_strides = mask_arguments(mask, q, k)
    inputs = (dout, q, k, v, memory, row_sums, delta)
    # What the sinks are given: in float32 from out in wider sums, else not from an out that is rounded.
    precise = q.dtype == torch.float32
    weighted = None if dsinks is None or precise else torch.zeros_like(delta)
    shape = (*sequences.arguments, alibi, queries, keys, heads)
    steps = (*strides(dout, q, k, v), *mask_strides, *strides(row_sums))
    numbers = (dim, value_dim, scale, window, softcap)
    special |= {"GROUP": heads // kv_heads, **sizes}
    launch(
        of_keys,
        (sequences.tiles(keys, sizes["BN"]), batch * kv_heads),
        *inputs, dk, dv, *shape, *steps, *strides(dk, dv), *numbers, **special,
    )  # fmt: skip
    launch(
        of_queries,
        (sequences.tiles(queries, sizes["BM"]), batch * heads),
        *inputs, weighted, dq, *shape, *steps, *strides(dq), *numbers, **special,
    )  # fmt: skip
    if dsinks is not None and sinks is not None:
        given = (dout.double() * out.double()).sum(-1) if weighted is None else weighted
        _of_sinks(sinks, row_sums, given, scale if special["PLAIN"] else 1.0, dsinks)


KERNELS = {"attention_backward": attention_backward}
