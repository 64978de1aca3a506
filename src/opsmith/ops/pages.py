"""A cache in blocks: how rows come to their slots, and what it refuses.

That is tensors that do not fit, slots and blocks that are not there, wrong lengths.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from opsmith.call.arguments import short
from opsmith.operator import Make


def has_values(*tensors: Tensor) -> bool:
    """False where values cannot be looked at: while a graph is captured, and on the meta device."""
    if torch.compiler.is_compiling() or any(t.is_meta or isinstance(t, FakeTensor) for t in tensors):
        return False
    return not (any(t.is_cuda for t in tensors) and torch.cuda.is_current_stream_capturing())


def check_slots(op: str, slots: Tensor, blocks: int, size: int) -> None:
    """Refuse slots that are neither -1 nor within so many blocks of this size."""
    if not slots.numel() or not has_values(slots):
        return
    end = blocks * size
    bad = ((slots < -1) | (slots >= end)).nonzero()
    if len(bad):
        at = int(bad[0])
        raise ValueError(
            f"{op}: slot_mapping must lie in [0, {end}) ({blocks} blocks of {size}) or be -1, got {int(slots[at])} "
            f"for token {at}; nothing was written"
        )


def write_rows(held: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Put rows [T, ...] at their slots of [blocks, size, ...], none at -1; autograd sees it, where it is recording.

    Without a look at any value, so that it can be traced: a token without a slot writes again what another one writes,
    and if no token has one, what is there already.
    """
    size = held.shape[1]
    if not held.shape[0] * size or not slots.shape[0]:
        return
    slots, keep = slots.long(), slots >= 0
    chosen = keep.to(torch.uint8).argmax().view(1)
    at = torch.where(keep, slots, slots.index_select(0, chosen).clamp(min=0))
    keep = keep.view(-1, *(1,) * (rows.dim() - 1))
    given = rows.detach().index_select(0, chosen)
    same = torch.where(keep.index_select(0, chosen), given, held.detach()[:1, 0])
    held.index_put_((at // size, at % size), torch.where(keep, rows, same))


def check_pages(
    op: str, tables: Tensor, lengths: Tensor, blocks: int, size: int, seen: int | None = None
) -> None:
    """Refuse lengths [S] that the tables [S, n] cannot hold, and blocks that are not there among those that are read.

    With `seen`, so many of the last numbers of a sequence are read, and else all.
    """
    if not lengths.numel() or not has_values(tables, lengths):
        return
    pages = tables.shape[1]
    bad = ((lengths < 0) | (lengths > pages * size)).nonzero()
    if len(bad):
        at = int(bad[0])
        raise ValueError(
            f"{op}: seq_lens must lie in [0, {pages * size}], what {pages} blocks of {size} hold, got "
            f"{int(lengths[at])} for sequence {at}"
        )
    start, end = torch.arange(pages, device=lengths.device) * size, lengths.view(-1, 1)
    used = start < end
    if seen is not None:
        used &= start + size > end - seen
    bad = (used & ((tables < 0) | (tables >= blocks))).nonzero()
    if len(bad):
        at, page = bad[0].tolist()
        raise ValueError(
            f"{op}: block_tables must lie in [0, {blocks}), the blocks of the cache, got {int(tables[at, page])} for "
            f"block {page} of sequence {at}"
        )


def some_slots(make: Make, tokens: int, end: int, skip: bool = True) -> Tensor:
    """Slots of a sample, in no order, none twice; every fifth token has none."""
    order = torch.randperm(end, generator=torch.Generator().manual_seed(7))[:tokens].clone()
    if skip:
        order[1::5] = -1
    return order.to(make.device)


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
