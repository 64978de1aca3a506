"""What paged attention and the writing of its cache refuse."""

from __future__ import annotations

from typing import Any

import torch

from opsmith.call.arguments import check_float, short
from opsmith.ops.attention.check import check_heads
from opsmith.ops.mla.cache import has_values

_INTEGERS = (torch.int32, torch.int64)


def check(
    q: Any, k_cache: Any, v_cache: Any, block_tables: Any, seq_lens: Any, k_scale: Any, v_scale: Any
) -> None:
    """Refuse arguments of paged_attention that do not fit each other, whatever the values of tables and lengths."""
    op = "paged_attention"
    check_float(op, q, "q", least_dim=3)
    if q.dim() > 4:
        raise ValueError(f"{op}: q must have shape [B, H, D] or [B, L, H, D], got {tuple(q.shape)}")
    check_caches(op, k_cache, v_cache, k_scale, v_scale, q, "q")
    if k_cache.shape[3] != q.shape[-1]:
        raise ValueError(
            f"{op}: k_cache must have shape [blocks, block_size, Hkv, {q.shape[-1]}] to fit q, got "
            f"{tuple(k_cache.shape)}"
        )
    check_heads(op, q.shape[-2], k_cache.shape[2], "the caches")
    check_integers(op, "block_tables", block_tables, q, "[B, blocks]")
    check_integers(op, "seq_lens", seq_lens, q, "[B]")
    if block_tables.dim() != 2 or block_tables.shape[0] != q.shape[0]:
        raise ValueError(
            f"{op}: block_tables must have shape [{q.shape[0]}, blocks], a row for each sequence of q, got "
            f"{tuple(block_tables.shape)}"
        )
    if seq_lens.dim() != 1 or seq_lens.shape[0] != q.shape[0]:
        raise ValueError(
            f"{op}: seq_lens must have shape ({q.shape[0]},), a length for each sequence of q, got "
            f"{tuple(seq_lens.shape)}"
        )


def check_caches(op: str, k: Any, v: Any, k_scale: Any, v_scale: Any, like: torch.Tensor, name: str) -> None:
    """Refuse caches that are not alike, or neither int8 with scales nor in the dtype of `like`."""
    for cache_name, t in (("k_cache", k), ("v_cache", v)):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{op}: {cache_name} must be a tensor, got {type(t).__name__}")
        if t.dim() != 4:
            raise ValueError(
                f"{op}: {cache_name} must have shape [blocks, block_size, Hkv, D], got {tuple(t.shape)}"
            )
        if t.dtype not in (like.dtype, torch.int8):
            raise TypeError(
                f"{op}: {cache_name} must be {short(like.dtype)} like {name}, or int8, got {short(t.dtype)}"
            )
        if t.device != like.device:
            raise ValueError(
                f"{op}: {cache_name} is on {t.device}, {name} on {like.device}; move one of them"
            )
    if v.shape[:3] != k.shape[:3] or v.dtype != k.dtype:
        raise ValueError(
            f"{op}: v_cache must be {short(k.dtype)} {(*k.shape[:3], 'Dv')} like k_cache, got {short(v.dtype)} "
            f"{tuple(v.shape)}"
        )
    for scale_name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if k.dtype != torch.int8:
            if scale is not None:
                raise ValueError(f"{op}: {scale_name} is for int8 caches, these are {short(k.dtype)}")
            continue
        if not isinstance(scale, torch.Tensor):
            raise TypeError(
                f"{op}: int8 caches need {scale_name}, float32 {tuple(k.shape[:3])}, got {type(scale).__name__}"
            )
        if scale.shape != k.shape[:3]:
            raise ValueError(
                f"{op}: {scale_name} must have shape {tuple(k.shape[:3])}, a number for each token and head, got "
                f"{tuple(scale.shape)}"
            )
        if scale.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"{op}: {scale_name} must be float32, got {short(scale.dtype)}; cast it first")
        if scale.device != like.device:
            raise ValueError(
                f"{op}: {scale_name} is on {scale.device}, {name} on {like.device}; move one of them"
            )


def check_integers(op: str, name: str, t: Any, like: torch.Tensor, shape: str) -> None:
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a tensor {shape}, got {type(t).__name__}")
    if t.dtype not in _INTEGERS:
        raise TypeError(f"{op}: {name} must be int32 or int64, got {short(t.dtype)}; cast it first")
    if t.device != like.device:
        raise ValueError(f"{op}: {name} is on {t.device}, the caches on {like.device}; move one of them")


def check_blocks(
    q: torch.Tensor, k_cache: torch.Tensor, tables: torch.Tensor, lengths: torch.Tensor, window: int
) -> None:
    """Refuse lengths that the tables cannot hold, and blocks that are not there among those that a query sees."""
    if not has_values(lengths) or not has_values(tables):
        return
    blocks, size = k_cache.shape[:2]
    most = tables.shape[1] * size
    queries = q.shape[1] if q.dim() == 4 else 1
    for b, length in enumerate(lengths.tolist()):
        if not 0 <= length <= most:
            raise ValueError(
                f"paged_attention: seq_lens must lie in [0, {most}], what {tables.shape[1]} blocks of {size} hold, got "
                f"{length} for sequence {b}"
            )
        if not length:
            continue
        first = max(0, length - queries - window + 1) if window else 0
        used = tables[b, first // size : -(-length // size)]
        bad = ((used < 0) | (used >= blocks)).nonzero()
        if len(bad):
            at = int(bad[0])
            raise ValueError(
                f"paged_attention: block_tables must lie in [0, {blocks}), the blocks of the cache, got "
                f"{int(used[at])} for block {first // size + at} of sequence {b}"
            )
