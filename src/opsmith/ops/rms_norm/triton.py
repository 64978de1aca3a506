"""RMSNorm: a program a row, which stays in registers where it fits and is read again from cache where not."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from opsmith.kernels.triton.common import in_registers, launch, steps
from opsmith.kernels.triton.norm import backward, sum_at


@triton.jit
def _forward(
    x,
    residual,
    weight,
    y,
    summed,
    rstds,
    n,
    eps,
    offset,
    xs,
    rs,
    ys,
    ss,
    BLOCK: tl.constexpr,
    ONE: tl.constexpr,
    ROUND: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    squares = tl.zeros((BLOCK,), tl.float32)
    v = sum_at(x, residual, row * xs, row * rs, lanes, lanes < n, residual is not None)
    for start in range(0, n, BLOCK):
        at = start + lanes
        if not ONE:
            v = sum_at(x, residual, row * xs, row * rs, at, at < n, residual is not None)
        squares += v * v
    rstd = 1.0 / tl.sqrt(tl.sum(squares, 0) / n + eps)
    if rstds is not None:
        tl.store(rstds + row, rstd)
    # The sum is stored only now that it has been read for the last time: it may lie over x.
    for start in range(0, n, BLOCK):
        at = start + lanes
        if not ONE:
            v = sum_at(x, residual, row * xs, row * rs, at, at < n, residual is not None)
        if summed is not None:
            tl.store(summed + row * ss + at, v.to(summed.dtype.element_ty), mask=at < n)
        v *= rstd
        if ROUND:
            v = v.to(y.dtype.element_ty).to(tl.float32)
        if weight is not None:
            v *= tl.load(weight + at, mask=at < n, other=0.0).to(tl.float32) + offset
        tl.store(y + row * ys + at, v.to(y.dtype.element_ty), mask=at < n)


def rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    round_before_weight: bool,
    *,
    y: torch.Tensor,
    summed: torch.Tensor | None = None,
    rstd: torch.Tensor | None = None,
) -> None:
    rows, n = x.shape
    if not x.numel():
        return
    how = in_registers(n)
    launch(
        _forward,
        (rows,),
        *(x, residual, weight, y, summed, rstd, n, eps, weight_offset),
        *steps(x, residual, y, summed),
        ONE=n <= how["BLOCK"],
        ROUND=round_before_weight,
        **how,
    )


def rms_norm_backward(
    dy: torch.Tensor,
    dsummed: torch.Tensor | None,
    s: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    weight_offset: float,
    *,
    dx: torch.Tensor | None = None,
    dweight: torch.Tensor | None = None,
) -> None:
    backward(dy, dsummed, s, None, rstd, weight, weight_offset, dx, dweight, None)


KERNELS = {"rms_norm": rms_norm, "rms_norm_backward": rms_norm_backward}
