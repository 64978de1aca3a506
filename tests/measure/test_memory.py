"""The peak of a call, and memory that is used again."""

import resource
import statistics

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
def test_reused_memory_faults_in_no_page_again() -> None:
    x = torch.zeros(48 * MB, dtype=torch.uint8)
    pages = x.nbytes // resource.getpagesize()

    def faults_of_one() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        x.clone()
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    def faults() -> float:
        # The median: the count is the whole process's, and a thread left by another test may fault in pages too.
        return statistics.median(faults_of_one() for _ in range(7))

    fresh = faults()
    with reused_memory(spare=4 * x.nbytes):
        reused = faults()
    again = faults()
    assert reused < min(fresh, again) / 10
    # Huge pages are faulted in five hundred and twelve at a time.
    assert min(fresh, again) > pages / 600
