"""Rotary embedding: each token's heads, rotated by angles that grow with its position."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from opsmith.operator import Cost, Implementation, Kind, Make, Operator, Sample, register
from opsmith.ops.common import (
    check_float,
    check_out,
    fresh,
    kernels,
    native,
    nbytes,
    needs_grad,
    recorded,
    short,
)
from opsmith.ops.rope_table import rope_table

Pair = tuple[torch.Tensor, torch.Tensor]


class PositionError(IndexError, ValueError):
    """A position that the table has no row for: an IndexError as in PyTorch, and a ValueError as in opsmith."""


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
    dims = _check("rope", x, cos, sin, positions, rotary_dim)
    if out is not None and out is not x:
        check_out("rope", out, x)
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
    dims = _check("rope_qk", q, cos, sin, positions, rotary_dim)
    _check_key(q, k)
    if out is not None:
        if not isinstance(out, tuple) or len(out) != 2:
            raise TypeError(f"rope_qk: out must be a pair of tensors, got {type(out).__name__}")
        check_out("rope_qk", out[0], q)
        check_out("rope_qk", out[1], k)
    if native(q, "rope_qk") is not True or needs_grad(cos, sin):
        y = reference_qk(q, k, cos, sin, interleaved=interleaved, positions=positions, rotary_dim=dims)
    elif needs_grad(q, k):
        y = recorded(_RopeQK, q, k, cos, sin, interleaved, positions, dims)
    else:
        return _native_qk(
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
        raise _bad_position(positions, table.shape[0]) from None


def _bad_position(positions: torch.Tensor, rows: int) -> PositionError:
    """The error that names the first position without a row."""
    bad = positions[(positions < 0) | (positions >= rows)]
    return PositionError(
        f"rope: positions must be in [0, {rows}) for a table of {rows} rows, got {int(bad[0])}; "
        "make a longer table"
    )


def _check(op: str, x: Any, cos: Any, sin: Any, positions: Any, rotary_dim: int | None) -> int:
    """Refuse wrong arguments; the number of rotated dimensions."""
    check_float(op, x, "q" if op == "rope_qk" else "x", least_dim=3)
    batch, tokens = check_heads(op, x)
    return check_table(op, x, cos, sin, positions, rotary_dim, x.shape[-1], batch, tokens)


def check_heads(op: str, x: torch.Tensor) -> tuple[int, int]:
    """Refuse what is neither layout of heads; the batch and the tokens of a sequence."""
    shape = x.shape
    if len(shape) == 3:
        return 1, shape[0]
    if len(shape) != 4:
        raise ValueError(f"{op}: expected [B, H, L, D] or [T, H, D], got shape {tuple(shape)}")
    return shape[0], shape[2]


def check_table(
    op: str,
    x: torch.Tensor,
    cos: Any,
    sin: Any,
    positions: Any,
    rotary_dim: int | None,
    size: int,
    batch: int,
    tokens: int,
    dtypes: tuple[torch.dtype, ...] = (),
) -> int:
    """Refuse a table that does not serve these tokens' heads of this size; the number of rotated dimensions."""
    dims = size if rotary_dim is None else rotary_dim
    if dims % 2 or not 2 <= dims <= size:
        raise ValueError(
            f"{op}: the rotated dimensions must be an even number in [2, {size}], the head size, got {dims}"
        )
    for name, t in (("cos", cos), ("sin", sin)):
        check_float(op, t, name, least_dim=2)
        if t.dtype not in (dtypes or (x.dtype, torch.float32)):
            known = " or ".join(short(d) for d in (dtypes or (x.dtype, torch.float32)))
            raise TypeError(f"{op}: {name} must be {known}, got {short(t.dtype)}")
        if t.device != x.device:
            raise ValueError(f"{op}: {name} is on {t.device}, the input on {x.device}; move one of them")
    given = cos.shape
    if sin.shape != given or sin.dtype != cos.dtype:
        raise ValueError(
            f"{op}: cos and sin must be alike, got {short(cos.dtype)} {tuple(given)} "
            f"and {short(sin.dtype)} {tuple(sin.shape)}"
        )
    if (
        len(given) > 3
        or given[-1] not in (dims, dims // 2)
        or (len(given) == 3 and given[0] not in (1, batch))
    ):
        raise ValueError(
            f"{op}: cos and sin must have shape [rows, {dims}] or [rows, {dims // 2}], or [B, rows, ...] with "
            f"B = {batch}, got {tuple(given)}"
        )
    if positions is None:
        if given[-2] < tokens:
            raise PositionError(
                f"{op}: cos and sin must have a row for each of the {tokens} tokens, got {given[-2]}; "
                "make a longer table, or pass positions"
            )
        return int(dims)
    _check_positions(op, positions, x, batch, tokens)
    if len(given) == 3 and given[0] != 1:
        raise ValueError(
            f"{op}: positions choose rows of one table, got one table for each of {given[0]} sequences; "
            "leave positions out, or pass cos and sin as [rows, D]"
        )
    return int(dims)


def _check_positions(op: str, positions: Any, x: torch.Tensor, batch: int, tokens: int) -> None:
    if not isinstance(positions, torch.Tensor):
        raise TypeError(f"{op}: positions must be a tensor, got {type(positions).__name__}")
    if positions.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{op}: positions must be int64 or int32, got {short(positions.dtype)}; cast them")
    if positions.device != x.device:
        raise ValueError(
            f"{op}: positions are on {positions.device}, the input on {x.device}; move one of them"
        )
    shape = positions.shape
    if len(shape) not in (1, 2) or shape[-1] != tokens or (len(shape) == 2 and shape[0] not in (1, batch)):
        raise ValueError(
            f"{op}: positions must have shape ({tokens},) or ({batch}, {tokens}), one for each token, "
            f"got {tuple(shape)}"
        )


def _check_key(q: torch.Tensor, k: Any) -> None:
    check_float("rope_qk", k, "k", least_dim=3)
    if k.dim() != q.dim() or any(k.shape[d] != q.shape[d] for d in range(q.dim()) if d != 1):
        raise ValueError(
            f"rope_qk: k must have q's shape {tuple(q.shape)} but for the number of heads, got {tuple(k.shape)}"
        )
    if k.dtype != q.dtype or k.device != q.device:
        raise TypeError(
            f"rope_qk: k must be {short(q.dtype)} on {q.device} like q, got {short(k.dtype)} on {k.device}"
        )


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
    y = fresh(x) if out is None else out
    dims = x.shape[-1] if rotary_dim is None else rotary_dim
    target = dense_rows(y)
    try:
        torch.ops.opsmith.rope.default(
            dense_rows(x), dense_rows(cos), dense_rows(sin), positions, dims, interleaved, inverse, y=target
        )
    except RuntimeError:
        name_bad_position(positions, cos)
        raise
    return y if target is y else y.copy_(target)


def _native_qk(
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
) -> Pair:
    """The kernel on both, without autograd."""
    yq, yk = (fresh(q), fresh(k)) if out is None else out
    dims = q.shape[-1] if rotary_dim is None else rotary_dim
    tq, tk = dense_rows(yq), dense_rows(yk)
    try:
        torch.ops.opsmith.rope_qk.default(
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
        name_bad_position(positions, cos)
        raise
    return yq if tq is yq else yq.copy_(tq), yk if tk is yk else yk.copy_(tk)


def name_bad_position(positions: torch.Tensor | None, table: torch.Tensor) -> None:
    """What a refusal of the kernel was about, where it was a position."""
    rows = table.shape[-2]
    if positions is not None and bool(((positions < 0) | (positions >= rows)).any()):
        raise _bad_position(positions, rows) from None


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
        return _native_qk(q, k, cos, sin, interleaved=interleaved, positions=positions, rotary_dim=dims)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin, positions = ctx.saved_tensors
        turn = {"interleaved": ctx.interleaved, "positions": positions, "rotary_dim": ctx.dims}
        if ctx.needs_input_grad[0] and ctx.needs_input_grad[1]:
            dq, dk = _native_qk(dq, dk, cos, sin, **turn, inverse=True)
            return dq, dk, None, None, None, None, None
        alone = [
            _native(d, cos, sin, **turn, inverse=True) if needed else None
            for d, needed in zip((dq, dk), ctx.needs_input_grad[:2], strict=True)
        ]
        return (*alone, None, None, None, None, None)


def _cost(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, **options: Any) -> Cost:
    return _cost_of((x,), cos, **options)


def _cost_qk(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, **options: Any) -> Cost:
    return _cost_of((q, k), cos, **options)


def _cost_of(
    operands: tuple[torch.Tensor, ...],
    cos: torch.Tensor,
    *,
    interleaved: bool = False,
    positions: torch.Tensor | None = None,
    rotary_dim: int | None = None,
) -> Cost:
    first = operands[0]
    tokens = first.shape[0 if first.dim() == 3 else 2]
    rows = min(tokens, cos.shape[-2]) * (cos.shape[0] if cos.dim() == 3 else 1)
    table = 2 * rows * cos.shape[-1] * cos.element_size()
    dims = first.shape[-1] if rotary_dim is None else rotary_dim
    rotated = sum(t.numel() // t.shape[-1] * dims for t in operands if t.numel())
    return Cost(
        3.0 * rotated, 2 * sum(t.numel() * t.element_size() for t in operands) + table + nbytes(positions)
    )


# Name, (H, Hkv), (B, L, D), the table, the options.
_Variant = tuple[str, tuple[int, int], tuple[int, int, int], Pair, dict[str, Any]]


def _variants(make: Make) -> Iterator[_Variant]:
    """What both operators are tried on."""

    def table(dim: int, rows: int) -> Pair:
        return rope_table(dim, rows, dtype=make.dtype, device=make.device)

    for heads, batch, tokens, size in (
        (2, 1, 1, 2),
        (3, 2, 7, 6),
        (4, 1, 33, 64),
        (2, 2, 9, 34),
        (5, 2, 70, 130),
    ):
        yield f"{batch}x{heads}x{tokens}x{size}", (heads, 2), (batch, tokens, size), table(size, tokens), {}
    shape, grouped = (2, 9, 40), (4, 2)
    cos, sin = table(40, 50)
    chosen = make.ids(2, 9, high=50)
    half = (cos[:, :20], sin[:, :20])
    yield "longer table", grouped, shape, (cos, sin), {}
    yield "half a table", grouped, shape, half, {}
    yield "interleaved", grouped, shape, (cos, sin), {"interleaved": True}
    yield "interleaved, half a table", grouped, shape, half, {"interleaved": True}
    yield "positions", grouped, shape, (cos, sin), {"positions": chosen}
    yield "positions of all", grouped, shape, (cos, sin), {"positions": chosen[1].int()}
    yield "a table each", grouped, shape, (cos[chosen], sin[chosen]), {}
    yield "unrelated columns", grouped, shape, (make(9, 40), make(9, 40)), {}
    yield "unrelated, interleaved", grouped, shape, (make(9, 40), make(9, 40)), {"interleaved": True}
    few = table(12, 50)
    yield "partial", grouped, shape, few, {"rotary_dim": 12}
    yield (
        "partial, interleaved",
        grouped,
        shape,
        few,
        {"rotary_dim": 12, "interleaved": True, "positions": chosen},
    )
    yield "strided table", grouped, shape, (cos.t().contiguous().t(), sin.t().contiguous().t()), {}
    yield "empty", grouped, (2, 0, 40), (cos, sin), {}


def _samples(make: Make) -> Iterator[Sample]:
    for name, (heads, _), (batch, tokens, size), table, options in _variants(make):
        yield Sample(name, (make(batch, heads, tokens, size).requires_grad_(), *table), options)
    table = rope_table(24, 9, dtype=make.dtype, device=make.device)
    transposed = make(2, 9, 3, 24).transpose(1, 2)
    yield Sample("transposed", (transposed.requires_grad_(), *table))
    yield Sample("strided dimensions", (make(2, 3, 9, 48)[..., ::2].requires_grad_(), *table))
    yield Sample("packed", (make(9, 3, 24).requires_grad_(), *table))
    yield Sample(
        "packed, positions", (make(5, 3, 24).requires_grad_(), *table), {"positions": make.ids(5, high=9)}
    )
    wide = rope_table(24, 9, dtype=torch.float32, device=make.device)
    yield Sample("float32 table", (make(2, 3, 9, 24).requires_grad_(), *wide))


def _samples_qk(make: Make) -> Iterator[Sample]:
    for name, (heads, kv_heads), (batch, tokens, size), table, options in _variants(make):
        q, k = make(batch, heads, tokens, size), make(batch, kv_heads, tokens, size)
        yield Sample(name, (q.requires_grad_(), k.requires_grad_(), *table), options)
    table = rope_table(24, 9, dtype=make.dtype, device=make.device)
    fused = make(2, 9, 5 * 24).unflatten(-1, (5, 24)).transpose(1, 2).requires_grad_()
    yield Sample("slices of one projection", (*fused.split((3, 2), dim=1), *table))
    q, k = make(9, 3, 24).requires_grad_(), make(9, 1, 24).requires_grad_()
    yield Sample("packed", (q, k, *table))


def _workloads(make: Make) -> Iterator[Sample]:
    for heads, tokens, size in ((32, 4096, 128), (32, 512, 128), (32, 1, 128)):
        table = rope_table(size, tokens, dtype=make.dtype, device=make.device)
        yield Sample(f"1x{heads}x{tokens}x{size}", (make(1, heads, tokens, size), *table))
    table = rope_table(64, 4096, dtype=make.dtype, device=make.device)
    yield Sample("1x16x4096x64 interleaved", (make(1, 16, 4096, 64), *table), {"interleaved": True})


def _workloads_qk(make: Make) -> Iterator[Sample]:
    for tokens in (4096, 1):
        table = rope_table(128, tokens, dtype=make.dtype, device=make.device)
        yield Sample(
            f"32 and 8 heads, {tokens}x128", (make(1, 32, tokens, 128), make(1, 8, tokens, 128), *table)
        )


CARD = register(
    Operator(
        name="rope",
        kind=Kind.ROPE,
        function=rope,
        reference=reference,
        cost=_cost,
        samples=_samples,
        workloads=_workloads,
        implementations=[
            *kernels(_native, lambda x, *a, **k: native(x, "rope")),
            Implementation("eager", reference),
        ],
        schemas=(
            "rope(Tensor x, Tensor cos, Tensor sin, Tensor? positions, int dims, bool interleaved, bool inverse, "
            "*, Tensor(a!) y) -> ()",
        ),
        source="Su et al., 2021",
    )
)

CARD_QK = register(
    Operator(
        name="rope_qk",
        kind=Kind.ROPE,
        function=rope_qk,
        reference=reference_qk,
        cost=_cost_qk,
        samples=_samples_qk,
        workloads=_workloads_qk,
        implementations=[
            *kernels(_native_qk, lambda q, *a, **k: native(q, "rope_qk")),
            Implementation("eager", reference_qk),
        ],
        schemas=(
            "rope_qk(Tensor q, Tensor k, Tensor cos, Tensor sin, Tensor? positions, int dims, bool interleaved, "
            "bool inverse, *, Tensor(a!) yq, Tensor(b!) yk) -> ()",
        ),
        outputs=2,
        source="Su et al., 2021",
    )
)
