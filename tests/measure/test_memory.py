"""The peak of a call, and memory that is used again."""

import resource
import statistics
from pathlib import Path

import pytest
import torch

from opsmith.measure import can_reuse_memory, peak_bytes, reused_memory
from opsmith.measure.memory import peak_of

MB = 1 << 20


def test_what_is_freed_on_the_way_counts_while_it_is_there() -> None:
    x = torch.zeros(MB, dtype=torch.uint8)
    assert peak_bytes(lambda: x.clone()) == MB
    assert peak_bytes(lambda: x.clone().clone().clone()) == 2 * MB
    assert peak_bytes(lambda: x.add_(x)) == 0


def test_the_order_of_events_is_that_of_their_times() -> None:
    assert peak_of([(3, 5), (1, 10), (2, -10)]) == 10
    assert peak_of([]) == 0


@pytest.mark.skipif(not can_reuse_memory(), reason="the C library is not glibc")
def test_reused_memory_is_not_asked_of_the_system_again() -> None:
    """Counted in resident memory: page faults depend on huge pages, and on what other threads of the process do."""
    x = torch.zeros(48 * MB, dtype=torch.uint8)

    def of_one() -> int:
        before = resident()
        copy = x.clone()
        return resident() - before if copy.numel() else 0

    def given_by_the_system() -> float:
        return statistics.median(of_one() for _ in range(7))  # a thread left by another test may allocate too

    assert given_by_the_system() > 40 * MB
    with reused_memory(spare=4 * x.nbytes):
        assert given_by_the_system() < 8 * MB
    assert given_by_the_system() > 40 * MB


def resident() -> int:
    """Bytes of memory that this process has in use."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
