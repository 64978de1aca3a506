"""What paged attention and the writing of its cache refuse."""

from __future__ import annotations

from typing import Any

import torch

from opsmith.call.arguments import check_fit, short
from opsmith.ops.attention import INTEGERS, check_heads


def check(
    q: Any, k_cache: Any, v_cache: Any, block_tables: Any, seq_lens: Any, k_scale: Any, v_scale: Any
) -> None:
    """Refuse arguments of paged_attention that do not fit each other, whatever the values of tables and lengths."""
    op = "paged_attention"
    check_fit(
        op,
        ("q", q, "B H D" if getattr(q, "ndim", 4) == 3 else "B L H D"),
        *caches(op, k_cache, v_cache, k_scale, v_scale),
        ("block_tables", block_tables, "B blocks_each", *INTEGERS),
        ("seq_lens", seq_lens, "B", *INTEGERS),
    )
    check_heads(op, q.shape[-2], k_cache.shape[2], "the caches")


def caches(op: str, k: Any, v: Any, k_scale: Any, v_scale: Any) -> list[tuple[Any, ...]]:
    """Caches that are alike, int8 with scales or in the dtype of what they are used with, as `check_fit` takes them."""
    of_one = getattr(k, "dtype", None)
    found: list[tuple[Any, ...]] = [
        ("k_cache", k, "blocks block_size Hkv D", None, torch.int8),
        ("v_cache", v, "blocks block_size Hkv Dv", of_one),
    ]
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if of_one == torch.int8:
            if scale is None:
                raise TypeError(f"{op}: int8 caches need {name}, float32 {tuple(k.shape[:3])}, got NoneType")
            found.append((name, scale, "blocks block_size Hkv", torch.float32, torch.float64))
        elif scale is not None and of_one is not None:
            raise ValueError(f"{op}: {name} is for int8 caches, these are {short(of_one)}")
    return found
