"""Symbolic shapes: what formulas are checked with before any tensor exists.

A shape is a tuple of symbols and numbers. The symbol "..." may stand first, for any number of dimensions. Shapes
broadcast as PyTorch's do, aligned at the right; two different symbols, or a symbol and a number, do not meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import eq

Dim = int | str
Shape = tuple[Dim, ...]
ANY = "..."


def shown(shape: Sequence[Dim]) -> str:
    """`[B, H, L, D]`"""
    return f"[{', '.join(map(str, shape))}]"


def broadcast(a: Shape, b: Shape) -> Shape | None:
    """The shape of a + b, or None where the two do not fit.

    >>> broadcast(("B", "H", "L", "D"), ("L", "D"))
    ('B', 'H', 'L', 'D')
    >>> broadcast(("B", "N"), ("M", "N")) is None
    True
    """
    if len(a) < len(b) or (ANY in b and ANY not in a and len(a) <= len(b)):
        a, b = b, a
    if ANY in b and ANY not in a:
        return None  # nobody knows which of a's dimensions "..." are
    if ANY in a and ANY not in b and len(b) >= len(a):
        return None
    result: list[Dim] = list(a)
    for i in range(1, len(b) + 1):
        one, other = a[-i], b[-i]
        if one == other or other == 1:
            continue
        if one != 1 or ANY in (one, other):
            return None
        result[-i] = other
    return tuple(result)


def strides_of(shape: Shape, space: Shape) -> list[tuple[Shape, Shape]] | None:
    """How a contiguous tensor's rows follow from the rows of the whole: runs of `space`'s leading dimensions.

    Each run is (dimensions of the run, dimensions behind it), for the runs over which the tensor varies; the index in a
    run is `row / size(behind) % size(run)`, and later runs are contiguous with earlier ones. None where the tensor has
    every row of the whole.

    >>> strides_of(("L", "D"), ("B", "H", "L", "D"))
    [(('L',), ())]
    """
    outer = space[:-1]
    mine = (1,) * (len(space) - len(shape)) + shape[:-1]
    if mine == outer:
        return None
    runs: list[tuple[Shape, Shape]] = []
    end = 0
    for varies, run in groupby(map(eq, mine, outer)):
        start, end = end, end + len([*run])
        if varies and any(d != 1 for d in outer[start:end]):
            runs.append((outer[start:end], outer[end:]))
    return runs
