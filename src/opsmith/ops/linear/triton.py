"""The projection to queries, keys and values, rotated in registers: a program makes the two halves of some heads' pairs
as two products, so that both of a pair stand at one place and turn without leaving it.

What follows the rotated dimensions is divided between the products too, and is not turned. A group of heads is of
queries, of keys or of values, never of two of these, and one tensor is written.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from opsmith.kernels.triton import INTERPRETED
from opsmith.kernels.triton.common import dot, inner, launch, rounded
from opsmith.ops.rope.triton import Table, entries, table_rows, with_batch

_BAND = tl.constexpr(8)  # row tiles that pass one tile of the weight, while that is in the second cache


@inner
def load_block(p, rows, depth, K, EVEN: tl.constexpr):
    """Rows of a matrix, zeros where there is none and from column K on."""
    if EVEN:
        return tl.load(p, mask=rows[:, None], other=0.0)
    return tl.load(p, mask=rows[:, None] & (depth < K)[None, :], other=0.0)


@inner
def columns(lane, dims, size, INTERLEAVED: tl.constexpr):
    """Where the two numbers of each pair stand in a head; behind the rotated ones, two that have nothing in common."""
    half = dims // 2
    spare = (size - dims + 1) // 2
    first = lane
    second = half + lane
    if INTERLEAVED:
        first = 2 * lane
        second = first + 1
    first = tl.where(lane < half, first, half + lane)
    second = tl.where(lane < half, second, half + spare + lane)
    return first, second, (lane < half) | (first < dims + spare), second < size


@triton.jit
def _project(
    x, weight, bias, q, k, v, cos, sin, positions, bad, count, tokens, K, heads, kv_heads, size, dims, rows,
    second, cb, cl, sb, sl, pb, pl,
    x_l, w_l, q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l,
    BM: tl.constexpr, BK: tl.constexpr, PAIRS: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    # Programs in bands: the row tiles of a band one after another, for one group of heads after another.
    row_tiles = (count + BM - 1) // BM
    q_groups = (heads + GROUP - 1) // GROUP
    kv_groups = (kv_heads + GROUP - 1) // GROUP
    groups = q_groups + 2 * kv_groups
    band = tl.program_id(0) // (_BAND * groups)
    in_band = tl.minimum(row_tiles - band * _BAND, _BAND)
    place = tl.program_id(0) % (_BAND * groups)
    tile = band * _BAND + place % in_band
    group = place // in_band

    # Which tensor is written, the group's place in it and where its rows begin in the weight.
    of_v = group >= q_groups + kv_groups
    of_k = (group >= q_groups) & (group < q_groups + kv_groups)
    y = tl.where(of_v, v, tl.where(of_k, k, q))
    y_b = tl.where(of_v, v_b, tl.where(of_k, k_b, q_b))
    y_h = tl.where(of_v, v_h, tl.where(of_k, k_h, q_h))
    y_l = tl.where(of_v, v_l, tl.where(of_k, k_l, q_l))
    before = tl.where(of_v, heads + kv_heads, tl.where(of_k, heads, 0))
    group -= tl.where(of_v, q_groups + kv_groups, tl.where(of_k, q_groups, 0))
    limit = tl.where(of_v | of_k, kv_heads, heads)

    lane = tl.arange(0, GROUP * PAIRS)
    head = (group * GROUP + lane // PAIRS).to(tl.int64)
    pair = lane % PAIRS
    first, other, has_first, has_other = columns(pair, dims, size, INTERLEAVED)
    has_first &= head < limit
    has_other &= head < limit
    row1 = (before + head) * size + first
    row2 = (before + head) * size + other

    token = tile.to(tl.int64) * BM + tl.arange(0, BM)
    here = token < count
    depth = tl.arange(0, BK)
    a = x + token[:, None] * x_l + depth[None, :]
    w1 = weight + row1[:, None] * w_l + depth[None, :]
    w2 = weight + row2[:, None] * w_l + depth[None, :]
    y1 = tl.zeros((BM, GROUP * PAIRS), tl.float32)
    y2 = tl.zeros((BM, GROUP * PAIRS), tl.float32)
    for begin in range(0, K, BK):
        block = load_block(a, here, begin + depth, K, EVEN)
        y1 = dot(block, tl.trans(load_block(w1, has_first, begin + depth, K, EVEN)), y1)
        y2 = dot(block, tl.trans(load_block(w2, has_other, begin + depth, K, EVEN)), y2)
        a += BK
        w1 += BK
        w2 += BK
    if bias is not None:
        y1 += tl.load(bias + row1, mask=has_first, other=0.0).to(tl.float32)[None, :]
        y2 += tl.load(bias + row2, mask=has_other, other=0.0).to(tl.float32)[None, :]

    batch = token // tokens
    token = token % tokens
    if of_v == 0:
        row, inside = table_rows(
            positions, bad, batch, token, tokens, rows, here, pb, pl, positions is not None
        )
        cos1, sin1, cos2, sin2 = entries(
            cos, sin, batch * cb + row * cl, batch * sb + row * sl, inside, pair, dims // 2, second
        )
        turns = (pair < dims // 2)[None, :]
        left = y1
        y1 = tl.where(turns, y1 * cos1 - y2 * sin1, y1)
        y2 = tl.where(turns, y2 * cos2 + left * sin2, y2)
    to = y + (batch * y_b + token * y_l)[:, None] + (head * y_h)[None, :]
    tl.store(to + first[None, :], rounded(y1, y), mask=here[:, None] & has_first[None, :])
    tl.store(to + other[None, :], rounded(y2, y), mask=here[:, None] & has_other[None, :])


def _blocks(count: int, size: int, kv_heads: int, wide: bool) -> dict[str, int]:
    """Tokens, depth and pairs of a tile, its warps and stages, by what its sums take of the registers."""
    pairs = max(int(triton.next_power_of_2((size + 1) // 2)), 8)
    if INTERPRETED:
        return {"BM": 64, "BK": 64, "PAIRS": pairs, "GROUP": 2}
    few = count <= 16  # a matrix of weights times some vectors: many small tiles read it sooner
    group = 1 if few else min(64 // pairs, int(triton.next_power_of_2(kv_heads)))
    group = max(group, 16 // pairs, 1)
    lanes = pairs * group
    most = 16 if few else 64 if wide or count <= 64 else 128
    rows = min(most, max(16, 128 * 64 // lanes))
    large = rows * lanes >= 128 * 64
    depth = 16 if wide else 128 if few and lanes <= 64 else 64
    if lanes > 64:
        depth = min(depth, 32)
    return {
        "BM": rows,
        "BK": depth,
        "PAIRS": pairs,
        "GROUP": group,
        "num_warps": 8 if large else 4,
        "num_stages": 2 if wide else 3,
    }


def linear_rope(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    dims: int,
    interleaved: bool,
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> None:
    if not q.numel():
        return
    table = Table.of(cos, sin, positions, dims // 2)
    if q.dim() == 3:
        q, k, v = with_batch(q), with_batch(k), with_batch(v)
    batch, heads, tokens, size = q.shape
    kv_heads, count, depth = k.shape[1], batch * tokens, x.shape[1]
    blocks: dict[str, Any] = _blocks(count, size, kv_heads, x.dtype == torch.float32)
    group = blocks["GROUP"]
    groups = triton.cdiv(heads, group) + 2 * triton.cdiv(kv_heads, group)
    launch(
        _project,
        (triton.cdiv(count, blocks["BM"]) * groups,),
        *(x, weight, bias, q, k, v, *table.tensors),
        *(count, tokens, depth, heads, kv_heads, size, dims, table.rows, table.second),
        *(*table.steps, x.stride(0), weight.stride(1)),
        *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]),
        EVEN=depth % blocks["BK"] == 0,
        INTERLEAVED=interleaved,
        **blocks,
    )
    table.check("linear_rope")


def linear_pack(weight: Tensor, *, packed: Tensor) -> None:
    """The kernel reads rows as they are; only the pitch may be another."""
    depth = weight.shape[1]
    packed[0, :, :depth].copy_(weight)
    packed[0, :, depth:].zero_()


KERNELS = {"linear_rope": linear_rope, "linear_pack": linear_pack}
