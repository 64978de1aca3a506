"""RMSNorm: a program a row, which stays in registers where it fits and is read again from cache where not."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from opsmith.kernels.triton.common import block_of, launch, warps_of
from opsmith.kernels.triton.norm import COLUMN_TILE, column_grid, sum_at


@triton.jit
def _write(y, row, at, mask, v, rstd, weight, offset, WEIGHT: tl.constexpr, ROUND: tl.constexpr):
    v = v * rstd
    if ROUND:
        v = v.to(y.dtype.element_ty).to(tl.float32)
    if WEIGHT:
        v *= tl.load(weight + at, mask=mask, other=0.0).to(tl.float32) + offset
    tl.store(y + row + at, v.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _forward(
    x,
    residual,
    weight,
    y,
    summed,
    rstds,
    n,
    eps,
    offset,
    xs,
    rs,
    ys,
    ss,
    BLOCK: tl.constexpr,
    ONE: tl.constexpr,
    RESIDUAL: tl.constexpr,
    WEIGHT: tl.constexpr,
    ROUND: tl.constexpr,
    SUMMED: tl.constexpr,
    SAVE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    squares = tl.zeros((BLOCK,), tl.float32)
    v = sum_at(x, residual, row * xs, row * rs, lanes, lanes < n, RESIDUAL)
    for start in range(0, n, BLOCK):
        at = start + lanes
        if not ONE:
            v = sum_at(x, residual, row * xs, row * rs, at, at < n, RESIDUAL)
        squares += v * v
    rstd = 1.0 / tl.sqrt(tl.sum(squares, 0) / n + eps)
    if SAVE:
        tl.store(rstds + row, rstd)
    # The sum is stored only now that it has been read for the last time: it may lie over x.
    for start in range(0, n, BLOCK):
        at = start + lanes
        if not ONE:
            v = sum_at(x, residual, row * xs, row * rs, at, at < n, RESIDUAL)
        if SUMMED:
            tl.store(summed + row * ss + at, v.to(summed.dtype.element_ty), mask=at < n)
        _write(y, row * ys, at, at < n, v, rstd, weight, offset, WEIGHT, ROUND)


@triton.jit
def _gradient(dy, weight, offset, row, at, mask, WEIGHT: tl.constexpr):
    g = tl.load(dy + row + at, mask=mask, other=0.0).to(tl.float32)
    if WEIGHT:
        g *= tl.load(weight + at, mask=mask, other=0.0).to(tl.float32) + offset
    return g


@triton.jit
def _backward_rows(
    dy,
    dsummed,
    s,
    rstds,
    weight,
    dx,
    n,
    offset,
    gs,
    ds,
    ss,
    xs,
    BLOCK: tl.constexpr,
    ONE: tl.constexpr,
    DSUMMED: tl.constexpr,
    WEIGHT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    rstd = tl.load(rstds + row)
    lanes = tl.arange(0, BLOCK)
    g = _gradient(dy, weight, offset, row * gs, lanes, lanes < n, WEIGHT)
    hat = tl.load(s + row * ss + lanes, mask=lanes < n, other=0.0).to(tl.float32) * rstd
    along = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        at = start + lanes
        if not ONE:
            g = _gradient(dy, weight, offset, row * gs, at, at < n, WEIGHT)
            hat = tl.load(s + row * ss + at, mask=at < n, other=0.0).to(tl.float32) * rstd
        along += g * hat
    share = tl.sum(along, 0) / n
    for start in range(0, n, BLOCK):
        at = start + lanes
        if not ONE:
            g = _gradient(dy, weight, offset, row * gs, at, at < n, WEIGHT)
            hat = tl.load(s + row * ss + at, mask=at < n, other=0.0).to(tl.float32) * rstd
        v = (g - hat * share) * rstd
        if DSUMMED:
            v += tl.load(dsummed + row * ds + at, mask=at < n, other=0.0).to(tl.float32)
        tl.store(dx + row * xs + at, v.to(dx.dtype.element_ty), mask=at < n)


@triton.jit
def _backward_columns(dy, s, rstds, dweight, rows, n, gs, ss, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums over a stripe of rows, into row program_id(1) of a [stripes, n] float32 matrix."""
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    stripe = tl.program_id(1).to(tl.int64)
    stripes = tl.num_programs(1)
    w = tl.zeros((COLUMNS,), tl.float32)
    for first in range(stripe * ROWS, rows, stripes * ROWS):
        row = first + tl.arange(0, ROWS).to(tl.int64)
        mask = (row < rows)[:, None] & (at < n)[None, :]
        g = tl.load(dy + row[:, None] * gs + at[None, :], mask=mask, other=0.0).to(tl.float32)
        v = tl.load(s + row[:, None] * ss + at[None, :], mask=mask, other=0.0).to(tl.float32)
        w += tl.sum(g * v * tl.load(rstds + row, mask=row < rows, other=0.0)[:, None], 0)
    tl.store(dweight + stripe * n + at, w, mask=at < n)


def rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    round_before_weight: bool,
    *,
    y: torch.Tensor,
    summed: torch.Tensor | None = None,
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
        y,
        summed,
        rstd,
        n,
        eps,
        weight_offset,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        y.stride(0),
        0 if summed is None else summed.stride(0),
        BLOCK=block,
        ONE=n <= block,
        RESIDUAL=residual is not None,
        WEIGHT=weight is not None,
        ROUND=round_before_weight,
        SUMMED=summed is not None,
        SAVE=rstd is not None,
        num_warps=warps_of(block),
    )


def rms_norm_backward(
    dy: torch.Tensor,
    dsummed: torch.Tensor | None,
    s: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    weight_offset: float,
    *,
    dx: torch.Tensor | None = None,
    dweight: torch.Tensor | None = None,
) -> None:
    rows, n = s.shape
    if dx is not None:
        block = block_of(n, 8192)
        launch(
            _backward_rows,
            (rows if n else 0,),
            dy,
            dsummed,
            s,
            rstd,
            weight,
            dx,
            n,
            weight_offset,
            dy.stride(0),
            0 if dsummed is None else dsummed.stride(0),
            s.stride(0),
            dx.stride(0),
            BLOCK=block,
            ONE=n <= block,
            DSUMMED=dsummed is not None,
            WEIGHT=weight is not None,
            num_warps=warps_of(block),
        )
    if dweight is None:
        return
    blocks, stripes = column_grid(s)
    partial = torch.zeros((stripes, n), dtype=torch.float32, device=s.device)
    launch(
        _backward_columns,
        (blocks, stripes if rows else 0),
        dy,
        s,
        rstd,
        partial,
        rows,
        n,
        dy.stride(0),
        s.stride(0),
        ROWS=COLUMN_TILE[0],
        COLUMNS=COLUMN_TILE[1],
    )
    dweight.copy_(partial.sum(0))


KERNELS = {"rms_norm": rms_norm, "rms_norm_backward": rms_norm_backward}
