"""Reshape and permute on terms: they move inwards to the leaves, where pairs of them cancel.

`x.view(B*H, L, D)` before a batched matmul and `.view(B, H, L, S)` after it are bookkeeping; moved inwards
through the matmul they meet and vanish, so a model that folds heads into the batch and one that does not have
the same normal form.
"""

from __future__ import annotations

import math
from functools import partial

from opsmith.compiler.algebra.pieces import join
from opsmith.compiler.algebra.terms import Atom, Poly, Shape, Space


class _Outside(Exception):
    """What a view cannot move into."""


def reshape(p: Poly, old: Shape, new: Shape) -> Poly:
    """`p`, whose value has shape `old`, viewed with shape `new`."""
    if old == new or p.constant is not None:
        return p
    try:
        return _through(p, old, new)
    except _Outside:
        return p.space.fn("reshape", p, shape=new, attrs=(new,))


def _through(p: Poly, old: Shape, new: Shape) -> Poly:
    """Reshape of every atom, where each spans the leading dimensions wholly."""
    return p.space.rebuilt(p, partial(_atom, p.space, old=old, new=new), lambda e: _through(e, old, new))


def _atom(s: Space, atom: Atom, old: Shape, new: Shape) -> Poly:
    if not atom.shape:
        return s.from_atom(atom)
    same_last = bool(old) and bool(new) and old[-1] == new[-1]
    if atom.name == "reshape" and atom.shape == old:
        inner = atom.args[0]
        if not inner.shape and new:
            raise _Outside
        return reshape(inner, inner.shape, new)
    if atom.name == "matmul" and atom.shape == old and same_last:
        a, b = atom.args
        if len(b.shape) == 2 and len(a.shape) == len(old):
            return s.matmul(reshape(a, a.shape, (*new[:-1], a.shape[-1])), b, new)
        if old[-2:] == new[-2:] and a.shape[:-2] == b.shape[:-2] == old[:-2]:
            left = reshape(a, a.shape, (*new[:-2], *a.shape[-2:]))
            right = reshape(b, b.shape, (*new[:-2], *b.shape[-2:]))
            return s.matmul(left, right, new)
    if atom.name == "permute" and atom.shape == old:
        # What becomes of each axis, in the order that the axes had before.
        runs = sorted(_runs(old, new), key=lambda run: atom.attrs[run[0].start])
        moved, axes = ([i for run in runs for i in run[of]] for of in (0, 1))
        if [atom.attrs[i] for i in moved] == list(range(len(old))) and len(axes) == len(new):
            inner = atom.args[0]
            return permute(reshape(inner, inner.shape, tuple(new[i] for i in axes)), inverse(tuple(axes)))
    if atom.name == "gather" and atom.shape == old and same_last:
        table, ids = atom.args
        return s.fn("gather", table, reshape(ids, ids.shape, new[:-1]), shape=new, attrs=atom.attrs)
    if atom.name in ("sum", "mean", "max") and same_last and atom.shape == (*old[:-1], 1):
        wide = atom.args[0].shape
        if len(wide) != len(old):
            raise _Outside
        inner = _through(atom.args[0], wide, (*new[:-1], wide[-1]))
        return s.fn(atom.name, inner, shape=(*new[:-1], 1))
    if atom.name == "base" and atom.shape in (old, (*old[:-1], 1)):
        target = new if atom.shape == old else (*new[:-1], 1)
        if not same_last and atom.shape != old:
            raise _Outside
        return s.fn("base", _through(atom.args[0], atom.shape, target), shape=target)
    broadcast = len(atom.shape) == len(old) > 2 and atom.shape != old
    # One row for all of the last two axes.
    if broadcast and atom.shape[:-2] == old[:-2] and old[-2:] == new[-2:]:
        return reshape(s.from_atom(atom), atom.shape, (*new[:-2], *atom.shape[-2:]))
    if atom.name == "join" and atom.shape == old and same_last:
        kind, sizes = atom.attrs
        parts = [reshape(a, (*old[:-1], n), (*new[:-1], n)) for a, n in zip(atom.args, sizes, strict=True)]
        return join(kind, parts, sizes, new)
    if atom.shape == old:
        return s.fn("reshape", s.from_atom(atom), shape=new, attrs=(new,))
    raise _Outside


def _runs(old: Shape, new: Shape) -> list[tuple[range, range]]:
    """The axes of a view beside those they come from: one that becomes several, or several that become one."""
    runs, i, j = [], 0, 0
    while i < len(old):
        ends = [(i + 1, n) for n in range(j + 1, len(new) + 1)]
        ends += [(n, j + 1) for n in range(i + 2, len(old) + 1)]
        end = next((e for e in ends if math.prod(old[i : e[0]]) == math.prod(new[j : e[1]])), None)
        if end is None:
            raise _Outside
        runs.append((range(i, end[0]), range(j, end[1])))
        i, j = end
    return runs


def permute(p: Poly, perm: tuple[int, ...]) -> Poly:
    """`p` with its axes in another order."""
    if perm == tuple(range(len(perm))) or p.constant is not None:
        return p
    mono, coef = p.terms[0]
    atom = mono.atom if len(p.terms) == 1 else None
    if atom is not None and atom.name == "permute":
        return permute_rows(atom.args[0], tuple(int(atom.attrs[i]) for i in perm)) * coef
    if atom is not None and coef != 1:
        return permute(p.space.from_atom(atom), perm) * coef
    shape = tuple(p.shape[i] for i in perm) if len(p.shape) == len(perm) else p.shape
    return p.space.fn("permute", p, shape=shape, attrs=perm)


def permute_rows(p: Poly, perm: tuple[int, ...]) -> Poly:
    """The same, moved into a softmax over the last axis where that stays the last: exponentials, and sums over it."""
    same = perm == tuple(range(len(perm)))
    if same or perm[-1] != len(perm) - 1 or len(p.terms) != 1 or p.terms[0][0].expo is None:
        return permute(p, perm)
    try:
        return _rows(p, perm)
    except _Outside:
        return permute(p, perm)


def _rows(p: Poly, perm: tuple[int, ...]) -> Poly:
    s = p.space

    def of(atom: Atom) -> Poly:
        shape = (*(1,) * (len(perm) - len(atom.shape)), *atom.shape)
        new = tuple(shape[i] for i in perm)
        if not atom.shape:
            return s.from_atom(atom)
        if atom.name in ("sum", "max", "base") and len(atom.shape) == len(perm):
            return s.fn(atom.name, _rows(atom.args[0], perm), shape=new)
        if [n for n in shape if n != 1] == [n for n in new if n != 1]:
            while len(new) > 1 and new[0] == 1:
                new = new[1:]
            return reshape(s.from_atom(atom), atom.shape, new)
        if len(atom.shape) < len(perm):
            raise _Outside
        return permute(s.from_atom(atom), perm)

    return s.rebuilt(p, of, lambda e: _rows(e, perm))


def transpose(p: Poly, rank: int) -> Poly:
    """`p`, whose value has so many axes, with the last two in the other order."""
    return permute(p, (*range(rank - 2), rank - 1, rank - 2))


def inverse(perm: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(perm.index(i) for i in range(len(perm)))
