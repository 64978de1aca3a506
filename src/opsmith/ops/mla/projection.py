"""A projection of MLA pre-processing: in floating point, W8A8, or with quantized weights alone.

Defined, of PyTorch's operators, and of ours with the norm before it; and how a weight is quantized.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from opsmith.ops.linear import linear
from opsmith.ops.rms_norm import rms_norm
from opsmith.ops.rms_norm.quant import q8, quantize_rows, rms_norm_quant
from opsmith.ops.rounding import round_in_parts, round_rows

Quant = Literal["per_tensor", "per_token", "weight_int8", "weight_int4"]
QUANTS: tuple[str, ...] = get_args(Quant)

_LEVELS = {8: 127, 4: 7}
_GROUPS = (128, 64, 32)  # of K that share a scale in int4; the last one with K padded, where none divides it
_ROWS_AT_ONCE = 1 << 22  # elements quantized at a time: the float32 copies of a whole weight need not fit


class Projection(NamedTuple):
    """A weight [N, K] as one form of quantization keeps it.

    Attributes:
        weight: [N, K] floating-point or int8; int4: uint8 [N, K/2], K padded to whole groups, two elements a byte, the
            even one in the low bits, 8 added to each.
        bias: [N], int32 in "per_tensor", else as the weight; None for none.
        descale: float32, [N], or [N, groups] in int4; None in floating point.
        scale, offset: one float32 each, of the activations, in "per_tensor".
    """

    weight: Tensor
    bias: Tensor | None = None
    descale: Tensor | None = None
    scale: Tensor | None = None
    offset: Tensor | None = None

    def rows(self, index: Tensor) -> Projection:
        """The same with its output channels in another order."""
        bias = None if self.bias is None else self.bias[index]
        descale = None if self.descale is None else self.descale[index]
        return self._replace(weight=self.weight[index], bias=bias, descale=descale)

    def integers(self, y: Tensor) -> tuple[Tensor, Tensor | None]:
        """What int8 activations become, in floating point, and a scale for each row where there is not one for all."""
        if self.scale is None or self.offset is None:
            return quantize_rows(y)
        return q8(y / self.scale + self.offset), None


def project(y: Tensor, p: Projection, quant: str | None, dtype: torch.dtype) -> Tensor:
    """The definition of one projection of `y` (float32 or float64), rounded to `dtype` once."""
    if quant is None:
        return F.linear(y.to(dtype), p.weight, p.bias)
    if quant.startswith("weight"):
        bias = None if p.bias is None else p.bias.to(y.dtype)
        return F.linear(y.to(dtype).to(y.dtype), dequantized(p, y.shape[-1], y.dtype), bias).to(dtype)
    assert p.descale is not None
    q, s = p.integers(y)
    # Products of integers and their sums are exact in float64 as they are in int32.
    sums = q.double() @ p.weight.double().t()
    a = (sums if p.bias is None else sums + p.bias.double()).to(y.dtype) * p.descale.to(y.dtype)
    return (a if s is None else a * s).to(dtype)


def dequantized(p: Projection, k: int, dtype: torch.dtype) -> Tensor:
    """The weight [N, k] that integers alone stand for."""
    assert p.descale is not None
    if p.weight.dtype == torch.int8:
        return p.weight.to(dtype) * p.descale.to(dtype)[:, None]
    values = torch.stack((p.weight & 15, p.weight >> 4), -1).flatten(1).to(dtype) - 8
    grouped: Tensor = values.unflatten(1, (p.descale.shape[1], -1)) * p.descale.to(dtype)[:, :, None]
    return grouped.flatten(1)[:, :k]


def eager_projection(y: Tensor, p: Projection, quant: str | None) -> Tensor:
    """By PyTorch's operators, as a model would: rounded to y's dtype at every step."""
    if quant is None:
        return F.linear(y, p.weight, p.bias)
    if quant.startswith("weight"):
        return F.linear(y, dequantized(p, y.shape[1], torch.float32).to(y.dtype), p.bias)
    q, s = p.integers(y if quant == "per_tensor" else y.float())
    return integer_linear(q.to(torch.int8), s, p).to(y.dtype)


def integer_linear(q: Tensor, s: Tensor | None, p: Projection) -> Tensor:
    """int8 times int8 in int32, scaled in float32; `s` a factor for each row."""
    assert p.descale is not None
    sums = _integer_product(q, p.weight)
    a = (sums if p.bias is None else sums + p.bias) * p.descale
    return a if s is None else a * s


def _integer_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b.T of int8, in int32. On a GPU PyTorch takes no fewer than 17 rows, and columns by eights."""
    rows, columns = a.shape[0], b.shape[0]
    if not a.numel():
        return a.new_zeros((rows, columns), dtype=torch.int32)
    if a.is_cuda:
        k = -a.shape[1] % 8
        a = F.pad(a, (0, k, 0, max(0, 17 - rows)))
        b = F.pad(b, (0, k, 0, -columns % 8))
    return torch._int_mm(a, b.t())[:rows, :columns]


