"""Weights of linear layers in few bits: how they are rounded, and where each number lies in the packed tensor.

The layout is the same on every machine, so a packed weight is a checkpoint. Bytes (int8: the number plus 128; int4:
two numbers from 0 to 15) lie in panels of 32 rows of the weight, the last one of 16 or 32: four bytes of a row, then
four of the next row of the panel, then the next four of the first. Of eight int4 numbers that follow each other along
K the first four are the low nibbles. bfloat16 is packed as `linear` packs it: panels of 64, pairs.

The formats of GGUF files (gguf.py) lie the same way, 4 bits as nibbles and 5, 6 and 8 bits as bytes, and their scales
as the file has them: a float16 or an exponent for each group, or a whole number that a float16 of 256, `outer`,
multiplies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from opsmith.call.arguments import Maybe
from opsmith.call.layouts import in_huge_pages
from opsmith.ops.packed_linear.formats import BLOCK, FORMATS, SUPER, Scales
from opsmith.ops.packed_linear.gguf import KEPT, read, round_to
from opsmith.ops.packed_linear.inputs import Inputs
from opsmith.ops.rounding import TINY, RoundingError, on_grid, round_in_parts, round_rows

_PANEL, _LEAST, _DEPTH = 32, 16, 8
_UNIT = 4  # bytes of a row that lie together in a panel
_PAIRS = 64  # rows of a panel of bfloat16
_FLOATS4 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)  # what a float of four bits is, without its sign
_AT_ONCE = 1 << 21  # numbers that are rounded at a time
_AT_ONCE_BY_COLUMNS = 1 << 24  # the same, where each column is a step of its own

# Weight, scale, zero, outer.
Packed = tuple[Tensor, Maybe, Maybe, Maybe]


def packed_shape(format: str, n: int, k: int) -> tuple[int, ...]:
    if format == "bf16":
        return (1, n, k + k % 2)
    width = -(-k // _DEPTH) * _DEPTH
    return (-(-n // _LEAST) * _LEAST, width * FORMATS[format].bits // 8)


def _turn(rows: Tensor, panel: int, unit: int, *, back: bool = False) -> Tensor:
    """Rows [n, width] into panels of so many, and one of what is left; or back.

    In a panel, one unit of each of its rows is followed by the next unit of each.
    """
    n, width = rows.shape
    whole = n // panel * panel if width else n
    found = []
    for part, height in ((rows[:whole], panel), (rows[whole:], n - whole)):
        if part.numel():
            sizes = (width // unit, height) if back else (height, width // unit)
            found.append(part.reshape(-1, *sizes, unit).transpose(1, 2).reshape(-1, width))
    return torch.cat(found) if found else rows


def pack_integers(q: Tensor, format: str) -> Tensor:
    """Numbers [n, k], uint8, as packed bytes."""
    n, k = q.shape
    rows, width = packed_shape("int8", n, k)
    q = F.pad(q, (0, width - k, 0, rows - n))
    if FORMATS[format].bits == 4:
        low, high = q.view(rows, width // _DEPTH, 2, 4).unbind(2)
        q = (low | high << 4).view(rows, width // 2)
    return _turn(q, _PANEL, _UNIT)


def unpack_integers(packed: Tensor, format: str, n: int, k: int) -> Tensor:
    """The numbers [n, k], uint8, of packed bytes."""
    return _numbers(_turn(packed, _PANEL, _UNIT, back=True), format)[:n, :k]


def _numbers(rows: Tensor, format: str) -> Tensor:
    """Rows of bytes as the numbers in them."""
    if FORMATS[format].bits == 8:
        return rows
    words = rows.view(rows.shape[0], rows.shape[1] // _UNIT, _UNIT)
    return torch.stack((words & 15, words >> 4), 2).flatten(1)


def rows_of(packed: Packed, ids: Tensor, format: str, k: int, group_size: int) -> Tensor:
    """The rows [*ids, k] of a packed weight of bytes or nibbles, in float32; numbers without a row are refused."""
    return torch.ops.opsmith.packed_rows.default(ids, *packed, format, k, group_size)  # type: ignore[no-any-return]


def _rows(
    ids: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Maybe,
    outer: Maybe,
    format: str,
    k: int,
    group_size: int,
) -> Tensor:
    rows = ids.flatten()
    # This refuses them, where an index counts from the end.
    own = scale.index_select(-1, rows)
    zero, outer = (None if t is None else t.index_select(-1, rows) for t in (zero, outer))
    height, width = weight.shape
    whole, units = height // _PANEL * _PANEL, width // _UNIT
    start = rows // _PANEL * _PANEL
    step: Any = _PANEL if height == whole else torch.where(rows < whole, _PANEL, height - whole)[:, None]
    at = (start * units + rows - start)[:, None] + torch.arange(units, device=ids.device) * step
    numbers = _numbers(weight.view(torch.int32).flatten()[at].view(torch.uint8), format)[:, :k]
    found = values(numbers, own, zero, outer, format=format, group_size=group_size, dtype=torch.float32)
    return found.view(*ids.shape, k)


# One operator: the terms of all that a model makes of its embeddings would have this arithmetic in them.
_LIBRARY = torch.library.Library("opsmith", "FRAGMENT")
_LIBRARY.define(
    "packed_rows(Tensor ids, Tensor weight, Tensor scale, Tensor? zero, Tensor? outer, str format, int k, "
    "int group_size) -> Tensor"
)
_LIBRARY.impl("packed_rows", _rows, "CompositeExplicitAutograd")
torch.library.register_fake(
    "opsmith::packed_rows",
    lambda ids, weight, scale, zero, outer, format, k, group_size: torch.empty(
        (*ids.shape, k), dtype=torch.float32, device=ids.device
    ),
    lib=_LIBRARY,
)


def pack_pairs(weight: Tensor) -> Tensor:
    """A bfloat16 weight [n, k] as `linear` packs it."""
    rows = F.pad(weight, (0, weight.shape[1] % 2)).contiguous()
    return _turn(rows.view(torch.int32), _PAIRS, 1).view(torch.bfloat16)[None]


def unpack_pairs(packed: Tensor, k: int) -> Tensor:
    """The weight [n, k] of one that `linear` packed in pairs."""
    return _turn(packed[0], _PAIRS, 2, back=True)[:, :k]


def in_parts(
    weight: Tensor, scale: Maybe, zero: Maybe, bias: Maybe, outer: Maybe, *, k: int
) -> Iterator[tuple[slice, tuple[Maybe, ...]]]:
    """Columns of a layer's result, and the parts of its packed tensors that make them: to unpack some at a time."""
    axis = weight.dim() - 2
    n = weight.shape[axis] if scale is None else scale.shape[-1]
    step = max(1, _AT_ONCE // max(1, k) // _PAIRS) * _PAIRS  # whole panels
    for first in range(0, max(1, n), step):
        at = slice(first, min(n, first + step))
        own = [None if t is None else t[..., at] for t in (scale, zero, bias, outer)]
        rows = weight.narrow(axis, first, weight.shape[axis] - first if at.stop == n else step)
        yield at, (rows, *own)


def dequantize(
    weight: Tensor,
    scale: Maybe,
    zero: Maybe,
    outer: Maybe,
    *,
    format: str,
    k: int,
    group_size: int,
    dtype: torch.dtype,
) -> Tensor:
    """The weight [n, k] that a packed one stands for.

    Of whole numbers and float16 all products are exact in float32, so that what a GGUF file says comes out to the bit.
    """
    if format == "bf16":
        return unpack_pairs(weight, k).to(dtype)
    assert scale is not None
    q = unpack_integers(weight, format, scale.shape[-1], k)
    return values(q, scale, zero, outer, format=format, group_size=group_size, dtype=dtype)


def values(
    q: Tensor, scale: Tensor, zero: Maybe, outer: Maybe, *, format: str, group_size: int, dtype: torch.dtype
) -> Tensor:
    """What numbers [n, k] stand for, as they are stored."""
    k, middle = q.shape[1], 1 << FORMATS[format].bits - 1
    if FORMATS[format].scales is Scales.FLOAT4:
        steps = torch.ldexp(torch.ones_like(scale, dtype=torch.float64), scale.int() - 127).to(dtype)
        magnitudes = torch.tensor(_FLOATS4, dtype=dtype, device=q.device)
        return torch.cat((magnitudes, -magnitudes))[q.int()] * _spread(steps, group_size, k)
    if FORMATS[format].scales is Scales.FLOAT8:
        steps = _spread(scale.to(dtype), group_size, k) if group_size else scale.to(dtype)[:, None]
        return q.contiguous().view(torch.float8_e4m3fn).to(dtype) * steps
    if not group_size:
        return (q.to(dtype) - middle) * scale.to(dtype)[:, None]
    if outer is None:
        taken = middle if zero is None else _spread(zero.to(dtype), group_size, k)
        return (q.to(dtype) - taken) * _spread(scale.to(dtype), group_size, k)
    of, *least = outer.float().repeat_interleave(SUPER // group_size, 1)[:, : scale.shape[0]]
    steps = _spread(scale.float() * of, group_size, k)
    if zero is None:
        return ((q.float() - middle) * steps).to(dtype)
    numbers = q.float() - (middle if middle > 8 else 0)
    return (numbers * steps - _spread(zero.float() * least[0], group_size, k)).to(dtype)


def _spread(groups: Tensor, group_size: int, k: int) -> Tensor:
    """One number for each group [groups, n] as one for each weight [n, k]."""
    return groups.t().repeat_interleave(group_size, 1)[:, :k]


def _grid(blocks: Tensor, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Scales, as bfloat16 holds them, and middles [rows, groups] for weights [rows, groups, group].

    The steps reach from a group's least number to its largest (asymmetric), or, with 8 in the middle, either over both
    ends in 15 or over the larger one in 16, by the sum of squared errors. Clipping the ends makes that sum smaller, and
    models worse: docs/decisions/024-four-bits.md.
    """
    top, low = blocks.amax(2), blocks.amin(2)
    if not symmetric:
        top, low = top.clamp_(min=0), low.clamp_(max=0)
        scale = _stored((top - low) / 15)
        return scale, (-low / scale).round_().clamp_(0, 15)
    extreme = torch.where(top.abs() >= low.abs(), top, low)
    middle = torch.full_like(top, 8)
    first, second = (_stored(wanted) for wanted in (extreme.abs() / 7, extreme / -8))
    error, error2 = (
        (on_grid(blocks, scale[..., None], 8).sub_(8).mul_(scale[..., None]).sub_(blocks)).square_().sum(2)
        for scale in (first, second)
    )
    return torch.where(error2 < error, second, first), middle


def round_groups(
    part: Tensor, group_size: int, symmetric: bool, inputs: Inputs | None = None
) -> tuple[Tensor, Tensor, Maybe]:
    """Rows rounded to 0..15 by groups: the numbers, scales [groups, rows] in bfloat16, and zeros where asymmetric.

    Numbers are rounded with the scale as it is stored, so that rounding the scale itself costs next to nothing. Each
    goes to the nearest; or, where something is known of the layer's inputs, to where the rows' results change least.
    """
    n, k = part.shape
    groups = -(-k // group_size)
    blocks = F.pad(part, (0, groups * group_size - k)).view(n, groups, group_size)
    scale, middle = _grid(blocks, symmetric)
    if inputs is None:
        q = on_grid(blocks, scale[..., None], middle[..., None]).view(n, groups * group_size)[:, :k]
    else:
        q = inputs.round(part, scale, middle, group_size)
    zero = None if symmetric else middle.t().to(torch.int8).contiguous()
    return q.to(torch.uint8), scale.t().to(torch.bfloat16).contiguous(), zero


def round_to_float8(part: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Rows as bytes of e4m3 floats, and their scales: of each row, or of blocks of as many rows as a group has numbers.

    The largest magnitude that shares a scale becomes the largest that the format has.
    """
    n, k = part.shape
    most = torch.finfo(torch.float8_e4m3fn).max
    if not group_size:
        scale = _largest(part, 1) / most
        steps = scale[:, None]
    else:
        blocks = F.pad(part, (0, -k % group_size, 0, -n % group_size))
        blocks = blocks.view(-(-n // group_size), group_size, -(-k // group_size), group_size)
        scale = (_largest(blocks, (1, 3)) / most).repeat_interleave(group_size, 0)[:n].t().contiguous()
        steps = _spread(scale, group_size, k)
    q = (part / steps).clamp_(-most, most).to(torch.float8_e4m3fn)
    return q.view(torch.uint8), scale


def round_to_float4(part: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Rows as floats of four bits, one in each byte, and their scales: 127 more than an exponent, of each group.

    The largest magnitude of a group gets the largest exponent that the format has.
    """
    n, k = part.shape
    blocks = F.pad(part.double(), (0, -k % group_size)).view(n, -1, group_size)
    exponent = (blocks.abs().amax(2).frexp().exponent - 3).clamp_(-127, 127)
    numbers = torch.ldexp(blocks, -exponent[..., None]).view(n, -1)[:, :k]
    halfway = torch.tensor(_FLOATS4, dtype=torch.float64).to(part.device).unfold(0, 2, 1).mean(1)
    q = torch.bucketize(numbers.abs(), halfway) | numbers.signbit().long() << 3
    return q.to(torch.uint8), (exponent + 127).t().to(torch.uint8).contiguous()


def _largest(numbers: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """The largest magnitudes, none so small that a scale made of it would be zero."""
    return numbers.abs().amax(dim).clamp_(min=TINY * 1024)


def _stored(scale: Tensor) -> Tensor:
    """Scales as bfloat16 holds them, never zero."""
    scale = scale.to(torch.bfloat16).float()
    return torch.where(scale.abs() < TINY, TINY, scale)


def empty(
    format: str, n: int, k: int, group_size: int, symmetric: bool, device: torch.device | str | None
) -> Packed:
    """Memory, zeros, for a packed weight [n, k]."""

    def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    how = FORMATS[format]
    dtype = torch.bfloat16 if format == "bf16" else torch.uint8
    weight = in_huge_pages(torch.empty(packed_shape(format, n, k), dtype=dtype, device=device)).zero_()
    if format == "bf16":
        return weight, None, None, None
    if not group_size:
        return weight, zeros(torch.float32, n), None, None
    shape = (-(-k // group_size), n)
    nested = how.scales is Scales.NESTED
    of = {Scales.HALF: torch.float16, Scales.FLOAT8: torch.float32, Scales.FLOAT4: torch.uint8}
    scale = zeros(torch.int8 if nested else of.get(how.scales, torch.bfloat16), *shape)
    zero = zeros(torch.int8, *shape) if how.minima or not symmetric else None
    outer = zeros(torch.float16, 1 + how.minima, -(-k // SUPER), n) if nested else None
    return weight, scale, zero, outer


def keep_blocks(rows: Tensor, format: str, to: Packed) -> None:
    """Keep what a file's blocks hold as a packed weight, some rows at a time.

    Raises:
        ValueError: a scale that is not finite.
    """
    step = max(1, _AT_ONCE // max(1, to[0].shape[1]) // _PAIRS) * _PAIRS
    for first in range(0, rows.shape[0], step):
        q, *kept = read(rows[first : first + step], format)
        _keep(q, kept, KEPT.get(format, format), slice(first, first + step), to)


def _keep(q: Tensor, scales: Sequence[Maybe], format: str, here: slice, to: Packed) -> None:
    """Rows of numbers, packed, and their scales."""
    block = pack_integers(q, format)
    to[0][here.start : here.start + block.shape[0]] = block
    for t, some in zip(to[1:], scales, strict=True):
        if t is not None and some is not None:
            t[..., here] = some


def quantize(
    weight: Tensor, format: str, group_size: int, to: Packed, inputs: Inputs | None = None
) -> RoundingError:
    """Round a weight [n, k] into its packed form; of int4 to groups around their zeros where there is memory for these,
    and for the inputs that are given.

    Raises:
        ValueError: a number that is not finite, and that no scale represents.
    """
    k, (packed, scale, zero, _) = weight.shape[1], to
    changed, results = 0.0, 0.0  # of the results, squared

    def keep(here: slice, part: Tensor) -> Tensor:
        nonlocal changed, results
        if scale is None:
            half = part.to(torch.bfloat16)
            packed[0, here] = pack_pairs(half)[0]
            return half.float()
        zeros = outers = None
        if format == "int4":
            q, scales, zeros = round_groups(part, group_size, zero is None, inputs)
        elif format == "fp8":
            q, scales = round_to_float8(part, group_size)
        elif format == "mxfp4":
            q, scales = round_to_float4(part, group_size)
        elif FORMATS[format].group:
            q, scales, zeros, outers = round_to(part, format)
        else:
            numbers, scales = round_rows(part)
            q = (numbers + 128).to(torch.uint8)
        _keep(q, (scales, zeros, outers), format, here, to)
        back = values(q, scales, zeros, outers, format=format, group_size=group_size, dtype=torch.float32)
        if inputs is not None:
            changed += inputs.change(part - back)
            results += inputs.change(part)
        return back

    at_once = _AT_ONCE if inputs is None else _AT_ONCE_BY_COLUMNS
    rows = max(1, at_once // max(1, k) // BLOCK) * BLOCK  # whole panels, and whole blocks of fp8
    error = round_in_parts(weight, rows, keep, "PackedLinear: every weight" if scale is not None else "")
    return error if inputs is None else replace(error, result=(changed / results) ** 0.5 if results else 0.0)
