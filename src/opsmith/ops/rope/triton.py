"""Rotary embedding: a program takes a block of tokens, loads their part of the table once and turns some heads.

It turns whole rows in registers. So of int8 rows it knows the largest magnitude when it rounds them; the own scales of
these do not touch the integers, but multiply the new scale.

A position without a row is reported as an id without one is: nothing is read there, its tokens become NaN, and the call
raises once the kernel is done.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from opsmith.kernels.triton.common import check, flag, inner, launch, report, rounded

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


@inner
def table_rows(
    positions, bad, batch, token, tokens, rows, here, pb, pl, POSITIONS: tl.constexpr
):  # fmt: skip
    """The table's row of each token, and whether there is one."""
    row = token
    inside = here
    if POSITIONS:
        row = tl.load(positions + batch * pb + token * pl, mask=here, other=0).to(tl.int64)
        inside = here & (row >= 0) & (row < rows)
        first = tl.min(tl.where(here & (inside == 0), batch * tokens + token, 1 << 62), 0)
        report(bad, first, first == 1 << 62)
    return row, inside


@inner
def entries(cos, sin, c_at, s_at, inside, pair, half, second):
    """What both of each pair are multiplied by: cos1, sin1, cos2, sin2; NaN where there is no row."""
    mask = inside[:, None] & (pair < half)[None, :]
    c = cos + c_at[:, None] + pair[None, :]
    s = sin + s_at[:, None] + pair[None, :]
    cos1 = tl.load(c, mask=mask, other=float("nan")).to(tl.float32)
    sin1 = tl.load(s, mask=mask, other=float("nan")).to(tl.float32)
    cos2 = tl.load(c + second, mask=mask, other=float("nan")).to(tl.float32)
    sin2 = tl.load(s + second, mask=mask, other=float("nan")).to(tl.float32)
    return cos1, sin1, cos2, sin2


