"""Softmax: a program a row; rows beyond a block are scanned once for maximum and sum, once more for the result.

Subtracting the maximum costs a GPU nothing that memory does not hide, so every method is the stable one here.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from opsmith.kernels.triton.common import as_rows, in_registers, launch, rounded


@triton.jit
def _scores(x, mask, row, mask_row, at, visible, scale, ms, MASK: tl.constexpr):
    """A block of a row, scaled and masked, in float32; -inf where nothing is to be seen."""
    v = tl.load(x + row + at, mask=visible, other=0.0).to(tl.float32) * scale
    if MASK == 1:
        kept = tl.load(mask + mask_row + at * ms, mask=visible, other=0)
        visible = visible & (kept != 0)
    elif MASK == 2:
        v += tl.load(mask + mask_row + at * ms, mask=visible, other=0.0).to(tl.float32)
    return tl.where(visible, v, float("-inf"))


@triton.jit
def _finite(top):
    """A maximum that may be subtracted from -inf."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def _forward(
    x, mask, y, L, S, scale, xo, xl, mo, ml, ms, yo, yl,
    BLOCK: tl.constexpr, ONE: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    o = program // L
    l = program % L
    row = o * xo + l * xl
    mask_row = o * mo + l * ml
    out = o * yo + l * yl
    n = S
    if CAUSAL:
        n = tl.minimum(S, tl.maximum(0, l + S - L + 1))
    lanes = tl.arange(0, BLOCK)
    if ONE:
        v = _scores(x, mask, row, mask_row, lanes, lanes < n, scale, ms, MASK)
        e = tl.exp(v - _finite(tl.max(v, 0)))
        total = tl.sum(e.to(WIDE), 0)
    else:
        top = tl.max(tl.full((BLOCK,), float("-inf"), tl.float32), 0)
        total = tl.sum(tl.zeros((BLOCK,), WIDE), 0)
        for start in range(0, n, BLOCK):
            at = start + lanes
            v = _scores(x, mask, row, mask_row, at, at < n, scale, ms, MASK)
            higher = tl.maximum(top, tl.max(v, 0))
            e = tl.exp(v - _finite(higher))
            total = total * tl.exp(top - _finite(higher)).to(WIDE) + tl.sum(e.to(WIDE), 0)
            top = higher
    # Nothing to attend to gives zeros, or NaN where nobody masked.
    empty = float("nan")
    if MASK > 0 or CAUSAL:
        empty = 0.0
    inverse = tl.where(total == 0.0, empty, 1.0 / tl.where(total == 0.0, 1.0, total))
    high = inverse.to(tl.float32)
    low = (inverse - high.to(WIDE)).to(tl.float32)
    if ONE:
        tl.store(y + out + lanes, rounded(tl.fma(e, high, e * low), y), mask=lanes < S)
    else:
        for start in range(0, S, BLOCK):
            at = start + lanes
            v = _scores(x, mask, row, mask_row, at, at < n, scale, ms, MASK)
            e = tl.exp(v - _finite(top))
            tl.store(y + out + at, rounded(tl.fma(e, high, e * low), y), mask=at < S)


@triton.jit
def _backward(dy, y, dx, L, S, scale, gs, gl, ys, yl, xs, xl, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    o = program // L
    l = program % L
    grad = dy + o * gs + l * gl
    seen = y + o * ys + l * yl
    lanes = tl.arange(0, BLOCK)
    along = tl.sum(tl.zeros((BLOCK,), WIDE), 0)
    for start in range(0, S, BLOCK):
        at = start + lanes
        g = tl.load(grad + at, mask=at < S, other=0.0).to(WIDE)
        p = tl.load(seen + at, mask=at < S, other=0.0).to(WIDE)
        along += tl.sum(g * p, 0)
    for start in range(0, S, BLOCK):
        at = start + lanes
        g = tl.load(grad + at, mask=at < S, other=0.0).to(WIDE)
        p = tl.load(seen + at, mask=at < S, other=0.0).to(tl.float32)
        v = (g - along).to(tl.float32) * p * scale
        tl.store(dx + o * xs + l * xl + at, rounded(v, dx), mask=at < S)


def _three(t: Tensor) -> Tensor:
    """[outer, L, S]; what came without a mask may be rows of any number of dimensions."""
    return t if t.dim() == 3 else as_rows(t)[None]


def _wide(y: Tensor) -> tl.dtype:
    """What sums are formed in: a float32 result shows the error of a float32 sum, and dy - sum may cancel."""
    return tl.float64 if y.dtype == torch.float32 else tl.float32


def softmax(x: Tensor, mask: Tensor | None, scale: float, causal: bool, method: int, *, y: Tensor) -> None:
    if not x.numel():
        return
    x, y = _three(x), _three(y)
    outer, rows, n = x.shape
    steps = (0, 0, 0) if mask is None else mask.stride()
    kind = 0 if mask is None else 1 if mask.dtype == torch.bool else 2
    how = in_registers(n)
    launch(
        _forward,
        (outer * rows,),
        *(x, mask, y, rows, n, scale),
        *(*x.stride()[:2], *steps, *y.stride()[:2]),
        ONE=n <= how["BLOCK"],
        MASK=kind,
        CAUSAL=causal,
        WIDE=_wide(y),
        **how,
    )


def softmax_backward(dy: Tensor, y: Tensor, scale: float, *, dx: Tensor) -> None:
    if not y.numel():
        return
    dy, y, dx = _three(dy), _three(y), _three(dx)
    outer, rows, n = y.shape
    launch(
        _backward,
        (outer * rows,),
        *(dy, y, dx, rows, n, scale),
        *(*dy.stride()[:2], *y.stride()[:2], *dx.stride()[:2]),
        WIDE=_wide(y),
        **in_registers(n, 4096),
    )


KERNELS = {"softmax": softmax, "softmax_backward": softmax_backward}
