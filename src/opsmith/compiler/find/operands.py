"""The inputs of a site: nodes of the graph, or small things made of them (a transpose, an inverted mask)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from opsmith.compiler.algebra import pieces, views
from opsmith.compiler.algebra.canon import Canon, arguments, op_name, shape_of
from opsmith.compiler.algebra.rules import HIDES, negated
from opsmith.compiler.algebra.terms import Atom, Mono, Poly, Shape


@dataclass(frozen=True)
class Made:
    """An ATen call on operands that the model does not contain and the plan inserts."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    shape: Shape


Operand = Node | Made
_FILLED = torch.ops.aten.where.Scalar
_FILLS = ("fill", "keep")


def nodes_in(value: Any) -> Iterator[Node]:
    """The graph nodes an operand is made of."""
    if isinstance(value, Node):
        yield value
    elif isinstance(value, Made):
        for arg in value.args:
            yield from nodes_in(arg)


def shape_of_operand(value: Any) -> Shape:
    """The sizes of an operand; none of anything else."""
    return value.shape if isinstance(value, Made) else shape_of(value)


def evaluate(
    value: Any,
    env: Callable[[Node], Any],
    call: Callable[[Made, tuple[Any, ...]], Any] = lambda made, args: made.target(*args),
) -> Any:
    """The value of an operand, given the values of nodes, and what becomes of the calls that it is made by."""
    if isinstance(value, Node):
        return env(value)
    if isinstance(value, Made):
        return call(value, tuple(evaluate(a, env, call) for a in value.args))
    return value


def materialize(poly: Poly, canon: Canon, root: Node, shifted: bool = False) -> Operand | None:
    """The node that computes a term, or the call that would; None where that would take arithmetic.

    `shifted`: it is a mask, beside which a constant may stand, and a number times which serves too.
    """
    if shifted and (total := _sum(poly, canon, root, shifted)) is not None:
        return total
    if nodes := canon.nodes.get(poly):
        return _first(nodes, root)
    if (atom := poly.atom) is None:
        return _sum(poly, canon, root)
    return atom.leaf if isinstance(atom.leaf, Node) else _made(atom, canon, root)


def _first(nodes: list[Node], root: Node) -> Node:
    """Of nodes with one value the first in the root's dtype, or in any."""
    return min([n for n in nodes if _dtype(n) == _dtype(root)] or nodes)


def _dtype(node: Node) -> Any:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, Tensor) else None


def _sum(poly: Poly, canon: Canon, root: Node, shifted: bool = False) -> Operand | None:
    """Several summands, as additive masks are: those that nodes compute, alone or together, added up."""
    total: Operand | None = None
    left = {m: c for m, c in poly.terms if not (shifted and m is canon.space.one)}
    while left:
        computed = _summands(left, poly.shape, canon, root, shifted)
        best = max(computed, key=lambda c: (len(c[0].terms), isinstance(c[1], Node)), default=(poly, None))
        term, part = best
        if part is None:
            mono, coef = next(iter(left.items()))
            if mono.atom is None or (coef != 1 and mono.atom.name not in _FILLS):
                return None
            term = canon.space.from_atom(mono.atom) * coef
            part = _made(mono.atom, canon, root, coef)
        if part is None:
            return None
        left = {m: c for m, c in left.items() if m not in dict(term.terms)}
        if total is not None and isinstance(part, Made) and part.target is _FILLED:
            keep, _, fill = part.args  # what is filled in hides the others, from gradients too
            if isinstance(total, Made) and total.target is _FILLED and total.args[2] == fill:
                both = Made(torch.ops.aten.logical_and.default, (total.args[0], keep), poly.shape)
                part = Made(_FILLED, (both, 0.0, fill), poly.shape)
            else:
                part = Made(torch.ops.aten.where.ScalarOther, (keep, total, fill), poly.shape)
        elif total is not None:
            part = Made(torch.ops.aten.add.Tensor, (total, part), poly.shape)
        total = part
    return total


