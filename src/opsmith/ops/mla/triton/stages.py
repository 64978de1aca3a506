"""The stages of MLA pre-processing as Triton kernels; `mla.py` launches them."""

from __future__ import annotations

import triton
import triton.language as tl

from opsmith.kernels.triton.common import dot, integer_dot, integers_like, rounded
from opsmith.ops.attention.triton.scores import against
from opsmith.ops.mla.triton.rows import turned
from opsmith.ops.rms_norm.triton_quant import inverse_rms, norm_row, normalized, q8


@triton.jit
def project_kernel(
    x, weight, bias, descale, s, y, tokens, N, K, xs, ws, ds, ys,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    # Programs of one block of the weight's rows follow each other: it is read from memory once.
    blocks = (tokens + BM - 1) // BM
    token = (tl.program_id(0) % blocks).to(tl.int64) * BM + tl.arange(0, BM)
    row = (tl.program_id(0) // blocks).to(tl.int64) * BN + tl.arange(0, BN)
    here = (token < tokens)[:, None]
    there = (row < N)[:, None]
    depth = tl.arange(0, BK)
    sums = tl.zeros((BM, BN), tl.float32)
    whole = tl.zeros((BM, BN), tl.int32)
    for begin in range(0, K, BK):
        k = begin + depth
        if FORM == 4:
            # A byte holds an even column's number and an odd one's; a block of K is a group with a scale of its own.
            half = begin // 2 + tl.arange(0, BK // 2)
            even = x + token[:, None] * xs + 2 * half[None, :]
            a = tl.load(even, mask=here & (2 * half < K)[None, :], other=0.0)
            b = tl.load(even + 1, mask=here & (2 * half + 1 < K)[None, :], other=0.0)
            packed = tl.load(weight + row[:, None] * ws + half[None, :], mask=there, other=0).to(tl.int32)
            low = integers_like((packed & 15) - 8, a)
            high = integers_like(((packed >> 4) & 15) - 8, a)
            group = tl.load(descale + row * ds + begin // BK, mask=row < N, other=0.0)
            sums += dot(b, tl.trans(high), dot(a, tl.trans(low))) * group[None, :]
        else:
            a = tl.load(x + token[:, None] * xs + k[None, :], mask=here & (k < K)[None, :], other=0)
            w = tl.load(weight + row[:, None] * ws + k[None, :], mask=there & (k < K)[None, :], other=0)
            if FORM == 1 or FORM == 2:
                whole = integer_dot(a, tl.trans(w), whole)
            else:
                w = integers_like(w, a)
                if a.dtype == tl.float32:
                    sums += against(a, w)
                else:
                    sums = dot(a, tl.trans(w), sums)
    if FORM == 1 or FORM == 2:
        if bias is not None:
            whole += tl.load(bias + row, mask=row < N, other=0)[None, :]
        sums = whole.to(tl.float32)
    if (FORM == 1 or FORM == 2) or FORM == 3:
        sums *= tl.load(descale + row, mask=row < N, other=0.0)[None, :]
    if FORM == 2:
        sums *= tl.load(s + token, mask=token < tokens, other=0.0)[:, None]
    if bias is not None:  # noqa: SIM102  Triton 3.2 has no `and` of Python's own values
        if (FORM == 0 or FORM == 3) or FORM == 4:
            sums += tl.load(bias + row, mask=row < N, other=0.0).to(tl.float32)[None, :]
    tl.store(y + token[:, None] * ys + row[None, :], rounded(sums, y), mask=here & (row < N)[None, :])


@triton.jit
def middle_kernel(
    a, gamma1, beta1, z, s, scale, offset, plain, gamma2, cos, sin, slots, latent, rope, ctkv, inner, kv_lora,
    half, end, size, eps, as_, zs, ps, table, second, l_block, l_tile, l_token, l_width, r_block, r_tile,
    r_token, r_width,
    BLOCK: tl.constexpr, KV: tl.constexpr, PAIRS: tl.constexpr, FORM: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    if z is not None:  # noqa: SIM102  one is decided by the compiler, the other by each program
        if tl.program_id(1) == 1:
            behind = a + token * as_ + kv_lora + 2 * half
            s_row = s
            if FORM == 2:
                s_row = s + token
            beta: tl.constexpr = beta1 is not None
            z += token * zs
            norm_row(behind, gamma1, beta1, inner, eps, z, s_row, scale, offset, BLOCK, True, beta, FORM)
            if plain is not None:
                norm_row(behind, gamma1, beta1, inner, eps, plain + token * ps, s, s, s, BLOCK, True, beta, 0)
    if tl.program_id(1) == 0:
        slot = tl.load(slots + token).to(tl.int64)
        kept = tl.where((slot >= 0) & (slot < end), kv_lora, 0)  # of what a row has, if the token has a slot
        paired = tl.where((slot >= 0) & (slot < end), half, 0)
        block = slot // size
        at = slot % size
        row = a + token * as_
        lane = tl.arange(0, KV)
        rstd = inverse_rms(row, kv_lora, eps, KV)
        v = normalized(row, gamma2, gamma2, rstd, lane, lane < kv_lora, True, False)
        to = latent + block * l_block + at * l_token + lane // l_width * l_tile + lane % l_width
        if ctkv is not None:
            tl.store(to, q8(v / tl.load(ctkv)), mask=lane < kept)
        else:
            tl.store(to, rounded(v, latent), mask=lane < kept)
        pair = tl.arange(0, PAIRS)
        first, other, x1, x2 = turned(
            row + kv_lora,
            cos,
            sin,
            token * table,
            pair,
            half,
            pair < half,
            second,
            INTERLEAVED,
            cos is not None,
        )
        to = rope + block * r_block + at * r_token
        mask = pair < paired
        tl.store(to + first // r_width * r_tile + first % r_width, rounded(x1, rope), mask=mask)
        tl.store(to + other // r_width * r_tile + other % r_width, rounded(x2, rope), mask=mask)


@triton.jit
def absorb_kernel(
    q, wuk, cos, sin, head_scale, q_out, q_rope, tokens, nope, kv_lora, half, qt, qh, wh, table, second, ot,
    oh, rt, rh,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    here = (token < tokens)[:, None]
    row = q + token[:, None] * qt + head * qh
    if tl.program_id(2) == tl.num_programs(2) - 1:
        pair = tl.arange(0, PAIRS)[None, :]
        mask = here & (pair < half)
        first, other, x1, x2 = turned(
            row + nope,
            cos,
            sin,
            token[:, None] * table,
            pair,
            half,
            mask,
            second,
            INTERLEAVED,
            cos is not None,
        )
        beside = q_rope + token[:, None] * rt + head * rh
        tl.store(beside + first, rounded(x1, q_rope), mask=mask)
        tl.store(beside + other, rounded(x2, q_rope), mask=mask)
    else:
        column = tl.program_id(2) * BN + tl.arange(0, BN)
        there = (column < kv_lora)[None, :]
        sums = tl.zeros((BM, BN), tl.float32)
        for begin in range(0, nope, BK):
            k = begin + tl.arange(0, BK)
            a = tl.load(row + k[None, :], mask=here & (k < nope)[None, :], other=0.0)
            w = tl.load(
                wuk + head * wh + k[:, None] * kv_lora + column[None, :],
                mask=(k < nope)[:, None] & there,
                other=0.0,
            )
            sums = dot(a, w, sums)
        to = q_out + token[:, None] * ot + head * oh + column[None, :]
        if head_scale is not None:
            sums = rounded(sums, q_rope).to(tl.float32) * tl.load(head_scale + head)
            tl.store(to, q8(sums), mask=here & there)
        else:
            tl.store(to, rounded(sums, q_out), mask=here & there)
