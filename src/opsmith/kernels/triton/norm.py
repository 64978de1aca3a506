"""What the two norms share: how a row is read, and how the sums over columns are split."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from opsmith.kernels.triton.common import processors

COLUMN_TILE = (16, 64)  # rows, columns


@triton.jit
def sum_at(x, residual, xrow, rrow, at, mask, RESIDUAL: tl.constexpr):
    """Elements of a row of x, or of x + residual as it is rounded when it is stored."""
    v = tl.load(x + xrow + at, mask=mask, other=0.0).to(tl.float32)
    if RESIDUAL:
        v += tl.load(residual + rrow + at, mask=mask, other=0.0).to(tl.float32)
        v = v.to(x.dtype.element_ty).to(tl.float32)
    return v


def column_grid(s: torch.Tensor) -> tuple[int, int]:
    """Blocks of columns, and stripes of rows to be added up afterwards, that keep all of the device busy."""
    rows, n = s.shape
    blocks = triton.cdiv(n, COLUMN_TILE[1])
    return blocks, max(1, min(triton.cdiv(rows, COLUMN_TILE[0]), 4 * processors(s) // max(blocks, 1)))