def norm(x: Tensor, gamma: Tensor | None, beta: Tensor | None, eps: float) -> Tensor:
    """By our operator, where there is a gamma."""
    if gamma is None:
        return x
    y = rms_norm(x, gamma, eps)
    assert isinstance(y, Tensor)
    return y if beta is None else y + beta


def normalize_and_project(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, p: Projection, quant: str | None, eps: float
) -> Tensor:
    """A norm, where there is a gamma, and the projection behind it, in any form of quantization."""
    if quant in ("per_tensor", "per_token"):
        made = rms_norm_quant(x, gamma, beta, eps, scale=p.scale, offset=p.offset)
        q, s = (made, None) if isinstance(made, Tensor) else (made[0], made[1].unsqueeze(-1))
        return integer_linear(q, s, p).to(x.dtype)
    y = norm(x, gamma, beta, eps)
    return linear(y, p.weight, p.bias) if quant is None else eager_projection(y, p, quant)


def quantize_weight(weight: Tensor, bits: int) -> tuple[Tensor, Tensor, float]:
    """Integers and float32 scales of a weight, symmetric, and the error relative to it (root of summed squares)."""
    n, k = weight.shape
    group = k if bits == 8 else next((g for g in _GROUPS if k % g == 0), _GROUPS[-1])
    groups = 1 if bits == 8 else -(-k // group)
    padded = groups * group
    held = padded // 2 if bits == 4 else k
    packed = torch.empty((n, held), dtype=torch.int8 if bits == 8 else torch.uint8, device=weight.device)
    scale = torch.zeros((n, groups), dtype=torch.float32, device=weight.device)

    def keep(here: slice, part: Tensor) -> Tensor:
        part = F.pad(part, (0, padded - k)).unflatten(1, (groups, group))
        rounded, scale[here] = round_rows(part, _LEVELS[bits])
        values = rounded.flatten(1).to(torch.int8)
        if bits == 8:
            packed[here] = values
        else:
            nibbles = (values + 8).to(torch.uint8)
            packed[here] = nibbles[:, ::2] | (nibbles[:, 1::2] << 4)
        return (rounded * scale[here, :, None]).flatten(1)[:, :k]

    rows = max(1, _ROWS_AT_ONCE // max(1, k))
    error = round_in_parts(weight.detach(), rows, keep, "MLAWeights.quantize: every weight")
    return packed, scale[:, 0] if bits == 8 else scale, error.relative


def static_scale(
    op: str, i: int, scale: Tensor | float, offset: Tensor | float | None, like: Tensor
) -> dict[str, Any]:
    """By their names, the scale and the offset of projection i's inputs, as float32 scalars."""
    found = {}
    for name, value in ((f"scale{i}", scale), (f"offset{i}", 0.0 if offset is None else offset)):
        t = torch.as_tensor(value, device=like.device)
        if t.numel() != 1:
            raise ValueError(
                f"{op}: scales and offsets of activations must be one number, got {tuple(t.shape)}"
            )
        found[name] = t.detach().reshape(()).to(torch.float32)
    step = found[f"scale{i}"]
    if not like.is_meta and not (bool(step.isfinite()) and bool(step)):
        raise ValueError(f"{op}: scale{i} must be finite and not 0, got {float(step)}")
    return found


def quantize_projection(
    p: Projection, quant: str, low: float = 0.0, high: float = 0.0
) -> tuple[Projection, float]:
    """A floating-point projection in another form; `low` and `high` bound its inputs, for "per_tensor"."""
    bits = 4 if quant == "weight_int4" else 8
    weight, factor, error = quantize_weight(p.weight, bits)
    bias = None if p.bias is None else p.bias.detach()
    if quant == "per_token" and bias is not None:
        raise ValueError(
            'MLAWeights.quantize: "per_token" has no bias, and this projection has one; '
            'use "per_tensor" or a weight-only form'
        )
    if quant != "per_tensor":
        return Projection(weight, bias, factor), error
    low, high = min(low, 0.0), max(high, 0.0)
    step = (high - low) / 255 or 1.0
    offset = float(round(-128 - low / step))
    scale = torch.tensor(step, dtype=torch.float32, device=weight.device)
    descale = factor * scale
    # q8 adds the offset to every input, which adds `offset` times the sum of its weights to every output.
    correction = -offset * weight.sum(1, dtype=torch.int64).double()
    if bias is not None:
        correction = correction + torch.where(descale > 0, bias.double() / descale.double(), 0.0)
    bias_int32 = correction.round().clamp(-(2.0**31), 2.0**31 - 1).to(torch.int32)
    return Projection(weight, bias_int32, descale, scale, torch.full_like(scale, offset)), error
