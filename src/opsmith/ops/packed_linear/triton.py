"""The linear layer on 8 and 4 bits: numbers are taken apart in registers, and multiplied by the matrix units.

The layout is the CPU's (weight.py), so a packed weight moves between machines as it is. Both factors of a product are
whole numbers that x's dtype holds, so nothing but x is rounded before the sum; scales follow it: one for each column,
or for each group of K.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

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
_ROWS = 4  # so many are multiplied one by one


@inner
def place(word, row, whole, width):
    """Where a word, four bytes, of a row of the weight lies: in a panel of 32 rows, the last ones' of 16."""
    panel = tl.where(row < whole, 32, 16)
    first = tl.where(row < whole, row // 32 * 32, whole)
    return first * width + word * panel + row - first


@inner
def number(words, i, BITS: tl.constexpr):
    """Number i of each word, as it is stored: the low halves of four bytes come first."""
    if BITS == 8:
        return (words >> (i * 8)) & 255
    else:
        return (words >> (i % 4 * 8 + i // 4 * 4)) & 15


@triton.jit
def _largest(x, most, K, pitch, BLOCK: tl.constexpr):
    """The largest magnitude of each row."""
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


@triton.jit
def _multiply_row(
    x, weight, scale, zero, bias, most, y, N, K, whole, width,
    x_pitch, y_pitch, scale_pitch, zero_pitch,
    BITS: tl.constexpr, GROUP: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """One row: the weight is read at memory speed, a word at a time, and no matrix unit waits for it."""
    PER: tl.constexpr = 32 // BITS
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * BN
    columns = column + tl.arange(0, BN)
    wanted = (columns < N)[None, :]
    x += row * x_pitch
    sums = tl.zeros((BW, BN), tl.float32)
    inverse = 0.0
    if most is not None:
        inverse = per_unit(tl.load(most + row))
    # All columns are in one panel, next to each other: what `place` knows of each, said so that loads become wide.
    first = column // 32 * 32
    apart = tl.where(first < whole, 32, 16)
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
        part = tl.zeros((BW, BN), tl.float32)
        for i in tl.static_range(PER):
            depth = word * PER + i
            some = tl.load(x + depth, mask=depth < K, other=0.0).to(tl.float32)
            if most is not None:
                some = nearest(some * inverse)
            # As the last bits of a large float, where the conversion of an integer would take longer.
            numbers = (number(words, i, BITS) | _WHOLE_BITS).to(tl.float32, bitcast=True) - middle
            part += some[:, None] * numbers
        if GROUP > 0:
            of_group = (word * PER // GROUP)[:, None] * scale_pitch + columns[None, :]
            part = part * tl.load(scale + of_group, mask=known, other=0.0).to(tl.float32)
        sums += part
    if most is not None:  # whole numbers, exact in each lane
        total = tl.sum(sums.to(tl.int32), 0).to(tl.float32) * (tl.load(most + row) / 127.0)
    else:
        total = tl.sum(sums, 0)
    if GROUP == 0:
        total = total * tl.load(scale + columns, mask=columns < N, other=0.0)
    if bias is not None:
        total += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)
    tl.store(y + row * y_pitch + columns, rounded(total, y), mask=columns < N)


@triton.jit
def _multiply(
    x, weight, scale, zero, bias, most, y, M, N, K, whole, width,
    x_pitch, y_pitch, scale_pitch, zero_pitch,
    BITS: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    PER: tl.constexpr = 32 // BITS
    rows = tl.program_id(1).to(tl.int64) * BM + tl.arange(0, BM)
    columns = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    there, wanted = rows < M, columns < N
    sums = tl.zeros((BM, BN), tl.float32 if most is None else tl.int32)
    inverse = tl.zeros((BM,), tl.float32)
    if most is not None:
        inverse = per_unit(tl.load(most + rows, mask=there, other=0.0))
    once = tl.load(scale + columns, mask=wanted, other=0.0)  # the one scale of a column that has no groups
    for start in range(0, K, BK):
        depth = start + tl.arange(0, BK)
        inside = depth < K
        some = tl.load(
            x + rows[:, None] * x_pitch + depth[None, :], mask=there[:, None] & inside[None, :], other=0.0
        )
        at = place((depth // PER).to(tl.int64)[:, None], columns[None, :], whole, width)
        words = tl.load(weight + at, mask=inside[:, None] & wanted[None, :], other=0)
        numbers = number(words, (depth % PER)[:, None], BITS)
        middle = 1 << (BITS - 1)
        if zero is not None:
            middle = tl.load(zero + start // GROUP * zero_pitch + columns, mask=wanted, other=0).to(tl.int32)[
                None, :
            ]
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
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    bias: torch.Tensor | None,
    outer: torch.Tensor | None,
    bits: int,
    group: int,
    scales: int,
    *,
    y: torch.Tensor,
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
    given = (x, words, scale, zero, bias, most, y)
    lying = (weight.shape[0] // 32 * 32, words.shape[1], *steps(x, y, scale if group else None, zero))
    how = {"BITS": bits, "GROUP": group, "enable_fp_fusion": not dynamic}
    if m <= _ROWS and k <= 1 << 16:
        bn = next((bn for bn in (32, 16) if triton.cdiv(n, bn) >= 4 * processors(x)), 8)
        how |= {"BN": bn, "BW": 2048 // bn, "num_warps": 4}
        launch(_multiply_row, (m, triton.cdiv(n, bn)), *given, n, k, *lying, **how)
        return
    bm, bn = (16, 32) if m <= 16 else (64, 64)
    launch(
        _multiply,
        (triton.cdiv(n, bn), triton.cdiv(m, bm)),
        *(*given, m, n, k, *lying),
        **how,
        BM=bm,
        BN=bn,
        BK=group or 64,
        num_warps=8 if x.dtype == torch.float32 else 4,
        num_stages=3,
    )


KERNELS = {"packed_linear": packed_linear}
