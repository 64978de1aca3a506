"""Memory that goes back to the system while its addresses stay taken: what nobody reads again, and what a file has."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

_LEAST = 1 << 16  # bytes that are worth a call of the system
_MUCH = 1 << 26  # bytes that are worth looking up where files are mapped, which takes milliseconds


def forget(t: Tensor) -> None:
    """Give the memory of a tensor back, whose numbers nobody reads again; where it lies stays its own.

    >>> forget(torch.ones(1 << 20))

    Args:
        t: on a CPU, all of whose memory may be lost; nothing happens to another one.
    """
    if t.device.type == "cpu" and t.layout == torch.strided:
        storage = t.untyped_storage()
        advise(storage.data_ptr(), storage.nbytes(), "MADV_DONTNEED")


class Read:
    """Tensors that were read and are not needed for now: the memory of those that are mapped from a file is given back.

    Whoever reads them again gets them from the file. Nothing happens to a tensor that is not mapped, nor to a file of
    which some page was written to in this process.

    >>> read = Read()
    >>> for parameter in model.parameters():
    ...     read.add(parameter)
    >>> read.give_back()
    """

    def __init__(self) -> None:
        self._places: list[tuple[int, int]] = []  # and not the tensors, which are not held

    def add(self, t: Tensor) -> None:
        """One more; when they have become many, all of them are given back."""
        if t.device.type == "cpu" and t.nbytes >= _LEAST:
            self._places.append((t.data_ptr(), t.nbytes))
        if sum(size for _, size in self._places) > _MUCH:
            self.give_back()

    def give_back(self) -> None:
        """Give all of them back now."""
        places, self._places = self._places, []
        for start, end in _unwritten([place for place, _ in places]) if places else ():
            for place, size in places:
                if start <= place and place + size <= end:
                    advise(place, size, "MADV_DONTNEED")


def is_mapped(t: Tensor) -> bool:
    """Whether a tensor on a CPU is a part of a file, no page of which was written to in this process."""
    place = t.data_ptr()
    return any(start <= place and place + t.nbytes <= end for start, end in _unwritten([place]))


def _unwritten(places: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Where files are mapped, each page of which is still the file's own; nowhere if none of the places is a file's."""
    with contextlib.suppress(OSError):  # on other systems than Linux
        # Quick, for it looks at no page.
        maps = re.findall(
            r"^(\w+)-(\w+) .*/", Path("/proc/self/maps").read_text(errors="replace"), re.MULTILINE
        )
        if not any(int(a, 16) <= place < int(b, 16) for a, b in maps for place in places):
            return
        start = end = 0
        written = False
        for line in Path("/proc/self/smaps").read_text(errors="replace").split("\n"):
            name, _, rest = line.partition(":")
            if " " in name:  # "7f00-7f10 r--p 0 08:01 123  /a/path", the lines behind it are about it
                words = line.split(maxsplit=5)
                start, end = (int(n, 16) for n in words[0].split("-"))
                end = end if words[5:] and words[5].startswith("/") else start
                written = False
            elif name in ("Anonymous", "Swap"):  # what was written may have been swapped out
                written |= rest.split() != ["0", "kB"]
            elif name == "VmFlags" and end > start and not written:  # the last line of each
                yield start, end


def advise(start: int, size: int, advice: str) -> None:
    """Tell Linux what is wanted of the whole pages of a piece of memory, by the name of an advice."""
    at = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (start + size) // mmap.PAGESIZE * mmap.PAGESIZE - at
    if sys.platform.startswith("linux") and size >= _LEAST:
        number = 25 if advice == "MADV_COLLAPSE" else getattr(mmap, advice)  # of Linux 6.1, unknown to mmap
        ctypes.CDLL(None).madvise(ctypes.c_void_p(at), ctypes.c_size_t(size), number)
