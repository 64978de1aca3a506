"""Rotary embedding: each token's heads, rotated by angles that grow with its position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from opsmith.call.dispatch import compiling, needs_grad
from opsmith.call.layouts import fresh_as
from opsmith.call.run import Call, declare
from opsmith.call.signature import (
    Constant,
    Gradient,
    Input,
    Made,
    Number,
    Output,
    Saved,
    Signature,
    Sizes,
    Slope,
)
from opsmith.operator import GradientCost, Kind, MergedCalls
from opsmith.ops.rope.check import Pair, check, check_key, name_bad_position
from opsmith.ops.rope.patterns import PATTERNS
from opsmith.ops.rope.samples import cost, cost_qk, samples, samples_qk, workloads, workloads_qk

# A rotation is undone by the opposite one.
TABLE = (Input("cos", "... C"), Input("sin", "... C"), Input("positions", "... L", optional=True))
_HOW = (Number("dims", int), Number("interleaved", bool), Number("inverse", bool))
_BACK: tuple[Saved | Constant, ...] = (
    *map(Saved, ("cos", "sin", "positions", "dims", "interleaved")),
    Constant("inverse", True),
)
SIGNATURE = Signature(
    "rope",
    (Input("x", "... D"), *TABLE, *_HOW),
    (Output("y", "... D", like="x", onto=("x",)),),
    gradient=Gradient("rope", (Slope("y", "x"), *_BACK), (Made("x", "y", optional=False),)),
    strided=True,
)
SIGNATURE_QK = Signature(
    "rope_qk",
    (Input("q", "... D"), Input("k", "... D"), *TABLE, *_HOW),
    (Output("yq", "... D", like="q", onto=("q",)), Output("yk", "... D", like="k", onto=("k",))),
    gradient=Gradient(
        "rope_qk",
        (Slope("yq", "q"), Slope("yk", "k"), *_BACK),
        (Made("q", "yq", optional=False), Made("k", "yk", optional=False)),
    ),
    strided=True,
)


def rope(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    positions: Tensor | None = None,
    rotary_dim: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Rotate pairs of a head's dimensions by the angles of the token's position; one pass over memory.

    `(y1, y2) = (x1 cos - x2 sin, x2 cos + x1 sin)` for every pair `(x1, x2)`: dimensions `i` and `i + R/2` of the
    first `R = rotary_dim`, or `2i` and `2i + 1` if `interleaved`. Computed in float32, rounded once.

    >>> cos, sin = rope_table(128, 4096)
    >>> rope(torch.randn(1, 32, 512, 128), cos, sin).shape
    torch.Size([1, 32, 512, 128])
    >>> token = torch.randn(1, 32, 1, 128)
    >>> rope(token, cos, sin, positions=torch.tensor([511]), out=token) is token   # in place
    True

    Args:
        x: [B, H, L, D] or [T, H, D], float32, bfloat16 or float16 (float64 through PyTorch); any strides.
        cos, sin: [rows, R] as `rope_table` makes them, where columns i and i + R/2 are those of pair i, in either
            layout; or [rows, R/2], a column for each pair; or with a batch in front, [B, L, ...], as Hugging Face
            models pass them. In x's dtype or float32.
        interleaved: a pair is two neighbors (GPT-J, DeepSeek) and not a dimension of each half (Llama).
        positions: [L] or [B, L] ([T] for x [T, H, D]), int32 or int64: each token's row of the table; by default
            token l has row l.
        rotary_dim: R, how many of the D dimensions are rotated, the first ones; the others pass through.
        out: a tensor like x to write into; x itself to rotate in place.

    Raises:
        PositionError: (an IndexError and a ValueError) a position has no row; nothing is read out of range.
        TypeError, ValueError: for a wrong dtype, shape or device.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
    """
    dims = rotated(x, rotary_dim)
    call = _ROPE.fast.call if fits(dims, cos, positions) else _ROPE.compiled
    return call(x, cos, sin, positions, dims, interleaved, False, out)  # type: ignore[no-any-return]


def rope_qk(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    positions: Tensor | None = None,
    rotary_dim: int | None = None,
    out: Pair | None = None,
) -> Pair:
    """Rotate queries and keys in one call: `(rope(q, cos, sin), rope(k, cos, sin))`.

    >>> cos, sin = rope_table(128, 4096)
    >>> q, k = rope_qk(torch.randn(1, 32, 512, 128), torch.randn(1, 8, 512, 128), cos, sin)
    >>> k.shape
    torch.Size([1, 8, 512, 128])

    Args:
        q, k: [B, H, L, D] and [B, Hkv, L, D], or [T, H, D] and [T, Hkv, D], of one dtype.
        cos, sin, interleaved, positions, rotary_dim: as for `rope`.
        out: a pair like (q, k) to write into; (q, k) to rotate in place.

    Raises:
        PositionError: a position has no row; nothing is read out of range.
        TypeError, ValueError: for a wrong dtype, shape or device.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
    """
    dims = rotated(q, rotary_dim)
    call = _ROPE_QK.fast.call if fits(dims, cos, positions) else _ROPE_QK.compiled
    return call(q, k, cos, sin, positions, dims, interleaved, False, out)  # type: ignore[no-any-return]