def _summands(
    left: Mapping[Mono, float], shape: Shape, canon: Canon, root: Node, shifted: bool
) -> Iterator[tuple[Poly, Operand]]:
    """The nodes that compute some of a sum's terms; also where the heads are one axis with the batch there."""
    for term, nodes in canon.nodes.items():
        node = _first(nodes, root)
        operand: Operand = node
        both, *rest = shape_of(node) or (None,)
        if len(shape) == 4 and len(rest) == 2 and isinstance(shape[1], int) and both == shape[0] * shape[1]:
            apart = (*shape[:2], *rest)  # queries may share a row
            term = views.reshape(term, shape_of(node), apart)
            operand = Made(torch.ops.aten.unflatten.int, (node, 0, [-1, shape[1]]), apart)
        own = [(m, c) for m, c in term.terms if not (shifted and m is canon.space.one)]
        times = left.get(own[0][0], 0.0) / own[0][1] if own else 0.0
        if not all(math.isclose(left.get(m, 0.0), times * c, rel_tol=1e-6) for m, c in own):
            continue
        if math.isclose(times, 1, rel_tol=1e-6):
            yield term, operand
        elif times and shifted and not all(m.atom is not None and m.atom.name in _FILLS for m, _ in own):
            yield term * times, Made(torch.ops.aten.mul.Scalar, (operand, times), term.shape)


def _made(atom: Atom, canon: Canon, root: Node, times: float = 1.0) -> Operand | None:
    find = _condition if atom.name in _FILLS else materialize
    inner = find(atom.args[0], canon, root) if atom.args else None
    if inner is None:
        return None
    if atom.name == "permute":
        return Made(torch.ops.aten.permute.default, (inner, list(atom.attrs)), atom.shape)
    if atom.name == "reshape":  # an axis as two of them, or two as one
        before, after = shape_of_operand(inner), atom.shape
        for i, pair in enumerate(pairwise(before if len(before) > len(after) else after)):
            sizes, whole = [n if isinstance(n, int) else -1 for n in pair], (pair[0] * pair[1],)
            if (*after[:i], *whole, *after[i + 2 :]) == before and sizes != [-1, -1]:
                return Made(torch.ops.aten.unflatten.int, (inner, i, sizes), after)
            if (*before[:i], *whole, *before[i + 2 :]) == after:
                return Made(torch.ops.aten.flatten.using_ints, (inner, i, i + 1), after)
    if atom.name == "not":
        return Made(torch.ops.aten.logical_not.default, (inner,), atom.shape)
    if atom.name in _FILLS:
        fill = times * (atom.attrs[0] if atom.attrs else float("-inf"))
        return Made(_FILLED, (inner, 0.0, fill), atom.shape)
    return None


def is_triangle(mask: Poly, boolean: bool) -> bool:
    """Whether a mask keeps the lower triangle of a square: of each row something, whatever hides the rest.

    One that is added to scores says itself what it keeps, or is what is one there, or elsewhere, so many times that the
    other is hidden.
    """
    (mono, times), *more = mask.terms or ((None, 0.0),)
    atom = None if mono is None or more else mono.atom
    kept = boolean or times > 0
    if not boolean and atom is not None and atom.name in _FILLS and times == 1:
        atom = atom.args[0].atom
    elif not boolean and abs(times) < -HIDES:
        return False
    while atom is not None and atom.name in ("reshape", "not"):
        kept ^= atom.name == "not"
        atom = atom.args[0].atom
    return atom is not None and atom.name == "causal" and kept and mask.shape[-2:] == atom.shape


def _condition(poly: Poly, canon: Canon, root: Node) -> Operand | None:
    """What computes whether something holds, or whether it does not."""
    for wanted in (poly, negated(canon.space, poly)):
        node = next((n for n in canon.nodes.get(wanted, ()) if _dtype(n) == torch.bool), None)
        if node is not None:
            return node if wanted is poly else Made(torch.ops.aten.logical_not.default, (node,), poly.shape)
    return materialize(poly, canon, root)


