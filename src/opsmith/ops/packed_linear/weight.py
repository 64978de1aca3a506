"""Weights of linear layers in few bits: how they are rounded, and where each number lies in the packed tensor.

The layout is the same on every machine, so a packed weight is a checkpoint. Bytes (int8: the number plus 128; int4:
two numbers from 0 to 15) lie in panels of 32 rows of the weight, the last one of 16 or 32: four bytes of a row, then
four of the next row of the panel, then the next four of the first. Of eight int4 numbers that follow each other along
K the first four are the low nibbles. bfloat16 is packed as `linear` packs it: panels of 64, pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

FORMATS = ("bf16", "int8", "int8_dynamic", "int4")
GROUPS = (32, 64, 128)
_PANEL, _LEAST, _DEPTH = 32, 16, 8
PAIRS = 64  # rows of a panel of bfloat16
_ROWS_AT_ONCE = 1 << 21  # elements rounded at a time: float32 copies of a whole weight need not fit
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class WeightError:
    """What packing took from a weight: `relative` is the root of the summed squares, over the weight's."""

    largest: float
    relative: float


def packed_shape(format: str, n: int, k: int) -> tuple[int, ...]:
    """The shape of a packed weight [n, k]."""
    if format == "bf16":
        return (1, n, k + k % 2)
    width = -(-k // _DEPTH) * _DEPTH
    return (-(-n // _LEAST) * _LEAST, width // 2 if format == "int4" else width)


def _interleave(rows: torch.Tensor) -> torch.Tensor:
    """Bytes [n, width] in panels: whole ones of 32 rows, and one of 16 where that many are left."""
    n, width = rows.shape
    if not rows.numel():
        return rows
    whole = n // _PANEL * _PANEL
    parts = [rows[:whole].reshape(-1, _PANEL, width // 4, 4), rows[whole:].reshape(-1, _LEAST, width // 4, 4)]
    return torch.cat([part.transpose(1, 2).reshape(-1, width) for part in parts if part.shape[0]])


def _deinterleave(packed: torch.Tensor) -> torch.Tensor:
    n, width = packed.shape
    if not packed.numel():
        return packed
    whole = n // _PANEL * _PANEL
    parts = [
        packed[:whole].reshape(-1, width // 4, _PANEL, 4),
        packed[whole:].reshape(-1, width // 4, _LEAST, 4),
    ]
    return torch.cat([part.transpose(1, 2).reshape(-1, width) for part in parts if part.shape[0]])


def pack_integers(q: torch.Tensor, format: str) -> torch.Tensor:
    """Numbers [n, k], uint8, as packed bytes."""
    n, k = q.shape
    rows, width = packed_shape("int8", n, k)
    q = F.pad(q, (0, width - k, 0, rows - n))
    if format == "int4":
        low, high = q.view(rows, width // _DEPTH, 2, 4).unbind(2)
        q = (low | high << 4).view(rows, width // 2)
    return _interleave(q)


def unpack_integers(packed: torch.Tensor, format: str, n: int, k: int) -> torch.Tensor:
    """The numbers [n, k], uint8, of packed bytes."""
    q = _deinterleave(packed)
    if format == "int4":
        q = q.view(q.shape[0], q.shape[1] // 4, 4)
        q = torch.stack((q & 15, q >> 4), 2).flatten(1)
    return q[:n, :k]


def unpack_pairs(packed: torch.Tensor, k: int) -> torch.Tensor:
    """The weight [n, k] of one that `linear` packed in pairs."""
    width = packed.shape[2]
    if not packed.numel():
        return packed[0, :, :k]
    panels = [
        panel.reshape(width // 2, -1, 2).transpose(0, 1).reshape(-1, width)
        for panel in packed[0].split(PAIRS)
    ]
    return torch.cat(panels)[:, :k]


def dequantize(
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    zero: torch.Tensor | None,
    *,
    format: str,
    k: int,
    group_size: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The weight [n, k] that a packed one stands for."""
    if format == "bf16":
        return unpack_pairs(weight, k).to(dtype)
    assert scale is not None
    n = scale.shape[-1]
    q = unpack_integers(weight, format, n, k).to(dtype)
    if format != "int4":
        return (q - 128) * scale.to(dtype)[:, None]
    middle = 8 if zero is None else _spread(zero.to(dtype), group_size, k)
    return (q - middle) * _spread(scale.to(dtype), group_size, k)


def _spread(groups: torch.Tensor, group_size: int, k: int) -> torch.Tensor:
    """One number for each group [groups, n] as one for each weight [n, k]."""
    return groups.t().repeat_interleave(group_size, 1)[:, :k]


def round_rows(part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows rounded to int8, plus 128 as uint8, and their scales: the largest magnitude becomes 127."""
    scale = (part.abs().amax(1) / 127).clamp_(min=_TINY)
    return (part / scale[:, None]).round_().clamp_(-127, 127).add_(128).to(torch.uint8), scale


def round_groups(
    part: torch.Tensor, group_size: int, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Rows rounded to 0..15 by groups: the numbers, scales [groups, rows] in bfloat16, and zeros where asymmetric.

    Numbers are rounded with the scale as it is stored, so that rounding the scale itself costs next to nothing.
    Symmetric scales are chosen of two, by the sum of squared errors: 15 steps that hold both ends, or 16 that hold the
    larger one.
    """
    n, k = part.shape
    groups = -(-k // group_size)
    blocks = F.pad(part, (0, groups * group_size - k)).view(n, groups, group_size)
    zero = None
    if symmetric:
        top, low = blocks.amax(2), blocks.amin(2)
        extreme = torch.where(top.abs() >= low.abs(), top, low)
        found: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        for wanted in (extreme.abs() / 7, extreme / -8):
            scale = _stored(wanted)
            q = (blocks / scale[..., None]).round_().clamp_(-8, 7)
            found.append((scale, q, (blocks - q * scale[..., None]).square_().sum(2)))
        (first, q, error), (second, q2, error2) = found
        better = error2 < error
        scale = torch.where(better, second, first)
        q = torch.where(better[..., None], q2, q).add_(8)
    else:
        top, low = blocks.amax(2).clamp_(min=0), blocks.amin(2).clamp_(max=0)
        scale = _stored((top - low) / 15)
        middle = (-low / scale).round_().clamp_(0, 15)
        q = (blocks / scale[..., None]).round_().add_(middle[..., None]).clamp_(0, 15)
        zero = middle.t().to(torch.int8).contiguous()
    numbers = q.view(n, groups * group_size)[:, :k].to(torch.uint8)
    return numbers, scale.t().to(torch.bfloat16).contiguous(), zero


def _stored(scale: torch.Tensor) -> torch.Tensor:
    """Scales as bfloat16 holds them, never zero."""
    scale = scale.to(torch.bfloat16).float()
    return torch.where(scale.abs() < _TINY, _TINY, scale)


def _squared(t: torch.Tensor) -> float:
    """The sum of its squares, in float64: a norm converts as it sums, in a quarter of the time."""
    return float(torch.linalg.vector_norm(t, dtype=torch.float64)) ** 2


def quantize(
    weight: torch.Tensor,
    format: str,
    *,
    group_size: int,
    symmetric: bool,
    packed: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
) -> WeightError:
    """Round a weight [n, k] into its packed form, some rows at a time.

    Raises:
        ValueError: a number that is not finite.
    """
    n, k = weight.shape
    if weight.is_meta:  # shapes only
        return WeightError(0.0, 0.0)
    largest, lost, total = 0.0, 0.0, 0.0
    step = max(1, _ROWS_AT_ONCE // max(1, k) // _PANEL) * _PANEL
    for first in range(0, n if k else 0, step):
        part = weight[first : first + step].float()
        bad = (~part.isfinite()).any(1).nonzero()
        if bad.numel():
            raise ValueError(
                f"PackedLinear: every weight must be finite, row {first + int(bad[0])} holds NaN or an infinity; "
                "no scale represents it: mend the row first"
            )
        here = slice(first, first + part.shape[0])
        if format == "int4":
            q, scales, zeros = round_groups(part, group_size, symmetric)
            scale[:, here] = scales
            if zero is not None and zeros is not None:
                zero[:, here] = zeros
            middle = 8 if zeros is None else _spread(zeros.float(), group_size, k)
            back = (q.float() - middle) * _spread(scales.float(), group_size, k)
        else:
            q, scales = round_rows(part)
            scale[here] = scales
            back = (q.float() - 128) * scales[:, None]
        block = pack_integers(q, format)
        packed[first : first + block.shape[0]] = block
        error = part - back
        largest = max(largest, float(error.abs().max()))
        lost += _squared(error)
        total += _squared(part)
    return WeightError(largest, (lost / total) ** 0.5 if total else 0.0)
