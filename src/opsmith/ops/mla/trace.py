"""When each task of an MLA pre-processing call ran, and on which thread: for a picture of its stages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from opsmith.call.common import native_library

STAGES = (
    "norm of x",
    "rows of wdqkv, queries",
    "rows of wdqkv, keys",
    "norm of latent queries",
    "heads",
    "keys",
)
_LIBRARY = torch.library.Library("opsmith", "FRAGMENT")
_LIBRARY.define("mla_trace(Tensor(a!) rows, bool on) -> int")


class Task(NamedTuple):
    """One task of a call; times in seconds since the first of them began."""

    thread: int
    stage: str
    begin: float
    end: float


@contextmanager
def mla_trace(capacity: int = 4096) -> Iterator[list[Task]]:
    """Collect the tasks of the kernel's calls; the list is filled at the end, and stays empty without the kernel.

    >>> with mla_trace() as tasks:
    ...     mla_preprocess(x, w, cos, sin, slots, cache)
    >>> {task.stage for task in tasks}

    Args:
        capacity: of tasks; further ones are dropped.
    """
    tasks: list[Task] = []
    if not native_library("mla_trace"):
        yield tasks
        return
    rows = torch.zeros((capacity, 4), dtype=torch.int64)
    torch.ops.opsmith.mla_trace.default(rows, True)
    try:
        yield tasks
    finally:
        used = min(capacity, torch.ops.opsmith.mla_trace.default(rows, False))
        found = rows[:used].tolist()
        start = min((begin for _, _, begin, _ in found), default=0)
        tasks += [
            Task(thread, STAGES[stage], (begin - start) * 1e-9, (end - start) * 1e-9)
            for thread, stage, begin, end in sorted(found, key=lambda row: row[2])
        ]
