"""Cross-entropy: forward a program a row, maximum and sum in one scan; backward a program a block of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from opsmith.kernels.triton.common import block_of, launch, warps_of

_MEAN = 2


@triton.jit
def _forward(
    logits,
    target,
    losses,
    pivots,
    log_totals,
    n,
    row_stride,
    target_stride,
    ignore_index,
    smoothing,
    z_loss,
    BLOCK: tl.constexpr,
    SMOOTHED: tl.constexpr,
    SAVE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    t = tl.load(target + row * target_stride).to(tl.int64)
    x = logits + row * row_stride
    if t == ignore_index:
        tl.store(losses + row, 0.0)
        if SAVE:
            tl.store(pivots + row, 0.0)
            tl.store(log_totals + row, 0.0)
    else:
        lanes = tl.arange(0, BLOCK)
        first = tl.load(x).to(tl.float32)
        top = -3.4028234663852886e38  # not -inf: -inf - -inf would be NaN
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
                values += tl.sum(tl.where(mask, v - first, 0.0), 0)
        log_total = tl.log(tl.sum(lane_totals.to(tl.float64), 0)).to(tl.float32)
        # A target outside the classes reads nothing and gives NaN; where the host can look, it has refused it.
        inside = (t >= 0) & (t < n)
        z = tl.load(x + t, mask=inside, other=0.0).to(tl.float32)
        loss = tl.where(inside, (top - z) + log_total, float("nan"))
        if SMOOTHED:
            loss = (1.0 - smoothing) * loss + smoothing * ((top - first) - values / n + log_total)
        lse = top + log_total
        tl.store(losses + row, loss + z_loss * lse * lse)
        if SAVE:
            tl.store(pivots + row, top)
            tl.store(log_totals + row, log_total)


@triton.jit
def _backward(
    upstream,
    logits,
    target,
    pivots,
    log_totals,
    dlogits,
    n,
    row_stride,
    target_stride,
    out_stride,
    upstream_stride,
    ignore_index,
    smoothing,
    z_loss,
    BLOCK: tl.constexpr,
):
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
        v = p - smoothing / n - tl.where(at == t, 1.0 - smoothing, 0.0)
        tl.store(d + at, (v * g).to(d.dtype.element_ty), mask=mask)


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: int,
    *,
    loss: torch.Tensor,
    stats: torch.Tensor | None = None,
) -> None:
    rows, n = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    block = block_of(n, 8192)
    launch(
        _forward,
        (rows,),
        logits,
        target,
        losses,
        None if stats is None else stats[0],
        None if stats is None else stats[1],
        n,
        logits.stride(0),
        target.stride(0),
        ignore_index,
        label_smoothing,
        z_loss,
        BLOCK=block,
        SMOOTHED=label_smoothing != 0,
        SAVE=stats is not None,
        num_warps=warps_of(block),
    )
    if reduction:
        total = losses.sum()
        loss.copy_(total / (target != ignore_index).sum() if reduction == _MEAN else total)
    else:
        loss.copy_(losses)


def cross_entropy_backward(
    dloss: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    stats: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: int,
    *,
    dlogits: torch.Tensor,
) -> None:
    rows, n = logits.shape
    upstream = dloss.float() / (target != ignore_index).sum() if reduction == _MEAN else dloss
    block = block_of(n, 4096)
    launch(
        _backward,
        (rows, triton.cdiv(n, block)),
        upstream,
        logits,
        target,
        stats[0],
        stats[1],
        dlogits,
        n,
        logits.stride(0),
        target.stride(0),
        dlogits.stride(0),
        0 if reduction else upstream.stride(0),
        ignore_index,
        label_smoothing,
        z_loss,
        BLOCK=block,
        num_warps=warps_of(block),
    )


KERNELS = {"cross_entropy": cross_entropy, "cross_entropy_backward": cross_entropy_backward}
