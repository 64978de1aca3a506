"""Finds races in Triton kernels without a GPU: which programs of a launch touch what another one of them writes.

The interpreter runs the programs of a launch one after another, so that a kernel whose programs write to the same place
looks right there. On a GPU they run at once, in any order: of the addresses that they load and store, none may be
stored by one program and touched by another. Atomic operations are made for that and do not count.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from triton.runtime import interpreter

__all__ = ["watched"]


@contextmanager
def watched() -> Iterator[list[str]]:
    """Collects what is wrong with the launches inside; only under the interpreter are there any.

    >>> with watched() as races:
    ...     pass
    >>> races
    []
    """
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store, run = builder.create_masked_load, builder.create_masked_store, executor.__call__
    found: list[str] = []
    touched: dict[str, list[tuple[int, Any]]] = {"load": [], "store": []}

    def note(kind: str, place: Any, pointers: Any, mask: Any) -> None:
        x, y, z = place
        program = (z << 42) + (y << 21) + x
        touched[kind].append(
            (program, np.asarray(pointers.data)[np.broadcast_to(mask.data, pointers.data.shape)])
        )

    def noted_load(self: Any, ptrs: Any, mask: Any, *more: Any) -> Any:
        note("load", self.grid_idx, ptrs, mask)
        return load(self, ptrs, mask, *more)

    def noted_store(self: Any, ptrs: Any, value: Any, mask: Any, *more: Any) -> Any:
        note("store", self.grid_idx, ptrs, mask)
        return store(self, ptrs, value, mask, *more)

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        for kind in touched.values():
            kind.clear()
        result = run(self, *args, **kwargs)
        name = getattr(self.fn, "__name__", "a kernel")
        found.extend(f"{name}: {problem}" for problem in _conflicts(touched["load"], touched["store"]))
        return result

    builder.create_masked_load, builder.create_masked_store, executor.__call__ = (
        noted_load,
        noted_store,
        launch,
    )
    try:
        yield found
    finally:
        builder.create_masked_load, builder.create_masked_store, executor.__call__ = load, store, run


def _conflicts(loads: list[tuple[int, Any]], stores: list[tuple[int, Any]]) -> Iterator[str]:
    written, writers = _flat(stores)
    twice = _shared(written, writers, written, writers)
    if twice:
        yield f"{twice} places are stored by several programs"
    read, readers = _flat(loads)
    crossed = _shared(read, readers, written, writers)
    if crossed:
        yield f"{crossed} places are loaded by one program and stored by another"


def _flat(touches: list[tuple[int, Any]]) -> tuple[Any, Any]:
    """Addresses, and the program of each, every pair once, by address."""
    if not touches:
        return np.empty(0, np.uint64), np.empty(0, np.int64)
    addresses = np.concatenate([a.ravel().astype(np.uint64) for _, a in touches])
    programs = np.concatenate([np.full(a.size, p, np.int64) for p, a in touches])
    order = np.lexsort((programs, addresses))
    addresses, programs = addresses[order], programs[order]
    new = np.ones(addresses.size, bool)
    new[1:] = (addresses[1:] != addresses[:-1]) | (programs[1:] != programs[:-1])
    return addresses[new], programs[new]


def _shared(some: Any, by: Any, others: Any, by_others: Any) -> int:
    """How many of the addresses are among the others with another program."""
    first, last = np.searchsorted(others, some, "left"), np.searchsorted(others, some, "right")
    several = last - first > 1
    one = last - first == 1
    differs = np.zeros(some.size, bool)
    differs[one] = by_others[first[one]] != by[one]
    return int(np.unique(some[several | differs]).size)
