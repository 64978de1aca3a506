"""Rotary embedding: each token's heads, rotated by angles that grow with its position."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from opsmith.call.common import (
    check_out,
    compiling,
    earlier,
    fresh_as,
    kernels,
    native,
    needs_grad,
    recorded,
    soonest,
)
from opsmith.call.fast import direct
from opsmith.call.run import declare
from opsmith.call.signature import Constant, Gradient, Input, Made, Number, Output, Saved, Signature, Slope
from opsmith.operator import GradientCost, Implementation, Kind, MergedCalls, Operator, register
from opsmith.ops.rope.check import Pair, bad_position, check, check_key, name_bad_position
from opsmith.ops.rope.patterns import PATTERNS
from opsmith.ops.rope.samples import cost, cost_qk, samples, samples_qk, workloads, workloads_qk

# A rotation is undone by the opposite one.
_TABLE = (Input("cos", "... C"), Input("sin", "... C"), Input("positions", "... L", optional=True))
_HOW = (Number("dims", int), Number("interleaved", bool), Number("inverse", bool))
_BACK: tuple[Saved | Constant, ...] = (
    *map(Saved, ("cos", "sin", "positions", "dims", "interleaved")),
    Constant("inverse", True),
)
SIGNATURE = Signature(
    "rope",
    (Input("x", "... D"), *_TABLE, *_HOW),
    (Output("y", "... D", like="x"),),
    gradient=Gradient("rope", (Slope("y", "x"), *_BACK), (Made("x", "y", optional=False),), strided=True),
)
SIGNATURE_QK = Signature(
    "rope_qk",
    (Input("q", "... D"), Input("k", "... D"), *_TABLE, *_HOW),
    (Output("yq", "... D", like="q"), Output("yk", "... D", like="k")),
    gradient=Gradient(
        "rope_qk",
        (Slope("yq", "q"), Slope("yk", "k"), *_BACK),
        (Made("q", "yq", optional=False), Made("k", "yk", optional=False)),
        strided=True,
    ),
)


def rope(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    positions: torch.Tensor | None = None,
    rotary_dim: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
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
    if out is None and not compiling():
        try:
            dims = direct.sizes(x)[-1] if rotary_dim is None else rotary_dim
            if dims and (positions is None or cos.dim() == 2):
                y: torch.Tensor | None = direct.new_rope(x, cos, sin, positions, dims, interleaved, False)
                if y is not None:
                    return y
        except (RuntimeError, IndexError, AttributeError):  # the checks say why
            pass
    dims = check("rope", x, cos, sin, positions, rotary_dim)
    if out is not None:
        check_out("rope", out, x, onto=("x",), x=x, cos=cos, sin=sin, positions=positions)
    if native(x, "rope") is not True or needs_grad(cos, sin):
        y = reference(x, cos, sin, interleaved=interleaved, positions=positions, rotary_dim=dims)
    elif needs_grad(x):
        y = recorded(_Rope, x, cos, sin, interleaved, positions, dims)
    else:
        return _native(x, cos, sin, interleaved=interleaved, positions=positions, rotary_dim=dims, out=out)
    return y if out is None else out.copy_(y)


def rope_qk(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    positions: torch.Tensor | None = None,
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
    if out is None and not compiling():
        try:
            dims = direct.sizes(q)[-1] if rotary_dim is None else rotary_dim
            if dims and (positions is None or cos.dim() == 2):
                made: Pair | None = direct.new_rope_qk(q, k, cos, sin, positions, dims, interleaved, False)
                if made is not None:
                    return made
        except (RuntimeError, IndexError, AttributeError):  # the checks say why
            pass
    dims = check("rope_qk", q, cos, sin, positions, rotary_dim)
    check_key(q, k)
    if out is not None:
        if not isinstance(out, tuple) or len(out) != 2:
            raise TypeError(f"rope_qk: out must be a pair of tensors, got {type(out).__name__}")
        memory: dict[str, Any] = {"q": q, "k": k, "cos": cos, "sin": sin, "positions": positions}
        check_out("rope_qk", out[0], q, onto=("q",), **memory)
        check_out("rope_qk", out[1], k, onto=("k",), **memory, **earlier(out, 1))
    if native(q, "rope_qk") is not True or needs_grad(cos, sin):
        y = reference_qk(q, k, cos, sin, interleaved=interleaved, positions=positions, rotary_dim=dims)
    elif needs_grad(q, k):
        y = recorded(_RopeQK, q, k, cos, sin, interleaved, positions, dims)
    else:
        return native_qk(
            q, k, cos, sin, interleaved=interleaved, positions=positions, rotary_dim=dims, out=out
        )
    return y if out is None else (out[0].copy_(y[0]), out[1].copy_(y[1]))


def reference(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    positions: torch.Tensor | None = None,
    rotary_dim: int | None = None,
) -> torch.Tensor:
    """The definition, in plain PyTorch: `x cos + rotated(x) sin`, as models write it."""
    dims = x.shape[-1] if rotary_dim is None else rotary_dim
    c = _spread(cos, x, positions, dims, interleaved)
    s = _spread(sin, x, positions, dims, interleaved)
    turned, rest = x[..., :dims], x[..., dims:]
    if interleaved:
        swapped = torch.stack((-turned[..., 1::2], turned[..., ::2]), dim=-1).flatten(-2)
    else:
        swapped = torch.cat((-turned[..., dims // 2 :], turned[..., : dims // 2]), dim=-1)
    y = (turned * c + swapped * s).to(x.dtype)
    return torch.cat((y, rest), dim=-1) if dims < x.shape[-1] else y


def reference_qk(q: torch.Tensor, k: torch.Tensor, *args: Any, **options: Any) -> Pair:
    """The definition, in plain PyTorch."""
    return reference(q, *args, **options), reference(k, *args, **options)


def _spread(
    table: torch.Tensor, x: torch.Tensor, positions: torch.Tensor | None, dims: int, interleaved: bool
) -> torch.Tensor:
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


def _gather(table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    if torch.compiler.is_compiling():
        return F.embedding(positions, table)
    try:
        return F.embedding(positions, table)
    except IndexError:
        raise bad_position(positions, table.shape[0]) from None


def dense_rows(t: torch.Tensor) -> torch.Tensor:
    """The tensor with its last dimension contiguous; itself, where it is."""
    return t if t.stride()[-1] == 1 or t.shape[-1] <= 1 else t.contiguous()


def _native(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    positions: torch.Tensor | None = None,
    rotary_dim: int | None = None,
    out: torch.Tensor | None = None,
    inverse: bool = False,
) -> torch.Tensor:
    """The kernel, without autograd; `inverse` turns the other way, which is the gradient."""
    y = fresh_as(x) if out is None else out
    dims = x.shape[-1] if rotary_dim is None else rotary_dim
    target = dense_rows(y)
    try:
        soonest(ROPE)(
            dense_rows(x), dense_rows(cos), dense_rows(sin), positions, dims, interleaved, inverse, y=target
        )
    except RuntimeError:
        name_bad_position(positions, cos)
        raise
    return y if target is y else y.copy_(target)


def native_qk(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    positions: torch.Tensor | None = None,
    rotary_dim: int | None = None,
    out: Pair | None = None,
    inverse: bool = False,
    op: str = "rope_qk",
) -> Pair:
    """The kernel on both, without autograd; errors name the operator that was called."""
    yq, yk = (fresh_as(q), fresh_as(k)) if out is None else out
    dims = q.shape[-1] if rotary_dim is None else rotary_dim
    tq, tk = dense_rows(yq), dense_rows(yk)
    try:
        soonest(ROPE_QK)(
            dense_rows(q),
            dense_rows(k),
            dense_rows(cos),
            dense_rows(sin),
            positions,
            dims,
            interleaved,
            inverse,
            yq=tq,
            yk=tk,
        )
    except RuntimeError:
        name_bad_position(positions, cos, op)
        raise
    return yq if tq is yq else yq.copy_(tq), yk if tk is yk else yk.copy_(tk)


class _Rope(torch.autograd.Function):
    """A rotation is undone by the opposite one: backward is the same kernel, and x is not kept."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        interleaved: bool,
        positions: torch.Tensor | None,
        dims: int,
    ) -> torch.Tensor:
        ctx.save_for_backward(cos, sin, positions)
        ctx.interleaved, ctx.dims = interleaved, dims
        return _native(x, cos, sin, interleaved=interleaved, positions=positions, rotary_dim=dims)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin, positions = ctx.saved_tensors
        turn = {"interleaved": ctx.interleaved, "positions": positions, "rotary_dim": ctx.dims}
        return _native(dy, cos, sin, **turn, inverse=True), None, None, None, None, None


