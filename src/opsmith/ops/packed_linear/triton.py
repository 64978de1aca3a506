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
    rounded,
    steps,
)

_LEAST = tl.constexpr(1e-30)  # a row below this is rounded to zeros
_HALF_EVEN = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it leaves no bits for a fraction


@inner
def place(column, row, whole, width):
    """Where byte `column` of a row of the weight lies: in a panel of 32 rows, the last ones' of 16."""
    panel = tl.where(row < whole, 32, 16)
    first = tl.where(row < whole, row // 32 * 32, whole)
    return first * width + (column // 4) * (panel * 4) + (row - first) * 4 + column % 4


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


@triton.jit
def _multiply(
    x,
    weight,
    scale,
    zero,
    bias,
    most,
    y,
    M,
    N,
    K,
    whole,
    width,
    x_pitch,
    y_pitch,
    scale_pitch,
    zero_pitch,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    rows = tl.program_id(1).to(tl.int64) * BM + tl.arange(0, BM)
    columns = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    there, wanted = rows < M, columns < N
    sums = tl.zeros((BM, BN), tl.float32 if most is None else tl.int32)
    inverse = tl.zeros((BM,), tl.float32)
    if most is not None:
        largest = tl.load(most + rows, mask=there, other=0.0)
        inverse = tl.where(largest > _LEAST, 127.0 / tl.maximum(largest, _LEAST), 0.0)
    once = tl.load(scale + columns, mask=wanted, other=0.0)  # the one scale of a column that has no groups
    for start in range(0, K, BK):
        depth = start + tl.arange(0, BK)
        inside = depth < K
        some = tl.load(
            x + rows[:, None] * x_pitch + depth[None, :], mask=there[:, None] & inside[None, :], other=0.0
        )
        byte = depth if BITS == 8 else depth // 8 * 4 + depth % 4
        at = place(byte.to(tl.int64)[:, None], columns[None, :], whole, width)
        numbers = tl.load(weight + at, mask=inside[:, None] & wanted[None, :], other=0).to(tl.int32)
        middle = 128
        if BITS == 4:
            numbers = (numbers >> tl.where(depth % 8 < 4, 0, 4)[:, None]) & 15
            middle = 8
        if zero is not None:
            middle = tl.load(zero + start // GROUP * zero_pitch + columns, mask=wanted, other=0).to(tl.int32)[
                None, :
            ]
        numbers = tl.where(inside[:, None], numbers - middle, 0)
        if most is not None:
            bytes_ = ((some.to(tl.float32) * inverse[:, None] + _HALF_EVEN) - _HALF_EVEN).to(tl.int8)
            sums = integer_dot(bytes_, numbers.to(tl.int8), sums)
        elif GROUP > 0:
            step = tl.load(scale + start // GROUP * scale_pitch + columns, mask=wanted, other=0.0)
            part = dot(some, integers_like(numbers, some))
            sums += part * step.to(tl.float32)[None, :]
        elif (
            some.dtype == tl.float32
        ):  # its sums are kept apart by the scale: one long chain of them is less exact
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
    bits: int,
    group: int,
    dynamic: bool,
    *,
    y: torch.Tensor,
) -> None:
    if not y.numel():
        return
    x, y = as_rows(x), as_rows(y)
    (m, k), n = x.shape, y.shape[1]
    most = None
    if dynamic:
        most = torch.empty(m, dtype=torch.float32, device=x.device)
        launch(_largest, (m,), x, most, k, x.stride(0), **in_registers(k, 4096))
    few = m <= 16
    bm, bn = (16, 32) if few else (64, 64)
    launch(
        _multiply,
        (triton.cdiv(n, bn), triton.cdiv(m, bm)),
        *(x, weight, scale, zero, bias, most, y),
        *(m, n, k, weight.shape[0] // 32 * 32, weight.shape[1]),
        *steps(x, y, scale if group else None, zero),
        BITS=bits,
        GROUP=group,
        BM=bm,
        BN=bn,
        BK=group or 64,  # whatever M: a row's result does not depend on the others
        num_warps=4,
        num_stages=3,
        enable_fp_fusion=not dynamic,
    )


KERNELS = {"packed_linear": packed_linear}
