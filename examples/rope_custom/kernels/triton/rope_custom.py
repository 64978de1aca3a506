"""RopeCustom on a GPU: y = x * cos + rotate_interleaved(x) * sin

Generated once, and yours to tune: a program has a tile of ROWS rows and BLOCK columns, in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from opsmith.kernels.triton.common import block_of, launch, rounded, warps_of


@triton.jit
def _forward(x, cos, sin, y, rows, size, count_1, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """y = x * cos + rotate_interleaved(x) * sin"""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS).to(tl.int64)[:, None]
    at = (tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK))[None, :]
    mask = (row < rows) & (at < size)
    twin = at ^ 1
    sign = tl.where(at % 2 == 0, -1.0, 1.0)
    v_x = tl.load(x + row * size + at, mask=mask, other=0.0).to(tl.float32)
    v_cos = tl.load(cos + (row % count_1) * size + at, mask=mask, other=0.0).to(tl.float32)
    v_x_twin = tl.load(x + row * size + twin, mask=mask, other=0.0).to(tl.float32)
    v_sin = tl.load(sin + (row % count_1) * size + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + row * size + at, rounded(v_x * v_cos + sign * v_x_twin * v_sin, y), mask=mask)


def forward(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, y: torch.Tensor) -> None:
    size = x.shape[-1]
    rows = x.numel() // max(size, 1)
    block = block_of(size, 1024)
    width = max(1, 1024 // block)
    launch(
        _forward,
        (triton.cdiv(rows, width), triton.cdiv(size, block)),
        x,
        cos,
        sin,
        y,
        rows,
        size,
        max(x.shape[-2], 1),
        ROWS=width,
        BLOCK=block,
        num_warps=warps_of(width * block),
    )


@triton.jit
def _backward(
    dy, cos, sin, dx, rows, size, count_1, ROWS: tl.constexpr, BLOCK: tl.constexpr, DX: tl.constexpr
):
    """The gradients of x, derived from the formula."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS).to(tl.int64)[:, None]
    at = (tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK))[None, :]
    mask = (row < rows) & (at < size)
    twin = at ^ 1
    sign = tl.where(at % 2 == 0, -1.0, 1.0)
    v_dy_twin = tl.load(dy + row * size + twin, mask=mask, other=0.0).to(tl.float32)
    v_sin_twin = tl.load(sin + (row % count_1) * size + twin, mask=mask, other=0.0).to(tl.float32)
    v_dy = tl.load(dy + row * size + at, mask=mask, other=0.0).to(tl.float32)
    v_cos = tl.load(cos + (row % count_1) * size + at, mask=mask, other=0.0).to(tl.float32)
    v_1 = -sign * (v_dy_twin * v_sin_twin) + v_dy * v_cos
    if DX:
        tl.store(dx + row * size + at, rounded(v_1, dx), mask=mask)


def backward(
    dy: torch.Tensor, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, dx: torch.Tensor | None = None
) -> None:
    size = dy.shape[-1]
    rows = dy.numel() // max(size, 1)
    block = block_of(size, 1024)
    width = max(1, 1024 // block)
    launch(
        _backward,
        (triton.cdiv(rows, width), triton.cdiv(size, block)),
        dy,
        cos,
        sin,
        dx,
        rows,
        size,
        max(dy.shape[-2], 1),
        ROWS=width,
        BLOCK=block,
        DX=dx is not None,
        num_warps=warps_of(width * block),
    )


KERNELS = {"forward": forward, "backward": backward}
