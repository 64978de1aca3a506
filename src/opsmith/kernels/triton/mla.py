"""MLA pre-processing in five launches, meant for one captured graph.

Norm of the tokens | down-projection | norm of the latent queries beside the keys' way into the cache | up-projection |
absorption beside the rotation of the queries. A launch of two stages gives each programs of its own.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from opsmith.kernels.triton.common import block_of, dot, launch, rounded, warps_of
from opsmith.kernels.triton.mla_rows import (
    integer_dot,
    inverse_rms,
    layout,
    like,
    norm_row,
    normalized,
    power,
    q8,
    table_of,
    turned,
)

_FORMS = (0, 1, 2, 0, 0)  # what activations become, for each form of weights
_INTEGERS = (1, 2)
_WEIGHTS = (3, 4)


@triton.jit
def _norm(
    x,
    gamma,
    beta,
    y,
    s,
    scale,
    offset,
    n,
    eps,
    xs,
    ys,
    BLOCK: tl.constexpr,
    GAMMA: tl.constexpr,
    BETA: tl.constexpr,
    FORM: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    s_row = s
    if FORM == 2:
        s_row = s + row
    norm_row(x + row * xs, gamma, beta, n, eps, y + row * ys, s_row, scale, offset, BLOCK, GAMMA, BETA, FORM)


@triton.jit
def _project(
    x,
    weight,
    bias,
    descale,
    s,
    y,
    tokens,
    N,
    K,
    xs,
    ws,
    ds,
    ys,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    FORM: tl.constexpr,
    BIAS: tl.constexpr,
):
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
            low = like((packed & 15) - 8, a)
            high = like(((packed >> 4) & 15) - 8, a)
            group = tl.load(descale + row * ds + begin // BK, mask=row < N, other=0.0)
            sums += dot(b, tl.trans(high), dot(a, tl.trans(low))) * group[None, :]
        else:
            a = tl.load(x + token[:, None] * xs + k[None, :], mask=here & (k < K)[None, :], other=0)
            w = tl.load(weight + row[:, None] * ws + k[None, :], mask=there & (k < K)[None, :], other=0)
            if FORM == 1 or FORM == 2:
                whole = integer_dot(a, tl.trans(w), whole)
            else:
                sums = dot(a, tl.trans(like(w, a)), sums)
    if FORM == 1 or FORM == 2:
        if BIAS:
            whole += tl.load(bias + row, mask=row < N, other=0)[None, :]
        sums = whole.to(tl.float32)
    if FORM == 1 or FORM == 2 or FORM == 3:
        sums *= tl.load(descale + row, mask=row < N, other=0.0)[None, :]
    if FORM == 2:
        sums *= tl.load(s + token, mask=token < tokens, other=0.0)[:, None]
    if BIAS and (FORM == 0 or FORM == 3 or FORM == 4):
        sums += tl.load(bias + row, mask=row < N, other=0.0).to(tl.float32)[None, :]
    tl.store(y + token[:, None] * ys + row[None, :], rounded(sums, y), mask=here & (row < N)[None, :])


@triton.jit
def _middle(
    a,
    gamma1,
    beta1,
    z,
    s,
    scale,
    offset,
    plain,
    gamma2,
    cos,
    sin,
    slots,
    latent,
    rope,
    ctkv,
    inner,
    kv_lora,
    half,
    end,
    size,
    eps,
    as_,
    zs,
    ps,
    table,
    second,
    l_block,
    l_tile,
    l_token,
    l_width,
    r_block,
    r_tile,
    r_token,
    r_width,
    BLOCK: tl.constexpr,
    KV: tl.constexpr,
    PAIRS: tl.constexpr,
    QUERIES: tl.constexpr,
    BETA: tl.constexpr,
    FORM: tl.constexpr,
    PLAIN: tl.constexpr,
    CTKV: tl.constexpr,
    TURN: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    if QUERIES:  # noqa: SIM102  one is decided by the compiler, the other by each program
        if tl.program_id(1) == 1:
            behind = a + token * as_ + kv_lora + 2 * half
            s_row = s
            if FORM == 2:
                s_row = s + token
            norm_row(
                behind,
                gamma1,
                beta1,
                inner,
                eps,
                z + token * zs,
                s_row,
                scale,
                offset,
                BLOCK,
                True,
                BETA,
                FORM,
            )
            if PLAIN:
                norm_row(behind, gamma1, beta1, inner, eps, plain + token * ps, s, s, s, BLOCK, True, BETA, 0)
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
        if CTKV:
            tl.store(to, q8(v / tl.load(ctkv)), mask=lane < kept)
        else:
            tl.store(to, rounded(v, latent), mask=lane < kept)
        pair = tl.arange(0, PAIRS)
        first, other, x1, x2 = turned(
            row + kv_lora, cos, sin, token * table, pair, half, pair < half, second, INTERLEAVED, TURN
        )
        to = rope + block * r_block + at * r_token
        mask = pair < paired
        tl.store(to + first // r_width * r_tile + first % r_width, rounded(x1, rope), mask=mask)
        tl.store(to + other // r_width * r_tile + other % r_width, rounded(x2, rope), mask=mask)


@triton.jit
def _absorb(
    q,
    wuk,
    cos,
    sin,
    head_scale,
    q_out,
    q_rope,
    tokens,
    nope,
    kv_lora,
    half,
    qt,
    qh,
    wh,
    table,
    second,
    ot,
    oh,
    rt,
    rh,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PAIRS: tl.constexpr,
    SCALE: tl.constexpr,
    TURN: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    here = (token < tokens)[:, None]
    row = q + token[:, None] * qt + head * qh
    if tl.program_id(2) == tl.num_programs(2) - 1:
        pair = tl.arange(0, PAIRS)[None, :]
        mask = here & (pair < half)
        first, other, x1, x2 = turned(
            row + nope, cos, sin, token[:, None] * table, pair, half, mask, second, INTERLEAVED, TURN
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
        if SCALE:
            sums = rounded(sums, q_rope).to(tl.float32) * tl.load(head_scale + head)
            tl.store(to, q8(sums), mask=here & there)
        else:
            tl.store(to, rounded(sums, q_out), mask=here & there)


def rms_norm_quant(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    scale: torch.Tensor | None,
    offset: torch.Tensor | None,
    *,
    q: torch.Tensor,
    s: torch.Tensor | None = None,
) -> None:
    if scale is not None and offset is None:
        offset = torch.zeros_like(scale)
    normalize(x, weight, bias, eps, q, s, scale, offset, 2 if scale is None else 1)


def normalize(
    x: torch.Tensor,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    eps: float,
    y: torch.Tensor,
    s: torch.Tensor | None,
    scale: torch.Tensor | None,
    offset: torch.Tensor | None,
    form: int,
) -> None:
    n = x.shape[1]
    block = block_of(n, 8192)
    launch(
        _norm,
        (x.shape[0],),
        x,
        gamma,
        beta,
        y,
        s,
        scale,
        offset,
        n,
        eps,
        x.stride(0),
        y.stride(0),
        BLOCK=block,
        GAMMA=gamma is not None,
        BETA=beta is not None,
        FORM=form,
        num_warps=warps_of(block),
    )


def project(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    descale: torch.Tensor | None,
    s: torch.Tensor | None,
    y: torch.Tensor,
    form: int,
) -> None:
    tokens, n, k = x.shape[0], weight.shape[0], x.shape[1]
    bm = min(power(tokens), 64)
    # Few tokens: many programs that read the weight; many tokens: tiles that read it seldom.
    bn, bk = (32, 128) if bm <= 32 else (64, 64)
    if form == 4:
        assert descale is not None
        bk = 2 * weight.shape[1] // max(1, descale.shape[1])
    launch(
        _project,
        (triton.cdiv(tokens, bm) * triton.cdiv(n, bn),),
        x,
        weight,
        bias,
        descale,
        s,
        y,
        tokens,
        n,
        k,
        x.stride(0),
        weight.stride(0),
        0 if descale is None else descale.stride(0),
        y.stride(0),
        BM=bm,
        BN=bn,
        BK=bk,
        FORM=form,
        BIAS=bias is not None,
        num_warps=4,
        num_stages=4,
    )


def mla_kv_epilogue(
    a: torch.Tensor,
    gamma2: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    slots: torch.Tensor,
    rope_size: int,
    interleaved: bool,
    tiled: bool,
    eps: float,
    ctkv_scale: torch.Tensor | None,
    *,
    latent: torch.Tensor,
    rope: torch.Tensor | None = None,
) -> None:
    middle(a, None, gamma2, cos, sin, slots, rope_size, interleaved, tiled, eps, ctkv_scale, latent, rope)


def middle(
    a: torch.Tensor,
    queries: tuple[Any, ...] | None,
    gamma2: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    slots: torch.Tensor,
    rope_size: int,
    interleaved: bool,
    tiled: bool,
    eps: float,
    ctkv_scale: torch.Tensor | None,
    latent: torch.Tensor,
    rope: torch.Tensor | None,
) -> None:
    """Keys into the cache; `queries`, where there are latent ones: gamma1, beta1, z, s, scale, offset, plain, form."""
    kv_lora = gamma2.shape[0]
    gamma1, beta1, z, s, scale, offset, plain, form = queries or (None, None, None, None, None, None, None, 0)
    inner = 0 if z is None else z.shape[1]
    size = latent.shape[2 if tiled else 1]
    turn = rope
    if turn is None:  # within the latent's rows
        turn = latent[..., kv_lora:]
    strides = (*layout(latent, tiled), *layout(turn, tiled))
    cos, sin, table, second = table_of(cos, sin, rope_size)
    block = block_of(inner, 8192)
    launch(
        _middle,
        (a.shape[0], 1 if queries is None else 2),
        a,
        gamma1,
        beta1,
        z,
        s,
        scale,
        offset,
        plain,
        gamma2,
        cos,
        sin,
        slots,
        latent,
        turn,
        ctkv_scale,
        inner,
        kv_lora,
        rope_size // 2,
        latent.shape[0] * size,
        size,
        eps,
        a.stride(0),
        0 if z is None else z.stride(0),
        0 if plain is None else plain.stride(0),
        table,
        second,
        *strides,
        BLOCK=block,
        KV=power(kv_lora),
        PAIRS=power(rope_size // 2),
        QUERIES=queries is not None,
        BETA=beta1 is not None,
        FORM=form,
        PLAIN=plain is not None,
        CTKV=ctkv_scale is not None,
        TURN=cos is not None,
        INTERLEAVED=interleaved,
        num_warps=4,
    )


def mla_q_epilogue(
    q: torch.Tensor,
    wuk: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    interleaved: bool,
    q_nope_scale: torch.Tensor | None,
    *,
    q_out: torch.Tensor,
    q_rope: torch.Tensor,
) -> None:
    tokens, heads, _ = q.shape
    nope, kv_lora = wuk.shape[1:]
    rope = q.shape[2] - nope
    cos, sin, table, second = table_of(cos, sin, rope)
    bm = min(power(tokens), 64)
    bn = min(power(kv_lora), 128)
    launch(
        _absorb,
        (triton.cdiv(tokens, bm), heads, triton.cdiv(kv_lora, bn) + 1),
        q,
        wuk,
        cos,
        sin,
        q_nope_scale,
        q_out,
        q_rope,
        tokens,
        nope,
        kv_lora,
        rope // 2,
        q.stride(0),
        q.stride(1),
        wuk.stride(0),
        table,
        second,
        q_out.stride(0),
        q_out.stride(1),
        q_rope.stride(0),
        q_rope.stride(1),
        BM=bm,
        BN=bn,
        BK=min(power(nope), 64),
        PAIRS=power(rope // 2),
        SCALE=q_nope_scale is not None,
        TURN=cos is not None,
        INTERLEAVED=interleaved,
        num_warps=4,
    )


def mla_preprocess(
    x: torch.Tensor,
    wdqkv: torch.Tensor,
    wuq: torch.Tensor,
    wuk: torch.Tensor,
    gamma0: torch.Tensor | None,
    gamma1: torch.Tensor | None,
    gamma2: torch.Tensor,
    beta0: torch.Tensor | None,
    beta1: torch.Tensor | None,
    bias0: torch.Tensor | None,
    bias1: torch.Tensor | None,
    descale0: torch.Tensor | None,
    descale1: torch.Tensor | None,
    scale0: torch.Tensor | None,
    offset0: torch.Tensor | None,
    scale1: torch.Tensor | None,
    offset1: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    slots: torch.Tensor,
    quant: int,
    interleaved: bool,
    tiled: bool,
    eps: float,
    ctkv_scale: torch.Tensor | None,
    q_nope_scale: torch.Tensor | None,
    *,
    q_out: torch.Tensor,
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor | None = None,
    latent_q: torch.Tensor | None = None,
) -> None:
    tokens, size = x.shape
    heads, width = wuk.shape[0], q_rope.shape[2]
    form = _FORMS[quant]
    held = torch.int8 if form else x.dtype

    def activations(n: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        s = torch.empty(tokens, dtype=torch.float32, device=x.device) if form == 2 else None
        return torch.empty((tokens, n), dtype=held, device=x.device), s

    def normalized_for(scale: torch.Tensor | None, offset: torch.Tensor | None) -> tuple[Any, Any]:
        if form == 0 and gamma0 is None:
            return x, None
        y, s = activations(size)
        normalize(x, gamma0, beta0, eps, y, s, scale, offset, form)
        return y, s

    y, s = normalized_for(scale0, offset0)
    a = x.new_empty((tokens, wdqkv.shape[0]))
    project(y, wdqkv, bias0, descale0, s, a, quant)
    queries = None
    if gamma1 is not None:
        z, z_s = activations(a.shape[1] - gamma2.shape[0] - width)
        queries = gamma1, beta1, z, z_s, scale1, offset1, latent_q, form
    else:
        z, z_s = (y, s) if form != 1 else normalized_for(scale1, offset1)
    middle(a, queries, gamma2, cos, sin, slots, width, interleaved, tiled, eps, ctkv_scale, latent, rope)
    q = x.new_empty((tokens, wuq.shape[0]))
    project(z, wuq, bias1, descale1, z_s, q, quant)
    mla_q_epilogue(
        q.view(tokens, heads, -1), wuk, cos, sin, interleaved, q_nope_scale, q_out=q_out, q_rope=q_rope
    )


KERNELS = {
    "rms_norm_quant": rms_norm_quant,
    "mla_kv_epilogue": mla_kv_epilogue,
    "mla_q_epilogue": mla_q_epilogue,
    "mla_preprocess": mla_preprocess,
}
