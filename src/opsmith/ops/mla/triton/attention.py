"""Attention in the latent space: some heads of a token meet a part of its keys, which are read once as keys and values.

The parts of a sequence are put together in a second launch; values are projected by PyTorch's batched product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from opsmith.kernels.triton.common import dot, integers_like, launch, narrow, processors, rounded
from opsmith.ops.mla.triton.rows import power

_LOG2E = tl.constexpr(1.4426950408889634)
_KEYS = 32  # that a program holds at once
_MOST_HEADS = 16


@triton.jit
def _parts(
    q, qr, latent, rope, tables, lens, ctkv, head_scale, found, highest, heads, kv_lora, width, each, size,
    scale, qt, qh, rt, rh, l_block, l_token, l_tile, l_width, r_block, r_token, r_tile, r_width, pages,
    BM: tl.constexpr, BN: tl.constexpr, KV: tl.constexpr, ROPE: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(2)
    parts = tl.num_programs(2)
    head = tl.program_id(1) * BM + tl.arange(0, BM)
    here = head < heads
    sequence = token // each
    length = tl.load(lens + sequence).to(tl.int32)
    seen = tl.maximum(length - each + (token % each).to(tl.int32) + 1, 0)
    step = (seen + parts * BN - 1) // (parts * BN) * BN
    start = part * step
    stop = tl.minimum(start + step, seen)

    lane = tl.arange(0, KV)
    turned = tl.arange(0, ROPE)
    a = tl.load(
        q + token * qt + head[:, None] * qh + lane[None, :],
        mask=here[:, None] & (lane < kv_lora)[None, :],
        other=0,
    )
    b = tl.load(
        qr + token * rt + head[:, None] * rh + turned[None, :],
        mask=here[:, None] & (turned < width)[None, :],
        other=0.0,
    )
    factor = tl.zeros((BM,), tl.float32) + 1.0
    if INT8:
        a = integers_like(a, b)
        factor = tl.load(ctkv) / tl.load(head_scale + head, mask=here, other=1.0)
    most = tl.zeros((BM,), tl.float32) - float("inf")
    total = tl.zeros((BM,), tl.float32)
    sums = tl.zeros((BM, KV), tl.float32)
    for begin in range(start, stop, BN):
        key = begin + tl.arange(0, BN)
        there = key < stop
        block = tl.load(tables + sequence * pages + key // size, mask=there, other=0)
        block = block.to(tl.int64)
        at = key % size
        k = tl.load(
            latent
            + (block * l_block + at * l_token)[:, None]
            + (lane // l_width * l_tile + lane % l_width)[None, :],
            mask=there[:, None] & (lane < kv_lora)[None, :],
            other=0,
        )
        r = tl.load(
            rope
            + (block * r_block + at * r_token)[:, None]
            + (turned // r_width * r_tile + turned % r_width)[None, :],
            mask=there[:, None] & (turned < width)[None, :],
            other=0.0,
        )
        if INT8:
            k = integers_like(k, r)
        scores = dot(a, tl.trans(k)) * factor[:, None] + dot(b, tl.trans(r))
        scores = tl.where(there[None, :], scores * (scale * _LOG2E), float("-inf"))
        now = tl.maximum(most, tl.max(scores, 1))
        before = tl.exp2(most - now)
        weights = tl.exp2(scores - now[:, None])
        total = total * before + tl.sum(weights, 1)
        sums = dot(narrow(weights, k), k, sums * before[:, None])
        most = now
    row = (token * parts + part) * heads + head
    share = 1.0 / tl.where(total > 0, total, 1.0)
    tl.store(
        found + row[:, None] * kv_lora + lane[None, :],
        sums * share[:, None],
        mask=here[:, None] & (lane < kv_lora)[None, :],
    )
    tl.store(
        highest + row,
        tl.where(total > 0, most + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf")),
        mask=here,
    )


@triton.jit
def _join(found, highest, ctkv, y, parts, heads, kv_lora, KV: tl.constexpr, INT8: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    lane = tl.arange(0, KV)
    most = float("-inf")
    for part in range(parts):
        most = tl.maximum(most, tl.load(highest + (token * parts + part) * heads + head))
    most = tl.where(most == float("-inf"), 0.0, most)
    total = most * 0.0
    sums = tl.zeros((KV,), tl.float32)
    for part in range(parts):
        row = (token * parts + part) * heads + head
        share = tl.exp2(tl.load(highest + row) - most)
        total += share
        sums += share * tl.load(found + row * kv_lora + lane, mask=lane < kv_lora, other=0.0)
    sums = sums / tl.where(total > 0, total, 1.0)
    if INT8:
        sums *= tl.load(ctkv)
    tl.store(y + (token * heads + head) * kv_lora + lane, rounded(sums, y), mask=lane < kv_lora)


def attend(
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    rope: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    ctkv_scale: Tensor | None,
    q_nope_scale: Tensor | None,
    wuv: Tensor | None,
    *,
    latent_out: Tensor,
    out: Tensor | None = None,
) -> None:
    """Lengths and blocks were looked at before: here a wrong one is read as it is."""
    tokens, heads, kv_lora = q_nope.shape
    if tokens == 0:
        return
    width, size = q_rope.shape[2], max(latent.shape[1], 1)
    groups = triton.cdiv(heads, _MOST_HEADS)
    # Enough programs for the device, none with less than a few blocks of the longest sequence there is room for.
    longest = block_tables.shape[1] * size
    parts = max(1, min(triton.cdiv(2 * processors(q_nope), tokens * groups), triton.cdiv(longest, 4 * _KEYS)))
    found = torch.empty((tokens, parts, heads, kv_lora), dtype=torch.float32, device=q_nope.device)
    highest = torch.empty((tokens, parts, heads), dtype=torch.float32, device=q_nope.device)
    # Strides of a block, a token and a tile, and how wide a tile is.
    latent_at, rope_at = ((*t.stride()[:3], max(t.shape[3], 1)) for t in (latent, rope))
    launch(
        _parts,
        (tokens, groups, parts),
        *(q_nope, q_rope, latent, rope, block_tables.contiguous(), seq_lens.contiguous()),
        *(ctkv_scale, q_nope_scale, found, highest),
        *(heads, kv_lora, width, tokens // seq_lens.shape[0], size, scale),
        *(*q_nope.stride()[:2], *q_rope.stride()[:2]),
        *latent_at,
        *rope_at,
        block_tables.shape[1],
        BM=_MOST_HEADS,
        BN=_KEYS,
        KV=power(kv_lora),
        ROPE=power(width),
        INT8=q_nope_scale is not None,
        num_warps=4,
        num_stages=2,
    )
    launch(
        _join,
        (tokens, heads),
        *(found, highest, ctkv_scale, latent_out),
        *(parts, heads, kv_lora),
        KV=power(kv_lora),
        INT8=q_nope_scale is not None,
        num_warps=4,
    )
    if wuv is not None and out is not None:
        out.copy_(torch.einsum("thk,hvk->thv", latent_out, wuv))


KERNELS = {"mla_attention": attend}
