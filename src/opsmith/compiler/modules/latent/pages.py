"""Pages of a latent cache: which block holds which token of which sequence, for all layers alike.

Columns are a batch's as Hugging Face counts them, the padding at its left included. A sequence's first `starts`
columns are padding, which no slot is spent on; column j of a sequence is its row `j - starts`. Sequences may share
blocks (beams do, after they were reordered); a shared block is copied before it is written.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch

from opsmith.ops import MLACache

Rows = tuple[torch.Tensor, torch.Tensor]
Held = tuple[torch.Tensor, torch.Tensor]  # the slots of columns, and whether each has one


@dataclass
class Step:
    """One call of the model: where the rows of its tokens go, and what each of them may see."""

    pages: Pages
    batch: int
    tokens: int  # of each sequence
    slots: torch.Tensor  # [batch * tokens]
    tables: torch.Tensor
    lens: torch.Tensor  # [batch], the new tokens' rows included
    columns: int  # the same, padding included
    padded: bool
    table: tuple[torch.Tensor, Rows] | None = field(default=None, repr=False)  # the last one prepared

    @cached_property
    def held(self) -> Held:
        """[batch, columns]: each column's slot, and whether it has one."""
        return self.pages.slots_of(self.tables, self.columns)


class Pages:
    """The block tables of one batch of sequences, and the pools of all layers that they are for."""

    def __init__(self, caches: list[MLACache], batch: int, block_size: int, device: torch.device):
        self.caches, self.batch, self.block_size, self.device = caches, batch, block_size, device
        self.columns = 0
        self.starts = torch.zeros(batch, dtype=torch.int64, device=device)
        self.padded = False
        self.blocks: list[list[int]] = [[] for _ in range(batch)]
        self.uses: list[int] = [0] * (caches[0].blocks if caches else 0)
        self.free: list[int] = list(range(len(self.uses)))[::-1]
        self._tables: torch.Tensor | None = None

    def begin(self, tokens: int) -> Step:
        """Slots for so many new columns; nothing counts as there before `commit`, so a step may be run again."""
        end = self.columns + tokens
        starts = self.starts.tolist() if self.padded else [0] * self.batch
        for s, start in enumerate(starts):
            self._reserve(s, max(0, self.columns - start), max(0, end - start))
        tables = self.tables
        slots, there = self.slots_of(tables, end, self.columns)
        if self.padded:
            slots = slots.masked_fill(~there, -1)
        lens = (end - self.starts).clamp(min=0)
        return Step(self, self.batch, tokens, slots.flatten(), tables, lens, end, self.padded)

    def commit(self, tokens: int) -> None:
        """The rows of these columns are there."""
        self.columns += tokens

    @property
    def tables(self) -> torch.Tensor:
        """[batch, blocks] of the longest sequence; the rest of a shorter one is not read."""
        if self._tables is None:
            longest = max(1, *(len(b) for b in self.blocks)) if self.blocks else 1
            rows = [b + [0] * (longest - len(b)) for b in self.blocks]
            self._tables = torch.tensor(rows, dtype=torch.int64, device=self.device).view(self.batch, longest)
        return self._tables

    def slots_of(self, tables: torch.Tensor, columns: int, first: int = 0) -> Held:
        """[batch, columns - first]: the slot of each column, and whether it is one of the sequence's own."""
        row = torch.arange(first, columns, device=self.device) - self.starts[:, None]
        at = row.clamp(min=0)
        return tables.gather(1, at // self.block_size) * self.block_size + at % self.block_size, row >= 0

    def read(self, layer: int, kv_lora: int, held: Held) -> Rows:
        """Rows [batch, columns, kv_lora] and [..., rope] as they were cached, zeros where there is padding."""
        slots, there = held
        cache = self.caches[layer]
        block, offset = slots // self.block_size, slots % self.block_size
        nope, rope = (view[block, offset].flatten(2) for view in cache.rows(kv_lora))
        if cache.ctkv_scale is not None:
            nope = nope.float().mul_(cache.ctkv_scale).to(rope.dtype)
        if not self.padded:
            return nope, rope
        keep = there.unsqueeze(-1)
        return torch.where(keep, nope, 0), torch.where(keep, rope, 0)

    def select(self, order: list[int]) -> None:
        """Sequences `order` of the batch become the batch; some may be there twice, some no more."""
        blocks = [list(self.blocks[i]) for i in order]
        for chosen in blocks:
            for b in chosen:
                self.uses[b] += 1
        self._release(self.blocks)
        self.blocks, self.batch, self._tables = blocks, len(order), None
        self.starts = self.starts[torch.tensor(order, dtype=torch.int64, device=self.device)]

    def crop(self, columns: int) -> None:
        """Forget the last so many columns."""
        self.columns = max(0, self.columns - columns)
        for s, start in enumerate(self.starts.tolist()):
            needed = -(-max(0, self.columns - start) // self.block_size)
            self._release([self.blocks[s][needed:]])
            del self.blocks[s][needed:]
        self._tables = None

    def reset(self) -> None:
        """Forget everything; the pools stay."""
        self._release(self.blocks)
        self.blocks, self._tables, self.columns, self.padded = [[] for _ in range(self.batch)], None, 0, False
        self.starts = torch.zeros_like(self.starts)

    def _release(self, rows: list[list[int]]) -> None:
        for row in rows:
            for b in row:
                self.uses[b] -= 1
                if not self.uses[b]:
                    self.free.append(b)

    def _reserve(self, sequence: int, first: int, end: int) -> None:
        """Blocks of its own for a sequence's rows from `first` to `end`."""
        mine = self.blocks[sequence]
        at = first // self.block_size
        if first < end and at < len(mine) and self.uses[mine[at]] > 1:
            shared, mine[at] = mine[at], self._take()
            self.uses[shared] -= 1
            for cache in self.caches:
                for pool in (cache.latent, cache.rope):
                    if pool is not None:
                        pool[mine[at]].copy_(pool[shared])
            self._tables = None
        while len(mine) * self.block_size < end:
            mine.append(self._take())
            self._tables = None

    def _take(self) -> int:
        if not self.free:
            self._grow()
        block = self.free.pop()
        self.uses[block] = 1
        return block

    def _grow(self) -> None:
        """Half as many blocks again, and at least one for each sequence: copies become rarer as a batch grows."""
        before = len(self.uses)
        after = before + max(self.batch, before // 2)
        for cache in self.caches:
            cache.latent = _longer(cache.latent, after)
            cache.rope = None if cache.rope is None else _longer(cache.rope, after)
        self.uses += [0] * (after - before)
        self.free += list(range(before, after))[::-1]


def _longer(pool: torch.Tensor, blocks: int) -> torch.Tensor:
    new = pool.new_zeros((blocks, *pool.shape[1:]))
    new[: pool.shape[0]] = pool
    return new