def with_rows_kept(value: Operand, mask: Any) -> Operand:
    """An input with zeros for the rows of scores that the model fills in wholly.

    All numbers of such a row are one number, whatever the input, which learns nothing from them; to add that number to
    the scores is the same only where something of a row is left.
    """
    if not isinstance(mask, Made) or mask.target not in (_FILLED, torch.ops.aten.where.ScalarOther):
        return value
    keep, _, fill = mask.args
    if fill == float("-inf"):  # the model has NaN there
        return value
    kept = Made(torch.ops.aten.any.dim, (keep, -1, True), (*shape_of_operand(keep)[:-1], 1))
    return Made(torch.ops.aten.where.ScalarOther, (kept, value, 0.0), shape_of_operand(value))


def of_wider(poly: Poly, canon: Canon, root: Node) -> Operand | None:
    """A term that stands in a node as each of two equal halves, as every second element, or as a complex part."""
    made = [(n, _part_of(poly, term, n)) for term, nodes in canon.nodes.items() for n in nodes]
    found = [f for f in made if f[1] is not None]
    return min(found, key=lambda f: (_dtype(f[0]) != _dtype(root), f[0]), default=(root, None))[1]


def _part_of(poly: Poly, term: Poly, node: Node) -> Operand | None:
    shape = shape_of(node)
    if not shape or not poly.shape:
        return None
    if node.meta["val"].is_complex():
        for i, part in enumerate(pieces.parts(term)):
            if part is poly:
                pair = Made(torch.ops.aten.view_as_real.default, (node,), (*shape, 2))
                return _dense(Made(torch.ops.aten.select.int, (pair, -1, i), shape))
        return None
    size = poly.shape[-1]
    if not isinstance(size, int) or not term.shape or not shape[-1] == term.shape[-1] == 2 * size:
        return None
    wide, narrow = 2 * size, (*shape[:-1], size)
    if all(pieces.take(term, ("block", i * size, size), wide) is poly for i in range(2)):
        return Made(torch.ops.aten.slice.Tensor, (node, -1, 0, size), narrow)
    if all(pieces.take(term, ("turn", i, 2), wide) is poly for i in range(2)):
        return _dense(Made(torch.ops.aten.slice.Tensor, (node, -1, 0, wide, 2), narrow))
    return None


def _dense(value: Made) -> Made:
    """A copy without gaps, which the plan makes once for all that read it."""
    return Made(torch.ops.aten.contiguous.default, (value,), value.shape)


_VIEWS = ("aten::view", "aten::reshape", "aten::unsqueeze")
_EXPANDED = ("aten::expand", "aten::expand_as", "aten::broadcast_to")


def vector_of(value: Operand, axis: int) -> Node | None:
    """The vector whose numbers an operand has along an axis, counted from the last; None where others differ too."""
    while isinstance(value, Node) and len(shape := shape_of(value)) > 1:
        source = value.args[0] if value.args else None
        if not isinstance(source, Node):
            return None
        inner = shape_of(source)
        alone = all(n == 1 for i, n in enumerate(shape) if i != len(shape) + axis)
        if op_name(value) in _VIEWS and alone:
            axis = next((i for i, n in enumerate(inner) if n != 1), 0) - len(inner)
        elif op_name(value) not in _EXPANDED or len(inner) < -axis or inner[axis] != shape[axis]:
            return None
        value = source
    return value if isinstance(value, Node) and len(shape_of(value)) == 1 else None


# Calls that leave every axis but the last ones as it is.
_LAST_AXIS = (
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.select.int,
    torch.ops.aten.view_as_real.default,
    torch.ops.aten.contiguous.default,
)


def without_axis(value: Operand, axis: int) -> Operand | None:
    """The operand without an axis of size one; None where its size is another. Below zero there is no such axis."""
    shape = shape_of_operand(value)
    if axis < 0:
        return value
    if not isinstance(shape[axis], int) or shape[axis] != 1:
        return None
    rest = (*shape[:axis], *shape[axis + 1 :])
    if isinstance(value, Node):
        if op_name(value) == "aten::unsqueeze" and int(arguments(value)["dim"]) % len(shape) == axis:
            source = value.args[0]
            assert isinstance(source, Node)
            return source
    elif value.target in _LAST_AXIS:
        inner = without_axis(value.args[0], axis)
        return None if inner is None else Made(value.target, (inner, *value.args[1:]), rest)
    return Made(torch.ops.aten.squeeze.dim, (value, axis), rest)
