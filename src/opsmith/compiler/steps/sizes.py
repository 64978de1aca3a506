"""Which values of a graph change their sizes from call to call, and the sizes that one program serves."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_symbols

Key = tuple[Any, ...]  # the numbers that a graph is given; in a span, ranges of some of them


def varying(nodes: Sequence[Node], free: Collection[Any]) -> set[Node]:
    """The nodes whose sizes, strides or number depend on these symbols; of one without a value, the inputs do."""
    found: set[Node] = set()
    for node in nodes:
        if "val" in node.meta:
            varies = not free_symbols(node.meta["val"]).isdisjoint(free)
        else:
            varies = any(source in found for source in node.all_input_nodes)
        if varies:
            found.add(node)
    return found


def differing(key: Key, sizes: Key) -> set[int]:
    """The positions at which a key is not one of these sizes, some of which may be ranges."""
    pairs = enumerate(zip(key, sizes, strict=True))
    return {i for i, (k, s) in pairs if (k not in s if type(s) is range else k != s)}
