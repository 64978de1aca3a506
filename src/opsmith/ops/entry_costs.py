"""What an entry of the dispatcher costs when it is called by itself, where the card's own cost does not say.

The profiler sees such a call as shapes without values, under the names of the entry's schema; a card's `entries` names
the formula. Tensors are on the meta device, and None where a call left them out.
"""

from __future__ import annotations

from typing import Any

import torch

from opsmith.call.common import nbytes
from opsmith.operator import Cost
from opsmith.ops.attention.samples import visible_pairs

__all__ = [
    "attention",
    "attention_varlen",
    "linear_cross_entropy_and_gradients",
    "linear_cross_entropy_backward",
    "linear_gradient",
    "linear_pack",
    "linear_rope",
    "linear_rows_backward",
    "nonzero_rows",
    "paged_attention",
    "product",
    "reshape_and_cache",
]

Maybe = torch.Tensor | None


def linear_pack(weight: torch.Tensor, packed: torch.Tensor) -> Cost:
    """A weight in another layout: nothing is computed."""
    return Cost(0.0, nbytes(weight, packed))


def linear_gradient(
    dy: torch.Tensor, x: torch.Tensor, dweight: torch.Tensor, dbias: Maybe = None, **rest: Any
) -> Cost:
    """A product that sums over the rows, and the sum of the rows."""
    rows, n = dy.shape
    return Cost(
        2.0 * rows * dweight.numel() + (0 if dbias is None else rows * n), nbytes(dy, x, dweight, dbias)
    )


def linear_rows_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    dx: Maybe = None,
    dweight: Maybe = None,
    dbias: Maybe = None,
) -> Cost:
    """A product for each of the two matrices, of which it reads the other, and the sum of the rows."""
    products = [other for to, other in ((dx, weight), (dweight, x)) if to is not None]
    flops = 2.0 * len(products) * dy.numel() * x.shape[-1] + (0 if dbias is None else dy.numel())
    return Cost(flops, nbytes(dy, *products, dx, dweight, dbias))


def nonzero_rows(x: torch.Tensor, found: torch.Tensor) -> Cost:
    """At least the first cache line of each row."""
    line = min(64, x.shape[1] * x.element_size())
    return Cost(0.0, x.shape[0] * line + nbytes(found))


def linear_rope(
    x: torch.Tensor, packed: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **rest: Any
) -> Cost:
    """The projection, and a rotation of q and k; of the tables what the tokens of one sequence need."""
    results, turned = q.numel() + k.numel() + v.numel(), q.numel() + k.numel()
    length, cos = q.shape[-2], rest["cos"]
    table = 2 * min(length, cos.shape[-2]) * cos.shape[-1] * cos.element_size()
    moved = nbytes(x, packed, rest["bias"], rest["positions"], q, k, v) + table
    return Cost(2.0 * results * x.shape[-1] + 3.0 * turned, moved)


def _logits(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> float:
    return 2.0 * target.numel() * weight.shape[0] * weight.shape[1] + 9.0 * target.numel() * weight.shape[0]


def linear_cross_entropy_and_gradients(
    hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, **rest: Any
) -> Cost:
    """Logits once, and a product of their size for each gradient that is asked for."""
    return _with_gradients(hidden, weight, target, rest)


def linear_cross_entropy_backward(
    hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, **rest: Any
) -> Cost:
    """The same: the logits are computed again."""
    return _with_gradients(hidden, weight, target, rest)


def _with_gradients(
    hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, rest: dict[str, Any]
) -> Cost:
    wanted = sum(rest.get(name) is not None for name in ("dhidden", "dweight"))
    tensors = [t for t in rest.values() if isinstance(t, torch.Tensor)]
    products = 2.0 * target.numel() * weight.shape[0] * weight.shape[1] * wanted
    return Cost(_logits(hidden, weight, target) + products, nbytes(hidden, weight, target, *tensors))


def product(x: torch.Tensor, y: torch.Tensor, **rest: Any) -> Cost:
    """Rows times a weight, which may be packed: what the entry takes and writes, once."""
    tensors = [t for t in rest.values() if isinstance(t, torch.Tensor)]
    return Cost(2.0 * y.numel() * x.shape[-1], nbytes(x, y, *tensors))


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **rest: Any) -> Cost:
    """Of the pairs that are visible; the gradients have the scores once more."""
    seen = visible_pairs(q.shape[-2], k.shape[-2], bool(rest["causal"]), rest["window"] or None)
    tensors = [t for t in rest.values() if isinstance(t, torch.Tensor)]
    flops = 2.0 * q.shape[:-2].numel() * seen * (q.shape[-1] + v.shape[-1])
    return Cost(2.5 * flops if "dout" in rest else flops, nbytes(q, k, v, *tensors))


def attention_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, **rest: Any
) -> Cost:
    """Of one sequence; of several the lengths are values, which a call's shapes do not tell."""
    if cu_seqlens_q.shape[0] != 2:
        raise NotImplementedError
    window = rest["window"] if rest["window"] > 0 else None
    pairs = visible_pairs(q.shape[0], k.shape[0], rest["causal"], window)
    back = "dout" in rest
    tensors = [t for t in rest.values() if isinstance(t, torch.Tensor)]
    flops = 2.0 * q.shape[1] * pairs * (q.shape[2] + v.shape[2])
    return Cost(2.5 * flops if back else flops, nbytes(q, k, v, cu_seqlens_q, *tensors))


def reshape_and_cache(
    k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor, k_cache: torch.Tensor, **rest: Any
) -> Cost:
    """Rows read and written; of the caches only the slots of these tokens."""
    elements, held = k.numel() + v.numel(), k_cache.element_size()
    scales = 0 if rest["k_scale"] is None else 8 * k.numel() // max(k.shape[-1], 1)
    return Cost(3.0 * elements if scales else 0.0, nbytes(k, v, slot_mapping) + elements * held + scales)


def rows_of_tables(block_tables: torch.Tensor, block_size: int) -> int:
    """The rows that tables stand for, where lengths are not known: every block but the last is full, that has one."""
    sequences, columns = block_tables.shape
    return sequences * (max(columns - 1, 0) * block_size + min(columns, 1))


def paged_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_tables: torch.Tensor, **rest: Any
) -> Cost:
    """Keys and values as long as the tables say, once, for all heads that share them."""
    queries = q.shape[1] if q.dim() == 4 else 1
    heads, kv_heads, dims = q.shape[-2], k_cache.shape[2], k_cache.shape[3] + v_cache.shape[3]
    rows, window = rows_of_tables(block_tables, k_cache.shape[1]), rest["window"] or 0
    if window > 0:
        rows = min(rows, block_tables.shape[0] * (window + queries - 1))
    row = dims * k_cache.element_size() + (0 if rest["k_scale"] is None else 8)
    moved = rows * kv_heads * row + nbytes(q, block_tables, rest["seq_lens"], rest["y"])
    return Cost(2.0 * heads * queries * rows * dims, moved)