@triton.jit
def _rotate(
    x, scale, y, y_scale, cos, sin, positions, bad, heads, tokens, half, rest, rows, second, cb, cl, sb, sl,
    pb, pl, xb, xh, xl, yb, yh, yl, gb, gh, gl, zb, zh, zl,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(2).to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    here = token < tokens
    row, inside = table_rows(positions, bad, batch, token, tokens, rows, here, pb, pl, positions is not None)
    pair = tl.arange(0, HALF)
    cos1, sin1, cos2, sin2 = entries(
        cos, sin, batch * cb + row * cl, batch * sb + row * sl, inside, pair, half, second
    )
    if INVERSE:  # the transposed rotation
        swapped = sin1
        sin1 = -sin2
        sin2 = -swapped
    first = pair[None, :]
    apart = half
    if INTERLEAVED:
        first = 2 * first
        apart = 1
    mask = here[:, None] & (pair < half)[None, :]
    begin = tl.program_id(1).to(tl.int64) * HEADS
    source = x + batch * xb + begin * xh + (token * xl)[:, None]
    target = y + batch * yb + begin * yh + (token * yl)[:, None]
    if scale is not None:
        scale += batch * gb + begin * gh + token * gl
        y_scale += batch * zb + begin * zh + token * zl
    for _ in range(tl.minimum(HEADS, heads - begin)):
        x1 = tl.load(source + first, mask=mask, other=0).to(tl.float32)
        x2 = tl.load(source + first + apart, mask=mask, other=0).to(tl.float32)
        y1 = x1 * cos1 - x2 * sin1
        y2 = x2 * cos2 + x1 * sin2
        if REST > 0:
            at = tl.arange(0, REST)[None, :]
            left = here[:, None] & (at < rest)
            kept = tl.load(source + 2 * half + at, mask=left, other=0)
        if scale is None:
            tl.store(target + first, rounded(y1, y), mask=mask)
            tl.store(target + first + apart, rounded(y2, y), mask=mask)
            if REST > 0:
                tl.store(target + 2 * half + at, kept, mask=left)
        else:
            largest = tl.maximum(tl.max(sizes(y1, mask), 1), tl.max(sizes(y2, mask), 1))
            if REST > 0:
                largest = tl.maximum(largest, tl.max(tl.abs(kept.to(tl.float32)), 1))
            largest = tl.where(largest <= _LARGEST, largest, float("nan"))
            factor = tl.load(scale, mask=here, other=0.0)
            sign = tl.where(factor > 0, 1.0, tl.where(factor < 0, -1.0, 0.0))
            inverse = tl.where(largest > 0, 127.0 / tl.where(largest > 0, largest, 1.0) * sign, 0.0)[:, None]
            tl.store(target + first, integers(y1 * inverse), mask=mask)
            tl.store(target + first + apart, integers(y2 * inverse), mask=mask)
            if REST > 0:
                tl.store(target + 2 * half + at, integers(kept.to(tl.float32) * inverse), mask=left)
            tl.store(y_scale, largest / 127.0 * tl.abs(factor), mask=here)
            scale += gh
            y_scale += zh
        source += xh
        target += yh


def with_batch(x: Tensor) -> Tensor:
    """[T, H, D] as [1, H, T, D]; numbers for rows, [T, H], with a last dimension of one."""
    return x.transpose(0, 1).unsqueeze(0)


class Table(NamedTuple):
    """Cosines, sines and positions as kernels take them."""

    tensors: tuple[Tensor | None, ...]  # cos, sin, positions, the flag
    rows: int
    second: int  # from the entry of the first of a pair to that of the second
    steps: tuple[int, ...]  # over batch and row of cos and of sin, over batch and token of positions

    @classmethod
    def of(
        cls, cos: Tensor, sin: Tensor, positions: Tensor | None, half: int
    ) -> Table:  # fmt: skip
        steps: list[int] = []
        for t in (cos, sin):
            steps += [t.stride(0) if t.dim() == 3 and t.shape[0] > 1 else 0, t.stride(-2)]
        bad = None
        if positions is None:
            steps += [0, 0]
        else:
            bad = flag(positions)
            many = positions.dim() == 2 and positions.shape[0] > 1
            steps += [positions.stride(0) if many else 0, positions.stride(-1)]
        second = 0 if cos.shape[-1] == half else half
        return cls((cos, sin, positions, bad), cos.shape[-2], second, tuple(steps))

    def check(self, op: str) -> None:
        """Raise for a position without a row."""
        positions, bad = self.tensors[2:]
        if positions is not None and bad is not None:
            check(bad, op, positions, self.rows, "positions")


def _turn(
    x: Tensor, table: Table, dims: int, interleaved: bool, y: Tensor, *scales: Tensor, inverse: bool = False
) -> None:
    """Turn the heads of x; `scales` of int8 rows are x's and y's."""
    if not x.numel():
        return
    if x.dim() == 3:
        x, y = with_batch(x), with_batch(y)
        scales = tuple(with_batch(t) for t in scales)
    batch, heads, tokens, size = x.shape
    half, rest = dims // 2, size - dims
    block = int(triton.next_power_of_2(half))
    stays = not scales and y.data_ptr() == x.data_ptr()
    block_rest = 0 if stays or not rest else int(triton.next_power_of_2(rest))
    # Of int8 rows a program holds all numbers at once.
    lanes = 2 * block + block_rest if scales else 2 * block
    block_tokens = int(min(triton.next_power_of_2(tokens), max(1, 4096 // lanes)))
    scale, y_scale = scales or (None, None)
    launch(
        _rotate,
        (triton.cdiv(tokens, block_tokens), triton.cdiv(heads, _HEADS), batch),
        *(x, scale, y, y_scale, *table.tensors),
        *(heads, tokens, half, rest, table.rows, table.second, *table.steps),
        *(*x.stride()[:3], *y.stride()[:3]),
        *(step for t in scales or (x, y) for step in t.stride()[:3]),
        HEADS=_HEADS,
        TOKENS=block_tokens,
        HALF=block,
        REST=block_rest,
        INTERLEAVED=interleaved,
        INVERSE=inverse,
        num_warps=4 if lanes * block_tokens >= 2048 else 1,
    )


def turn(x, cos, sin, positions, dims, interleaved, inverse, *, y):
    table = Table.of(cos, sin, positions, dims // 2)
    _turn(x, table, dims, interleaved, y, inverse=inverse)
    table.check("rope")


def turn_qk(q, k, cos, sin, positions, dims, interleaved, inverse, *, yq, yk):
    table = Table.of(cos, sin, positions, dims // 2)
    for source, target in ((q, yq), (k, yk)):
        _turn(source, table, dims, interleaved, target, inverse=inverse)
    table.check("rope_qk")


def turn_int8(x, scale, cos, sin, positions, dims, interleaved, *, y, y_scale):
    table = Table.of(cos, sin, positions, dims // 2)
    _turn(x, table, dims, interleaved, y, scale, y_scale)
    table.check("rope_int8")


KERNELS = {"rope": turn, "rope_qk": turn_qk, "rope_int8": turn_int8}
