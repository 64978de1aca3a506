"""LayerNorm: a program a row, which stays in registers where it fits and is read again from cache where not."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from opsmith.kernels.triton.common import block_of, launch, warps_of
from opsmith.kernels.triton.norm import COLUMN_TILE, column_grid, sum_at


@triton.jit
def _write(y, row, at, mask, v, mean, rstd, weight, bias, WEIGHT: tl.constexpr, BIAS: tl.constexpr):
    v = (v - mean) * rstd
    if WEIGHT:
        v *= tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        v += tl.load(bias + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + row + at, v.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _forward(
    x,
    residual,
    weight,
    bias,
    y,
    summed,
    means,
    rstds,
    n,
    eps,
    xs,
    rs,
    ys,
    ss,
    BLOCK: tl.constexpr,
    ONE: tl.constexpr,
    RESIDUAL: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    SUMMED: tl.constexpr,
    SAVE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    # Around the row's first element, so that the mean of what is left is small and exact enough.
    pivot = tl.load(x + row * xs).to(tl.float32)
    mean = 0.0
    m2 = 0.0
    v = sum_at(x, residual, row * xs, row * rs, lanes, lanes < n, RESIDUAL)
    for start in range(0, n, BLOCK):
        at = start + lanes
        mask = at < n
        if not ONE:
            v = sum_at(x, residual, row * xs, row * rs, at, mask, RESIDUAL)
        # Chan's formula: the block's two moments, exact in registers, are merged with those of the blocks before.
        count = tl.minimum(n - start, BLOCK).to(tl.float32)
        d = tl.where(mask, v - pivot, 0.0)
        block_mean = tl.sum(d, 0) / count
        d = tl.where(mask, d - block_mean, 0.0)
        delta = block_mean - mean
        share = count / (start + count)
        mean += delta * share
        m2 += tl.sum(d * d, 0) + delta * delta * share * start
    rstd = 1.0 / tl.sqrt(m2 / n + eps)
    if SAVE:
        tl.store(means + row, pivot + mean)
        tl.store(rstds + row, rstd)
    # The sum is stored only now that it has been read for the last time: it may lie over x.
    for start in range(0, n, BLOCK):
        at = start + lanes
        if not ONE:
            v = sum_at(x, residual, row * xs, row * rs, at, at < n, RESIDUAL)
        if SUMMED:
            tl.store(summed + row * ss + at, v.to(summed.dtype.element_ty), mask=at < n)
        _write(y, row * ys, at, at < n, v - pivot, mean, rstd, weight, bias, WEIGHT, BIAS)


@triton.jit
def _gradient(dy, weight, row, at, mask, WEIGHT: tl.constexpr):
    g = tl.load(dy + row + at, mask=mask, other=0.0).to(tl.float32)
    if WEIGHT:
        g *= tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
    return g


@triton.jit
def _backward_rows(
    dy,
    dsummed,
    s,
    means,
    rstds,
    weight,
    dx,
    n,
    gs,
    ds,
    ss,
    xs,
    BLOCK: tl.constexpr,
    DSUMMED: tl.constexpr,
    WEIGHT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    mean = tl.load(means + row)
    rstd = tl.load(rstds + row)
    lanes = tl.arange(0, BLOCK)
    total = 0.0
    along = 0.0
    for start in range(0, n, BLOCK):
        at = start + lanes
        mask = at < n
        g = _gradient(dy, weight, row * gs, at, mask, WEIGHT)
        hat = (tl.load(s + row * ss + at, mask=mask, other=0.0).to(tl.float32) - mean) * rstd
        total += tl.sum(g, 0)
        along += tl.sum(tl.where(mask, g * hat, 0.0), 0)
    for start in range(0, n, BLOCK):
        at = start + lanes
        mask = at < n
        g = _gradient(dy, weight, row * gs, at, mask, WEIGHT)
        hat = (tl.load(s + row * ss + at, mask=mask, other=0.0).to(tl.float32) - mean) * rstd
        v = (g - total / n - hat * (along / n)) * rstd
        if DSUMMED:
            v += tl.load(dsummed + row * ds + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx + row * xs + at, v.to(dx.dtype.element_ty), mask=mask)


@triton.jit
def _backward_columns(
    dy,
    s,
    means,
    rstds,
    dweight,
    dbias,
    rows,
    n,
    gs,
    ss,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DWEIGHT: tl.constexpr,
    DBIAS: tl.constexpr,
):
    """Sums over a stripe of rows, into row program_id(1) of two [stripes, n] float32 matrices."""
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    stripe = tl.program_id(1).to(tl.int64)
    stripes = tl.num_programs(1)
    w = tl.zeros((COLUMNS,), tl.float32)
    b = tl.zeros((COLUMNS,), tl.float32)
    for first in range(stripe * ROWS, rows, stripes * ROWS):
        row = first + tl.arange(0, ROWS).to(tl.int64)
        mask = (row < rows)[:, None] & (at < n)[None, :]
        g = tl.load(dy + row[:, None] * gs + at[None, :], mask=mask, other=0.0).to(tl.float32)
        if DWEIGHT:
            v = tl.load(s + row[:, None] * ss + at[None, :], mask=mask, other=0.0).to(tl.float32)
            mean = tl.load(means + row, mask=row < rows, other=0.0)
            rstd = tl.load(rstds + row, mask=row < rows, other=0.0)
            w += tl.sum(tl.where(mask, g * (v - mean[:, None]) * rstd[:, None], 0.0), 0)
        if DBIAS:
            b += tl.sum(g, 0)
    if DWEIGHT:
        tl.store(dweight + stripe * n + at, w, mask=at < n)
    if DBIAS:
        tl.store(dbias + stripe * n + at, b, mask=at < n)


def layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    *,
    y: torch.Tensor,
    summed: torch.Tensor | None = None,
    mean: torch.Tensor | None = None,
    rstd: torch.Tensor | None = None,
) -> None:
    rows, n = x.shape
    if not x.numel():
        return
    block = block_of(n)
    launch(
        _forward,
        (rows,),
        x,
        residual,
        weight,
        bias,
        y,
        summed,
        mean,
        rstd,
        n,
        eps,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        y.stride(0),
        0 if summed is None else summed.stride(0),
        BLOCK=block,
        ONE=n <= block,
        RESIDUAL=residual is not None,
        WEIGHT=weight is not None,
        BIAS=bias is not None,
        SUMMED=summed is not None,
        SAVE=mean is not None,
        num_warps=warps_of(block),
    )


def layer_norm_backward(
    dy: torch.Tensor,
    dsummed: torch.Tensor | None,
    s: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    dx: torch.Tensor | None = None,
    dweight: torch.Tensor | None = None,
    dbias: torch.Tensor | None = None,
) -> None:
    rows, n = s.shape
    if dx is not None:
        block = block_of(n, 4096)
        launch(
            _backward_rows,
            (rows if n else 0,),
            dy,
            dsummed,
            s,
            mean,
            rstd,
            weight,
            dx,
            n,
            dy.stride(0),
            0 if dsummed is None else dsummed.stride(0),
            s.stride(0),
            dx.stride(0),
            BLOCK=block,
            DSUMMED=dsummed is not None,
            WEIGHT=weight is not None,
            num_warps=warps_of(block),
        )
    if dweight is None and dbias is None:
        return
    blocks, stripes = column_grid(s)
    partial = [
        None if t is None else torch.zeros((stripes, n), dtype=torch.float32, device=s.device)
        for t in (dweight, dbias)
    ]
    launch(
        _backward_columns,
        (blocks, stripes if rows else 0),
        dy,
        s,
        mean,
        rstd,
        partial[0],
        partial[1],
        rows,
        n,
        dy.stride(0),
        s.stride(0),
        ROWS=COLUMN_TILE[0],
        COLUMNS=COLUMN_TILE[1],
        DWEIGHT=dweight is not None,
        DBIAS=dbias is not None,
    )
    for total, part in ((dweight, partial[0]), (dbias, partial[1])):
        if total is not None and part is not None:
            total.copy_(part.sum(0))


KERNELS = {"layer_norm": layer_norm, "layer_norm_backward": layer_norm_backward}
