"""Cross-entropy: forward a program a row, maximum and sum in one scan; backward a program a block of a row.

The forward is that of logits which come in parts (`linear_cross_entropy`): one part, then all rows' losses from a few
numbers each, which takes no time to speak of.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from opsmith.kernels.triton.common import block_of, in_registers, launch, steps, warps_of
from opsmith.ops.pages import has_values

_MEAN = 2
_STATE = 6  # float32 numbers a row, see `_part`


@triton.jit
def _scan(x, n, top, shift, BLOCK: tl.constexpr, SMOOTHED: tl.constexpr):
    """The row's maximum (or `top`, if that is higher), the sum of e^(x - it) in float64, and the sum of x - shift."""
    lanes = tl.arange(0, BLOCK)
    # Lanes add up apart and meet in float64: each addition beside a dominating term would cost half its unit.
    lane_totals = tl.zeros((BLOCK,), tl.float32)
    values = 0.0
    for start in range(0, n, BLOCK):
        at = start + lanes
        mask = at < n
        v = tl.load(x + at, mask=mask, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(v, 0))
        lane_totals = lane_totals * tl.exp(top - higher) + tl.exp(v - higher)
        top = higher
        if SMOOTHED:
            values += tl.sum(tl.where(mask, v - shift, 0.0), 0)
    return top, tl.sum(lane_totals.to(tl.float64), 0), values


@triton.jit
def _loss(top, log_total, z, shift, values, classes, smoothing, z_loss, SMOOTHED: tl.constexpr):
    """In float64, as log_total is: a few numbers a row."""
    top = top.to(tl.float64)
    loss = (top - z) + log_total
    if SMOOTHED:
        loss = (1.0 - smoothing) * loss + smoothing * ((top - shift) - values / classes + log_total)
    lse = top + log_total
    return loss + z_loss * lse * lse


@triton.jit
def _part(
    logits, target, state, n, first, row_stride, target_stride, state_stride, ignore_index,
    BLOCK: tl.constexpr, SMOOTHED: tl.constexpr, BEGIN: tl.constexpr,
):  # fmt: skip
    """One part of a row's logits into its state: maximum, sum in two floats, shift, sum of values, target's logit."""
    row = tl.program_id(0).to(tl.int64)
    t = tl.load(target + row * target_stride).to(tl.int64)
    if t != ignore_index:
        x = logits + row * row_stride
        s = state + row
        before = -3.4028234663852886e38
        total = tl.zeros((1,), tl.float64)
        shift = 0.0
        values = 0.0
        if BEGIN:
            shift = tl.load(x).to(tl.float32)
            tl.store(s + 3 * state_stride, shift)
            tl.store(s + 5 * state_stride, float("nan"))  # stays where the target is no class
        else:
            before = tl.load(s)
            high = tl.load(s + state_stride + tl.arange(0, 1)).to(tl.float64)
            total = high + tl.load(s + 2 * state_stride + tl.arange(0, 1)).to(tl.float64)
            shift = tl.load(s + 3 * state_stride)
            values = tl.load(s + 4 * state_stride)
        top, more, some = _scan(x, n, before, shift, BLOCK, SMOOTHED)
        total = total * tl.exp(before - top).to(tl.float64) + more
        high = total.to(tl.float32)
        tl.store(s, top)
        tl.store(s + state_stride + tl.arange(0, 1), high)
        tl.store(s + 2 * state_stride + tl.arange(0, 1), (total - high.to(tl.float64)).to(tl.float32))
        tl.store(s + 4 * state_stride, values + some)
        at = t - first
        if (at >= 0) & (at < n):
            tl.store(s + 5 * state_stride, tl.load(x + at).to(tl.float32))