def rotated(x: Any, rotary_dim: int | None) -> int:
    """The number of rotated dimensions, or 0 for the checks to say why."""
    if rotary_dim is not None:
        return rotary_dim
    try:
        return int(x.shape[-1])
    except (AttributeError, IndexError):
        return 0


def fits(dims: int, cos: Any, positions: Any) -> bool:
    """Whether the kernel, which takes positions in one table alone, may be asked at once."""
    return not compiling() and dims != 0 and (positions is None or getattr(cos, "ndim", 0) == 2)


def definition(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Any, dims: int, interleaved: bool, *_: Any
) -> Tensor:
    """The definition, in plain PyTorch: `x cos + rotated(x) sin`, as models write it."""
    c = _spread(cos, x, positions, dims, interleaved)
    s = _spread(sin, x, positions, dims, interleaved)
    turned, rest = x[..., :dims], x[..., dims:]
    if interleaved:
        swapped = torch.stack((-turned[..., 1::2], turned[..., ::2]), dim=-1).flatten(-2)
    else:
        swapped = torch.cat((-turned[..., dims // 2 :], turned[..., : dims // 2]), dim=-1)
    y = (turned * c + swapped * s).to(x.dtype)
    return torch.cat((y, rest), dim=-1) if dims < x.shape[-1] else y


def definition_qk(q: Tensor, k: Tensor, *rest: Any) -> Pair:
    """The definition, in plain PyTorch."""
    return definition(q, *rest), definition(k, *rest)


def _spread(table: Tensor, x: Tensor, positions: Tensor | None, dims: int, interleaved: bool) -> Tensor:
    """A cosine or sine for every element that is rotated, broadcast over heads."""
    tokens = x.shape[0] if x.dim() == 3 else x.shape[2]
    if positions is None:
        rows = table[..., :tokens, :]
    else:
        one = table if table.dim() == 2 else table[0]
        rows = _gather(one, positions)
    first, second = (rows, rows) if rows.shape[-1] < dims else rows.split(dims // 2, dim=-1)
    wide = torch.stack((first, second), -1).flatten(-2) if interleaved else torch.cat((first, second), -1)
    if x.dim() == 3:
        return wide.reshape(tokens, 1, dims)
    return wide.unsqueeze(-3)


def _gather(table: Tensor, positions: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        return F.embedding(positions, table)
    try:
        return F.embedding(positions, table)
    except IndexError:
        name_bad_position(positions, table)
        raise


class Rotation(Call):
    """One tensor of heads, or two; a rotation is undone by the opposite one, so that neither is kept."""

    @property
    def heads(self) -> int:
        """How many tensors are rotated."""
        return len(self.signature.results)

    def check(self, values: Sequence[Any]) -> None:
        check(self.op, values[0], *values[self.heads :][:4])
        if self.heads == 2:
            check_key(*values[:2])

    def sizes(self, values: Sequence[Any]) -> Mapping[str, Sizes]:
        heads = ("T", "H", "D") if values[0].dim() == 3 else ("B", "H", "L", "D")
        few = {"cos": ("B", "L", "R"), "sin": ("B", "L", "R"), "positions": ("B", "L")}
        return dict.fromkeys(("x", "q", "k", "y", "yq", "yk"), heads) | few

    def apart(self, values: Sequence[Any]) -> Sequence[str]:
        return "B", "H"

    def backend(self, values: Sequence[Any], training: bool) -> str | None:
        learned = training and needs_grad(*values[self.heads :][:2])
        ours = super().backend(values, training)
        return None if learned else ours

    def explain(self, values: Sequence[Any]) -> None:
        cos, _, positions = values[self.heads :][:3]
        name_bad_position(positions, cos, self.op)

    def fresh(
        self, like: Tensor, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        return fresh_as(like)


_ROPE = Rotation(SIGNATURE, rope, definition, converted={"dims": rotated, "inverse": False})
_ROPE_QK = Rotation(
    SIGNATURE_QK,
    rope_qk,
    definition_qk,
    converted={"dims": lambda q, rotary_dim: rotated(q, rotary_dim), "inverse": False},
)

CARD = _ROPE.card(
    kind=Kind.ROPE,
    cost=cost,
    samples=samples,
    workloads=workloads,
    patterns=PATTERNS,
    gradient=GradientCost(bytes=1.0),  # another rotation
    schemas=declare(SIGNATURE, "rope"),
    source="Su et al., 2021",
)

CARD_QK = _ROPE_QK.card(
    kind=Kind.ROPE,
    cost=cost_qk,
    samples=samples_qk,
    workloads=workloads_qk,
    schemas=declare(SIGNATURE_QK, "rope"),
    gradient=GradientCost(bytes=1.0),
    merges=MergedCalls("rope", over="x", inputs=("q", "k")),
    source="Su et al., 2021",
)
