"""A projection of MLA pre-processing: in floating point, W8A8, or with quantized weights alone.

Defined, of PyTorch's operators, and of ours with the norm before it; and how a weight is quantized.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F

from opsmith.ops.linear import linear
from opsmith.ops.rms_norm import rms_norm
from opsmith.ops.rms_norm.quant import q8, quantize_rows, rms_norm_quant

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

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    descale: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    offset: torch.Tensor | None = None

    def rows(self, index: torch.Tensor) -> Projection:
        """The same with its output channels in another order."""
        bias = None if self.bias is None else self.bias[index]
        descale = None if self.descale is None else self.descale[index]
        return self._replace(weight=self.weight[index], bias=bias, descale=descale)


def project(y: torch.Tensor, p: Projection, quant: str | None, dtype: torch.dtype) -> torch.Tensor:
    """The definition of one projection of `y` (float32 or float64), rounded to `dtype` once."""
    if quant is None:
        return F.linear(y.to(dtype), p.weight, p.bias)
    assert p.descale is not None
    if quant == "weight_int8":
        return _weight_only(y.to(dtype), p.weight.to(y.dtype) * p.descale.to(y.dtype)[:, None], p.bias)
    if quant == "weight_int4":
        return _weight_only(y.to(dtype), dequantize_int4(p, y.shape[-1]).to(y.dtype), p.bias)
    descale = p.descale.to(y.dtype)
    if quant == "per_token":
        q, s = quantize_rows(y)
        return (_integer_product(q, p).to(y.dtype) * descale * s).to(dtype)
    assert p.scale is not None
    assert p.offset is not None
    q = q8(y / p.scale.to(y.dtype) + p.offset.to(y.dtype))
    return (_integer_product(q, p).to(y.dtype) * descale).to(dtype)


def _integer_product(q: torch.Tensor, p: Projection) -> torch.Tensor:
    """Sums of products of integers, and the integer bias: exact in float64 as they are in int32."""
    sums = q.double() @ p.weight.double().t()
    return sums if p.bias is None else sums + p.bias.double()


def _weight_only(y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    added = None if bias is None else bias.to(weight.dtype)
    return F.linear(y.to(weight.dtype), weight, added).to(y.dtype)


def dequantize_int4(p: Projection, k: int) -> torch.Tensor:
    """The weight [N, k] in float32."""
    assert p.descale is not None
    low, high = (p.weight & 15).to(torch.int8) - 8, (p.weight >> 4).to(torch.int8) - 8
    values = torch.stack((low, high), -1).flatten(1).to(p.descale.dtype)
    grouped: torch.Tensor = values.unflatten(1, (p.descale.shape[1], -1)) * p.descale[:, :, None]
    return grouped.flatten(1)[:, :k]


def eager_q8(v: torch.Tensor) -> torch.Tensor:
    """As PyTorch rounds: to integers first."""
    return v.round().clamp(-128, 127).to(torch.int8)


def eager_projection(y: torch.Tensor, p: Projection, quant: str | None) -> torch.Tensor:
    """By PyTorch's operators, as a model would: rounded to y's dtype at every step."""
    if quant is None:
        return F.linear(y, p.weight, p.bias)
    assert p.descale is not None
    if quant == "weight_int8":
        return F.linear(y, (p.weight * p.descale[:, None]).to(y.dtype), p.bias)
    if quant == "weight_int4":
        return F.linear(y, dequantize_int4(p, y.shape[1]).to(y.dtype), p.bias)
    if p.scale is not None and p.offset is not None:
        return integer_linear(eager_q8(y / p.scale + p.offset), None, p).to(y.dtype)
    s = y.float().abs().amax(-1, keepdim=True) / 127 if y.shape[1] else y.new_zeros((y.shape[0], 1)).float()
    q = eager_q8(y / torch.where(s > 0, s, 1.0))
    return integer_linear(q, s, p).to(y.dtype)


def integer_linear(q: torch.Tensor, s: torch.Tensor | None, p: Projection) -> torch.Tensor:
    """int8 times int8 in int32, scaled in float32; `s` a factor for each row."""
    assert p.descale is not None
    sums = (
        torch._int_mm(q, p.weight.t())
        if q.numel()
        else q.new_zeros((q.shape[0], p.weight.shape[0]), dtype=torch.int32)
    )
    a = (sums if p.bias is None else sums + p.bias) * p.descale
    return a if s is None else a * s


def norm(x: torch.Tensor, gamma: torch.Tensor | None, beta: torch.Tensor | None, eps: float) -> torch.Tensor:
    """By our operator, where there is a gamma."""
    if gamma is None:
        return x
    y = rms_norm(x, gamma, eps)
    assert isinstance(y, torch.Tensor)
    return y if beta is None else y + beta


def normalize_and_project(
    x: torch.Tensor,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    p: Projection,
    quant: str | None,
    eps: float,
) -> torch.Tensor:
    """A norm, where there is a gamma, and the projection behind it, in any form of quantization."""
    if quant is None:
        return linear(norm(x, gamma, beta, eps), p.weight, p.bias)
    if quant.startswith("weight"):
        return eager_projection(norm(x, gamma, beta, eps), p, quant)
    if p.scale is not None:
        q = rms_norm_quant(x, gamma, beta, eps, scale=p.scale, offset=p.offset)
        assert isinstance(q, torch.Tensor)
        return integer_linear(q, None, p).to(x.dtype)
    q, s = rms_norm_quant(x, gamma, beta, eps)
    return integer_linear(q, s.unsqueeze(-1), p).to(x.dtype)


def quantize_weight(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Integers and float32 scales of a weight, symmetric, and the error relative to it (root of summed squares)."""
    n, k = weight.shape
    weight = weight.detach()
    group = k if bits == 8 else next((g for g in _GROUPS if k % g == 0), _GROUPS[-1])
    groups = -(-k // group) if group else 0
    padded = groups * group
    held = padded // 2 if bits == 4 else k
    packed = torch.empty((n, held), dtype=torch.int8 if bits == 8 else torch.uint8, device=weight.device)
    scale = torch.zeros((n, groups), dtype=torch.float32, device=weight.device)
    step = max(1, _ROWS_AT_ONCE // max(1, k))
    lost, total = 0.0, 0.0
    for first in range(0, n if k else 0, step):
        part = F.pad(weight[first : first + step].float(), (0, padded - k)).unflatten(1, (groups, group))
        top = part.abs().amax(-1, keepdim=True)
        if not bool(top.isfinite().all()):
            raise ValueError(
                "MLAWeights.quantize: every weight must be finite, found NaN or an infinity; no scale represents it"
            )
        factor = (top / _LEVELS[bits]).clamp_(min=torch.finfo(torch.float32).tiny)
        rounded = (part / factor).round_().clamp_(-_LEVELS[bits], _LEVELS[bits])
        lost += float((part - rounded * factor).double().square().sum())
        total += float(part.double().square().sum())
        scale[first : first + step] = factor.squeeze(-1)
        values = rounded.flatten(1).to(torch.int8)
        if bits == 8:
            packed[first : first + step] = values
        else:
            nibbles = (values + 8).to(torch.uint8)
            packed[first : first + step] = nibbles[:, ::2] | (nibbles[:, 1::2] << 4)
    return packed, scale[:, 0] if bits == 8 and groups else scale, (lost / total) ** 0.5 if total else 0.0


def static_scale(
    op: str, i: int, scale: torch.Tensor | float, offset: torch.Tensor | float | None, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale and the offset of a projection's inputs, as float32 scalars."""
    found = []
    for value in (scale, 0.0 if offset is None else offset):
        t = torch.as_tensor(value, device=like.device)
        if t.numel() != 1:
            raise ValueError(
                f"{op}: scales and offsets of activations must be one number, got {tuple(t.shape)}"
            )
        found.append(t.detach().reshape(()).to(torch.float32))
    if not like.is_meta and not (bool(found[0].isfinite()) and bool(found[0])):
        raise ValueError(f"{op}: scale{i} must be finite and not 0, got {float(found[0])}")
    return found[0], found[1]


def quantize_projection(
    p: Projection, quant: str, low: float = 0.0, high: float = 0.0
) -> tuple[Projection, float]:
    """A floating-point projection in another form; `low` and `high` bound its inputs, for "per_tensor"."""
    bits = 4 if quant == "weight_int4" else 8
    weight, factor, error = quantize_weight(p.weight, bits)
    if bits == 8 and factor.dim() == 2:  # K = 0: no column to take a scale from
        factor = factor.new_zeros(p.weight.shape[0])
    bias = None if p.bias is None else p.bias.detach()
    if quant.startswith("weight"):
        return Projection(weight, bias, factor), error
    if quant == "per_token":
        if bias is not None:
            raise ValueError(
                'MLAWeights.quantize: "per_token" has no bias, and this projection has one; '
                'use "per_tensor" or a weight-only form'
            )
        return Projection(weight, None, factor), error
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
