"""The formats of GGUF files: blocks as numbers and scales of a packed weight, and how a weight is rounded to them.

A block of 32 numbers has a float16 scale; one of 256 has a float16 that small whole numbers, one for each 16 or 32, are
multiplied by, and where its numbers begin at the least of a group, a second such pair for that. A block of mxfp4 has
the exponent of a power of two.

Source: ggml's quantized types, https://github.com/ggml-org/ggml (ggml-common.h, ggml-quants.c).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from opsmith.ops.packed_linear.formats import FORMATS, SUPER, Scales

# Numbers as they are stored, scale, zero and outer, which lie as those of a packed weight do.
Rounded = tuple[Tensor, Tensor, Tensor | None, Tensor | None]

# Of a block: how many numbers, and how many bytes.
BLOCKS = {
    "q8_0": (32, 34),
    "q5_0": (32, 22),
    "q4_0": (32, 18),
    "mxfp4": (32, 17),
    "q6_k": (256, 210),
    "q5_k": (256, 176),
    "q4_k": (256, 144),
    "q3_k": (256, 110),
    "iq4_xs": (256, 136),
    "iq4_nl": (32, 18),
}
# Formats that are kept in another one, a byte a number.
KEPT = {"q3_k": "q6_k", "iq4_xs": "q6_k", "iq4_nl": "q8_0"}
# What the sixteen nibbles of iq4 stand for, plus 128.
_UNEVEN = (1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241)


def read(rows: Tensor, format: str) -> Rounded:
    """Rows [n, bytes] of a file's blocks as what they hold; k is a multiple of a block's numbers.

    Raises:
        ValueError: a scale that is not finite.
    """
    blocks = rows.view(rows.shape[0], -1, BLOCKS[format][1])
    zero = outer = None
    if format == "iq4_nl":
        scale, numbers = _halves(blocks[..., :2]), _uneven(blocks[..., 2:])
    elif format == "iq4_xs":
        low, high = _nibbles(blocks[..., 4:8, None]), _bits(blocks[..., 2:4]).unflatten(-1, (8, 2))
        scale = low.flatten(-2) | high[..., 0] << 4 | high[..., 1] << 5
        scale = (scale.to(torch.int8) - 32).repeat_interleave(2, -1)  # two of 16 for each 32
        outer, numbers = _halves(blocks[..., :2])[None], _uneven(blocks[..., 8:].unflatten(-1, (8, 16)))
    elif format == "q3_k":
        low = blocks[..., 32:96].unflatten(-1, (2, 1, 32)) >> _shifts(0, 2, 4, 6)[:, None] & 3
        high = blocks[..., None, :32] >> _shifts(*range(8))[:, None] & 1
        numbers = (low | high.unflatten(-2, (2, 4)) << 2) + 124
        high = (blocks[..., None, 104:108] >> _shifts(0, 2, 4, 6)[:, None] & 3).flatten(-2)
        scale = (_nibbles(blocks[..., 96:104]) | high << 4).to(torch.int8) - 32
        outer = _halves(blocks[..., 108:])[None]
    elif FORMATS[format].scales is Scales.HALF:
        scale = _halves(blocks[..., :2])
        if format == "q8_0":
            numbers = blocks[..., 2:] ^ 128  # a signed byte plus 128
        else:
            numbers = _nibbles(blocks[..., -16:])
            if format == "q5_0":
                numbers = (numbers | _bits(blocks[..., 2:6]) << 4) + 112
    elif format == "mxfp4":
        scale, numbers = blocks[..., 0], _nibbles(blocks[..., 1:])
        if bool((scale == 255).any()):
            raise ValueError(f"{format}: every scale must be finite, the file holds NaN")
    elif format == "q6_k":
        low = _nibbles(blocks[..., :128].unflatten(-1, (2, 64))).unflatten(-1, (4, 32))
        high = blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> _shifts(0, 2, 4, 6)[:, None] & 3
        numbers = (low | high << 4) + 96
        scale, outer = blocks[..., 192:208].contiguous().view(torch.int8), _halves(blocks[..., 208:])[None]
    else:
        scale, zero = _sixes(blocks[..., 4:16])
        outer = torch.stack((_halves(blocks[..., :2]), _halves(blocks[..., 2:4])))
        numbers = _nibbles(blocks[..., -128:].unflatten(-1, (4, 32)))
        if format == "q5_k":
            high = blocks[..., None, 16:48] >> _shifts(*range(8))[:, None] & 1
            numbers = (numbers.unflatten(-1, (2, 32)) | high.unflatten(-2, (4, 2)) << 4) + 128
    kept = [None if t is None else t.flatten(1).t().contiguous() for t in (scale, zero)]
    outer = None if outer is None else outer.mT.contiguous()
    for t in (kept[0], outer):
        if t is not None and not bool(t.isfinite().all()):
            raise ValueError(f"{format}: every scale must be finite, the file holds NaN or an infinity")
    assert kept[0] is not None
    return numbers.flatten(1), kept[0], kept[1], outer


def round_to(part: Tensor, format: str) -> Rounded:
    """Rows [n, k] rounded to a format: each number to the nearest step, a group's steps over what it spans."""
    how, (n, k) = FORMATS[format], part.shape
    middle = 1 << how.bits - 1
    whole = SUPER if how.scales is Scales.NESTED else how.group
    blocks = F.pad(part, (0, -k % whole)).view(n, -1, whole // how.group, how.group)
    most, zero, outer = how.steps // 2, None, None  # most: steps on one side of zero
    top, low = blocks.amax(-1), blocks.amin(-1)
    extreme = torch.where(top.abs() > low.abs(), top, low)
    if how.scales is Scales.HALF:
        # 255 steps have as many on both sides. 16 and 32 have one more below, where the larger end goes.
        step = scale = (extreme.abs() / most if how.steps % 2 else extreme / -most).half()
    elif not how.minima:
        step = extreme / -most
        largest = step.gather(-1, step.abs().argmax(-1, True))
        of = (largest / -128).half()
        scale = _whole(step, of, -128, 127)
        step, outer = scale * of.float(), of[None, ..., 0]
    else:
        low, top = low.clamp(max=0), top.clamp(min=0)
        both = torch.stack(((top - low) / (how.steps - 1), -low))
        of = (both.amax(-1, keepdim=True) / 63).half()
        scale, zero = _whole(both, of, 0, 63)
        step, taken = torch.stack((scale, zero)) * of.float()
        blocks, outer = blocks + taken[..., None], of[..., 0]
    least = 0 if how.minima else most - how.steps + (how.steps % 2)
    q = _whole(blocks, step[..., None], least, least + how.steps - 1)
    stored = (q + (0 if how.minima and how.bits == 4 else middle)).to(torch.uint8)

    def kept(t: Tensor | None) -> Tensor | None:
        if t is None:
            return None
        t = t.flatten(1)[:, : -(-k // how.group)].t().contiguous()
        return t.to(torch.int8) if how.scales is Scales.NESTED else t

    steps = kept(scale)
    assert steps is not None
    return stored.view(n, -1)[:, :k], steps, kept(zero), None if outer is None else outer.mT.contiguous()


def _whole(numbers: Tensor, step: Tensor, least: int, most: int) -> Tensor:
    """The nearest whole numbers of steps; zero of steps that are none."""
    step = step.float()
    return torch.where(step == 0, 0.0, (numbers / step).round()).clamp(least, most)


def _halves(pairs: Tensor) -> Tensor:
    return pairs.contiguous().view(torch.float16)[..., 0]


def _nibbles(bytes_: Tensor) -> Tensor:
    """The low nibbles of some bytes, then the high ones."""
    return torch.cat((bytes_ & 15, bytes_ >> 4), -1)


def _uneven(bytes_: Tensor) -> Tensor:
    """What the nibbles of some bytes stand for."""
    return torch.tensor(_UNEVEN, dtype=torch.uint8)[_nibbles(bytes_).int()]


def _bits(bytes_: Tensor) -> Tensor:
    """The bits of bytes, the lowest of the first before the others."""
    return (bytes_[..., None] >> _shifts(*range(8)) & 1).flatten(-2)


def _shifts(*bits: int) -> Tensor:
    return torch.tensor(bits, dtype=torch.uint8)


def _sixes(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight minima of six bits each, in twelve bytes."""
    first, second, last = packed.unflatten(-1, (3, 4)).unbind(-2)
    scale = torch.cat((first & 63, last & 15 | (first >> 6) << 4), -1)
    least = torch.cat((second & 63, last >> 4 | (second >> 6) << 4), -1)
    return scale.to(torch.int8), least.to(torch.int8)
