"""What Triton kernels made from a formula are written in: functions of float32 values."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from opsmith.kernels.triton.common import exponential, inner


@inner
def larger(a, b):
    """The larger one; a NaN in either stays."""
    return tl.where((a > b) | (a != a), a, b)


@inner
def smaller(a, b):
    """The smaller one; a NaN in either stays."""
    return tl.where((a < b) | (a != a), a, b)


@inner
def row_extreme(v, mask, sign):
    """The largest of each row, with sign -1 the smallest; NaN where it has one, which Triton's own passes over."""
    top = tl.max(tl.where(mask, sign * v, -float("inf")), 1)
    return sign * top + tl.sum(tl.where(mask & (v != v), v, 0.0), 1)


@inner
def rsqrt(x):
    return 1.0 / tl.sqrt(x)


@inner
def sigmoid(x):
    return tl.div_rn(tl.where(x == x, 1.0, x), 1.0 + exponential(-x))


@inner
def tanh(x):
    """By e^(-2|x|), which never overflows; near 0, where it would cancel, by its series."""
    t = exponential(-2.0 * tl.abs(x))
    far = tl.div_rn(1.0 - t, 1.0 + t)
    s = x * x
    rest = -0.333333333 + s * (0.133333333 + s * (-0.0539682540 + s * (0.0218694885 - s * 0.00886323553)))
    near = x + x * s * rest
    return tl.where(tl.abs(x) < 0.25, near, tl.where(x < 0.0, -far, far))


@inner
def silu(x):
    return tl.div_rn(x, 1.0 + exponential(-x))


@inner
def silu_slope(x):
    e = exponential(-tl.abs(x))  # s(1 - s) is the same for both signs
    s = tl.div_rn(tl.where(x < 0.0, e, 1.0), 1.0 + e)
    return s + x * tl.div_rn(e, (1.0 + e) * (1.0 + e))


@inner
def gelu(x):
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@inner
def gelu_slope(x):
    return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * exponential(-0.5 * x * x) * 0.3989422804014327


@inner
def gelu_tanh(x):
    return x * sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * x * x))


@inner
def gelu_tanh_slope(x):
    c = tl.where(tl.abs(x) < 12.0, x, tl.where(x < 0.0, -12.0, 12.0))
    s = sigmoid(1.5957691216057308 * c * (1.0 + 0.044715 * c * c))
    e = sigmoid(-1.5957691216057308 * c * (1.0 + 0.044715 * c * c))
    return s + c * s * e * 1.5957691216057308 * (1.0 + 3.0 * 0.044715 * c * c)


def parts_of(total: Tensor | None, programs: int) -> Tensor | None:
    """Memory for what each program sums up, where the sum is wanted."""
    if total is None:
        return None
    return torch.zeros((max(programs, 1), total.numel()), dtype=torch.float32, device=total.device)


def add_parts(total: Tensor | None, parts: Tensor | None) -> None:
    """The sum of what the programs have, rounded once."""
    if total is not None and parts is not None:
        total.copy_(parts.sum(0).view(total.shape))
