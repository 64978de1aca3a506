"""Experts for a few tokens: a program a block of an expert's hidden numbers, then one a block of a token's result."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from opsmith.kernels.triton.common import block_of, exp_for, flag, launch, report, rounded
from opsmith.ops.gelu.triton import curve

_OSS = tl.constexpr(3)


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
    gate = tl.minimum(gate, limit)
    up = tl.maximum(tl.minimum(up, limit), -limit)
    if ACTIVATION == _OSS:
        value = (up + 1.0) * gate / (1.0 + exp_for(-1.702 * gate, acted))
    else:
        value = curve(gate, acted, ACTIVATION) * up
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


def experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    activation: int,
    limit: float,
    *,
    y: torch.Tensor,
) -> None:
    (tokens, each), (count, d, hidden) = ids.shape, down.shape
    acted = torch.empty((tokens * each, hidden), dtype=torch.float32, device=x.device)
    bad = flag(ids)
    block, depth = min(block_of(hidden), 32), min(block_of(d), 128)
    biases = [0 if b is None else b.stride(0) for b in (gate_up_bias, down_bias)]
    launch(
        _hidden,
        (tokens * each, triton.cdiv(hidden, block)),
        *(x, gate_up, ids, gate_up_bias, acted, bad, each, count, d, hidden, limit),
        *(x.stride(0), ids.stride(0), *gate_up.stride(), biases[0]),
        ACTIVATION=activation,
        BLOCK=block,
        DEPTH=depth,
    )
    at = int(bad)
    if at < ids.numel():
        place = divmod(at, each)
        raise RuntimeError(f"experts: ids must be in [0, {count}), got {int(ids[place])} at position {place}")
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
