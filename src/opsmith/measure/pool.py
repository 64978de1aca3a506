"""Inputs that are in no cache: a pool rotated call by call, or a flush by all threads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .machine import describe

# Past this many times the last-level cache, what was touched one rotation ago has been evicted.
_FACTOR = 5
# The pool may take this part of the memory, so that measuring never drives a machine into swap.
_MEMORY_SHARE = 8

Inputs = tuple[Any, ...]


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists and dictionaries."""
    return (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))


def with_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same nested tuples, lists and dictionaries with other tensors."""
    return pytree.tree_map_only(Tensor, change, value)


def cold_bytes(device: str | torch.device = "cpu") -> int:
    """Bytes between two uses of the same data that make it cold: five times the last-level cache.

    >>> cold_bytes() > 0
    True
    """
    machine = describe()
    if torch.device(device).type == "cuda" and machine.gpu_cache_bytes:
        return _FACTOR * machine.gpu_cache_bytes
    return _FACTOR * machine.last_level_cache


def _limit(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory // _MEMORY_SHARE
    return (describe().memory_bytes or 1 << 40) // _MEMORY_SHARE


class Pool:
    """Sets of inputs, together larger than the caches, handed out in turn.

    Memory that two sets share, such as a tensor that `make` always returns, is counted once: it stays in the
    cache, whatever the number of sets.

    >>> pool = Pool(lambda i: (torch.full((4, 8), float(i)),), total_bytes=1024)
    >>> len(pool), pool.cold
    (9, True)

    Args:
        make: `make(i)` returns the i-th set, the positional arguments of every contestant.
        total_bytes: what the sets must exceed together; five times the last-level cache by default.
        max_bytes: never more than this; an eighth of the memory by default. A pool that had to stop there
            reports `cold` as False.
        device: where the tensors live; decides which cache counts.

    Raises:
        ValueError: when a set holds no tensor, so that nothing could be made cold.
    """

    def __init__(
        self,
        make: Callable[[int], Inputs],
        *,
        total_bytes: int | None = None,
        max_bytes: int | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        target = cold_bytes(device) if total_bytes is None else total_bytes
        limit = _limit(torch.device(device)) if max_bytes is None else max_bytes
        first = make(0)
        self._sets: list[Inputs] = [first]
        self._next = 0
        seen: set[int] = set()
        size = _new_bytes(first, seen)
        if size == 0:
            raise ValueError(
                "Pool: expected make(0) to return tensors, got none; return the contestants' inputs"
            )
        second = make(1)
        step = _new_bytes(second, seen)
        self._sets.append(second)
        # What the first set has alone is never evicted by rotation if the others share it.
        self.bytes = 2 * step
        if step:
            wanted = math.floor(target / step) + 1
            affordable = max(2, (limit - size) // step)
            for index in range(2, min(wanted, affordable)):
                self._sets.append(make(index))
            self.bytes = len(self._sets) * step
        self.cold = self.bytes > target

    def __len__(self) -> int:
        return len(self._sets)

    def __getitem__(self, index: int) -> Inputs:
        return self._sets[index]

    def take(self) -> Inputs:
        """The set used longest ago; one sequence for all contestants, so that none warms it for another."""
        inputs = self._sets[self._next]
        self._next = (self._next + 1) % len(self._sets)
        return inputs


def _new_bytes(inputs: Inputs, seen: set[int]) -> int:
    total = 0
    for tensor in tensors_of(inputs):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


class CacheFlush:
    """Evicts the caches: every thread reads its part of a block five times the last level.

    It does not write: lines that it left changed would go back to memory while the next call is timed, which made a
    call that moves 64 MB take 1.3 times as long here.

    >>> flush = CacheFlush(total_bytes=1 << 16)
    >>> flush()
    """

    def __init__(self, total_bytes: int | None = None, device: str | torch.device = "cpu") -> None:
        size = cold_bytes(device) if total_bytes is None else total_bytes
        self._block = torch.zeros(max(size // 4, 1), dtype=torch.float32, device=device)

    def __call__(self) -> None:
        self._block.sum()  # on the threads that will work next
