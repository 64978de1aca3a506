"""Which block holds which token of which sequence, for all layers of a cache that see alike.

Columns are a batch's as Hugging Face counts them, the padding at its left included. A sequence's first `starts`
columns are padding, which no slot is spent on; column j of a sequence is its row `j - starts`, and row i lies in its
block `i // block_size`. Sequences may share blocks (beams do, after they were reordered); a shared block is copied
before it is written. Where layers see only a window, the blocks that left it are used again.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

_LEFT = -1  # the window: a block that nobody looks at any more, whatever a table says there
_MANY = 64  # new slots, from which on tensors compute them


@dataclass(frozen=True)
class Step:
    """New columns of a batch: where their rows go, and what each of them may see."""

    past: int  # columns before these
    tokens: int  # of each sequence
    slots: Tensor  # [batch * tokens], -1 for padding and for what no later token sees
    tables: Tensor  # [batch, blocks] int32
    lens: Tensor  # [batch] int32, the new rows included

    @property
    def columns(self) -> int:
        """The new ones included."""
        return self.past + self.tokens


class Pool(Protocol):
    """Where the rows of a layer lie."""

    def copy(self, new: list[int], old: list[int]) -> None:
        """Make these blocks copies of those."""


def padded(kept: Tensor, columns: int) -> list[int] | None:
    """How many of so many columns a mask [batch, columns] hides at the left of each sequence; None for other holes."""
    if kept.dim() != 2 or kept.shape[1] < columns:
        return None
    kept = kept[:, :columns].to(torch.bool)
    starts = columns - kept.sum(1)
    left = torch.arange(columns, device=kept.device) >= starts[:, None]
    return starts.tolist() if torch.equal(kept, left) else None


class Pages:
    """The block tables of one batch of sequences.

    Args:
        block_size: tokens in a block.
        window: a token sees only the columns less than so many before its own.
    """

    def __init__(self, block_size: int, window: int | None = None) -> None:
        self.block_size, self.window = block_size, window
        self.layers = 0  # that share these
        self.pools: list[Pool] = []  # whose blocks these are
        self.step: Step | None = None  # the last one
        self.writer: object = None  # who began it
        self.keep = False  # what left the window too, for a crop that may come
        self.capacity = 0  # blocks that were ever in use
        self.reset(0, torch.device("cpu"))

    def reset(self, batch: int, device: torch.device, starts: Sequence[int] | None = None) -> None:
        """Forget everything; the pools stay. So many columns at the left of each sequence will be padding."""
        self.batch, self.device, self.columns, self.first = batch, device, 0, 0
        self.starts = [0] * batch if starts is None else list(starts)
        self.blocks: list[list[int]] = [[] for _ in range(batch)]
        self._users: Counter[int] = Counter()
        self._free: list[int] = list(range(self.capacity))[::-1]
        self._tables = self._new(torch.zeros((batch, 8), dtype=torch.int32, device=device))

    def begin(self, tokens: int) -> Step:
        """Slots for so many new columns; nothing counts as there before `commit`, so a step may be run again."""
        end = self.columns + tokens
        if not self.keep:
            self._drop(self.oldest(self.columns))
        # Of a prompt only what a later token may see is written.
        first = self.columns or (0 if self.keep else self.oldest(end))
        self._reserve(first, end)
        lens = [max(0, end - start) for start in self.starts]
        # A GPU's tables seldom grow, so that what was recorded of a step serves the next.
        narrow = self.batch and self.device.type == "cpu"
        return Step(
            self.columns,
            tokens,
            self._slots(first, end),
            self._tables[:, : max(1, *map(len, self.blocks))] if narrow else self._tables,
            torch.tensor(lens, dtype=torch.int32, device=self.device),
        )

    def commit(self, tokens: int) -> None:
        """The rows of these columns are there."""
        if not self.columns and not self.keep:
            self.first = self.oldest(tokens)
        self.columns += tokens

    def oldest(self, columns: int) -> int:
        """The first column that a token behind so many sees."""
        return 0 if self.window is None else max(0, columns - self.window + 1)

    def there(self, first: int, end: int) -> Tensor | None:
        """[batch, 1, 1, end - first]: whether each column is one of the sequence's own; None where all of them are."""
        if all(start <= first for start in self.starts):
            return None
        starts = torch.tensor(self.starts, device=self.device)
        return torch.arange(first, end, device=self.device) >= starts.view(-1, 1, 1, 1)

    def slots(self, first: int, end: int) -> Tensor:
        """[batch, end - first]: the slot of each column, -1 where there is padding."""
        columns = torch.arange(first, end, device=self.device)
        row = columns - torch.tensor(self.starts, dtype=torch.int64, device=self.device).view(-1, 1)
        at = row.clamp(min=0)
        block = self._tables.long().gather(1, at // self.block_size)
        return (block * self.block_size + at % self.block_size).masked_fill(row < 0, -1)

    def _slots(self, first: int, end: int) -> Tensor:
        """[batch * new columns]: as above, and -1 before the first."""
        new = end - self.columns
        if self.batch * new <= _MANY:
            size = self.block_size
            return torch.tensor(
                [
                    mine[(at - start) // size] * size + (at - start) % size if at >= max(first, start) else -1
                    for mine, start in zip(self.blocks, self.starts, strict=True)
                    for at in range(self.columns, end)
                ],
                dtype=torch.int64,
                device=self.device,
            )
        slots = torch.full((self.batch, new), -1, dtype=torch.int64, device=self.device)
        slots[:, first - self.columns :] = self.slots(first, end)
        return slots.view(-1)

    def select(self, order: Sequence[int]) -> None:
        """Sequences `order` of the batch become the batch; some may be there twice, some no more."""
        self.blocks, self.batch = [list(self.blocks[i]) for i in order], len(order)
        self.starts = [self.starts[i] for i in order]
        self._tables = self._new(self._tables[torch.tensor(list(order), device=self.device)])
        self._users = Counter(itertools.chain.from_iterable(self.blocks))
        del self._users[_LEFT]
        self._free = [b for b in range(self.capacity) if b not in self._users][::-1]

    def crop(self, columns: int) -> None:
        """Forget what is behind so many columns, and what then is out of the window.

        Raises:
            RuntimeError: where what they see has left the window.
        """
        if columns < self.columns:
            if self.first > self.oldest(columns):
                raise RuntimeError(
                    f"crop: a layer with a window of {self.window} holds the columns from {self.first} on, and to crop "
                    f"{self.columns} to {columns} needs earlier ones; call activate_past_recording() before the "
                    "tokens that may be cropped"
                )
            self.columns = columns
            for mine, start in zip(self.blocks, self.starts, strict=True):
                kept = -(-max(0, columns - start) // self.block_size)
                self._release(mine[kept:])
                del mine[kept:]
        self._drop(self.oldest(self.columns))

    @staticmethod
    def _new(made: Tensor) -> Tensor:
        """A tensor that is written later, out of inference mode too."""
        with torch.inference_mode(False):
            return made.clone() if made.is_inference() else made

    def _drop(self, first: int) -> None:
        """Give back the blocks before this column."""
        if first <= self.first:
            return
        for mine, start in zip(self.blocks, self.starts, strict=True):
            left = max(0, first - start) // self.block_size
            before = max(0, self.first - start) // self.block_size
            self._release(mine[before:left])
            mine[before:left] = [_LEFT] * (left - before)
        self.first = first

    def _release(self, blocks: list[int]) -> None:
        for block in blocks:
            if block == _LEFT:
                continue
            self._users[block] -= 1
            if not self._users[block]:
                del self._users[block]
                self._free.append(block)

    def _take(self) -> int:
        if not self._free:
            self._free.append(self.capacity)
            self.capacity += 1
        block = self._free.pop()
        self._users[block] += 1
        return block

    def _reserve(self, first: int, end: int) -> None:
        """Blocks of its own for what each sequence writes from the first to this column."""
        copies: dict[int, int] = {}  # of shared blocks, by the new one
        for b, (mine, start) in enumerate(zip(self.blocks, self.starts, strict=True)):
            at, last = max(0, first - start) // self.block_size, -(-(end - start) // self.block_size)
            if at < last and at < len(mine) and self._users[mine[at]] > 1:
                new = self._take()
                copies[new] = mine[at]
                self._users[mine[at]] -= 1
                self._put(b, at, new)
            if len(mine) < last:
                mine += [_LEFT] * (min(at, last) - len(mine))
                for entry in range(len(mine), last):
                    mine.append(_LEFT)
                    self._put(b, entry, self._take())
        if copies:
            for pool in self.pools:
                pool.copy(list(copies), list(copies.values()))

    def _put(self, sequence: int, entry: int, block: int) -> None:
        self.blocks[sequence][entry] = block
        while entry >= self._tables.shape[1]:
            self._tables = self._new(self._tables.repeat(1, 2))  # what is there twice is not looked at
        self._tables[sequence, entry] = block
