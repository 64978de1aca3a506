"""The memory of a call: how much it holds at its peak, and whether its outputs land on pages that are there already."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

# glibc's names for what mallopt sets.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
# Where glibc's own, moving thresholds end in a process that has freed a large block.
_MMAP_THRESHOLD_AT_MOST = 32 << 20
_MMAP_MAX_BY_DEFAULT = 1 << 16


def peak_bytes(call: Callable[[], object], device: str | torch.device = "cpu") -> int:
    """The most bytes that a call holds at a time beyond what was there before it, its result included.

    On the CPU every allocation of PyTorch's allocator is counted, compiled code's too, by PyTorch's profiler: the
    number is exact and the same in every run, unlike the size of the process. What a kernel takes from C++ for scratch
    (a few rows for each thread) is not in it. On a GPU the caching allocator keeps the count.

    >>> x = torch.zeros(1000)
    >>> peak_bytes(lambda: x.exp().neg())   # both tensors, for a moment
    8000

    Args:
        call: takes nothing; run once to warm up and once to be measured.
        device: "cpu" or "cuda".
    """
    call()
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device) - before)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        result = call()
    del result
    assert profile.profiler is not None
    assert profile.profiler.kineto_results is not None
    events = profile.profiler.kineto_results.events()
    return peak_of((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")


def peak_of(changes: Iterable[tuple[int, int]]) -> int:
    """The highest sum of changes `(time, bytes)`, in the order of their times, from zero.

    >>> peak_of([(1, 100), (3, -100), (2, 50), (4, 80)])
    150
    """
    sizes = (size for _, size in sorted(changes, key=lambda change: change[0]))
    return max(itertools.accumulate(sizes, initial=0))


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018  there under glibc only
        library.mallopt.restype = library.malloc_trim.restype = ctypes.c_int
        library.mallopt.argtypes = [ctypes.c_int, ctypes.c_int]
        library.malloc_trim.argtypes = library.malloc.argtypes = [ctypes.c_size_t]
        library.malloc.restype, library.free.restype = ctypes.c_void_p, None
        library.free.argtypes = [ctypes.c_void_p]
        return library
    return None


def trim() -> None:
    """Give the system back what the heap holds and nobody uses, where the C library is glibc."""
    if (library := _glibc()) is not None:
        library.malloc_trim(0)


def trim_later() -> None:
    """Trim the heap once: behind the garbage collection that runs now, or else the next one.

    For whoever learns that something large dies: until the collection is over, most of it is there. What PyTorch keeps
    of a compilation lies above the freed weights in the heap, which glibc gives back from its top only.
    """
    if _trim_once not in gc.callbacks:
        gc.callbacks.append(_trim_once)


def _trim_once(phase: str, _: Any) -> None:
    if phase == "stop":
        gc.callbacks.remove(_trim_once)
        trim()


def can_reuse_memory() -> bool:
    """Whether `reused_memory` does anything here: the C library has to be glibc."""
    return _glibc() is not None


@contextlib.contextmanager
def reused_memory(spare: int = 0) -> Iterator[None]:
    """Inside, large blocks come from memory that freed ones have left, whose pages the system has given already.

    Outside, glibc asks the system for each block above 32 MB and gives it back at once, so every page of a large
    output is faulted in while it is written, which on a CPU takes longer than the arithmetic of an operator bound by
    memory. Programs that keep their buffers do not pay for that; this is how they are imitated, for any callable.

    >>> with reused_memory(spare=1 << 24):
    ...     y = torch.zeros(1 << 20) + 1

    Args:
        spare: bytes to have ready from the beginning. A freed block serves a new one of its size only if nothing has
            settled at its edges, so a few times what a call holds at its peak.
    """
    library = _glibc()
    if library is None:
        yield
        return
    library.mallopt(_TRIM_THRESHOLD, -1)
    library.mallopt(_MMAP_MAX, 0)
    if spare and (block := library.malloc(spare)):
        ctypes.memset(block, 0, spare)
        library.free(block)
    try:
        yield
    finally:
        library.mallopt(_MMAP_MAX, _MMAP_MAX_BY_DEFAULT)
        library.mallopt(_MMAP_THRESHOLD, _MMAP_THRESHOLD_AT_MOST)
        library.mallopt(_TRIM_THRESHOLD, 2 * _MMAP_THRESHOLD_AT_MOST)
        library.malloc_trim(0)  # or the next large block would find the pages of this one
