"""Rotary embedding: a program takes a block of tokens, loads their part of the table once and turns some heads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from opsmith.kernels.triton import INTERPRETED
from opsmith.kernels.triton.common import launch

_HEADS = 4  # of a program, at most


@triton.jit
def _rotate(
    x,
    y,
    cos,
    sin,
    positions,
    heads,
    tokens,
    half,
    rest,
    rows,
    second,
    xb,
    xh,
    xl,
    yb,
    yh,
    yl,
    cb,
    cl,
    sb,
    sl,
    pb,
    pl,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
    POSITIONS: tl.constexpr,
):
    batch = tl.program_id(2).to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    here = token < tokens
    row = token
    if POSITIONS:
        row = tl.load(positions + batch * pb + token * pl, mask=here, other=0).to(tl.int64)
        # The launch has asked for an error; until it comes, nothing is read out of range.
        row = tl.minimum(tl.maximum(row, 0), rows - 1)
    pair = tl.arange(0, HALF)
    mask = here[:, None] & (pair < half)[None, :]
    c = cos + batch * cb + (row * cl)[:, None] + pair[None, :]
    s = sin + batch * sb + (row * sl)[:, None] + pair[None, :]
    cos1 = tl.load(c, mask=mask, other=0.0).to(tl.float32)
    sin1 = tl.load(s, mask=mask, other=0.0).to(tl.float32)
    cos2 = tl.load(c + second, mask=mask, other=0.0).to(tl.float32)
    sin2 = tl.load(s + second, mask=mask, other=0.0).to(tl.float32)
    if INVERSE:  # the transposed rotation
        swapped = sin1
        sin1 = -sin2
        sin2 = -swapped
    first = pair[None, :]
    apart = half
    if INTERLEAVED:
        first = 2 * first
        apart = 1
    begin = tl.program_id(1).to(tl.int64) * HEADS
    source = x + batch * xb + begin * xh + (token * xl)[:, None]
    target = y + batch * yb + begin * yh + (token * yl)[:, None]
    for _ in range(tl.minimum(HEADS, heads - begin)):
        x1 = tl.load(source + first, mask=mask, other=0.0).to(tl.float32)
        x2 = tl.load(source + first + apart, mask=mask, other=0.0).to(tl.float32)
        y1 = x1 * cos1 - x2 * sin1
        y2 = x2 * cos2 + x1 * sin2
        tl.store(target + first, y1.to(y.dtype.element_ty), mask=mask)
        tl.store(target + first + apart, y2.to(y.dtype.element_ty), mask=mask)
        if REST > 0:
            at = tl.arange(0, REST)[None, :]
            left = here[:, None] & (at < rest)
            kept = tl.load(source + 2 * half + at, mask=left, other=0.0)
            tl.store(target + 2 * half + at, kept, mask=left)
        source += xh
        target += yh


def _turn(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None,
    dims: int,
    interleaved: bool,
    inverse: bool,
    y: torch.Tensor,
) -> None:
    if not x.numel():
        return
    if x.dim() == 3:  # [T, H, D]
        x, y = x.transpose(0, 1).unsqueeze(0), y.transpose(0, 1).unsqueeze(0)
    batch, heads, tokens, size = x.shape
    tables = [t if t.dim() == 3 else t.unsqueeze(0) for t in (cos, sin)]
    steps = [(t.stride(0) if t.shape[0] > 1 else 0, t.stride(1)) for t in tables]
    half, rest = dims // 2, size - dims
    block = int(triton.next_power_of_2(half))
    block_tokens = int(min(triton.next_power_of_2(tokens), max(1, 2048 // block)))
    at = (0, 0)
    if positions is not None:
        at = (
            positions.stride(0) if positions.dim() == 2 and positions.shape[0] > 1 else 0,
            positions.stride(-1),
        )
    in_place = y.data_ptr() == x.data_ptr()
    launch(
        _rotate,
        (triton.cdiv(tokens, block_tokens), triton.cdiv(heads, _HEADS), batch),
        x,
        y,
        *tables,
        positions,
        heads,
        tokens,
        half,
        rest,
        tables[0].shape[1],
        0 if tables[0].shape[2] == half else half,
        *x.stride()[:3],
        *y.stride()[:3],
        *steps[0],
        *steps[1],
        *at,
        HEADS=_HEADS,
        TOKENS=block_tokens,
        HALF=block,
        REST=0 if in_place or not rest else int(triton.next_power_of_2(rest)),
        INTERLEAVED=interleaved,
        INVERSE=inverse,
        POSITIONS=positions is not None,
        num_warps=4 if block * block_tokens >= 1024 else 1,
    )


def _check(positions: torch.Tensor | None, rows: int) -> None:
    """Raise for a position without a row; on a GPU, when the error is next asked for, so that nothing waits."""
    if positions is None:
        return
    good = ((positions >= 0) & (positions < rows)).all()
    if not INTERPRETED:
        torch._assert_async(good)
    elif not bool(good):
        raise RuntimeError(f"rope: positions must lie in [0, {rows}), the rows of the table")


def rope(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None,
    dims: int,
    interleaved: bool,
    inverse: bool,
    *,
    y: torch.Tensor,
) -> None:
    _check(positions, cos.shape[-2])
    _turn(x, cos, sin, positions, dims, interleaved, inverse, y)


def rope_qk(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None,
    dims: int,
    interleaved: bool,
    inverse: bool,
    *,
    yq: torch.Tensor,
    yk: torch.Tensor,
) -> None:
    _check(positions, cos.shape[-2])
    for source, target in ((q, yq), (k, yk)):
        _turn(source, cos, sin, positions, dims, interleaved, inverse, target)


KERNELS = {"rope": rope, "rope_qk": rope_qk}
