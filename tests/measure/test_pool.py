"""Pools: as many sets as the caches ask for, no more than memory allows, shared memory not counted twice."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from opsmith.measure import CacheFlush, Pool, cold_bytes, describe


def test_the_sets_exceed_the_target_together() -> None:
    pool = Pool(lambda i: (torch.zeros(256), {"more": [torch.zeros(256)]}), total_bytes=10_000)
    assert pool.bytes == len(pool) * 2048 > 10_000
    assert (len(pool) - 1) * 2048 <= 10_000
    assert pool.cold


def test_the_target_is_five_times_the_last_level_cache() -> None:
    assert cold_bytes() == 5 * describe().last_level_cache


def test_what_all_sets_share_makes_nothing_cold() -> None:
    weight = torch.zeros(1000)
    pool = Pool(lambda i: (torch.zeros(100), weight, weight[:10]), total_bytes=4000)
    assert pool.bytes == len(pool) * 400 > 4000
    assert not Pool(lambda i: (weight,), total_bytes=4000).cold


def test_memory_bounds_the_pool_and_it_says_so() -> None:
    pool = Pool(lambda i: (torch.zeros(256),), total_bytes=1 << 30, max_bytes=8192)
    assert pool.bytes <= 8192
    assert not pool.cold


def test_a_pool_without_tensors_is_refused() -> None:
    with pytest.raises(ValueError, match="return tensors"):
        Pool(lambda i: (i,), total_bytes=10)


def test_sets_are_made_by_index_and_taken_in_turn() -> None:
    pool = Pool(lambda i: (torch.full((4,), float(i)),), total_bytes=40)
    assert [int(pool.take()[0][0]) for _ in range(len(pool) + 1)] == [*range(len(pool)), 0]


def test_a_flush_reads_its_whole_block_and_leaves_nothing_to_write_back() -> None:
    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.extend((func._schema.is_mutable, t.numel()) for t in args if isinstance(t, torch.Tensor))
            return func(*args, **(kwargs or {}))

    seen: list[tuple[bool, int]] = []
    flush = CacheFlush(total_bytes=4096)
    with Reads():
        flush()
    assert seen == [(False, 1024)]
