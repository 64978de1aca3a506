"""Rotary embedding of int8 rows: a program turns whole rows in registers, so that it knows their largest magnitude when
it rounds them. The rows' own scales do not touch the integers: they multiply the new scale."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from opsmith.kernels.triton.common import inner, launch
from opsmith.ops.rope.triton.rope import Table, entries, table_rows, with_batch

_HEADS = 4  # of a program, at most
_LARGEST = tl.constexpr(3.4e38)


@inner
def sizes(value, mask):
    """Magnitudes, infinite for what is not finite: `max` may drop a NaN."""
    size = tl.abs(value)
    return tl.where(mask, tl.where(size <= _LARGEST, size, float("inf")), 0.0)


@inner
def integers(value):
    """To nearest, ties to even: the sum with 3 * 2^22 has no bits behind the point."""
    value = tl.where(tl.abs(value) <= 127.5, value, 0.0)
    return ((value + 12582912.0) - 12582912.0).to(tl.int8)


@triton.jit
def _rotate(
    x,
    scale,
    y,
    y_scale,
    cos,
    sin,
    positions,
    bad,
    heads,
    tokens,
    half,
    rest,
    rows,
    second,
    cb,
    cl,
    sb,
    sl,
    pb,
    pl,
    xb,
    xh,
    xl,
    gb,
    gh,
    gl,
    yb,
    yh,
    yl,
    zb,
    zh,
    zl,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    batch = tl.program_id(2).to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    here = token < tokens
    row, inside = table_rows(positions, bad, batch, token, tokens, rows, here, pb, pl, positions is not None)
    pair = tl.arange(0, HALF)
    cos1, sin1, cos2, sin2 = entries(
        cos, sin, batch * cb + row * cl, batch * sb + row * sl, inside, pair, half, second
    )
    first = pair[None, :]
    apart = half
    if INTERLEAVED:
        first = 2 * first
        apart = 1
    mask = here[:, None] & (pair < half)[None, :]
    begin = tl.program_id(1).to(tl.int64) * HEADS
    source = x + batch * xb + begin * xh + (token * xl)[:, None]
    target = y + batch * yb + begin * yh + (token * yl)[:, None]
    given = scale + batch * gb + begin * gh + token * gl
    found = y_scale + batch * zb + begin * zh + token * zl
    for _ in range(tl.minimum(HEADS, heads - begin)):
        x1 = tl.load(source + first, mask=mask, other=0).to(tl.float32)
        x2 = tl.load(source + first + apart, mask=mask, other=0).to(tl.float32)
        y1 = x1 * cos1 - x2 * sin1
        y2 = x2 * cos2 + x1 * sin2
        largest = tl.maximum(tl.max(sizes(y1, mask), 1), tl.max(sizes(y2, mask), 1))
        if REST > 0:
            at = tl.arange(0, REST)[None, :]
            left = here[:, None] & (at < rest)
            kept = tl.load(source + 2 * half + at, mask=left, other=0).to(tl.float32)
            largest = tl.maximum(largest, tl.max(tl.abs(kept), 1))
        largest = tl.where(largest <= _LARGEST, largest, float("nan"))
        factor = tl.load(given, mask=here, other=0.0)
        sign = tl.where(factor > 0, 1.0, tl.where(factor < 0, -1.0, 0.0))
        inverse = tl.where(largest > 0, 127.0 / tl.where(largest > 0, largest, 1.0) * sign, 0.0)[:, None]
        tl.store(target + first, integers(y1 * inverse), mask=mask)
        tl.store(target + first + apart, integers(y2 * inverse), mask=mask)
        if REST > 0:
            tl.store(target + 2 * half + at, integers(kept * inverse), mask=left)
        tl.store(found, largest / 127.0 * tl.abs(factor), mask=here)
        source += xh
        target += yh
        given += gh
        found += zh


def turn(
    x: torch.Tensor,
    scale: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None,
    dims: int,
    interleaved: bool,
    *,
    y: torch.Tensor,
    y_scale: torch.Tensor,
) -> None:
    if not x.numel():
        return
    table = Table.of(cos, sin, positions, dims // 2)
    if x.dim() == 3:
        x, scale, y, y_scale = (with_batch(t) for t in (x, scale, y, y_scale))
    batch, heads, tokens, size = x.shape
    half, rest = dims // 2, size - dims
    block = int(triton.next_power_of_2(half))
    block_rest = int(triton.next_power_of_2(rest)) if rest else 0
    width = 2 * block + block_rest
    block_tokens = int(min(triton.next_power_of_2(tokens), max(1, 4096 // width)))
    launch(
        _rotate,
        (triton.cdiv(tokens, block_tokens), triton.cdiv(heads, _HEADS), batch),
        *(x, scale, y, y_scale, *table.tensors),
        *(heads, tokens, half, rest, table.rows, table.second, *table.steps),
        *(*x.stride()[:3], *scale.stride(), *y.stride()[:3], *y_scale.stride()),
        HEADS=_HEADS,
        TOKENS=block_tokens,
        HALF=block,
        REST=block_rest,
        INTERLEAVED=interleaved,
        num_warps=4 if width * block_tokens >= 2048 else 1,
    )
    table.check("rope_int8")


KERNELS = {"rope_int8": turn}
