"""The last axis in pieces: slices and concatenations, neighbors and pairs, complex numbers.

A rotary embedding is written with halves (`cat((-x2, x1))`), with neighbors (`stack((-x[1::2], x[::2]), -1)`) or
with complex numbers. Cut into the pieces that they are joined from, all of them are the same sums of products:
`x1 cos - x2 sin` and `x2 cos + x1 sin`. What is joined is an atom `join`, in blocks (`cat`) or in turns (`zip`);
`take` is a piece of a value, moved inwards until it meets the join that it undoes.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

from opsmith.compiler.algebra.terms import Atom, Mono, Poly, Shape, Space, is_row_constant

Piece = tuple[str, int, int]  # ("block", start, length), or ("turn", first, step)

# Functions of one value, element by element.
_CURVES = ("cos", "sin", "erf", "log", "base", "rounded")
_CHOICES = ("larger", "where", "above", "at_least", "equal", "not", "keep", "fill")
ELEMENTWISE = frozenset((*_CURVES, *_CHOICES))


def join(kind: str, parts: list[Poly], sizes: tuple[int, ...], shape: Shape) -> Poly:
    """Values joined along the last axis: in blocks of these sizes (`cat`), or in turns (`zip`)."""
    space = parts[0].space
    if kind == "cat":
        flat: list[Poly] = []
        lengths: list[int] = []
        for part, size in zip(parts, sizes, strict=True):
            atom = part.atom
            if atom is not None and atom.name == "join" and atom.attrs[0] == "cat":
                flat += atom.args
                lengths += atom.attrs[1]
            elif size:  # a rotation of all features still appends the none that are left
                flat.append(part)
                lengths.append(size)
        parts, sizes = flat, tuple(lengths)
    if len(parts) == 1:
        return parts[0]
    return space.fn("join", *parts, shape=shape, attrs=(kind, sizes))


def take(p: Poly, piece: Piece, size: int) -> Poly:
    """The piece of a value whose last axis has this size."""
    kind, first, second = piece
    if kind == "block" and (first, second) == (0, size):
        return p
    return p.space.rebuilt(p, lambda a: _take_atom(p.space, a, piece, size), lambda e: take(e, piece, size))


def _take_atom(s: Space, atom: Atom, piece: Piece, size: int) -> Poly:
    if is_row_constant(atom.shape):
        return s.from_atom(atom)
    kind, first, second = piece
    shape = (*atom.shape[:-1], _length(piece, size))
    if atom.name == "join":
        if (found := _of_join(atom, piece)) is not None:
            return found
    elif atom.name in ELEMENTWISE:
        args = [take(a, piece, size) for a in atom.args]
        return s.fn(atom.name, *args, shape=shape, attrs=atom.attrs)
    elif atom.name == "take" and atom.attrs[0][0] == kind == "block":
        _, start, _ = atom.attrs[0]
        inner = atom.args[0]
        return take(inner, ("block", start + first, second), int(inner.shape[-1]))
    elif atom.name in ("reshape", "expand") and atom.args[0].shape[-1:] == atom.shape[-1:]:
        # Through a view of the leading axes to a join inside; what nothing joins is taken outside.
        inside = take(atom.args[0], piece, size)
        if not any(part.name == "take" for mono, _ in inside.terms for part, _p in mono.factors):
            return s.fn(atom.name, inside, shape=shape, attrs=(shape,))
    return s.fn("take", s.from_atom(atom), shape=shape, attrs=(piece,))


def _length(piece: Piece, size: int) -> int:
    kind, first, second = piece
    return second if kind == "block" else len(range(first, size, second))


def _of_join(atom: Atom, piece: Piece) -> Poly | None:
    how, sizes = atom.attrs
    kind, first, second = piece
    if how == "zip":
        return atom.args[first] if kind == "turn" and second == len(atom.args) else None
    if kind != "block":
        return None
    ends = list(accumulate(sizes, initial=0))
    if first in ends and first + second in ends:  # of symbolic sizes too
        i, j = ends.index(first), ends.index(first + second)
        return join("cat", list(atom.args[i:j]), sizes[i:j], (*atom.shape[:-1], second))
    for i, (start, end) in enumerate(pairwise(ends)):
        known = all(isinstance(n, int) for n in (start, end, first, second))
        if known and start <= first and first + second <= end:
            return take(atom.args[i], ("block", first - start, second), sizes[i])
    return None


def lower(p: Poly, shape: Shape) -> Poly:
    """A value that is joined somewhere as the join of its pieces; any other value as it is."""
    if not shape or not isinstance(shape[-1], int):
        return p
    size = shape[-1]
    joins = [a for mono, _ in p.terms for a, _p in mono.factors if a.name == "join" and a.shape[-1] == size]
    if not joins:
        return p
    blocks = [a for a in joins if a.attrs[0] == "cat"]
    if any(not isinstance(n, int) for a in blocks for n in a.attrs[1]):  # ends without an order
        return p
    if blocks:
        ends = sorted({end for a in blocks for end in accumulate(a.attrs[1], initial=0)})
        pieces: list[Piece] = [("block", a, b - a) for a, b in pairwise(ends)]
    else:
        turns = len(joins[0].args)
        if any(len(a.args) != turns for a in joins):
            return p
        pieces = [("turn", i, turns) for i in range(turns)]
    sizes = tuple(_length(piece, size) for piece in pieces)
    parts = [lower(take(p, piece, size), (*shape[:-1], n)) for piece, n in zip(pieces, sizes, strict=True)]
    return join("cat" if blocks else "zip", parts, sizes, shape)


def components(p: Poly, shape: Shape, axis: int) -> list[Poly] | None:
    """The slices of the axis that a view gave a value, as in `x.view(..., n, 2)` or `x.view(..., 2, n)`, else None.

    The last but one has blocks of the value, the last one elements in turns.
    """
    atom, rank = p.atom, len(shape)
    if atom is None or atom.name != "reshape" or atom.shape != shape or not rank - 2 <= axis < rank > 1:
        return None
    inner, count, other = atom.args[0], shape[axis], shape[2 * rank - 3 - axis]
    size = inner.shape[-1] if inner.shape else None
    if not isinstance(size, int) or inner.shape != (*shape[:-2], count * other):
        return None
    whole = [("turn", i, count) if axis == rank - 1 else ("block", i * other, other) for i in range(count)]
    return [take(inner, piece, size) for piece in whole]


def parts(p: Poly) -> tuple[Poly, Poly]:
    """The real and the imaginary part."""
    real: dict[Mono, float] = {}
    s, imag = p.space, p.space.zero
    for mono, coef in p.terms:
        if any(atom is s.i.atom for atom, _ in mono.factors):
            rest = tuple((a, power) for a, power in mono.factors if a is not s.i.atom)
            imag += s.monomial(rest, mono.expo) * coef
        else:
            real[mono] = coef
    return s._poly(real), imag
