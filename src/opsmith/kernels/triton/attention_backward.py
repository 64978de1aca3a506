"""Gradients of attention: the weights are made again from what the forward pass kept of each row.

One kernel goes over tiles of keys and sums dk and dv over all queries, one over tiles of queries and sums dq over
all keys. Both make the scores again, which costs less than adding to shared sums would, and gives the same bits
every time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from opsmith.kernels.triton.attention import (
    LOG2E,
    blocks,
    key_range,
    load_rows,
    mask_arguments,
    masked,
    options,
    packed,
    place,
    saturate,
    store_rows,
    strides,
    visible,
)
from opsmith.kernels.triton.common import dot, inner, launch, narrow


@triton.jit
def _deltas(
    dout, out, delta, queries, H, g_b, g_h, g_l, y_b, y_h, y_l, DV, BM: tl.constexpr, BDV: tl.constexpr
):  # fmt: skip
    """delta = dout . out of every row."""
    b = (tl.program_id(1) // H).to(tl.int64)
    h = (tl.program_id(1) % H).to(tl.int64)
    i = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM).to(tl.int64)
    lanes = tl.arange(0, BDV)
    g = load_rows(dout + b * g_b + h * g_h, i, g_l, queries, lanes, DV, False).to(tl.float32)
    y = load_rows(out + b * y_b + h * y_h, i, y_l, queries, lanes, DV, False).to(tl.float32)
    tl.store(delta + (b * H + h) * queries + i, tl.sum(g * y, 1), mask=i < queries)


@inner
def _weights(
    s,
    dp,
    largest,
    total,
    delta,
    mask,
    i,
    j,
    n,
    m,
    m_l,
    m_s,
    scale,
    window,
    softcap,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASK: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """The weights p and the scores' gradient, before its scale, from the products q.k and dout.v of a tile.

    Rows i, keys j and what is known of the rows are broadcast against each other: the tile may be transposed.
    """
    c = LOG2E
    slope = 1.0
    if PLAIN:
        c = scale * LOG2E
    else:
        s *= scale
        if SOFTCAP:
            t = saturate(s / softcap)
            slope = 1.0 - t * t
            s = softcap * t
        s = masked(s, mask, i, j, n, m, m_l, m_s, MASK)
    s = tl.where(visible(i, j, n, m, window, CAUSAL, WINDOW), s, float("-inf"))
    base = tl.where(largest == float("-inf"), 0.0, largest)
    p = tl.exp2((s - base) * c) * tl.where(total == 0.0, 0.0, 1.0 / tl.where(total == 0.0, 1.0, total))
    return p, p * (dp - delta) * slope


@triton.jit
def _of_keys(
    dout,
    q,
    k,
    v,
    mask,
    sums,
    delta,
    dk,
    dv,
    q_starts,
    k_starts,
    sequences,
    queries,
    keys,
    H,
    g_b,
    g_h,
    g_l,
    q_b,
    q_h,
    q_l,
    k_b,
    k_h,
    k_l,
    v_b,
    v_h,
    v_l,
    m_b,
    m_h,
    m_l,
    m_s,
    s_b,
    s_h,
    s_l,
    dk_b,
    dk_h,
    dk_l,
    dv_b,
    dv_h,
    dv_l,
    D,
    DV,
    scale,
    window,
    softcap,
    GROUP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASK: tl.constexpr,
    PLAIN: tl.constexpr,
    EVEN: tl.constexpr,
    VARLEN: tl.constexpr,
):
    heads = H // GROUP
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = (tl.program_id(1) % heads).to(tl.int64)
    first, q0, n, k0, m = place(
        q_starts, k_starts, sequences, queries, keys, tl.program_id(0), BN, True, VARLEN
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
        for row in range(begin, end, BM):
            i = row + tl.arange(0, BM).to(tl.int64)
            x = load_rows(rows, i, q_l, n, lanes, D, EVEN)
            g = load_rows(grads, i, g_l, n, value_lanes, DV, EVEN)
            p, ds = _weights(
                dot(block, tl.trans(x)),
                dot(values, tl.trans(g)),
                tl.load(kept + i * s_l, mask=i < n, other=0.0)[None, :],
                tl.load(kept + i * s_l + 1, mask=i < n, other=0.0)[None, :],
                tl.load(deltas + i, mask=i < n, other=0.0)[None, :],
                shown, i[None, :], j[:, None], n, m, m_l, m_s, scale, window, softcap,
                CAUSAL, WINDOW, SOFTCAP, MASK, PLAIN,
            )  # fmt: skip
            dv_sum = dot(narrow(p, g), g, dv_sum)
            dk_sum = dot(narrow(ds, x), x, dk_sum)
    store_rows(dk + b * dk_b + h * dk_h + k0 * dk_l, j, dk_l, m, lanes, D, dk_sum * scale)
    store_rows(dv + b * dv_b + h * dv_h + k0 * dv_l, j, dv_l, m, value_lanes, DV, dv_sum)


@triton.jit
def _of_queries(
    dout,
    q,
    k,
    v,
    mask,
    sums,
    delta,
    dq,
    q_starts,
    k_starts,
    sequences,
    queries,
    keys,
    H,
    g_b,
    g_h,
    g_l,
    q_b,
    q_h,
    q_l,
    k_b,
    k_h,
    k_l,
    v_b,
    v_h,
    v_l,
    m_b,
    m_h,
    m_l,
    m_s,
    s_b,
    s_h,
    s_l,
    dq_b,
    dq_h,
    dq_l,
    D,
    DV,
    scale,
    window,
    softcap,
    GROUP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASK: tl.constexpr,
    PLAIN: tl.constexpr,
    EVEN: tl.constexpr,
    VARLEN: tl.constexpr,
):
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    b = (tl.program_id(1) // H).to(tl.int64)
    h = (tl.program_id(1) % H).to(tl.int64)
    first, q0, n, k0, m = place(q_starts, k_starts, sequences, queries, keys, tile, BM, False, VARLEN)
    if first >= n:
        return
    lanes = tl.arange(0, BD)
    value_lanes = tl.arange(0, BDV)
    k += b * k_b + h // GROUP * k_h + k0 * k_l
    v += b * v_b + h // GROUP * v_h + k0 * v_l
    if MASK:
        mask += b * m_b + h * m_h
    i = first + tl.arange(0, BM).to(tl.int64)
    x = load_rows(q + b * q_b + h * q_h + q0 * q_l, i, q_l, n, lanes, D, EVEN)
    g = load_rows(dout + b * g_b + h * g_h + q0 * g_l, i, g_l, n, value_lanes, DV, EVEN)
    kept = sums + b * s_b + h * s_h + (q0 + i) * s_l
    largest = tl.load(kept, mask=i < n, other=0.0)[:, None]
    total = tl.load(kept + 1, mask=i < n, other=0.0)[:, None]
    row_delta = tl.load(delta + (b * H + h) * queries + q0 + i, mask=i < n, other=0.0)[:, None]
    dq_sum = tl.zeros((BM, BD), tl.float32)
    begin, end = key_range(first, n, m, window, BM, CAUSAL, WINDOW)
    for key in range(begin // BN * BN, end, BN):
        j = key + tl.arange(0, BN).to(tl.int64)
        block = load_rows(k, j, k_l, m, lanes, D, EVEN)
        values = load_rows(v, j, v_l, m, value_lanes, DV, EVEN)
        _, ds = _weights(
            dot(x, tl.trans(block)), dot(g, tl.trans(values)), largest, total, row_delta,
            mask, i[:, None], j[None, :], n, m, m_l, m_s, scale, window, softcap,
            CAUSAL, WINDOW, SOFTCAP, MASK, PLAIN,
        )  # fmt: skip
        dq_sum = dot(narrow(ds, block), block, dq_sum)
    store_rows(dq + b * dq_b + h * dq_h + q0 * dq_l, i, dq_l, n, lanes, D, dq_sum * scale)


def _run(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    mask: torch.Tensor | None,
    starts: tuple[torch.Tensor, torch.Tensor] | None,
    settings: tuple[float, bool, int, float],
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
) -> None:
    scale, _, window, softcap = settings
    batch, heads, queries, dim = q.shape
    kv_heads, keys, value_dim = v.shape[1:]
    if not heads or not queries:
        dk.zero_()
        dv.zero_()
        return
    special = options(q, v, mask, *settings)
    sizes = blocks(q, v, backward=True)
    delta = torch.empty((batch, heads, queries), dtype=torch.float32, device=q.device)
    launch(
        _deltas,
        (triton.cdiv(queries, sizes["BM"]), batch * heads),
        dout,
        out,
        delta,
        queries,
        heads,
        *strides(dout, out),
        value_dim,
        BM=sizes["BM"],
        BDV=special["BDV"],
    )
    sequences = 0 if starts is None else starts[0].numel() - 1
    memory, mask_strides = mask_arguments(mask)

    def grid(length: int, block: int, programs: int) -> tuple[int, int]:
        tiles = triton.cdiv(length, block) if starts is None else length // block + sequences
        return tiles if length else 0, programs

    inputs = (dout, q, k, v, memory, sums, delta)
    shape = (*(starts or (None, None)), sequences, queries, keys, heads)
    steps = (*strides(dout, q, k, v), *mask_strides, *strides(sums))
    numbers = (dim, value_dim, scale, window, softcap)
    special |= {"GROUP": heads // kv_heads, "VARLEN": starts is not None, **sizes}
    launch(
        _of_keys,
        grid(keys, sizes["BN"], batch * kv_heads),
        *inputs, dk, dv, *shape, *steps, *strides(dk, dv), *numbers, **special,
    )  # fmt: skip
    launch(
        _of_queries,
        grid(queries, sizes["BM"], batch * heads),
        *inputs, dq, *shape, *steps, *strides(dq), *numbers, **special,
    )  # fmt: skip


def attention_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    row_sums: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
    *,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
) -> None:
    settings = (scale, causal, window, softcap)
    _run(dout, q, k, v, out, row_sums, mask, None, settings, dq, dk, dv)


def attention_varlen_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    row_sums: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
    *,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
) -> None:
    starts = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
    _run(
        packed(dout),
        packed(q),
        packed(k),
        packed(v),
        packed(out),
        packed(row_sums),
        None,
        starts,
        (scale, causal, window, softcap),
        packed(dq),
        packed(dk),
        packed(dv),
    )


KERNELS = {
    "attention_backward": attention_backward,
    "attention_varlen_backward": attention_varlen_backward,
}
