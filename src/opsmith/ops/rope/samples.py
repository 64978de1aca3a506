"""What the rotary embeddings are tried and timed on, and what they cost at least."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from opsmith.call.layouts import nbytes
from opsmith.operator import Cost, Make, Sample
from opsmith.ops.rope.check import Pair
from opsmith.ops.rope.table import rope_table


def cost(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, **options: Any) -> Cost:
    return _cost_of((x,), cos, **options)


def cost_qk(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, **options: Any) -> Cost:
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


def samples(make: Make) -> Iterator[Sample]:
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


def samples_qk(make: Make) -> Iterator[Sample]:
    for name, (heads, kv_heads), (batch, tokens, size), table, options in _variants(make):
        q, k = make(batch, heads, tokens, size), make(batch, kv_heads, tokens, size)
        yield Sample(name, (q.requires_grad_(), k.requires_grad_(), *table), options)
    table = rope_table(24, 9, dtype=make.dtype, device=make.device)
    fused = make(2, 9, 5 * 24).unflatten(-1, (5, 24)).transpose(1, 2).requires_grad_()
    yield Sample("slices of one projection", (*fused.split((3, 2), dim=1), *table))
    q, k = make(9, 3, 24).requires_grad_(), make(9, 1, 24).requires_grad_()
    yield Sample("packed", (q, k, *table))


def workloads(make: Make) -> Iterator[Sample]:
    for heads, tokens, size in ((32, 4096, 128), (32, 512, 128), (32, 1, 128)):
        table = rope_table(size, tokens, dtype=make.dtype, device=make.device)
        yield Sample(f"1x{heads}x{tokens}x{size}", (make(1, heads, tokens, size).requires_grad_(), *table))
    table = rope_table(64, 4096, dtype=make.dtype, device=make.device)
    yield Sample(
        "1x16x4096x64 interleaved", (make(1, 16, 4096, 64).requires_grad_(), *table), {"interleaved": True}
    )


def workloads_qk(make: Make) -> Iterator[Sample]:
    for tokens in (4096, 1):
        table = rope_table(128, tokens, dtype=make.dtype, device=make.device)
        q, k = make(1, 32, tokens, 128).requires_grad_(), make(1, 8, tokens, 128).requires_grad_()
        yield Sample(f"32 and 8 heads, {tokens}x128", (q, k, *table))
