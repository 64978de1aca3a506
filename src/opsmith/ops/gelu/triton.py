"""GELU and the gated activations' curves: elementwise, a program a block of a row, or of everything."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from opsmith.kernels.triton.common import as_rows, exp_for, launch, quotient_for, steps

BLOCK = 1024

SILU: tl.constexpr = tl.constexpr(0)
GELU: tl.constexpr = tl.constexpr(1)


@triton.jit
def _phi(x, gauss, like):
    """The normal distribution's share below x, its lower tail as exact as `gauss` = exp(-x^2 / 2)."""
    t = quotient_for(tl.full(x.shape, 1.0, tl.float32), 1.0 + 0.35 * tl.abs(x), like)
    q = -0.0291459318 * t + 0.143971711
    q = q * t - 0.255714267
    q = q * t + 0.159174174
    q = q * t - 0.0231098365
    q = q * t + 0.105508
    q = q * t + 0.119832866
    q = q * t + 0.139861867
    q = q * t + 0.139621407
    tail = gauss * t * q
    return tl.where(x < 0, tail, 1.0 - tail)


@triton.jit
def _odds(z, like):
    """e = exp(-|z|), which cannot overflow, and sigmoid(z) from it."""
    e = exp_for(-tl.abs(z), like)
    return e, quotient_for(tl.where(z < 0, e, 1.0), 1.0 + e, like)


@triton.jit
def _tanh_form(x):
    """z with Phi(x) = sigmoid(z) in GELU's tanh form."""
    return x * (1.5957691216 + 0.0713548163 * x * x)


@triton.jit
def curve(x, like, CURVE: tl.constexpr):
    """f(x) in float32, for what `like` points to: 0 SiLU, 1 GELU, 2 its tanh form."""
    if CURVE == SILU:
        _, s = _odds(x, like)
        return x * s
    elif CURVE == GELU:
        return x * _phi(x, exp_for(-0.5 * x * x, like), like)
    else:
        _, s = _odds(_tanh_form(x), like)
        return x * s


@triton.jit
def curve_and_slope(x, like, CURVE: tl.constexpr):
    """f(x) and f'(x); sigmoid's own slope is s (1 - s) = e / (1 + e)^2, without the cancellation."""
    if CURVE == SILU:
        e, s = _odds(x, like)
        return x * s, s + quotient_for(x * e, (1.0 + e) * (1.0 + e), like)
    elif CURVE == GELU:
        gauss = exp_for(-0.5 * x * x, like)
        p = _phi(x, gauss, like)
        return x * p, p + 0.3989422804 * x * gauss
    else:
        e, s = _odds(_tanh_form(x), like)
        rate = 1.5957691216 + 0.2140644488 * x * x
        return x * s, s + quotient_for(x * rate * e, (1.0 + e) * (1.0 + e), like)


@triton.jit
def place(n, BLOCK: tl.constexpr):
    """The row of this program, its columns, and which of them there are."""
    blocks = tl.cdiv(n, BLOCK)
    program = tl.program_id(0).to(tl.int64)
    at = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    return program // blocks, at, at < n


def spread_out(*tensors: Tensor, may_ignore_rows: bool = True) -> list[Tensor]:
    """The tensors as rows of one size: as one single row where all are contiguous."""
    if may_ignore_rows and all(t.is_contiguous() for t in tensors):
        return [t.view(1, -1) for t in tensors]
    return [as_rows(t) for t in tensors]


def programs(rows: Tensor) -> tuple[int, ...]:
    """The grid for `place`."""
    return (rows.shape[0] * triton.cdiv(rows.shape[1], BLOCK),)


@triton.jit
def _forward(x, bias, y, n, xs, ys, CURVE: tl.constexpr, BLOCK: tl.constexpr):
    row, at, mask = place(n, BLOCK)
    v = tl.load(x + row * xs + at, mask=mask, other=0.0).to(tl.float32)
    if bias is not None:
        v += tl.load(bias + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + row * ys + at, curve(v, y, CURVE).to(y.dtype.element_ty), mask=mask)


@triton.jit
def _backward(dy, x, bias, dx, n, gs, xs, os, CURVE: tl.constexpr, BLOCK: tl.constexpr):
    row, at, mask = place(n, BLOCK)
    v = tl.load(x + row * xs + at, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(dy + row * gs + at, mask=mask, other=0.0).to(tl.float32)
    if bias is not None:
        v += tl.load(bias + at, mask=mask, other=0.0).to(tl.float32)
    _, slope = curve_and_slope(v, dx, CURVE)
    tl.store(dx + row * os + at, (g * slope).to(dx.dtype.element_ty), mask=mask)


def gelu(x: Tensor, bias: Tensor | None, tanh: bool, *, y: Tensor) -> None:
    x, y = spread_out(x, y, may_ignore_rows=bias is None)
    launch(_forward, programs(x), x, bias, y, x.shape[1], *steps(x, y), CURVE=1 + tanh, BLOCK=BLOCK)


def gelu_backward(
    dy: Tensor, x: Tensor, bias: Tensor | None, tanh: bool, *, dx: Tensor, dbias: Tensor | None = None
) -> None:
    dy, x, dx = spread_out(dy, x, dx, may_ignore_rows=bias is None)
    given = (dy, x, bias, dx, x.shape[1], *steps(dy, x, dx))
    launch(_backward, programs(x), *given, CURVE=1 + tanh, BLOCK=BLOCK)
    if dbias is not None:
        torch.sum(dx.reshape(-1, dbias.shape[0]), 0, out=dbias)


KERNELS = {"gelu": gelu, "gelu_backward": gelu_backward}
