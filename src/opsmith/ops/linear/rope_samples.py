"""The work of a projection with rotated heads, the inputs worth trying, and the sizes that models use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from opsmith.call.layouts import nbytes
from opsmith.operator import Cost, Make, Sample
from opsmith.ops.rope.table import rope_table


def cost(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    positions: torch.Tensor | None = None,
    rotary_dim: int | None = None,
    **options: Any,
) -> Cost:
    n, k = (heads + 2 * kv_heads) * head_dim, x.shape[-1]
    rows = x.numel() // k if k else 0
    dims = head_dim if rotary_dim is None else rotary_dim
    turned = rows * (heads + kv_heads) * dims
    tokens = min(x.shape[-2], cos.shape[-2]) * (cos.shape[0] if cos.dim() == 3 else 1)
    table = 2 * tokens * cos.shape[-1] * cos.element_size()
    moved = nbytes(x, weight, bias, positions) + rows * n * x.element_size() + table
    return Cost(2.0 * rows * n * k + 3.0 * turned + (rows * n if bias is not None else 0), moved)


def samples(make: Make) -> Iterator[Sample]:
    def sample(
        name: str,
        x: torch.Tensor,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        bias: bool = True,
        width: int | None = None,
        rows: int | None = None,
        **options: Any,
    ) -> Sample:
        n, k = (heads + 2 * kv_heads) * head_dim, x.shape[-1]
        tokens = x.shape[-2] if rows is None else rows
        table = rope_table(width or head_dim, tokens, dtype=make.dtype, device=make.device)
        weight = make(n, k, scale=max(k, 1) ** -0.5).requires_grad_()
        b = make(n).requires_grad_() if bias else None
        sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
        return Sample(name, (x.requires_grad_(), weight, b, *table), {**sizes, **options})

    for batch, tokens, k in ((2, 2, 6), (3, 7, 33), (2, 20, 48)):
        yield sample(f"{batch}x{tokens}x{k}", make(batch, tokens, k), 4, 2, 16)
    yield sample("1x1x1", make(1, 1, 1), 1, 1, 2)
    x = make(2, 9, 40)
    for size in (48, 64, 80, 96, 128):
        yield sample(f"heads of {size}", x, 3, 1, size)
    yield sample("no tile", x, 2, 1, 202)
    yield sample("many rows", make(1, 210, 30), 2, 1, 128)
    yield sample("no bias", x, 4, 2, 16, bias=False)
    yield sample("interleaved", x, 4, 2, 32, interleaved=True)
    at = make.ids(2, 9, high=50)
    yield sample("positions", x, 4, 2, 32, positions=at, rows=50)
    yield sample("partial", x, 3, 3, 40, width=10, rotary_dim=10)
    yield sample("partial, interleaved", x, 3, 3, 80, width=32, rotary_dim=32, interleaved=True)
    yield sample("packed", make(9, 40), 4, 1, 64)
    yield sample("strided", make(40, 9).t(), 4, 2, 16)
    yield sample("empty", make(2, 0, 40), 4, 2, 16, rows=3)


def workloads(make: Make) -> Iterator[Sample]:
    for tokens, k, heads, kv_heads in ((512, 2048, 32, 8), (1, 2048, 32, 8)):
        n = (heads + 2 * kv_heads) * 64
        table = rope_table(64, tokens, dtype=make.dtype, device=make.device)
        sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": 64}
        inputs = (make(1, tokens, k), make(n, k, scale=k**-0.5), make(n))
        yield Sample(f"{tokens}x{k}x{n}", (*(t.requires_grad_() for t in inputs), *table), sizes)
