"""Experts of a few tokens: a program a block of an expert's hidden numbers, then one a block of a token's result.

Of many, rows of tokens are taken in the order of their experts, and a program makes a tile of rows of one expert on the
matrix units. How many tiles an expert has is known on the device alone, so there are programs for as many as can be.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from opsmith.kernels.triton.common import block_of, check, dot, exp_for, flag, inner, launch, report, rounded
from opsmith.ops.gelu.triton import curve

_OSS = tl.constexpr(3)
_FEW = 4  # tokens, up to which each reads its experts by itself


@triton.jit
def _rows(weight, x, at, rows, k, ws, wk, BLOCK: tl.constexpr, DEPTH: tl.constexpr):
    """The products of some rows of a weight and a vector, in float32."""
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, k, DEPTH):
        along = first + tl.arange(0, DEPTH)
        v = tl.load(x + along, mask=along < k, other=0.0).to(tl.float32)
        inside = (at < rows)[:, None] & (along < k)[None, :]
        w = tl.load(weight + at[:, None] * ws + along[None, :] * wk, mask=inside, other=0.0).to(tl.float32)
        total += tl.sum(w * v[None, :], 1)
    return total


@inner
def _gated(gate, up, limit, like, ACTIVATION: tl.constexpr):
    gate = tl.minimum(gate, limit)
    up = tl.maximum(tl.minimum(up, limit), -limit)
    if ACTIVATION == _OSS:
        return (up + 1.0) * gate / (1.0 + exp_for(-1.702 * gate, like))
    return curve(gate, like, ACTIVATION) * up


@triton.jit
def _hidden(
    x, gate_up, ids, bias, acted, bad, each, experts, d, hidden, limit, xs, ns, we, ws, wk, bs,
    ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    token = pair // each
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids + token * ns + pair % each).to(tl.int64)
    inside = (expert >= 0) & (expert < experts)
    report(bad, pair, inside)
    rows = tl.where(inside, hidden, 0)  # of an expert that is not there, none
    first = at
    second = at + hidden
    if ACTIVATION == _OSS:
        first = 2 * at
        second = 2 * at + 1
    mine = at < rows
    weight = gate_up + tl.where(inside, expert, 0) * we
    gate = _rows(
        weight, x + token * xs, tl.where(mine, first, 2 * hidden), 2 * hidden, d, ws, wk, BLOCK, DEPTH
    )
    up = _rows(
        weight, x + token * xs, tl.where(mine, second, 2 * hidden), 2 * hidden, d, ws, wk, BLOCK, DEPTH
    )
    if bias is not None:
        gate += tl.load(bias + expert * bs + first, mask=mine, other=0.0).to(tl.float32)
        up += tl.load(bias + expert * bs + second, mask=mine, other=0.0).to(tl.float32)
    value = _gated(gate, up, limit, acted, ACTIVATION)
    tl.store(acted + pair * hidden + at, value, mask=at < hidden)


@triton.jit
def _out(
    acted, down, ids, weights, bias, y, each, experts, d, hidden, ns, hs, we, ws, wk, bs, ys,
    BLOCK: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in range(each):
        expert = tl.load(ids + token * ns + j).to(tl.int64)
        inside = (expert >= 0) & (expert < experts)
        rows = tl.where(inside, d, 0)
        weight = down + tl.where(inside, expert, 0) * we
        one = _rows(weight, acted + (token * each + j) * hidden, at, rows, hidden, ws, wk, BLOCK, DEPTH)
        if bias is not None:
            one += tl.load(bias + expert * bs + at, mask=at < rows, other=0.0).to(tl.float32)
        total += one * tl.load(weights + token * hs + j).to(tl.float32)
    tl.store(y + token * ys + at, rounded(total, y), mask=at < d)


@inner
def _tile(starts, ends, order, experts, BM: tl.constexpr, EXPERTS: tl.constexpr):
    """The expert of this program's tile, its rows' places among all pairs of token and expert, and which are there."""
    tile = tl.program_id(0)
    e = tl.arange(0, EXPERTS)
    before = tl.load(ends + e, mask=e < experts, other=0x7FFFFFFF) <= tile
    expert = tl.sum(before.to(tl.int32), 0)
    known = tl.minimum(expert, experts - 1)
    first = tl.where(known > 0, tl.load(ends + tl.maximum(known - 1, 0)), 0)
    row = tl.load(starts + known) + (tile - first) * BM + tl.arange(0, BM)
    there = row < tl.where(expert < experts, tl.load(starts + known + 1), 0)
    return known.to(tl.int64), tl.load(order + row, mask=there, other=0), there


@inner
def _product(x, weight, rows, at, there, wanted, k, wk, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Rows of x times rows of a weight, which begin at these pointers, in float32."""
    total = tl.zeros((BM, BN), tl.float32)
    for first in range(0, k, BK):
        along = first + tl.arange(0, BK)
        inside = along < k
        a = tl.load(x + rows[:, None] + along[None, :], mask=there[:, None] & inside[None, :], other=0.0)
        b = tl.load(
            weight + at[None, :] + along[:, None] * wk, mask=inside[:, None] & wanted[None, :], other=0.0
        )
        total = dot(a, b, total)
    return total


