"""Rotary embedding of int8 rows, each with a scale of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from opsmith.call.arguments import short
from opsmith.call.dispatch import native
from opsmith.call.layouts import nbytes
from opsmith.call.run import declare
from opsmith.call.signature import Input, Number, Output, Signature
from opsmith.operator import Cost, Kind, Make, Sample, Supports
from opsmith.ops.rms_norm.quant import Steps
from opsmith.ops.rope import CARD as FLOATING, TABLE, Rotation, definition as rope_definition, fits, rotated
from opsmith.ops.rope.check import Pair, check_heads, check_table
from opsmith.ops.rope.table import rope_table

SIGNATURE = Signature(
    "rope_int8",
    (
        *(Input("x_q", "... D", torch.int8), Input("x_scale", "...", torch.float32)),
        *(*TABLE, Number("dims", int), Number("interleaved", bool)),
    ),
    (
        Output("y", "... D", torch.int8, like="x_q", onto=("x_q",)),
        Output("y_scale", "...", torch.float32, like="x_scale", onto=("x_scale",)),
    ),
    strided=True,
)


def rope_int8(
    x_q: Tensor,
    x_scale: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    positions: Tensor | None = None,
    rotary_dim: int | None = None,
    out: Pair | None = None,
) -> Pair:
    """Rotate int8 rows and quantize them again, in one pass: a quarter of the bytes of float32.

    `y = rope(x_q x_scale)` in float32, `y_scale = max|y| / 127` for every row, `y_q = round(y / y_scale)`. So
    `|y_q y_scale - y| <= max|y| / 254` for every element, which with the cosine and sine of one angle is at most
    `0.0056 max|x|` of the row.

    >>> cos, sin = rope_table(128, 512)
    >>> x_q, x_scale = torch.randint(-127, 128, (1, 8, 512, 128), dtype=torch.int8), torch.rand(1, 8, 512)
    >>> y_q, y_scale = rope_int8(x_q, x_scale, cos, sin)
    >>> y_q.dtype, y_scale.shape
    (torch.int8, torch.Size([1, 8, 512]))

    Args:
        x_q: [B, H, L, D] or [T, H, D] int8.
        x_scale: [B, H, L] or [T, H] float32, a factor for each row.
        cos, sin, interleaved, positions, rotary_dim: as for `rope`; float32, bfloat16 or float16.
        out: tensors like (x_q, x_scale) to write into; these themselves to rotate in place.

    Returns:
        y_q and y_scale, like x_q and x_scale. A row of zeros has scale 0; one that is not finite, a scale that
        is not. Scales other than 0 should be above 1e-30, so that float32 holds the inverse.

    Raises:
        PositionError: a position has no row; nothing is read out of range.
        TypeError, ValueError: for a wrong dtype, shape or device.

    Source: Su et al., 2021; Jacob et al., "Quantization and Training of Neural Networks", 2018.
    """
    dims = rotated(x_q, rotary_dim)
    call = _CALL.fast.call if fits(dims, cos, positions) else _CALL.compiled
    return call(x_q, x_scale, cos, sin, positions, dims, interleaved, out)  # type: ignore[no-any-return]


def definition(x_q: Tensor, x_scale: Tensor, *rest: Any) -> Pair:
    """The definition, in plain PyTorch."""
    y = rope_definition(x_q * x_scale.unsqueeze(-1), *rest)
    y_scale = y.abs().amax(-1) / 127
    inverse = torch.where(y_scale > 0, 1 / y_scale, 0)
    return (y * inverse.unsqueeze(-1)).round().to(torch.int8), y_scale


class _Int8(Rotation):
    learns = False

    def check(self, values: Sequence[Any]) -> None:
        x_q, x_scale, cos, sin, positions, dims, _ = values
        if not isinstance(x_q, Tensor) or not isinstance(x_scale, Tensor):
            given = ", ".join(type(t).__name__ for t in (x_q, x_scale))
            raise TypeError(f"rope_int8: x_q and x_scale must be tensors, got {given}")
        if x_q.dtype != torch.int8:
            raise TypeError(
                f"rope_int8: x_q must be int8, got {short(x_q.dtype)}; quantize it first, or call rope"
            )
        if x_scale.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"rope_int8: x_scale must be float32, got {short(x_scale.dtype)}; cast it first")
        batch, tokens = check_heads("rope_int8", x_q)
        if x_scale.shape != x_q.shape[:-1] or x_scale.device != x_q.device:
            raise ValueError(
                f"rope_int8: x_scale must have shape {tuple(x_q.shape[:-1])} on {x_q.device}, one for each row of "
                f"x_q, got {tuple(x_scale.shape)} on {x_scale.device}"
            )
        dtypes = (x_scale.dtype, torch.float32, torch.bfloat16, torch.float16)
        check_table("rope_int8", x_q, cos, sin, positions, dims, x_q.shape[-1], batch, tokens, dtypes)

    def supported(self, values: Sequence[Any], *more: str) -> Supports:
        return native(values[1], "rope_int8", *more)

    def taken(self, of: Any, t: Tensor | None) -> Tensor | None:
        return t if of.name == "x_scale" else super().taken(of, t)  # scales may lie as they like

    def writable(self, t: Tensor) -> bool:
        return t.dtype != torch.int8 or super().writable(t)

    def fresh(
        self, like: Tensor, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        return super().fresh(like) if like.dtype == torch.int8 else torch.empty_like(like)


_CALL = _Int8(
    SIGNATURE, rope_int8, definition, converted={"dims": lambda x_q, rotary_dim: rotated(x_q, rotary_dim)}
)

_LEAST_SCALE = 1e-30


def _promised(x_q: Tensor, x_scale: Tensor, *table: Tensor, **options: Any) -> bool:
    """Finite calls, their scales 0 or far enough from it for a float32 to hold the inverse of the result's."""
    size = x_scale.abs()
    return all(bool(t.isfinite().all()) for t in (x_scale, *table)) and bool(
        ((size == 0) | (size > _LEAST_SCALE)).all()
    )


