"""What operators mean that only move values: views, permutations, slices, concatenations, pairs; see `canon`."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from opsmith.compiler.algebra import pieces, views
from opsmith.compiler.algebra.canon import Canon, Unreadable, op_name, rule, shape_of, shape_of_value
from opsmith.compiler.algebra.terms import Poly


@rule("view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "flatten", "unflatten")
def _reshape(c: Canon, node: Node, self: Any, **_: Any) -> Poly:
    return views.reshape(c.space, c(self), shape_of(self), shape_of(node))


@rule("transpose")
def _transpose(c: Canon, node: Node, self: Any, dim0: int, dim1: int) -> Poly:
    perm = list(range(len(shape_of(self))))
    perm[dim0], perm[dim1] = perm[dim1], perm[dim0]
    return views.permute(c.space, c(self), tuple(perm))


@rule("t", "numpy_T", "mT", "adjoint")
def _t(c: Canon, node: Node, self: Any) -> Poly:
    rank = len(shape_of(self))
    if rank < 2 or (rank > 2 and op_name(node) in ("aten::t", "aten::numpy_T")):
        raise Unreadable
    return views.permute(c.space, c(self), (*range(rank - 2), rank - 1, rank - 2))


@rule("permute")
def _permute(c: Canon, node: Node, self: Any, dims: Any) -> Poly:
    rank = len(shape_of(self))
    return views.permute(c.space, c(self), tuple(int(d) % rank for d in dims))


@rule("expand", "expand_as", "broadcast_to")
def _expand(c: Canon, node: Node, self: Any, **_: Any) -> Poly:
    before, after = shape_of(self), shape_of(node)
    if before == after or (before[:-1] == after[:-1] and before[-1:] == (1,)):
        return c(self)  # what has one value for a row has it for every element
    return c.space.fn("expand", (c(self),), shape_of(node), (shape_of(node),))


def _along_last(x: Any, dim: Any) -> int:
    """The size of the last axis, if that is the one meant."""
    shape = shape_of(x)
    if not shape or not isinstance(dim, int) or dim % len(shape) != len(shape) - 1:
        raise Unreadable
    if not isinstance(shape[-1], int):
        raise Unreadable
    return shape[-1]


@rule("slice")
def _slice(
    c: Canon, node: Node, self: Any, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1
) -> Poly:
    size = _along_last(self, dim)
    if not all(v is None or isinstance(v, int) for v in (start, end, step)):
        raise Unreadable
    first, stop, step = slice(start, end, step).indices(size)
    if step == 1:
        return pieces.take(c.space, c(self), ("block", first, max(stop - first, 0)), size)
    if stop < size or first >= step:
        raise Unreadable
    return pieces.take(c.space, c(self), ("turn", first, step), size)


@rule("narrow")
def _narrow(c: Canon, node: Node, self: Any, dim: int, start: Any, length: Any) -> Poly:
    size = _along_last(self, dim)
    if not isinstance(start, int) or not isinstance(length, int):
        raise Unreadable
    return pieces.take(c.space, c(self), ("block", start % size if size else 0, length), size)


@rule("split[]", "split_with_sizes[]", "chunk[]")
def _split(c: Canon, node: Node, source: Node, index: int, self: Any, dim: int = 0, **_: Any) -> Poly:
    size = _along_last(self, dim)
    lengths = [shape_of_value(v)[-1] for v in source.meta["val"]]
    if not all(isinstance(n, int) for n in lengths):
        raise Unreadable
    return pieces.take(c.space, c(self), ("block", sum(lengths[:index]), lengths[index]), size)


@rule("cat", "concat", "concatenate")
def _cat(c: Canon, node: Node, tensors: Any, dim: int = 0) -> Poly:
    _along_last(node, dim)
    sizes = tuple(shape_of(t)[-1] for t in tensors)
    if not all(isinstance(n, int) for n in sizes):
        raise Unreadable
    return pieces.join(c.space, "cat", [c(t) for t in tensors], sizes, shape_of(node))


@rule("stack")
def _stack(c: Canon, node: Node, tensors: Any, dim: int = 0) -> Poly:
    """Pairs in a new last axis, or halves in a new axis before it."""
    rank = len(shape_of(node))
    if dim % rank < rank - 2:
        raise Unreadable
    return c.space.fn("stack", [c(t) for t in tensors], shape_of(node), (dim % rank - rank,))


@rule("repeat_interleave")
def _repeat_interleave(c: Canon, node: Node, self: Any, repeats: Any, dim: Any = None, **_: Any) -> Poly:
    size = _along_last(self, dim)
    if not isinstance(repeats, int):
        raise Unreadable
    return pieces.join(c.space, "zip", [c(self)] * repeats, (size,) * repeats, shape_of(node))


@rule("repeat", "tile")
def _repeat(c: Canon, node: Node, self: Any, repeats: Any = None, dims: Any = None) -> Poly:
    times = repeats if repeats is not None else dims
    size = _along_last(self, -1)
    if len(times) != len(shape_of(self)) or any(n != 1 for n in times[:-1]) or not isinstance(times[-1], int):
        raise Unreadable
    return pieces.join(c.space, "cat", [c(self)] * times[-1], (size,) * times[-1], shape_of(node))


@rule("select")
def _component(c: Canon, node: Node, self: Any, dim: int, index: int) -> Poly:
    _along_last(self, dim)
    found = pieces.components(c.space, c(self), shape_of(self))
    if found is None:
        raise Unreadable
    return found[index]


@rule("unbind[]")
def _unbind(c: Canon, node: Node, source: Node, index: int, self: Any, dim: int = 0) -> Poly:
    return _component(c, node, self, dim, index)


@rule("view_as_complex")
def _view_as_complex(c: Canon, node: Node, self: Any) -> Poly:
    return pieces.from_parts(c.space, *(_component(c, node, self, -1, i) for i in (0, 1)))


@rule("complex")
def _complex(c: Canon, node: Node, real: Any, imag: Any) -> Poly:
    return pieces.from_parts(c.space, c(real), c(imag))


@rule("polar")
def _polar(c: Canon, node: Node, abs: Any, angle: Any) -> Poly:
    s, turn = c.space, c(angle)
    unit = pieces.from_parts(s, *(s.fn(name, (turn,), turn.shape) for name in ("cos", "sin")))
    return s.mul(c(abs), unit)


@rule("view_as_real")
def _view_as_real(c: Canon, node: Node, self: Any) -> Poly:
    return c.space.fn("stack", pieces.parts(c.space, c(self)), shape_of(node), (-1,))


@rule("real", "imag")
def _part(c: Canon, node: Node, self: Any) -> Poly:
    return pieces.parts(c.space, c(self))[op_name(node) == "aten::imag"]
