"""The rows of a quantized table that are asked for most often, dequantized."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opsmith.ops.embedding.quantized import gather_cached

# The first choice is made after this many lookups for each row of the cache, the next ones after twice as many each, up
# to so many for each row of the cache, or of the table: a choice reads all counts, and must cost little next to the
# lookups between two of them.
_FIRST = 4
_PER_CACHED_ROW = 64
_PER_ROW = 4


@dataclass(frozen=True)
class CacheInfo:
    """A cache as it stands: rows it may hold and holds, lookups and how many of them it answered, its memory."""

    capacity: int = 0
    rows: int = 0
    hits: int = 0
    lookups: int = 0
    nbytes: int = 0

    @property
    def hit_rate(self) -> float:
        """Hits over lookups, 0 before the first."""
        return self.hits / self.lookups if self.lookups else 0.0


@dataclass(frozen=True)
class _Snapshot:
    """What readers see. It is replaced as a whole and never changed, so any number of threads may read it."""

    slots: Tensor  # [V] int32: where a row stands in `rows`, or -1
    rows: Tensor  # [C, N]
    chosen: Tensor  # [C] which rows these are, ascending


class RowCache:
    """Counts how often each row is asked for, and keeps those asked for most: admission by frequency.

    The counts are halved at each choice, so that what was popular once gives way. Increments that two threads make at
    the same moment may count as one. A copy, by `deepcopy` or pickle, starts cold.

    Args:
        capacity: rows to keep.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._lock = threading.Lock()  # for those who change things; readers never wait
        self._counts: Tensor | None = None
        self._stats: Tensor | None = None
        self._snapshot: _Snapshot | None = None
        self._seen = 0
        self._due = _FIRST * capacity

    def __reduce__(self) -> tuple[Any, ...]:
        return RowCache, (self.capacity,)

    def gather(
        self, ids: Tensor, table: Tensor, scale: Tensor, dtype: torch.dtype, kept: torch.dtype, prefetch: int
    ) -> Tensor:
        """`quantized_embedding`, with rows from the cache where they are in this dtype. Counts; chooses when due."""
        if self._counts is None:
            self._start(table)
        held = self._snapshot
        slots, rows = (None, None) if held is None or held.rows.dtype != dtype else (held.slots, held.rows)
        counted = self._counts, self._stats
        y = gather_cached(ids, table, scale, prefetch, None, slots, rows, dtype, *counted, None)
        self._seen += ids.numel()
        if self._seen >= self._due:
            self.refresh(table, scale, kept)
        return y  # type: ignore[no-any-return]

    def refresh(self, table: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        """Choose the rows to keep, unless another thread is at it."""
        if self._counts is None or not self._lock.acquire(blocking=False):
            return
        try:
            self._choose(table, scale, dtype)
            most = max(_PER_CACHED_ROW * self.capacity, _PER_ROW * table.shape[0])
            self._due = min(2 * max(self._seen, self._due), most)
            self._seen = 0
        finally:
            self._lock.release()

    def info(self) -> CacheInfo:
        """The cache as it stands."""
        hits, lookups = (0, 0) if self._stats is None else self._stats.tolist()
        held = self._snapshot
        tensors = [self._counts, self._stats, *((held.slots, held.rows, held.chosen) if held else ())]
        rows, nbytes = len(held.chosen) if held else 0, sum(t.nbytes for t in tensors if t is not None)
        return CacheInfo(self.capacity, rows, hits, lookups, nbytes)

    def _start(self, table: Tensor) -> None:
        with self._lock, torch.inference_mode(False):
            if self._counts is None:
                self._stats = torch.zeros(2, dtype=torch.int64, device=table.device)
                self._counts = torch.zeros(table.shape[0], dtype=torch.int32, device=table.device)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _choose(self, table: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        assert self._counts is not None
        held = self._snapshot
        # Twice the count, and one more for a row that is here already: a tie is no reason to replace it.
        weight = self._counts.long() * 2
        if held is not None:
            weight[held.chosen] += weight[held.chosen] > 0
        top, rows = weight.topk(self.capacity)
        chosen = rows[top > 0].sort().values
        if held is None or held.rows.dtype != dtype or not torch.equal(chosen, held.chosen):
            values = (table[chosen].to(scale.dtype) * scale[chosen, None]).to(dtype)
            slots = torch.full((table.shape[0],), -1, dtype=torch.int32, device=table.device)
            slots[chosen] = torch.arange(len(chosen), dtype=torch.int32, device=table.device)
            self._snapshot = _Snapshot(slots, values, chosen)
        self._counts = self._counts >> 1
