"""What the cards of MLA's operators are called with: a fresh cache, a table, slots."""

from __future__ import annotations

import torch

from opsmith.operator import Make
from opsmith.ops.mla.cache import MLACache
from opsmith.ops.rope.table import rope_table


def fresh_cache(
    op: str, mode: str, blocks: int, block_size: int, kv_lora: int, rope: int, like: torch.Tensor
) -> MLACache:
    """A cache of zeros for a card's form, whose refusals are the operator's."""
    try:
        return MLACache.allocate(
            mode, blocks, block_size, kv_lora=kv_lora, rope=rope, dtype=like.dtype, device=like.device
        )
    except ValueError as refusal:
        raise ValueError(f"{op}: {refusal}") from None


def fresh_rows(cache: MLACache) -> tuple[torch.Tensor, ...]:
    return (cache.latent,) if cache.rope is None else (cache.latent, cache.rope)


def table(make: Make, tokens: int, rope: int, start: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of a table for tokens at positions that do not begin at 0."""
    cos, sin = rope_table(rope, start + tokens, dtype=make.dtype, device=make.device)
    return cos[start:].contiguous(), sin[start:].contiguous()


def some_slots(make: Make, tokens: int, blocks: int, block_size: int, skip: bool = True) -> torch.Tensor:
    """Slots in no order, none twice, every fifth token without one."""
    order = torch.randperm(blocks * block_size, generator=torch.Generator().manual_seed(7))[:tokens].clone()
    if skip:
        order[1::5] = -1
    return order.to(make.device)
