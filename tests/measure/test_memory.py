"""The peak of a call, and memory that is used again."""

import subprocess
import sys

import pytest
import torch

from opsmith.measure import can_reuse_memory, peak_bytes
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


# Resident memory: page faults depend on huge pages. Medians, as libraries allocate in threads of their own; afterwards
# one call, whose memory the heap may keep when other blocks have settled behind it.
REUSING = """
import resource, statistics
from pathlib import Path
import torch
from opsmith.measure import reused_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

def of_one():
    before = resident()
    copy = x.clone()
    return resident() - before if copy.numel() else 0

x = torch.zeros(48 << 20, dtype=torch.uint8)
print(statistics.median(of_one() for _ in range(7)))
with reused_memory(spare=4 * x.nbytes):
    print(statistics.median(of_one() for _ in range(7)))
print(of_one())
"""


@pytest.mark.skipif(not can_reuse_memory(), reason="the C library is not glibc")
def test_reused_memory_is_not_asked_of_the_system_again() -> None:
    """In a process of its own: what stays free in a heap depends on everything that ran there before."""
    run = subprocess.run(
        [sys.executable, "-c", REUSING], capture_output=True, text=True, timeout=600, check=True
    )
    before, inside, after = map(float, run.stdout.split())
    assert before > 40 * MB
    assert inside < 8 * MB
    assert after > 40 * MB