@triton.jit
def _hidden_tile(
    x, gate_up, bias, acted, starts, ends, order, each, experts, d, hidden, limit, xs, we, ws, wk, bs,
    ACTIVATION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    expert, pair, there = _tile(starts, ends, order, experts, BM, EXPERTS)
    at = (tl.program_id(1) * BN + tl.arange(0, BN)).to(tl.int64)
    wanted = at < hidden
    first = at
    second = at + hidden
    if ACTIVATION == _OSS:
        first = 2 * at
        second = 2 * at + 1
    weight = gate_up + expert * we
    rows = pair // each * xs
    gate = _product(x, weight, rows, first * ws, there, wanted, d, wk, BM, BN, BK)
    up = _product(x, weight, rows, second * ws, there, wanted, d, wk, BM, BN, BK)
    if bias is not None:
        gate += tl.load(bias + expert * bs + first, mask=wanted, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias + expert * bs + second, mask=wanted, other=0.0).to(tl.float32)[None, :]
    value = _gated(gate, up, limit, acted, ACTIVATION)
    to = acted + pair[:, None] * hidden + at[None, :]
    tl.store(to, rounded(value, acted), mask=there[:, None] & wanted[None, :])


@triton.jit
def _out_tile(
    acted, down, weights, bias, parts, starts, ends, order, each, experts, d, hidden, hs, we, ws, wk, bs,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    expert, pair, there = _tile(starts, ends, order, experts, BM, EXPERTS)
    at = (tl.program_id(1) * BN + tl.arange(0, BN)).to(tl.int64)
    wanted = at < d
    weight = down + expert * we
    total = _product(acted, weight, pair * hidden, at * ws, there, wanted, hidden, wk, BM, BN, BK)
    if bias is not None:
        total += tl.load(bias + expert * bs + at, mask=wanted, other=0.0).to(tl.float32)[None, :]
    share = tl.load(weights + pair // each * hs + pair % each, mask=there, other=0.0).to(tl.float32)
    to = parts + pair[:, None] * d + at[None, :]
    tl.store(to, total * share[:, None], mask=there[:, None] & wanted[None, :])


def experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: int,
    limit: float,
    *,
    y: Tensor,
) -> None:
    (tokens, each), (count, d, hidden) = ids.shape, down.shape
    biases = [0 if b is None else b.stride(0) for b in (gate_up_bias, down_bias)]
    if tokens > _FEW:
        pairs = ids.numel()
        found, order = ids.flatten().sort(stable=True)
        known = torch.arange(count + 1, dtype=found.dtype, device=x.device)
        starts = torch.searchsorted(found, known, out_int32=True)
        rows = min(max(triton.next_power_of_2(triton.cdiv(pairs, count)), 16), 64)
        ends = ((starts.diff() + rows - 1) // rows).cumsum(0, dtype=torch.int32)
        bad = torch.where((starts[:1] > 0) | (starts[-1:] < pairs), 0, pairs)
        check(bad, "experts", ids, count)
        acted = torch.empty((pairs, hidden), dtype=x.dtype, device=x.device)
        parts = torch.empty((pairs, d), dtype=torch.float32, device=x.device)
        tiles = triton.cdiv(pairs, rows) + min(count, pairs)
        how = {"BM": rows, "BN": 64, "BK": 32 if x.dtype == torch.float32 else 64}
        how["EXPERTS"] = triton.next_power_of_2(count)
        launch(
            _hidden_tile,
            (tiles, triton.cdiv(hidden, 64)),
            *(x, gate_up, gate_up_bias, acted, starts, ends, order, each, count, d, hidden, limit),
            *(x.stride(0), *gate_up.stride(), biases[0]),
            ACTIVATION=activation,
            **how,
        )
        launch(
            _out_tile,
            (tiles, triton.cdiv(d, 64)),
            *(acted, down, weights, down_bias, parts, starts, ends, order, each, count, d, hidden),
            *(weights.stride(0), *down.stride(), biases[1]),
            **how,
        )
        y.copy_(parts.view(tokens, each, d).sum(1))
        return
    acted = torch.empty((tokens * each, hidden), dtype=torch.float32, device=x.device)
    bad = flag(ids)
    block, depth = min(block_of(hidden), 32), min(block_of(d), 128)
    launch(
        _hidden,
        (tokens * each, triton.cdiv(hidden, block)),
        *(x, gate_up, ids, gate_up_bias, acted, bad, each, count, d, hidden, limit),
        *(x.stride(0), ids.stride(0), *gate_up.stride(), biases[0]),
        ACTIVATION=activation,
        BLOCK=block,
        DEPTH=depth,
    )
    check(bad, "experts", ids, count)
    block, depth = min(block_of(d), 32), min(block_of(hidden), 128)
    launch(
        _out,
        (tokens, triton.cdiv(d, block)),
        *(acted, down, ids, weights, down_bias, y, each, count, d, hidden),
        *(ids.stride(0), weights.stride(0), *down.stride(), biases[1], y.stride(0)),
        BLOCK=block,
        DEPTH=depth,
    )


KERNELS = {"experts": experts}
