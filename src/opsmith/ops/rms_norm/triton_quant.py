"""RMSNorm whose result leaves as int8, in Triton; MLA normalizes with it too, into any form of activations."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from opsmith.kernels.triton.common import in_registers, inner, launch, nearest, rounded, steps


@inner
def q8(v):
    """rint(clamp(v, -128, 127)), half to even."""
    v = tl.minimum(tl.maximum(v, -128.0), 127.0)
    return nearest(v).to(tl.int8)


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
def largest(x, gamma, beta, rstd, n, BLOCK: tl.constexpr, GAMMA: tl.constexpr, BETA: tl.constexpr):
    """The largest magnitude of a normalized row, in float64: where float32 holds the products exactly, from them."""
    bits: tl.constexpr = gamma.dtype.element_ty.primitive_bitwidth if GAMMA else 0
    EXACT: tl.constexpr = x.dtype.element_ty.primitive_bitwidth + bits + 64 * BETA <= 32
    factor = rstd
    if EXACT:  # a power of two, which keeps the products within range
        factor = (rstd.to(tl.float32).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    most = tl.zeros((BLOCK,), tl.float32 if EXACT else tl.float64)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        v = normalized(x, gamma, beta, factor, at, at < n, GAMMA, BETA)
        most = tl.maximum(most, tl.abs(v).to(most.dtype), propagate_nan=tl.PropagateNan.ALL)
    found = (tl.max(most, 0) + tl.sum(most * 0.0, 0)).to(tl.float64)  # NaN of what is not finite
    if EXACT:
        found = found * (rstd / factor.to(tl.float64))
    return found


@inner
def norm_row(
    x, gamma, beta, n, eps, y, s, scale, offset,
    BLOCK: tl.constexpr, GAMMA: tl.constexpr, BETA: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
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
        most = largest(x, gamma, beta, exact, n, BLOCK, GAMMA, BETA)
        step = (most / 127.0).to(tl.float32)
        tl.store(s, step)
        rstd = exact.to(tl.float32)
        there = (step > 0) & (step < float("inf"))
        step = tl.where(there, step, 1.0)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        v = normalized(x, gamma, beta, rstd, at, at < n, GAMMA, BETA)
        if FORM == 0:
            tl.store(y + at, rounded(v, y), mask=at < n)
        if FORM == 1:
            tl.store(y + at, q8(tl.div_rn(v, step) + tl.load(offset)), mask=at < n)
        if FORM == 2:
            tl.store(y + at, q8(tl.where(there, tl.div_rn(v, step), 0.0)), mask=at < n)


@triton.jit
def norm_kernel(x, gamma, beta, y, s, scale, offset, n, eps, xs, ys, BLOCK: tl.constexpr, FORM: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    s_row = s
    if FORM == 2:
        s_row = s + row
    x += row * xs
    y += row * ys
    has_gamma: tl.constexpr = gamma is not None
    has_beta: tl.constexpr = beta is not None
    norm_row(x, gamma, beta, n, eps, y, s_row, scale, offset, BLOCK, has_gamma, has_beta, FORM)


def normalize(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    eps: float,
    y: Tensor,
    s: Tensor | None,
    scale: Tensor | None,
    offset: Tensor | None,
    form: int,
) -> None:
    n = x.shape[1]
    launch(
        norm_kernel,
        (x.shape[0],),
        *(x, gamma, beta, y, s, scale, offset),
        *(n, eps, *steps(x, y)),
        FORM=form,
        enable_fp_fusion=form == 0,
        **in_registers(n, 8192),
    )


def rms_norm_quant(x, weight, bias, eps, scale, offset, *, q, s=None):
    if scale is not None and offset is None:
        offset = torch.zeros_like(scale)
    normalize(x, weight, bias, eps, q, s, scale, offset, 2 if scale is None else 1)


KERNELS = {"rms_norm_quant": rms_norm_quant}