def _cost(x_q: Tensor, x_scale: Tensor, cos: Tensor, sin: Tensor, **options: Any) -> Cost:
    rotation = FLOATING.cost(x_q, cos, sin, **options)
    # and for each element a magnitude, a comparison, a product and a rounding
    return Cost(
        rotation.flops + 4.0 * x_q.numel(), rotation.min_bytes + nbytes(x_scale) + 4 * x_scale.numel()
    )


def _samples(make: Make) -> Iterator[Sample]:
    """Those of `rope`, quantized."""

    def rows(x: Tensor) -> Pair:
        scale = x.abs().amax(-1) / 127 if x.numel() else x.new_zeros(x.shape[:-1])
        return (x / scale.unsqueeze(-1)).round().to(torch.int8), scale

    for sample in FLOATING.samples(make):
        x, *table = sample.args
        yield Sample(sample.name, (*rows(x.detach().float()), *table), sample.kwargs)
    x_q, x_scale = rows(make(2, 9, 3, 24).float())
    cos_sin = rope_table(24, 9, dtype=make.dtype, device=make.device)
    yield Sample("transposed scales", (x_q.transpose(1, 2), x_scale.transpose(1, 2), *cos_sin))
    yield Sample("rows of zeros", (torch.zeros_like(x_q), x_scale, *cos_sin))


def _workloads(make: Make) -> Iterator[Sample]:
    for tokens in (4096, 1):
        x_q = make.ids(1, 32, tokens, 128, high=255).sub_(127).to(torch.int8)
        table = rope_table(128, tokens, device=make.device)
        yield Sample(f"1x32x{tokens}x128", (x_q, make(1, 32, tokens).float().abs(), *table))


CARD = _CALL.card(
    kind=Kind.ROPE,
    cost=_cost,
    samples=_samples,
    workloads=_workloads,
    tolerance=Steps(),
    domain=_promised,
    schemas=declare(SIGNATURE, "rope"),
    source="Su et al., 2021",
)
