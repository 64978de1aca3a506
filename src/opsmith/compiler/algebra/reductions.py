"""What means, sums, maxima, softmax and normalizations along the last axis mean in the algebra; see `canon`."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from opsmith.compiler.algebra import views
from opsmith.compiler.algebra.canon import Canon, Unreadable, last_axis, op_name, rule, shape_of
from opsmith.compiler.algebra.terms import Poly, Space


def _kept(c: Canon, result: Poly, x: Any, keepdim: bool) -> Poly:
    """What was reduced along the last axis of x, with that axis or without."""
    shape = shape_of(x)[:-1]
    return result if keepdim else views.reshape(c.space, result, (*shape, 1), shape)


@rule("amax", "amin")
def _extreme(c: Canon, node: Node, self: Any, dim: Any = (), keepdim: bool = False) -> Poly:
    """The maximum along the last axis is an atom that a softmax cancels; the minimum is minus that of the negative."""
    sign = -1 if op_name(node) in ("aten::amin", "aten::min") else 1
    value = c.space.scale(c(self), sign)
    if not last_axis(node, dim):
        return c.space.scale(c.space.fn("max", (value,), shape_of(node), ("dim", str(dim))), sign)
    result = c.space.fn("max", (value,), (*shape_of(self)[:-1], 1))
    return c.space.scale(_kept(c, result, self, keepdim), sign)


@rule("max[]", "min[]")
def _extreme_values(
    c: Canon, node: Node, source: Node, index: int, self: Any, dim: Any = None, keepdim: bool = False
) -> Poly:
    if index != 0 or dim is None:
        raise Unreadable
    return _extreme(c, source, self, dim, keepdim)


def _reduce(c: Canon, node: Node, name: str, x: Any, dim: Any, keepdim: bool) -> Poly:
    if dim is None or not isinstance(x, Node):
        raise Unreadable
    shape = shape_of(x)
    if not last_axis(node if node.target is not operator.getitem else node.args[0], dim):  # type: ignore[arg-type]
        # Another axis: an atom of its own, so that no law for the last axis applies and the report can name it.
        kept = "sum" if any(m.expo for m, _ in c(x).terms) else "mean"
        size = shape[dim] if kept != name and isinstance(dim, int) else 1
        atom = c.space.fn(kept, (c(x),), shape_of(node), ("dim", str(dim)))
        return c.space.scale(atom, float(size) if isinstance(size, int) else 1.0)
    return _kept(c, c.space.reduce(name, c(x), shape[-1], as_written="sum" in c.keeps), x, keepdim)


@rule("mean", "sum")
def _mean(c: Canon, node: Node, self: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Poly:
    return _reduce(c, node, op_name(node).removeprefix("aten::"), self, dim, keepdim)


@rule("linalg_vector_norm")
def _length(
    c: Canon, node: Node, self: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Poly:
    if ord != 2 or dim is None or not last_axis(node, dim):
        raise Unreadable
    s, size = c.space, shape_of(self)[-1]
    squares = s.reduce("sum", s.mul(c(self), c(self)), size, as_written="sum" in c.keeps)
    return _kept(c, s.power(squares, 0.5), self, keepdim)


@rule("var", "std")
def _var(
    c: Canon,
    node: Node,
    self: Any,
    dim: Any = None,
    unbiased: Any = None,
    correction: Any = None,
    keepdim: bool = False,
) -> Poly:
    s, size = c.space, shape_of(self)[-1]
    if correction is None:
        correction = 1 if unbiased in (None, True) else 0
    mean = _reduce(c, node, "mean", self, dim, True)
    result = s.add(s.reduce("mean", s.mul(c(self), c(self)), size), s.mul(mean, mean), -1)
    if correction:
        if not isinstance(size, int) or size <= correction:
            raise Unreadable
        result = s.scale(result, size / (size - correction))
    if op_name(node) == "aten::std":
        result = s.power(result, 0.5)
    return _kept(c, result, self, keepdim)


@rule("logsumexp")
def _logsumexp(c: Canon, node: Node, self: Any, dim: Any, keepdim: bool = False) -> Poly:
    if not last_axis(node, dim):
        raise Unreadable
    total = c.space.reduce("sum", c.space.exp(c(self)), shape_of(self)[-1])
    return _kept(c, c.space.log(total), self, keepdim)


def softmax(s: Space, x: Poly, size: Any) -> Poly:
    """exp(x) / sum(exp(x)) along the last axis."""
    e = s.exp(x)
    return s.mul(e, s.power(s.reduce("sum", e, size), -1))


@rule("softmax", "_softmax", "_safe_softmax")
def _softmax(c: Canon, node: Node, self: Any, dim: Any, **_: Any) -> Poly:
    if not last_axis(node, dim):
        e = c.space.exp(c(self))
        total = c.space.fn("sum", (e,), shape_of(self), ("dim", str(dim)))
        return c.space.mul(e, c.space.power(total, -1))
    return softmax(c.space, c(self), shape_of(self)[-1])


@rule("log_softmax", "_log_softmax")
def _log_softmax(c: Canon, node: Node, self: Any, dim: Any, **_: Any) -> Poly:
    if not last_axis(node, dim):
        raise Unreadable
    return log_softmax(c.space, c(self), shape_of(self)[-1])


def log_softmax(s: Space, x: Poly, size: Any) -> Poly:
    """x - log(sum(exp(x))) along the last axis."""
    return s.add(x, s.log(s.reduce("sum", s.exp(x), size)), -1)


@rule("layer_norm")
def _layer_norm(
    c: Canon,
    node: Node,
    input: Any,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    **_: Any,
) -> Poly:
    if len(normalized_shape) != 1:
        raise Unreadable
    x, s, size = c(input), c.space, shape_of(input)[-1]
    mean = s.reduce("mean", x, size)
    var = s.add(s.reduce("mean", s.mul(x, x), size), s.mul(mean, mean), -1)
    y = s.mul(s.add(x, mean, -1), s.power(s.add(var, s.const(eps)), -0.5))
    y = y if weight is None else s.mul(y, c(weight))
    return y if bias is None else s.add(y, c(bias))


@rule("rms_norm")
def _rms_norm(
    c: Canon, node: Node, input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None
) -> Poly:
    if len(normalized_shape) != 1:
        raise Unreadable
    x, s = c(input), c.space
    if eps is None:  # PyTorch takes that of the type it computes in
        wide = torch.float64 if input.meta["val"].dtype == torch.float64 else torch.float32
        eps = torch.finfo(wide).eps
    y = s.mul(x, s.power(s.add(s.reduce("mean", s.mul(x, x), shape_of(input)[-1]), s.const(eps)), -0.5))
    return y if weight is None else s.mul(y, c(weight))


@rule("var_mean[]")
def _var_mean(
    c: Canon,
    node: Node,
    source: Node,
    index: int,
    self: Any,
    dim: Any = None,
    correction: Any = None,
    keepdim: bool = False,
    **_: Any,
) -> Poly:
    if not last_axis(source, dim):
        raise Unreadable
    if index == 1:
        return _reduce(c, node, "mean", self, dim, keepdim)
    return _var(c, node, self, dim, correction=correction, keepdim=keepdim)


@rule("native_layer_norm[]")
def _normalized(c: Canon, node: Node, source: Node, index: int, **arguments: Any) -> Poly:
    if index != 0:
        raise Unreadable
    return _layer_norm(c, source, **arguments)
