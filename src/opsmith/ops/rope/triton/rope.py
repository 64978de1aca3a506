"""Rotary embedding: a program takes a block of tokens, loads their part of the table once and turns some heads.

A position without a row is reported as an id without one is: nothing is read there, its tokens become NaN, and the call
raises once the kernel is done.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from opsmith.kernels.triton.common import check, flag, inner, launch, report, rounded

_HEADS = 4  # of a program, at most


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
    x,
    y,
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
    yb,
    yh,
    yl,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
):
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
    for _ in range(tl.minimum(HEADS, heads - begin)):
        x1 = tl.load(source + first, mask=mask, other=0.0).to(tl.float32)
        x2 = tl.load(source + first + apart, mask=mask, other=0.0).to(tl.float32)
        y1 = x1 * cos1 - x2 * sin1
        y2 = x2 * cos2 + x1 * sin2
        tl.store(target + first, rounded(y1, y), mask=mask)
        tl.store(target + first + apart, rounded(y2, y), mask=mask)
        if REST > 0:
            at = tl.arange(0, REST)[None, :]
            left = here[:, None] & (at < rest)
            kept = tl.load(source + 2 * half + at, mask=left, other=0.0)
            tl.store(target + 2 * half + at, kept, mask=left)
        source += xh
        target += yh


def with_batch(x: torch.Tensor) -> torch.Tensor:
    """[T, H, D] as [1, H, T, D]; numbers for rows, [T, H], with a last dimension of one."""
    return x.transpose(0, 1).unsqueeze(0)


class Table(NamedTuple):
    """Cosines, sines and positions as kernels take them."""

    tensors: tuple[torch.Tensor | None, ...]  # cos, sin, positions, the flag
    rows: int
    second: int  # from the entry of the first of a pair to that of the second
    steps: tuple[int, ...]  # over batch and row of cos and of sin, over batch and token of positions

    @classmethod
    def of(
        cls, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor | None, half: int
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
    x: torch.Tensor, table: Table, dims: int, interleaved: bool, inverse: bool, y: torch.Tensor
) -> None:
    if not x.numel():
        return
    if x.dim() == 3:
        x, y = with_batch(x), with_batch(y)
    batch, heads, tokens, size = x.shape
    half, rest = dims // 2, size - dims
    block = int(triton.next_power_of_2(half))
    block_tokens = int(min(triton.next_power_of_2(tokens), max(1, 2048 // block)))
    in_place = y.data_ptr() == x.data_ptr()
    launch(
        _rotate,
        (triton.cdiv(tokens, block_tokens), triton.cdiv(heads, _HEADS), batch),
        *(x, y, *table.tensors),
        *(heads, tokens, half, rest, table.rows, table.second, *table.steps),
        *(*x.stride()[:3], *y.stride()[:3]),
        HEADS=_HEADS,
        TOKENS=block_tokens,
        HALF=block,
        REST=0 if in_place or not rest else int(triton.next_power_of_2(rest)),
        INTERLEAVED=interleaved,
        INVERSE=inverse,
        num_warps=4 if block * block_tokens >= 1024 else 1,
    )


def turn(
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
    table = Table.of(cos, sin, positions, dims // 2)
    _turn(x, table, dims, interleaved, inverse, y)
    table.check("rope")


def turn_qk(
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
    table = Table.of(cos, sin, positions, dims // 2)
    for source, target in ((q, yq), (k, yk)):
        _turn(source, table, dims, interleaved, inverse, target)
    table.check("rope_qk")


KERNELS = {"rope": turn, "rope_qk": turn_qk}
