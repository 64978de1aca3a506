"""What an entry of the dispatcher costs when it is called by itself, where the card's own cost does not say.

The profiler sees such a call as shapes without values, under the names of the entry's schema; a card's `entries` names
the formula. Tensors are on the meta device, and None where a call left them out.
"""

from __future__ import annotations

from typing import Any

import torch

from opsmith.call.layouts import nbytes
from opsmith.operator import Cost


def cache_entry(
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


def paged_entry(
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
