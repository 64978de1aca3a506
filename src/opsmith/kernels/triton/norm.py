"""LayerNorm and RMSNorm, which is the one without means: a program a row, forward and backward.

A row stays in registers where it fits, and is read again from cache where not.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from opsmith.kernels.triton.common import in_registers, launch, processors, steps
from opsmith.kernels.triton.formula import add_parts, parts_of

_ROWS, _COLUMNS = 16, 64  # of a tile of column sums


@triton.jit
def _sum_at(x, residual, xrow, rrow, at, mask, RESIDUAL: tl.constexpr):
    """Elements of a row of x, or of x + residual as it is rounded when it is stored."""
    v = tl.load(x + xrow + at, mask=mask, other=0.0).to(tl.float32)
    if RESIDUAL:
        v += tl.load(residual + rrow + at, mask=mask, other=0.0).to(tl.float32)
        v = v.to(x.dtype.element_ty).to(tl.float32)
    return v


@triton.jit
def _forward(
    x, residual, weight, bias, y, summed, means, rstds, n, eps, offset, xs, rs, ys, ss,
    BLOCK: tl.constexpr, ONE: tl.constexpr, CENTERED: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    pivot = 0.0
    if CENTERED:  # around the row's first element, so that the mean of what is left is small and exact enough
        pivot = tl.load(x + row * xs).to(tl.float32)
    mean = 0.0
    m2 = 0.0
    squares = tl.zeros((BLOCK,), tl.float32)
    v = _sum_at(x, residual, row * xs, row * rs, lanes, lanes < n, residual is not None)
    for start in range(0, n, BLOCK):
        at = start + lanes
        mask = at < n
        if not ONE:
            v = _sum_at(x, residual, row * xs, row * rs, at, mask, residual is not None)
        if CENTERED:
            # Chan's formula: the block's two moments, exact in registers, are merged with those of the blocks before.
            count = tl.minimum(n - start, BLOCK).to(tl.float32)
            d = tl.where(mask, v - pivot, 0.0)
            block_mean = tl.sum(d, 0) / count
            d = tl.where(mask, d - block_mean, 0.0)
            delta = block_mean - mean
            share = count / (start + count)
            mean += delta * share
            m2 += tl.sum(d * d, 0) + delta * delta * share * start
        else:
            squares += v * v
    if not CENTERED:
        m2 = tl.sum(squares, 0)
    rstd = 1.0 / tl.sqrt(m2 / n + eps)
    if means is not None:
        tl.store(means + row, pivot + mean)
    if rstds is not None:
        tl.store(rstds + row, rstd)
    # The sum is stored only now that it has been read for the last time: it may lie over x.
    for start in range(0, n, BLOCK):
        at = start + lanes
        if not ONE:
            v = _sum_at(x, residual, row * xs, row * rs, at, at < n, residual is not None)
        if summed is not None:
            tl.store(summed + row * ss + at, v.to(summed.dtype.element_ty), mask=at < n)
        if CENTERED:
            v = v - pivot - mean
        v *= rstd
        if ROUND:
            v = v.to(y.dtype.element_ty).to(tl.float32)
        if weight is not None:
            v *= tl.load(weight + at, mask=at < n, other=0.0).to(tl.float32) + offset
        if bias is not None:
            v += tl.load(bias + at, mask=at < n, other=0.0).to(tl.float32)
        tl.store(y + row * ys + at, v.to(y.dtype.element_ty), mask=at < n)


def forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    offset: float,
    y: Tensor,
    summed: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    *,
    centered: bool,
    rounds: bool = False,
) -> None:
    """`(s - mean) * rstd * (weight + offset) + bias` of s = x + residual; without a mean where it is not `centered`."""
    rows, n = x.shape
    if not x.numel():
        return
    how = in_registers(n)
    launch(
        _forward,
        (rows,),
        *(x, residual, weight, bias, y, summed, mean, rstd, n, eps, offset),
        *steps(x, residual, y, summed),
        ONE=n <= how["BLOCK"],
        CENTERED=centered,
        ROUND=rounds,
        **how,
    )


@triton.jit
def _gradient(dy, weight, offset, at, mask, WEIGHT: tl.constexpr):
    g = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
    if WEIGHT:
        g *= tl.load(weight + at, mask=mask, other=0.0).to(tl.float32) + offset
    return g


@triton.jit
def _rows(
    dy, dsummed, s, means, rstds, weight, dx, n, offset, gs, ds, ss, xs,
    BLOCK: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    dy += row * gs
    s += row * ss
    mean = 0.0
    if means is not None:
        mean = tl.load(means + row)
    rstd = tl.load(rstds + row)
    lanes = tl.arange(0, BLOCK)
    g = _gradient(dy, weight, offset, lanes, lanes < n, weight is not None)
    hat = (tl.load(s + lanes, mask=lanes < n, other=0.0).to(tl.float32) - mean) * rstd
    total = tl.zeros((BLOCK,), tl.float32)
    along = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        at = start + lanes
        if not ONE:
            g = _gradient(dy, weight, offset, at, at < n, weight is not None)
            hat = (tl.load(s + at, mask=at < n, other=0.0).to(tl.float32) - mean) * rstd
        along += g * hat
        if means is not None:
            total += g
    mean_g = tl.sum(total, 0) / n
    share = tl.sum(along, 0) / n
    for start in range(0, n, BLOCK):
        at = start + lanes
        if not ONE:
            g = _gradient(dy, weight, offset, at, at < n, weight is not None)
            hat = (tl.load(s + at, mask=at < n, other=0.0).to(tl.float32) - mean) * rstd
        v = (g - mean_g - hat * share) * rstd
        if dsummed is not None:
            v += tl.load(dsummed + row * ds + at, mask=at < n, other=0.0).to(tl.float32)
        tl.store(dx + row * xs + at, v.to(dx.dtype.element_ty), mask=at < n)


@triton.jit
def _columns(dy, s, means, rstds, dweight, dbias, rows, n, gs, ss, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
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
        if dweight is not None:
            v = tl.load(s + row[:, None] * ss + at[None, :], mask=mask, other=0.0).to(tl.float32)
            if means is not None:
                v -= tl.load(means + row, mask=row < rows, other=0.0)[:, None]
            v *= tl.load(rstds + row, mask=row < rows, other=0.0)[:, None]
            w += tl.sum(g * v, 0)
        if dbias is not None:
            b += tl.sum(g, 0)
    if dweight is not None:
        tl.store(dweight + stripe * n + at, w, mask=at < n)
    if dbias is not None:
        tl.store(dbias + stripe * n + at, b, mask=at < n)


def backward(
    dy: Tensor,
    dsummed: Tensor | None,
    s: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    offset: float,
    dx: Tensor | None,
    dweight: Tensor | None,
    dbias: Tensor | None,
) -> None:
    """Gradients of `(s - mean) * rstd * (weight + offset) + bias`, those that there is memory for."""
    rows, n = s.shape
    if dx is not None:
        how = in_registers(n, 8192)
        launch(
            _rows,
            (rows if n else 0,),
            *(dy, dsummed, s, mean, rstd, weight, dx, n, offset),
            *steps(dy, dsummed, s, dx),
            ONE=n <= how["BLOCK"],
            **how,
        )
    if dweight is None and dbias is None:
        return
    # Blocks of columns, and stripes of rows to be added up afterwards, that keep all of the device busy.
    blocks = triton.cdiv(n, _COLUMNS)
    stripes = max(1, min(triton.cdiv(rows, _ROWS), 4 * processors(s) // max(blocks, 1)))
    partial = [parts_of(t, stripes) for t in (dweight, dbias)]
    launch(
        _columns,
        (blocks, stripes if rows else 0),
        *(dy, s, mean, rstd, *partial, rows, n, *steps(dy, s)),
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
    )
    for total, part in zip((dweight, dbias), partial, strict=True):
        add_parts(total, part)