@triton.jit
def _finish(
    state, target, losses, pivots, log_totals, rows, classes, target_stride, state_stride, ignore_index,
    smoothing, z_loss,
    BLOCK: tl.constexpr, SMOOTHED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = row < rows
    t = tl.load(target + row * target_stride, mask=mask, other=0).to(tl.int64)
    valid = mask & (t != ignore_index)
    s = state + row
    top = tl.load(s, mask=valid, other=0.0)
    total = tl.load(s + state_stride, mask=valid, other=1.0).to(tl.float64)
    total += tl.load(s + 2 * state_stride, mask=valid, other=0.0).to(tl.float64)
    shift = tl.load(s + 3 * state_stride, mask=valid, other=0.0)
    values = tl.load(s + 4 * state_stride, mask=valid, other=0.0)
    z = tl.load(s + 5 * state_stride, mask=valid, other=0.0)
    log_total = tl.log(total)
    loss = _loss(top, log_total, z, shift, values, classes, smoothing, z_loss, SMOOTHED)
    tl.store(losses + row, tl.where(valid, loss, 0.0), mask=mask)
    if pivots is not None:
        tl.store(pivots + row, top, mask=mask)
        tl.store(log_totals + row, log_total.to(tl.float32), mask=mask)


@triton.jit
def _backward(
    upstream, logits, target, pivots, log_totals, dlogits, n, first, classes, row_stride, target_stride,
    out_stride, upstream_stride, ignore_index, smoothing, z_loss,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    t = tl.load(target + row * target_stride).to(tl.int64)
    d = dlogits + row * out_stride
    if t == ignore_index:
        tl.store(d + at, tl.zeros((BLOCK,), d.dtype.element_ty), mask=mask)
    else:
        g = tl.load(upstream + row * upstream_stride).to(tl.float32)
        pivot = tl.load(pivots + row)
        log_total = tl.load(log_totals + row)
        v = tl.load(logits + row * row_stride + at, mask=mask, other=0.0).to(tl.float32)
        p = tl.exp(v - pivot) * (tl.exp(-log_total) * (1.0 + 2.0 * z_loss * (pivot + log_total)))
        v = p - smoothing / classes - tl.where(first + at == t, 1.0 - smoothing, 0.0)
        tl.store(d + at, (v * g).to(d.dtype.element_ty), mask=mask)


def _refuse_bad(target: Tensor, classes: int, ignore_index: int) -> None:
    """A kernel cannot raise, so the host looks first; where it may not wait, the loss of a bad target is NaN."""
    if not has_values(target):
        return
    bad = ((target < 0) | (target >= classes)) & (target != ignore_index)
    if bool(bad.any()):
        raise RuntimeError(f"cross_entropy: targets must lie in [0, {classes}) or be ignored")


def cross_entropy(logits, target, ignore_index, label_smoothing, z_loss, reduction, *, loss, stats=None):
    """All of the logits as one part."""
    rows, n = logits.shape
    state = torch.empty(_STATE, rows, dtype=torch.float32, device=logits.device)
    cross_entropy_part(logits, target, ignore_index, label_smoothing, 0, n, state=state)
    how = (ignore_index, label_smoothing, z_loss, reduction, n)
    cross_entropy_finish(state, target, *how, loss=loss, stats=stats)


def _kept(stats: Tensor | None) -> tuple[Tensor | None, ...]:
    return (None, None) if stats is None else (stats[0], stats[1])


def cross_entropy_part(
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    first: int,
    classes: int,
    *,
    state: Tensor,
) -> None:
    rows, n = logits.shape
    if first == 0:
        _refuse_bad(target, classes, ignore_index)
    launch(
        _part,
        (rows,),
        *(logits, target, state, n, first, *steps(logits, target, state), ignore_index),
        SMOOTHED=label_smoothing != 0,
        BEGIN=first == 0,
        **in_registers(n, 8192),
    )


def cross_entropy_finish(
    state: Tensor,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: int,
    classes: int,
    *,
    loss: Tensor,
    stats: Tensor | None = None,
) -> None:
    rows, block = target.shape[0], 256
    losses = torch.empty(rows, dtype=torch.float64, device=state.device)
    launch(
        _finish,
        (triton.cdiv(rows, block),),
        *(state, target, losses, *_kept(stats), rows, classes),
        *(*steps(target, state), ignore_index, label_smoothing, z_loss),
        BLOCK=block,
        SMOOTHED=label_smoothing != 0,
    )
    if reduction:
        total = losses.sum()
        loss.copy_(total / (target != ignore_index).sum() if reduction == _MEAN else total)
    else:
        loss.copy_(losses)


def cross_entropy_backward(
    dloss: Tensor,
    logits: Tensor,
    target: Tensor,
    stats: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: int,
    first: int = 0,
    classes: int = -1,
    *,
    dlogits: Tensor,
) -> None:
    rows, n = logits.shape
    classes = n if classes < 0 else classes
    upstream = dloss.float() / (target != ignore_index).sum() if reduction == _MEAN else dloss
    block = block_of(n, 4096)
    launch(
        _backward,
        (rows, triton.cdiv(n, block)),
        *(upstream, logits, target, *_kept(stats), dlogits, n, first, classes),
        *steps(logits, target, dlogits, None if reduction else upstream),
        *(ignore_index, label_smoothing, z_loss),
        BLOCK=block,
        num_warps=warps_of(block),
    )


KERNELS = {
    "cross_entropy": cross_entropy,
    "cross_entropy_backward": cross_entropy_backward,
    "cross_entropy_part": cross_entropy_part,
    "cross_entropy_finish": cross_entropy_finish,
}
