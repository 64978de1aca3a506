"""What stands between an expert's two products, in plain PyTorch: the activation of the gate, times up."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

SILU, GELU, GELU_TANH, SWIGLU_OSS = range(4)
ACTIVATIONS = {"silu": SILU, "gelu": GELU, "gelu_tanh": GELU_TANH, "swiglu_oss": SWIGLU_OSS}
OSS_ALPHA = 1.702
_HOW = {GELU: "none", GELU_TANH: "tanh"}  # F.gelu is asked for them


def halves(between: Tensor, activation: int) -> tuple[Tensor, Tensor]:
    """Gate and up [..., I] of [..., 2I]."""
    if activation == SWIGLU_OSS:
        return between[..., ::2], between[..., 1::2]
    gate, up = between.chunk(2, -1)
    return gate, up


def middle(between: Tensor, activation: int, limit: float) -> Tensor:
    """[..., I] of gate and up [..., 2I]."""
    _, value, factor = _factors(*halves(between, activation), activation, limit)
    return value * factor


def _factors(gate: Tensor, up: Tensor, activation: int, limit: float) -> tuple[Tensor, Tensor, Tensor]:
    """The gate within its limit, its activation, and what that is multiplied by."""
    if limit < math.inf:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if activation == SWIGLU_OSS:
        return gate, gate * torch.sigmoid(gate * OSS_ALPHA), up + 1
    return gate, F.silu(gate) if activation == SILU else F.gelu(gate, approximate=_HOW[activation]), up


def middle_backward(
    between: Tensor, through: Tensor, share: Tensor, activation: int, limit: float, wanted: bool
) -> tuple[Tensor, Tensor | None]:
    """The result once more, and where it is wanted the gradient [m, 2I] of gate and up, in float32.

    `through` is the gradient of the result [m, I], still to be multiplied by `share` [m, 1].
    """
    aten = torch.ops.aten
    raw_gate, raw_up = (t.float() for t in halves(between, activation))
    gate, value, factor = _factors(raw_gate, raw_up, activation, limit)
    acted = (value * factor).to(between.dtype)
    if not wanted:
        return acted, None
    slope = through * share
    dvalue = slope * factor
    if activation == SWIGLU_OSS:  # g sigmoid(a g) is silu(a g) / a, whose slope is silu'(a g)
        dgate = aten.silu_backward(dvalue, gate * OSS_ALPHA)
    elif activation == SILU:
        dgate = aten.silu_backward(dvalue, gate)
    else:
        dgate = aten.gelu_backward(dvalue, gate, approximate=_HOW[activation])
    dup = slope * value
    if limit < math.inf:
        dgate = dgate.masked_fill(raw_gate > limit, 0.0)
        dup = dup.masked_fill(raw_up.abs() > limit, 0.0)
    if activation == SWIGLU_OSS:
        return acted, torch.stack((dgate, dup), -1).flatten(-2)
    return acted, torch.cat((dgate, dup), -1)
