"""What the Triton kernels of MLA do to rows: norm, quantization, rotation, the way into the cache."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from opsmith.kernels.triton import INTERPRETED
from opsmith.kernels.triton.common import inner, rounded

_WIDEN = tl.constexpr(INTERPRETED)
_HALF_EVEN = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it leaves no bits for a fraction


@inner
def q8(v):
    """rint(clamp(v, -128, 127)), half to even."""
    v = tl.minimum(tl.maximum(v, -128.0), 127.0)
    return ((v + _HALF_EVEN) - _HALF_EVEN).to(tl.int8)


@inner
def like(whole, x):
    """Integers in x's dtype, which holds them; in float32 where `dot` would widen them again."""
    if _WIDEN:
        return whole.to(tl.float32)
    return whole.to(x.dtype)


@inner
def integer_dot(a, b, acc):
    """a @ b + acc in int32. The interpreter multiplies in float32, exact for a block of K."""
    if _WIDEN:
        return acc + tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee").to(tl.int32)
    return tl.dot(a, b, acc, out_dtype=tl.int32)


@inner
def inverse_rms(x, n, eps, BLOCK: tl.constexpr):
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        v = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
        squares += v * v
    return 1.0 / tl.sqrt(tl.sum(squares, 0) / n + eps)


@inner
def exact_inverse_rms(x, n, eps, BLOCK: tl.constexpr):
    """The same in float64; Newton's step in the place of a root, which not every back end has in float64."""
    squares = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        v = tl.load(x + at, mask=at < n, other=0.0).to(tl.float64)
        squares += v * v
    mean = tl.sum(squares, 0) / n + eps
    near = (1.0 / tl.sqrt(mean.to(tl.float32))).to(tl.float64)
    return near * (1.5 - 0.5 * mean * near * near)


@inner
def normalized(x, gamma, beta, rstd, at, mask, GAMMA: tl.constexpr, BETA: tl.constexpr):
    v = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if GAMMA:
        v = v * rstd * tl.load(gamma + at, mask=mask, other=0.0).to(tl.float32)
    if BETA:
        v += tl.load(beta + at, mask=mask, other=0.0).to(tl.float32)
    return v


@inner
def norm_row(
    x,
    gamma,
    beta,
    n,
    eps,
    y,
    s,
    scale,
    offset,
    BLOCK: tl.constexpr,
    GAMMA: tl.constexpr,
    BETA: tl.constexpr,
    FORM: tl.constexpr,
):
    """One row normalized into y. FORM 0: in y's dtype; 1: int8, `scale` and `offset`; 2: with a scale of its own."""
    rstd = 1.0
    if GAMMA and FORM != 2:
        rstd = inverse_rms(x, n, eps, BLOCK)
    step = 1.0
    if FORM == 1:
        step = tl.load(scale)
    if FORM == 2:
        # A scale is a result, right to its last bit as any other; the row is divided by it in float32.
        exact = tl.full((), 1.0, tl.float64)
        if GAMMA:
            exact = exact_inverse_rms(x, n, eps, BLOCK)
        most = tl.zeros((BLOCK,), tl.float64)
        for start in range(0, n, BLOCK):
            at = start + tl.arange(0, BLOCK)
            most = tl.maximum(
                most, tl.abs(normalized(x, gamma, beta, exact, at, at < n, GAMMA, BETA)).to(tl.float64)
            )
        step = (tl.max(most, 0) / 127.0).to(tl.float32)
        tl.store(s, step)
        rstd = exact.to(tl.float32)
        step = tl.where(step > 0, step, 1.0)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        v = normalized(x, gamma, beta, rstd, at, at < n, GAMMA, BETA)
        if FORM == 0:
            tl.store(y + at, rounded(v, y), mask=at < n)
        if FORM == 1:
            tl.store(y + at, q8(v / step + tl.load(offset)), mask=at < n)
        if FORM == 2:
            tl.store(y + at, q8(v / step), mask=at < n)


@inner
def turned(x, cos, sin, row, pair, half, mask, second, INTERLEAVED: tl.constexpr, TURN: tl.constexpr):
    """Both numbers of each pair of x, rotated, and where they stand; row `row` of the table begins `second` apart."""
    first = pair
    other = pair + half
    if INTERLEAVED:
        first = 2 * pair
        other = first + 1
    a = tl.load(x + first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x + other, mask=mask, other=0.0).to(tl.float32)
    if TURN:
        cos1 = tl.load(cos + row + pair, mask=mask, other=0.0).to(tl.float32)
        sin1 = tl.load(sin + row + pair, mask=mask, other=0.0).to(tl.float32)
        cos2 = tl.load(cos + row + pair + second, mask=mask, other=0.0).to(tl.float32)
        sin2 = tl.load(sin + row + pair + second, mask=mask, other=0.0).to(tl.float32)
        c = a * cos1 - b * sin1
        b = b * cos2 + a * sin2
        a = c
    return first, other, a, b


def layout(t: torch.Tensor, tiled: bool) -> tuple[int, int, int, int]:
    """Strides of a block, of a tile and of a token in a cache's tensor, and how wide a tile is."""
    if tiled:
        return t.stride(0), t.shape[2] * t.shape[3], t.shape[3], max(t.shape[3], 1)
    return t.stride(0), 0, t.stride(1), max(t.shape[3], 1)


def table_of(cos: torch.Tensor | None, sin: torch.Tensor | None, rope: int) -> tuple[Any, Any, int, int]:
    """The table as one dtype and stride, and how far the columns of a pair's second number are."""
    if cos is None or sin is None:
        return None, None, 0, 0
    if sin.stride(0) != cos.stride(0) and cos.shape[0] > 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    return cos, sin, cos.stride(0), (rope // 2 if cos.shape[1] == rope else 0)


def power(n: int, least: int = 16) -> int:
    return int(max(triton.next_power_of_2(max(n, 1)), least))
