"""The linear layer on 16, 8 and 4 bits: numbers are taken apart in registers, and multiplied by the matrix units.

The layout is the CPU's (weight.py), so a packed weight moves between machines as it is. Both factors of a product are
whole numbers that x's dtype holds, so nothing but x is rounded before the sum; scales follow it: one for each column,
or for each group of K. Numbers of 16 bits are bfloat16 and have no scales.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from opsmith.kernels.triton import INTERPRETED
from opsmith.kernels.triton.common import (
    as_rows,
    dot,
    in_registers,
    inner,
    integer_dot,
    integers_like,
    launch,
    nearest,
    processors,
    rounded,
    steps,
)
from opsmith.ops.packed_linear.formats import Scales

_LEAST = tl.constexpr(1e-30)  # a row below this is rounded to zeros
_WHOLE, _WHOLE_BITS = tl.constexpr(8388608.0), tl.constexpr(0x4B000000)  # 2^23: its last bits count by one
_IN_TURN = tl.constexpr(INTERPRETED)  # its sums go from one number to the next, a GPU's by halves
_ROWS = 4  # so many are multiplied without the matrix units
_PANELS = {16: 64, 8: 32, 4: 32}  # rows of the weight that lie together, by their bits


@inner
def place(word, row, whole, width, last, PANEL: tl.constexpr):
    """Where a word, four bytes, of a row of the weight lies: in a panel of so many rows, the last one of `last`."""
    panel = tl.where(row < whole, PANEL, last)
    first = tl.where(row < whole, row // PANEL * PANEL, whole)
    return first * width + word * panel + row - first


@inner
def number(words, i, BITS: tl.constexpr):
    """Number i of each word, as it is stored: the low halves of four bytes come first."""
    if BITS == 8:
        return (words >> (i * 8)) & 255
    else:
        return (words >> (i % 4 * 8 + i // 4 * 4)) & 15


@inner
def half(words, i):
    """Number i of each word of two bfloat16, in float32."""
    return ((words >> (i * 16)) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _largest(x, most, K, pitch, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    found = tl.zeros((BLOCK,), tl.float32)
    odd = tl.zeros((BLOCK,), tl.float32)  # NaN where a number is not finite, which a maximum may pass over
    for start in range(0, K, BLOCK):
        at = start + tl.arange(0, BLOCK)
        some = tl.load(x + row * pitch + at, mask=at < K, other=0.0).to(tl.float32)
        found = tl.maximum(found, tl.abs(some))
        odd += some * 0.0
    tl.store(most + row, tl.max(found, 0) + tl.sum(odd, 0))


@inner
def per_unit(most):
    """What a row is multiplied by to be int8, of its largest magnitude."""
    return tl.where(most > _LEAST, 127.0 / tl.maximum(most, _LEAST), 0.0)


@inner
def numbers_of(x, depth, K, inverse):
    """Some of a row of x, rounded where its inverse is known."""
    some = tl.load(x + depth, mask=depth < K, other=0.0).to(tl.float32)
    if inverse is not None:
        some = nearest(some * inverse)
    return some[:, None]


@inner
def finished(sums, row, columns, scale, bias, most, y, y_pitch, M, N, BW: tl.constexpr, GROUP: tl.constexpr):
    """A row's results from its lanes' sums."""
    if most is not None:  # whole numbers, exact in each lane
        total = tl.sum(sums.to(tl.int32), 0).to(tl.float32) * (tl.load(most + row) / 127.0)
    else:
        if _IN_TURN:
            sums = tl.sum(tl.reshape(sums, (BW // 16, 16, sums.shape[1])), 1)
        total = tl.sum(sums, 0)
    if GROUP == 0 and scale is not None:
        total = total * tl.load(scale + columns, mask=columns < N, other=0.0)
    if bias is not None:
        total += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)
    there = tl.where(row < M, columns, N) < N
    tl.store(y + row * y_pitch + columns, rounded(total, y), mask=there)


@triton.jit
def _multiply_rows(
    x, weight, scale, zero, bias, most, y, M, N, K, whole, width, last,
    x_pitch, y_pitch, scale_pitch, zero_pitch,
    BITS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Up to four rows: the weight is read once, at memory speed, a word at a time, and no matrix unit waits for it."""
    PER: tl.constexpr = 32 // BITS
    PANEL: tl.constexpr = 64 if BITS == 16 else 32
    row = tl.program_id(0).to(tl.int64) * ROWS
    # Behind the last row the last one again, which is not written.
    row1 = tl.minimum(row + 1, M - 1)
    row2 = tl.minimum(row + 2, M - 1)
    row3 = tl.minimum(row + 3, M - 1)
    column = tl.program_id(1).to(tl.int64) * BN
    columns = column + tl.arange(0, BN)
    wanted = (columns < N)[None, :]
    sums = tl.zeros((BW, BN), tl.float32)
    sums1 = sums
    sums2 = sums
    sums3 = sums
    inverse = None
    inverse1 = None
    inverse2 = None
    inverse3 = None
    if most is not None:
        inverse = per_unit(tl.load(most + row))
        inverse1 = per_unit(tl.load(most + row1))
        inverse2 = per_unit(tl.load(most + row2))
        inverse3 = per_unit(tl.load(most + row3))
    # All columns are in one panel, next to each other: what `place` knows of each, said so that loads become wide.
    first = column // PANEL * PANEL
    apart = tl.where(first < whole, PANEL, last)
    panel = weight + first * width + (column - first) + tl.arange(0, BN)[None, :]
    word = tl.arange(0, BW)
    following = tl.load(panel + word[:, None] * apart, mask=(word < width)[:, None] & wanted, other=0)
    for start in range(0, width, BW):
        word = start + tl.arange(0, BW)
        known = (word < width)[:, None] & wanted
        words = following
        # The next ones are on their way while these are multiplied.
        later = (word + BW)[:, None]
        following = tl.load(panel + later * apart, mask=(later < width) & wanted, other=0)
        middle = _WHOLE + (1 << (BITS - 1))
        if zero is not None:
            of_group = (word * PER // GROUP)[:, None] * zero_pitch + columns[None, :]
            middle = _WHOLE + tl.load(zero + of_group, mask=known, other=0).to(tl.float32)
        step = 1.0
        if GROUP > 0:
            of_group = (word * PER // GROUP)[:, None] * scale_pitch + columns[None, :]
            step = tl.load(scale + of_group, mask=known, other=0.0).to(tl.float32)
        part = tl.zeros((BW, BN), tl.float32)
        part1 = part
        part2 = part
        part3 = part
        for i in tl.static_range(PER):
            depth = word * PER + i
            if BITS == 16:
                numbers = half(words, i)
            else:
                # As the last bits of a large float, where the conversion of an integer would take longer.
                numbers = (number(words, i, BITS) | _WHOLE_BITS).to(tl.float32, bitcast=True) - middle
            part += numbers_of(x + row * x_pitch, depth, K, inverse) * numbers
            if ROWS > 1:
                part1 += numbers_of(x + row1 * x_pitch, depth, K, inverse1) * numbers
            if ROWS > 2:
                part2 += numbers_of(x + row2 * x_pitch, depth, K, inverse2) * numbers
                part3 += numbers_of(x + row3 * x_pitch, depth, K, inverse3) * numbers
        sums += part * step
        sums1 += part1 * step
        sums2 += part2 * step
        sums3 += part3 * step
    finished(sums, row, columns, scale, bias, most, y, y_pitch, M, N, BW, GROUP)
    if ROWS > 1:
        finished(sums1, row + 1, columns, scale, bias, most, y, y_pitch, M, N, BW, GROUP)
    if ROWS > 2:
        finished(sums2, row + 2, columns, scale, bias, most, y, y_pitch, M, N, BW, GROUP)
        finished(sums3, row + 3, columns, scale, bias, most, y, y_pitch, M, N, BW, GROUP)


@triton.jit
def _multiply(
    x, weight, scale, zero, bias, most, y, M, N, K, whole, width, last,
    x_pitch, y_pitch, scale_pitch, zero_pitch,
    BITS: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    PER: tl.constexpr = 32 // BITS
    PANEL: tl.constexpr = 64 if BITS == 16 else 32
    rows = tl.program_id(1).to(tl.int64) * BM + tl.arange(0, BM)
    columns = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    there, wanted = rows < M, columns < N
    sums = tl.zeros((BM, BN), tl.float32 if most is None else tl.int32)
    inverse = tl.zeros((BM,), tl.float32)
    if most is not None:
        inverse = per_unit(tl.load(most + rows, mask=there, other=0.0))
    once = tl.where(wanted, 1.0, 0.0)  # no constant, for which float32 below would be one long chain of sums
    if GROUP == 0 and scale is not None:  # the one scale of a column
        once = tl.load(scale + columns, mask=wanted, other=0.0)
    for start in range(0, K, BK):
        depth = start + tl.arange(0, BK)
        inside = depth < K
        some = tl.load(
            x + rows[:, None] * x_pitch + depth[None, :], mask=there[:, None] & inside[None, :], other=0.0
        )
        at = place((depth // PER).to(tl.int64)[:, None], columns[None, :], whole, width, last, PANEL)
        words = tl.load(weight + at, mask=inside[:, None] & wanted[None, :], other=0)
        if BITS == 16:
            numbers = half(words, (depth % PER)[:, None])
        else:
            numbers = number(words, (depth % PER)[:, None], BITS)
            middle = 1 << (BITS - 1)
            if zero is not None:
                of_group = zero + start // GROUP * zero_pitch + columns
                middle = tl.load(of_group, mask=wanted, other=0).to(tl.int32)[None, :]
            numbers = tl.where(inside[:, None], numbers - middle, 0)
        if most is not None:
            bytes_ = nearest(some.to(tl.float32) * inverse[:, None]).to(tl.int8)
            sums = integer_dot(bytes_, numbers.to(tl.int8), sums)
        elif GROUP > 0:
            step = tl.load(scale + start // GROUP * scale_pitch + columns, mask=wanted, other=0.0)
            part = dot(some, integers_like(numbers, some))
            sums += part * step.to(tl.float32)[None, :]
        elif some.dtype == tl.float32:  # the scale keeps its sums apart: one long chain of them is less exact
            sums += dot(some, integers_like(numbers, some)) * once[None, :]
        else:
            sums = dot(some, integers_like(numbers, some), sums)
    total = sums.to(tl.float32)
    if most is not None:
        total = total * (tl.load(most + rows, mask=there, other=0.0) / 127.0)[:, None]
    if GROUP == 0:  # noqa: SIM102
        if most is not None or x.dtype.element_ty != tl.float32:
            total = total * once[None, :]
    if bias is not None:
        total += tl.load(bias + columns, mask=wanted, other=0.0).to(tl.float32)[None, :]
    tl.store(
        y + rows[:, None] * y_pitch + columns[None, :],
        rounded(total, y),
        mask=there[:, None] & wanted[None, :],
    )


def packed_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    bias: Tensor | None,
    outer: Tensor | None,
    bits: int,
    group: int,
    scales: int,
    *,
    y: Tensor,
) -> None:
    if not y.numel():
        return
    dynamic = scales == Scales.DYNAMIC  # others with `outer`, or their own numbers, do not come here
    x, y = as_rows(x), as_rows(y)
    (m, k), n = x.shape, y.shape[1]
    most = None
    if dynamic:
        most = torch.empty(m, dtype=torch.float32, device=x.device)
        launch(_largest, (m,), x, most, k, x.stride(0), **in_registers(k, 4096))
    words = weight.view(torch.int32)
    whole = words.shape[0] // _PANELS[bits] * _PANELS[bits]
    lying = (whole, words.shape[1], words.shape[0] - whole, *steps(x, y, scale if group else None, zero))
    given = (x, words, scale, zero, bias, most, y, m, n, k, *lying)
    how = {"BITS": bits, "GROUP": group, "enable_fp_fusion": not dynamic}
    if m <= _ROWS and k <= 1 << 16:
        rows = triton.next_power_of_2(m)
        most_columns = (16,) if rows == 4 and bits < 16 else (32, 16)  # whose sums stay in registers
        bn = next((bn for bn in most_columns if triton.cdiv(n, bn) >= 2 * processors(x)), 8)
        how |= {"ROWS": rows, "BN": bn, "BW": 128 if rows == 1 else 64, "num_warps": 4}
        launch(_multiply_rows, (triton.cdiv(m, rows), triton.cdiv(n, bn)), *given, **how)
        return
    how |= _tile(m, bits, group, x.dtype == torch.float32)
    launch(_multiply, (triton.cdiv(n, how["BN"]), triton.cdiv(m, how["BM"])), *given, **how)


def _tile(m: int, bits: int, group: int, wide: bool) -> dict[str, int]:
    """The tile of a product for m rows, as an H200 was fastest; the sums of float32 take more registers."""
    depth = group or (128 if m <= 16 or (bits == 16 and m <= 64) else 64)
    bm, bn, warps = 16, 32, 4
    if m > 64 and not wide:
        bm, bn, warps = 128, 64, 8
    elif m > 16:
        bm, bn, warps = (64, 64, 4) if depth < 128 or wide else (64, 128, 8)
    if wide:
        depth, warps = group or 64, 8
    return {
        "BM": bm,
        "BN": bn,
        "BK": depth,
        "num_warps": warps,
        "num_stages": 4 if bm == 16 and depth == 32 else 3,
    }


def linear_packed(x, packed, bias, residual, activation, *, y):
    if packed.dtype != torch.bfloat16 or residual is not None or activation:
        raise RuntimeError("linear_packed: GPUs multiply by packed bfloat16, and nothing follows the product")
    packed_linear(x, packed[0], None, None, bias, None, 16, 0, 0, y=y)


KERNELS = {"packed_linear": packed_linear, "linear_packed": linear_packed}
