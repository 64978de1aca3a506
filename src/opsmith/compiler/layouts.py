"""What operators mean that only move values: views, permutations, slices, concatenations, pairs; see `canon`."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from opsmith.compiler import views
from opsmith.compiler.canon import Canon, Unreadable, op_name, rule, shape_of
from opsmith.compiler.terms import Poly


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
    if shape_of(self) == shape_of(node):
        return c(self)
    return c.space.fn("expand", (c(self),), shape_of(node), (shape_of(node),))
