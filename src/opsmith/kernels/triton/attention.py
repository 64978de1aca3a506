"""Attention, dense and over packed sequences: a program a tile of queries, which meets one tile of keys after another.

Packed sequences are one long row of tokens, [1, H, T, D]; a program finds the sequence of its tile by bisection, so
nothing waits for the lengths to come back from the device. The backward pass is `attention_backward.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from opsmith.kernels.triton import INTERPRETED
from opsmith.kernels.triton.common import dot, inner, launch, narrow, rounded

LOG2E = tl.constexpr(1.4426950408889634)


@inner
def place(
    q_starts,
    k_starts,
    sequences,
    queries,
    keys,
    tile,
    BLOCK: tl.constexpr,
    OF_KEYS: tl.constexpr,
    VARLEN: tl.constexpr,
):
    """Of the sequence a tile lies in: the tile's first row, where queries and keys begin, and how many they are."""
    first = tile.to(tl.int64) * BLOCK
    q0 = tl.full((), 0, tl.int64)
    k0 = tl.full((), 0, tl.int64)
    n = q0 + queries
    m = k0 + keys
    if VARLEN:
        # Sequence i owns the tiles from starts[i] // BLOCK + i on: enough for it, whatever its length.
        starts = k_starts if OF_KEYS else q_starts
        low = 0
        high = sequences
        while high - low > 1:
            middle = (low + high) // 2
            below = tl.load(starts + middle) // BLOCK + middle <= tile
            low = tl.where(below, middle, low)
            high = tl.where(below, high, middle)
        # Offsets on a GPU are not validated, so they are held to the tensors here.
        q0 = tl.minimum(tl.maximum(tl.load(q_starts + low).to(tl.int64), 0), queries)
        k0 = tl.minimum(tl.maximum(tl.load(k_starts + low).to(tl.int64), 0), keys)
        n = tl.minimum(tl.maximum(tl.load(q_starts + low + 1).to(tl.int64), q0), queries) - q0
        m = tl.minimum(tl.maximum(tl.load(k_starts + low + 1).to(tl.int64), k0), keys) - k0
        first = (tile - tl.load(starts + low) // BLOCK - low).to(tl.int64) * BLOCK
    return first, q0, n, k0, m


@inner
def load_rows(x, at, stride, limit, lanes, width, EVEN: tl.constexpr):
    """Rows `at` of a matrix, zeros from row `limit` and column `width` on."""
    p = x + at[:, None] * stride + lanes[None, :]
    if EVEN:
        return tl.load(p, mask=(at < limit)[:, None], other=0.0)
    return tl.load(p, mask=(at < limit)[:, None] & (lanes < width)[None, :], other=0.0)


@inner
def store_rows(x, at, stride, limit, lanes, width, value):
    p = x + at[:, None] * stride + lanes[None, :]
    tl.store(p, rounded(value, x), mask=(at < limit)[:, None] & (lanes < width)[None, :])


@inner
def saturate(x):
    """tanh, exact to an ulp or so near zero too: a softcap multiplies its error."""
    x2 = x * x
    p = x2 * -8.8632355e-3 + 2.1869488e-2
    p = p * x2 - 5.3968254e-2
    p = p * x2 + 1.3333333e-1
    p = p * x2 - 3.3333333e-1
    near = x + x * x2 * p
    far = 1.0 - 2.0 / (tl.exp2(tl.minimum(tl.abs(x), 20.0) * (2.0 * LOG2E)) + 1.0)
    return tl.where(tl.abs(x) < 0.35, near, tl.where(x < 0, -far, far))


@inner
def visible(i, j, n, m, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Whether query i of n sees key j of m: both broadcast against each other."""
    seen = (i < n) & (j < m)
    if CAUSAL:
        seen &= j <= i + (m - n)
    if WINDOW:
        seen &= i + (m - n) - j < window
        if not CAUSAL:
            seen &= j - i - (m - n) < window
    return seen


@inner
def masked(s, mask, i, j, n, m, m_l, m_s, MASK: tl.constexpr):
    """Scores under a mask: 1 is boolean, 2 additive. i and j are broadcast against each other."""
    if MASK == 1:
        keep = tl.load(mask + i * m_l + j * m_s, mask=(i < n) & (j < m), other=0)
        s = tl.where(keep != 0, s, float("-inf"))
    if MASK == 2:
        s += tl.load(mask + i * m_l + j * m_s, mask=(i < n) & (j < m), other=0.0).to(tl.float32)
    return s


@inner
def key_range(first, n, m, window, BM: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """The keys that some query of a tile sees."""
    begin = m * 0
    end = m
    last = tl.minimum(first + BM, n) - 1 + (m - n)
    if CAUSAL:
        end = tl.minimum(m, last + 1)
    if WINDOW:
        begin = tl.maximum(begin, first + (m - n) - window + 1)
        if not CAUSAL:
            end = tl.minimum(m, last + window)
    return begin, end


@inner
def _meet(
    acc,
    largest,
    total,
    q,
    k,
    v,
    mask,
    i,
    begin,
    end,
    n,
    m,
    k_l,
    v_l,
    m_l,
    m_s,
    D,
    DV,
    scale,
    window,
    softcap,
    BN: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASK: tl.constexpr,
    PLAIN: tl.constexpr,
    EVEN: tl.constexpr,
    EDGE: tl.constexpr,
):
    """A tile of queries and the keys from begin to end; without EDGE every query sees all of them."""
    lanes = tl.arange(0, BD)
    value_lanes = tl.arange(0, BDV)
    for key in range(begin, end, BN):
        j = key + tl.arange(0, BN).to(tl.int64)
        s = dot(q, tl.trans(load_rows(k, j, k_l, m, lanes, D, EVEN)))
        c = LOG2E
        if PLAIN:  # the scale is part of the exponent
            c = scale * LOG2E
        else:
            s *= scale
            if SOFTCAP:
                s = softcap * saturate(s / softcap)
            s = masked(s, mask, i[:, None], j[None, :], n, m, m_l, m_s, MASK)
        if EDGE:
            s = tl.where(visible(i[:, None], j[None, :], n, m, window, CAUSAL, WINDOW), s, float("-inf"))
        # A NaN among the scores must come out as one, and `max` may drop it: the weights keep it.
        grown = tl.maximum(largest, tl.max(s, 1))
        base = tl.where(grown == float("-inf"), 0.0, grown)
        p = tl.exp2((s - base[:, None]) * c)
        shrink = tl.exp2((largest - base) * c)
        total = total * shrink + tl.sum(p, 1)
        values = load_rows(v, j, v_l, m, value_lanes, DV, EVEN)
        acc = dot(narrow(p, values), values, acc * shrink[:, None])
        largest = grown
    return acc, largest, total


@triton.jit
def _forward(
    q,
    k,
    v,
    mask,
    y,
    sums,
    q_starts,
    k_starts,
    sequences,
    queries,
    keys,
    H,
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
    y_b,
    y_h,
    y_l,
    s_b,
    s_h,
    s_l,
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
    SAVE: tl.constexpr,
):
    # The last tiles first: under the causal rule they are the longest.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    b = (tl.program_id(1) // H).to(tl.int64)
    h = (tl.program_id(1) % H).to(tl.int64)
    first, q0, n, k0, m = place(q_starts, k_starts, sequences, queries, keys, tile, BM, False, VARLEN)
    if first >= n:
        return
    k += b * k_b + h // GROUP * k_h + k0 * k_l
    v += b * v_b + h // GROUP * v_h + k0 * v_l
    if MASK:
        mask += b * m_b + h * m_h
    i = first + tl.arange(0, BM).to(tl.int64)
    block = load_rows(q + b * q_b + h * q_h + q0 * q_l, i, q_l, n, tl.arange(0, BD), D, EVEN)
    acc = tl.zeros((BM, BDV), tl.float32)
    largest = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
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
    if WINDOW:
        acc, largest, total = _meet(
            acc, largest, total, block, k, v, mask, i, begin, tl.minimum(whole, end), n, m, k_l, v_l, m_l, m_s,
            D, DV, scale, window, softcap, BN, BD, BDV, CAUSAL, WINDOW, SOFTCAP, MASK, PLAIN, EVEN, True,
        )  # fmt: skip
    acc, largest, total = _meet(
        acc, largest, total, block, k, v, mask, i, whole, tl.minimum(until, end), n, m, k_l, v_l, m_l, m_s,
        D, DV, scale, window, softcap, BN, BD, BDV, CAUSAL, WINDOW, SOFTCAP, MASK, PLAIN, EVEN, False,
    )  # fmt: skip
    acc, largest, total = _meet(
        acc, largest, total, block, k, v, mask, i, until, end, n, m, k_l, v_l, m_l, m_s,
        D, DV, scale, window, softcap, BN, BD, BDV, CAUSAL, WINDOW, SOFTCAP, MASK, PLAIN, EVEN, True,
    )  # fmt: skip
    acc = tl.where((total == 0.0)[:, None], 0.0, acc / tl.where(total == 0.0, 1.0, total)[:, None])
    store_rows(y + b * y_b + h * y_h + q0 * y_l, i, y_l, n, tl.arange(0, BDV), DV, acc)
    if SAVE:
        kept = sums + b * s_b + h * s_h + (q0 + i) * s_l
        tl.store(kept, largest, mask=i < n)
        tl.store(kept + 1, total, mask=i < n)


def packed(x: torch.Tensor) -> torch.Tensor:
    """[T, H, ...] as a dense tensor of one batch, [1, H, T, ...]."""
    return x.transpose(0, 1)[None]


def options(
    q: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
) -> dict[str, Any]:
    """What forward and backward are specialized for."""
    dim, value_dim = q.shape[3], v.shape[3]
    wide, wide_values = (max(triton.next_power_of_2(d), 16) for d in (dim, value_dim))
    additive = mask is not None and mask.dtype != torch.bool
    return {
        "BD": wide,
        "BDV": wide_values,
        "CAUSAL": causal,
        "WINDOW": window > 0,
        "SOFTCAP": softcap > 0,
        "MASK": 0 if mask is None else 2 if additive else 1,
        "PLAIN": mask is None and softcap <= 0 and scale > 0,
        "EVEN": wide == dim and wide_values == value_dim,
    }


def blocks(q: torch.Tensor, v: torch.Tensor, *, backward: bool) -> dict[str, int]:
    """Rows and columns of a tile, warps and stages, from what a multiprocessor's shared memory holds."""
    if INTERPRETED:
        return {"BM": 64, "BN": 32}
    width = max(q.shape[3], v.shape[3])
    if q.dtype == torch.float32:
        small = width > 64
        return {"BM": 32 if small else 64, "BN": 32, "num_warps": 4, "num_stages": 1 if small else 2}
    if backward:
        if width <= 64:
            return {"BM": 64, "BN": 128, "num_warps": 8, "num_stages": 2}
        return {
            "BM": 64,
            "BN": 64 if width <= 128 else 32,
            "num_warps": 8 if width <= 128 else 4,
            "num_stages": 2,
        }
    if width <= 64:
        return {"BM": 128, "BN": 64, "num_warps": 4, "num_stages": 3}
    if width <= 128:
        return {"BM": 128, "BN": 64, "num_warps": 8, "num_stages": 3}
    return {"BM": 64, "BN": 32, "num_warps": 4, "num_stages": 2}


def strides(*tensors: torch.Tensor | None) -> list[int]:
    """Strides over batch, head and token of each tensor, zeros for one that is not there."""
    return [step for t in tensors for step in (t.stride()[:3] if t is not None else (0, 0, 0))]


def mask_arguments(mask: torch.Tensor | None) -> tuple[torch.Tensor | None, tuple[int, int, int, int]]:
    """The mask as memory that Triton reads, and its four strides."""
    if mask is None:
        return None, (0, 0, 0, 0)
    b, h, l, s = mask.stride()
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask, (b, h, l, s)


def _run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    starts: tuple[torch.Tensor, torch.Tensor] | None,
    settings: tuple[float, bool, int, float],
    y: torch.Tensor,
    sums: torch.Tensor | None,
) -> None:
    scale, _, window, softcap = settings
    batch, heads, queries, dim = q.shape
    if not heads:
        return
    sizes = blocks(q, v, backward=False)
    sequences = 0 if starts is None else starts[0].numel() - 1
    tiles = triton.cdiv(queries, sizes["BM"]) if starts is None else queries // sizes["BM"] + sequences
    memory, mask_strides = mask_arguments(mask)
    launch(
        _forward,
        (tiles if queries else 0, batch * heads),
        q,
        k,
        v,
        memory,
        y,
        sums,
        *(starts or (None, None)),
        sequences,
        queries,
        k.shape[2],
        heads,
        *strides(q, k, v),
        *mask_strides,
        *strides(y, sums),
        dim,
        v.shape[3],
        scale,
        window,
        softcap,
        GROUP=heads // max(k.shape[1], 1),
        VARLEN=starts is not None,
        SAVE=sums is not None,
        **options(q, v, mask, *settings),
        **sizes,
    )


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
    *,
    y: torch.Tensor,
    row_sums: torch.Tensor | None = None,
) -> None:
    _run(q, k, v, mask, None, (scale, causal, window, softcap), y, row_sums)


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
    *,
    y: torch.Tensor,
    row_sums: torch.Tensor | None = None,
) -> None:
    starts = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
    sums = None if row_sums is None else packed(row_sums)
    settings = (scale, causal, window, softcap)
    _run(packed(q), packed(k), packed(v), None, starts, settings, packed(y), sums)


KERNELS = {"attention": attention, "attention_varlen": attention_varlen}
