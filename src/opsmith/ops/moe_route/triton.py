"""Routing: a program a row of logits, which takes the largest as often as experts are chosen."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from opsmith.kernels.triton.common import as_rows, block_of, exp_for, launch, rounded


@triton.jit
def _scores(x, visible, like, SIGMOID: tl.constexpr):
    if SIGMOID:
        return 1.0 / (1.0 + exp_for(-x, like))
    e = tl.where(visible, exp_for(x - tl.max(tl.where(visible, x, float("-inf")), 0), like), 0.0)
    return e / tl.sum(e, 0)


@triton.jit
def _best(values, lanes, left, BLOCK: tl.constexpr):
    """The first place of the largest value among those that are left; the first of all where that is NaN."""
    top = tl.max(tl.where(left, values, float("-inf")), 0)
    found = tl.min(tl.where(left & (values == top), lanes, BLOCK), 0)
    return tl.where(found < BLOCK, found, tl.min(tl.where(left, lanes, BLOCK), 0))


@triton.jit
def _forward(
    logits, bias, ids, weights, experts, chosen, groups, opened, scale, ls,
    BLOCK: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    visible = lanes < experts
    x = tl.load(logits + row * ls + lanes, mask=visible, other=0.0).to(tl.float32)
    scores = _scores(x, visible, weights, SIGMOID)
    by = x
    ranked = x
    if SIGMOID:
        ranked = scores
    if bias is not None:
        by = scores + tl.load(bias + lanes, mask=visible, other=0.0).to(tl.float32)
        ranked = by
    left = visible
    if groups > 1:
        size = experts // groups
        rank = tl.full((BLOCK,), 0.0, tl.float32)
        for g in range(groups):
            mine = visible & (lanes // size == g)
            first = _best(ranked, lanes, mine, BLOCK)
            value = tl.sum(tl.where(lanes == first, ranked, 0.0), 0)
            if SIGMOID or bias is not None:
                others = mine & (lanes != first)
                second = tl.max(tl.where(others, ranked, float("-inf")), 0)
                value += tl.where(size > 1, second, 0.0)
            rank = tl.where(lanes == g, value, rank)
        waiting = lanes < groups
        left = lanes < 0
        for _ in range(opened):
            g = _best(rank, lanes, waiting, BLOCK)
            waiting = waiting & (lanes != g)
            left = left | (visible & (lanes // size == g))
    taken = lanes < 0
    total = 1e-20
    for j in range(chosen):
        e = _best(by, lanes, left, BLOCK)
        left = left & (lanes != e)
        taken = taken | (lanes == e)
        tl.store(ids + row * chosen + j, e.to(tl.int64))
    if NORMALIZE:
        total += tl.sum(tl.where(taken, scores, 0.0), 0)
    for j in range(chosen):
        e = tl.load(ids + row * chosen + j)
        weight = tl.sum(tl.where(lanes == e, scores, 0.0), 0)
        if NORMALIZE:
            weight = weight / total
        tl.store(weights + row * chosen + j, weight * scale)


@triton.jit
def _backward(
    dweights, logits, ids, dlogits, experts, chosen, scale, ls, ds,
    BLOCK: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    visible = lanes < experts
    x = tl.load(logits + row * ls + lanes, mask=visible, other=0.0).to(tl.float32)
    scores = _scores(x, visible, dweights, SIGMOID)
    seen = tl.zeros((BLOCK,), tl.float32)
    taken = lanes < 0
    for j in range(chosen):
        here = lanes == tl.load(ids + row * chosen + j)
        seen = tl.where(here, tl.load(dweights + row * chosen + j), seen)
        taken = taken | here
    if NORMALIZE:
        total = 1e-20 + tl.sum(tl.where(taken, scores, 0.0), 0)
        seen = tl.where(taken, (seen - tl.sum(seen * scores, 0) / total) / total, 0.0)
    seen = seen * scale
    slope = seen * scores * (1.0 - scores) if SIGMOID else scores * (seen - tl.sum(seen * scores, 0))
    tl.store(dlogits + row * ds + lanes, rounded(slope, dlogits), mask=visible)


def moe_route(
    logits: Tensor,
    bias: Tensor | None,
    k: int,
    sigmoid: bool,
    groups: int,
    topk_groups: int,
    normalize: bool,
    scale: float,
    *,
    ids: Tensor,
    weights: Tensor,
) -> None:
    rows, experts = logits.shape
    if experts % groups or topk_groups > groups or not 0 < k <= experts // groups * topk_groups:
        raise RuntimeError(f"moe_route: {k} of {topk_groups} of {groups} groups of {experts} experts")
    given = (logits, bias, ids, weights, experts, k, groups, topk_groups, scale, as_rows(logits).stride(0))
    launch(_forward, (rows,), *given, BLOCK=block_of(experts), SIGMOID=sigmoid, NORMALIZE=normalize)


def moe_route_backward(
    dweights: Tensor,
    logits: Tensor,
    ids: Tensor,
    sigmoid: bool,
    normalize: bool,
    scale: float,
    *,
    dlogits: Tensor,
) -> None:
    (rows, experts), k = logits.shape, ids.shape[1]
    given = (dweights, logits, ids, dlogits, experts, k, scale, logits.stride(0), dlogits.stride(0))
    launch(_backward, (rows,), *given, BLOCK=block_of(experts), SIGMOID=sigmoid, NORMALIZE=normalize)


KERNELS = {"moe_route": moe_route, "moe_route_backward": moe_route_backward}