class _RopeQK(torch.autograd.Function):
    """The same for queries and keys in one call each way."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        interleaved: bool,
        positions: torch.Tensor | None,
        dims: int,
    ) -> Pair:
        ctx.save_for_backward(cos, sin, positions)
        ctx.interleaved, ctx.dims = interleaved, dims
        return native_qk(q, k, cos, sin, interleaved=interleaved, positions=positions, rotary_dim=dims)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin, positions = ctx.saved_tensors
        turn = {"interleaved": ctx.interleaved, "positions": positions, "rotary_dim": ctx.dims}
        if ctx.needs_input_grad[0] and ctx.needs_input_grad[1]:
            dq, dk = native_qk(dq, dk, cos, sin, **turn, inverse=True)
            return dq, dk, None, None, None, None, None
        alone = [
            _native(d, cos, sin, **turn, inverse=True) if needed else None
            for d, needed in zip((dq, dk), ctx.needs_input_grad[:2], strict=True)
        ]
        return (*alone, None, None, None, None, None)


CARD = register(
    Operator(
        name="rope",
        kind=Kind.ROPE,
        function=rope,
        reference=reference,
        cost=cost,
        samples=samples,
        workloads=workloads,
        implementations=[
            *kernels(_native, lambda x, *a, **k: native(x, "rope")),
            Implementation("eager", reference),
        ],
        patterns=PATTERNS,
        gradient=GradientCost(bytes=1.0),  # another rotation
        onto=(("x",),),
        schemas=declare(SIGNATURE, "rope"),
        source="Su et al., 2021",
    )
)

CARD_QK = register(
    Operator(
        name="rope_qk",
        kind=Kind.ROPE,
        function=rope_qk,
        reference=reference_qk,
        cost=cost_qk,
        samples=samples_qk,
        workloads=workloads_qk,
        implementations=[
            *kernels(native_qk, lambda q, *a, **k: native(q, "rope_qk")),
            Implementation("eager", reference_qk),
        ],
        schemas=declare(SIGNATURE_QK, "rope"),
        outputs=2,
        gradient=GradientCost(bytes=1.0),
        onto=(("q",), ("k",)),
        merges=MergedCalls("rope", over="x", inputs=("q", "k")),
        source="Su et al., 2021",
    )
)

ROPE, ROPE_QK = torch.ops.opsmith.rope.default, torch.ops.opsmith.rope_qk.default
