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

    watching = noted_load, noted_store, launch
    builder.create_masked_load, builder.create_masked_store, executor.__call__ = watching
    try:
        yield found
    finally:
        builder.create_masked_load, builder.create_masked_store, executor.__call__ = load, store, run


def _conflicts(loads: list[tuple[int, Any]], stores: list[tuple[int, Any]]) -> Iterator[str]:
    written, writers = _flat(stores)
    places, at = np.unique(written, return_inverse=True)
    first, last = np.full(places.size, np.iinfo(np.int64).max), np.full(places.size, -1)
    np.minimum.at(first, at, writers)
    np.maximum.at(last, at, writers)
    if twice := np.count_nonzero(first != last):
        yield f"{twice} places are stored by several programs"
    read, readers = _flat(loads)
    both = np.isin(read, places)
    read, readers = read[both], readers[both]
    at = np.searchsorted(places, read)
    if crossed := np.unique(read[(first[at] != readers) | (last[at] != readers)]).size:
        yield f"{crossed} places are loaded by one program and stored by another"


def _flat(touches: list[tuple[int, Any]]) -> tuple[Any, Any]:
    """Addresses, and the program of each."""
    addresses = [np.empty(0, np.uint64), *(a.ravel().astype(np.uint64) for _, a in touches)]
    programs = [np.full(a.size, p, np.int64) for p, a in touches]
    return np.concatenate(addresses), np.concatenate([np.empty(0, np.int64), *programs])
