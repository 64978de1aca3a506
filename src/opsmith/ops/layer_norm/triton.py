"""LayerNorm: a program a row, which stays in registers where it fits and is read again from cache where not."""

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
    bias,
    y,
    summed,
    means,
    rstds,
    n,
    eps,
    xs,
    rs,
    ys,
    ss,
    BLOCK: tl.constexpr,
    ONE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    # Around the row's first element, so that the mean of what is left is small and exact enough.
    pivot = tl.load(x + row * xs).to(tl.float32)
    mean = 0.0
    m2 = 0.0
    v = sum_at(x, residual, row * xs, row * rs, lanes, lanes < n, residual is not None)
    for start in range(0, n, BLOCK):
        at = start + lanes
        mask = at < n
        if not ONE:
            v = sum_at(x, residual, row * xs, row * rs, at, mask, residual is not None)
        # Chan's formula: the block's two moments, exact in registers, are merged with those of the blocks before.
        count = tl.minimum(n - start, BLOCK).to(tl.float32)
        d = tl.where(mask, v - pivot, 0.0)
        block_mean = tl.sum(d, 0) / count
        d = tl.where(mask, d - block_mean, 0.0)
        delta = block_mean - mean
        share = count / (start + count)
        mean += delta * share
        m2 += tl.sum(d * d, 0) + delta * delta * share * start
    rstd = 1.0 / tl.sqrt(m2 / n + eps)
    if means is not None:
        tl.store(means + row, pivot + mean)
        tl.store(rstds + row, rstd)
    # The sum is stored only now that it has been read for the last time: it may lie over x.
    for start in range(0, n, BLOCK):
        at = start + lanes
        if not ONE:
            v = sum_at(x, residual, row * xs, row * rs, at, at < n, residual is not None)
        if summed is not None:
            tl.store(summed + row * ss + at, v.to(summed.dtype.element_ty), mask=at < n)
        v = (v - pivot - mean) * rstd
        if weight is not None:
            v *= tl.load(weight + at, mask=at < n, other=0.0).to(tl.float32)
        if bias is not None:
            v += tl.load(bias + at, mask=at < n, other=0.0).to(tl.float32)
        tl.store(y + row * ys + at, v.to(y.dtype.element_ty), mask=at < n)


def layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    *,
    y: torch.Tensor,
    summed: torch.Tensor | None = None,
    mean: torch.Tensor | None = None,
    rstd: torch.Tensor | None = None,
) -> None:
    rows, n = x.shape
    if not x.numel():
        return
    how = in_registers(n)
    launch(
        _forward,
        (rows,),
        *(x, residual, weight, bias, y, summed, mean, rstd, n, eps),
        *steps(x, residual, y, summed),
        ONE=n <= how["BLOCK"],
        **how,
    )


def layer_norm_backward(
    dy: torch.Tensor,
    dsummed: torch.Tensor | None,
    s: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    dx: torch.Tensor | None = None,
    dweight: torch.Tensor | None = None,
    dbias: torch.Tensor | None = None,
) -> None:
    backward(dy, dsummed, s, mean, rstd, weight, 0.0, dx, dweight, dbias)


KERNELS = {"layer_norm": layer_norm, "layer_norm_backward": layer_norm_backward}
