"""What the rotary embeddings are tried and timed on, and what they cost at least."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from opsmith.call.layouts import nbytes
from opsmith.operator import Cost, Make, Sample
from opsmith.ops.rope.check import Pair
from opsmith.ops.rope.table import rope_table


def cost(x: Tensor, cos: Tensor, sin: Tensor, **options: Any) -> Cost:
    return _cost_of((x,), cos, **options)


def cost_qk(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **options: Any) -> Cost:
    return _cost_of((q, k), cos, **options)


def _cost_of(operands: tuple[Tensor, ...], cos: Tensor, **options: Any) -> Cost:
    first = operands[0]
    tokens = first.shape[0 if first.dim() == 3 else 2]
    rows = min(tokens, cos.shape[-2]) * (cos.shape[0] if cos.dim() == 3 else 1)
    table = 2 * rows * cos.shape[-1] * cos.element_size()
    dims = options.get("rotary_dim") or first.shape[-1]
    rotated = sum(t.numel() // t.shape[-1] * dims for t in operands if t.numel())
    positions = nbytes(options.get("positions"))
    return Cost(3.0 * rotated, 2 * sum(t.nbytes for t in operands) + table + positions)


def samples(make: Make) -> Iterator[Sample]:
    def table(dim: int, rows: int) -> Pair:
        return rope_table(dim, rows, dtype=make.dtype, device=make.device)

    for shape in ((1, 2, 1, 2), (2, 3, 7, 6), (1, 4, 33, 64), (2, 2, 9, 34), (2, 5, 70, 130)):
        name = "x".join(map(str, shape))
        yield Sample(name, (make(*shape).requires_grad_(), *table(shape[-1], shape[2])))
    cos, sin = full = table(40, 50)
    half, few = (cos[:, :20], sin[:, :20]), table(12, 50)
    chosen, interleaved = make.ids(2, 9, high=50), {"interleaved": True}
    tables: tuple[tuple[str, Pair, dict[str, Any]], ...] = (
        ("longer table", full, {}),
        ("half a table", half, {}),
        ("interleaved", full, interleaved),
        ("interleaved, half a table", half, interleaved),
        ("positions", full, {"positions": chosen}),
        ("positions of all", full, {"positions": chosen[1].int()}),
        ("a table each", (cos[chosen], sin[chosen]), {}),
        ("unrelated columns", (make(9, 40), make(9, 40)), {}),
        ("unrelated, interleaved", (make(9, 40), make(9, 40)), interleaved),
        ("partial", few, {"rotary_dim": 12}),
        ("partial, interleaved", few, {"rotary_dim": 12, "positions": chosen} | interleaved),
        ("strided table", (cos.t().contiguous().t(), sin.t().contiguous().t()), {}),
    )
    for name, given, options in tables:
        yield Sample(name, (make(2, 4, 9, 40).requires_grad_(), *given), options)
    yield Sample("empty", (make(2, 4, 0, 40).requires_grad_(), *full))
    transposed = make(2, 9, 3, 24).transpose(1, 2)
    yield Sample("transposed", (transposed.requires_grad_(), *table(24, 9)))
    yield Sample("strided dimensions", (make(2, 3, 9, 48)[..., ::2].requires_grad_(), *table(24, 9)))
    packed = make(9, 3, 24).requires_grad_()
    yield Sample("packed", (packed, *table(24, 9)))
    yield Sample("packed, positions", (packed, *table(24, 9)), {"positions": make.ids(9, high=9)})
    wide = rope_table(24, 9, dtype=torch.float32, device=make.device)
    yield Sample("float32 table", (make(2, 3, 9, 24).requires_grad_(), *wide))


def samples_qk(make: Make) -> Iterator[Sample]:
    """Those of one tensor, each with keys of two heads."""
    for sample in samples(make):
        q, *table = sample.args
        k = make(q.shape[0], 2, *q.shape[2:]).requires_grad_()
        yield Sample(sample.name, (q, k, *table), sample.kwargs)
    fused = make(2, 9, 5 * 24).unflatten(-1, (5, 24)).transpose(1, 2).requires_grad_()
    table_of_all = rope_table(24, 9, dtype=make.dtype, device=make.device)
    yield Sample("slices of one projection", (*fused.split((3, 2), dim=1), *table_of_all))


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
