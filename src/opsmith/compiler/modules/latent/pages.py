"""Pages of a latent cache: which block holds which token of which sequence, for all layers alike.

Columns are a batch's as Hugging Face counts them, the padding at its left included. A sequence's first `starts`
columns are padding, which no slot is spent on; column j of a sequence is its row `j - starts`. Sequences may share
blocks (beams do, after they were reordered); a shared block is copied before it is written.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass

import torch

from opsmith.ops import MLACache

Rows = tuple[torch.Tensor, torch.Tensor]


@dataclass
class Step:
    """One call of the model: where the rows of its tokens go, and what each of them may see."""

    pages: Pages
    tokens: int  # of each sequence
    slots: torch.Tensor  # [batch * tokens]
    tables: torch.Tensor
    lens: torch.Tensor  # [batch], the new tokens' rows included
    columns: int  # the same, padding included


class Pages:
    """The block tables of one batch of sequences, and the pools of all layers that they are for."""

    def __init__(self, caches: list[MLACache], batch: int, block_size: int, device: torch.device):
        self.caches, self.batch, self.block_size, self.device = caches, batch, block_size, device
        self.reset()

    def reset(self) -> None:
        """Forget everything; the pools stay."""
        self.columns, self.padded = 0, False
        self.starts = torch.zeros(self.batch, dtype=torch.int64, device=self.device)
        self.blocks: list[list[int]] = [[] for _ in range(self.batch)]

    def pad(self, starts: torch.Tensor | None) -> None:
        """Before anything is written: how many columns at the left of each sequence are padding."""
        if starts is not None:
            self.starts, self.padded = starts.to(torch.int64), bool(starts.any())

    def begin(self, tokens: int) -> Step:
        """Slots for so many new columns; nothing counts as there before `commit`, so a step may be run again."""
        end = self.columns + tokens
        self._reserve(end)
        tables = self.tables
        slots, there = self._slots(tables, end, self.columns)
        if self.padded:
            slots = slots.masked_fill(~there, -1)
        return Step(self, tokens, slots.flatten(), tables, (end - self.starts).clamp(min=0), end)

    def commit(self, tokens: int) -> None:
        """The rows of these columns are there."""
        self.columns += tokens

    @property
    def tables(self) -> torch.Tensor:
        """[batch, blocks] of the longest sequence; the rest of a shorter one is not read."""
        longest = max([1, *map(len, self.blocks)])
        rows = [b + [0] * (longest - len(b)) for b in self.blocks]
        return torch.tensor(rows, dtype=torch.int64, device=self.device).view(self.batch, longest)

    def _slots(self, tables: torch.Tensor, columns: int, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[batch, columns - first]: the slot of each column, and whether it is one of the sequence's own."""
        row = torch.arange(first, columns, device=self.device) - self.starts[:, None]
        at = row.clamp(min=0)
        return tables.gather(1, at // self.block_size) * self.block_size + at % self.block_size, row >= 0

    def there(self, columns: int) -> torch.Tensor | None:
        """[batch, columns]: whether each column is one of the sequence's own; None where all of them are."""
        if not self.padded:
            return None
        return torch.arange(columns, device=self.device) >= self.starts[:, None]

    def read(self, layer: int, columns: int) -> Rows:
        """Rows [batch, columns, kv_lora] and [..., rope] as they were cached, zeros where there is padding."""
        cache = self.caches[layer]
        assert cache.kv_lora is not None
        slots, there = self._slots(self.tables, columns, 0)
        block, offset = slots // self.block_size, slots % self.block_size
        nope, rope = (view[block, offset].flatten(2) for view in cache.rows(cache.kv_lora))
        if cache.ctkv_scale is not None:
            nope = nope.float().mul_(cache.ctkv_scale).to(rope.dtype)
        if not self.padded:
            return nope, rope
        keep = there.unsqueeze(-1)
        return torch.where(keep, nope, 0), torch.where(keep, rope, 0)

    def select(self, order: list[int]) -> None:
        """Sequences `order` of the batch become the batch; some may be there twice, some no more."""
        self.blocks, self.batch = [list(self.blocks[i]) for i in order], len(order)
        self.starts = self.starts[torch.tensor(order, dtype=torch.int64, device=self.device)]

    def crop(self, columns: int) -> None:
        """Forget the last so many columns."""
        self.columns = max(0, self.columns - columns)
        for mine, start in zip(self.blocks, self.starts.tolist(), strict=True):
            del mine[-(-max(0, self.columns - start) // self.block_size) :]

    def _reserve(self, end: int) -> None:
        """Blocks of its own for what each sequence writes up to this column, in pools that hold all of them."""
        users = Counter(itertools.chain.from_iterable(self.blocks))
        free = (b for b in itertools.count() if b not in users)
        copies: dict[int, int] = {}  # of shared blocks, by the new one
        starts = self.starts.tolist() if self.padded else [0] * self.batch
        for mine, start in zip(self.blocks, starts, strict=True):
            at = max(0, self.columns - start) // self.block_size
            if start < end and at < len(mine) and users[mine[at]] > 1:
                users[mine[at]] -= 1
                new = next(free)
                copies[new], mine[at] = mine[at], new
            while len(mine) * self.block_size < end - start:
                mine.append(next(free))
        needed = 1 + max(itertools.chain.from_iterable(self.blocks), default=-1)
        for cache in self.caches:
            cache.latent = _grown(cache.latent, needed, copies)
            cache.rope = None if cache.rope is None else _grown(cache.rope, needed, copies)


def _grown(pool: torch.Tensor, blocks: int, copies: dict[int, int]) -> torch.Tensor:
    """A pool that has so many blocks, some of them copied, in new memory that is half as large again if it must be."""
    before = len(pool)
    if blocks > before:
        new = pool.new_zeros((max(blocks, before + before // 2), *pool.shape[1:]))
        new[:before] = pool
        pool = new
    if copies:
        pool[list(copies)] = pool[list(copies.values())]
    return pool
