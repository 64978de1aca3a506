"""Which values of a graph change their sizes from call to call, and the sizes that one program serves."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch.fx import Node

Key = tuple[Any, ...]  # the numbers that a graph is given; in a span, ranges of some of them


def symbols(value: Any) -> frozenset[Any]:
    """The symbols in a fake value: in a tensor's sizes, strides and offset, or in a number."""
    if isinstance(value, torch.Tensor):
        numbers: Iterable[Any] = (*value.shape, *value.stride(), value.storage_offset())
        return frozenset().union(*map(symbols, numbers))
    if isinstance(value, list | tuple):
        return frozenset().union(*map(symbols, value))
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return frozenset(value.node.expr.free_symbols)
    return frozenset()


def varying(nodes: Sequence[Node], free: Collection[Any]) -> set[Node]:
    """The nodes whose sizes, strides or number depend on these symbols; of one without a value, the inputs do."""
    found: set[Node] = set()
    for node in nodes:
        if "val" in node.meta:
            varies = not symbols(node.meta["val"]).isdisjoint(free)
        else:
            varies = any(source in found for source in node.all_input_nodes)
        if varies:
            found.add(node)
    return found


def span(key: Key, positions: Collection[int], placeholders: Sequence[Node]) -> tuple[Key, frozenset[Any]]:
    """The sizes like `key` in which the numbers at these positions are any between the same two powers of two.

    With it come the symbols that vary then. What is no symbolic size stays as it is.
    """
    numbers = list(key)
    free: frozenset[Any] = frozenset()
    for i in positions:
        own = symbols(placeholders[i].meta.get("val"))
        if type(key[i]) is int and key[i] > 0 and own:
            low = 1 << (key[i].bit_length() - 1)
            numbers[i], free = range(low, 2 * low), free | own
    return tuple(numbers), free


def _serves(size: Any, number: Any) -> bool:
    return number in size if type(size) is range else bool(number == size)


def differing(key: Key, sizes: Key) -> set[int]:
    """The positions at which a key is not one of these sizes."""
    return {i for i, (k, s) in enumerate(zip(key, sizes, strict=True)) if not _serves(s, k)}


def within(key: Key, sizes: Key) -> bool:
    """True when a program for these sizes, some of them ranges, serves a call of this key."""
    return all(map(_serves, sizes, key))


def named(names: Sequence[str], sizes: Key) -> str:
    """Sizes as people read them, each once: `s0=4, s1=512 to 1023`."""
    texts = [f"{s.start} to {s.stop - 1}" if type(s) is range else str(s) for s in sizes]
    return ", ".join(dict.fromkeys(f"{n}={t}" for n, t in zip(names, texts, strict=True)))
