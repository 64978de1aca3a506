"""What elementwise operators mean in the algebra: sums, products, functions of one value; see `canon`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from opsmith.compiler.algebra.canon import RULES, Canon, Rule, Unreadable, op_name, rule, shape_of
from opsmith.compiler.algebra.terms import Poly, Space


@rule("add", "sub", "add_", "sub_")
def _add(c: Canon, node: Node, self: Any, other: Any, alpha: Any = 1) -> Poly:
    sign = -1.0 if "sub" in op_name(node) else 1.0
    if not isinstance(alpha, int | float):
        raise Unreadable
    return c.space.add(c(self), c(other), sign * alpha)


@rule("rsub")
def _rsub(c: Canon, node: Node, self: Any, other: Any, alpha: Any = 1) -> Poly:
    return c.space.add(c(other), c(self), -float(alpha))


@rule("mul", "mul_")
def _mul(c: Canon, node: Node, self: Any, other: Any) -> Poly:
    return c.space.mul(c(self), c(other))


@rule("div", "div_")
def _div(c: Canon, node: Node, self: Any, other: Any, rounding_mode: Any = None) -> Poly:
    if rounding_mode is not None:
        raise Unreadable
    return c.space.mul(c(self), c.space.power(c(other), -1))


@rule("addcmul")
def _addcmul(c: Canon, node: Node, self: Any, tensor1: Any, tensor2: Any, value: Any = 1) -> Poly:
    return c.space.add(c(self), c.space.mul(c(tensor1), c(tensor2)), float(value))


@rule("pow")
def _pow(c: Canon, node: Node, self: Any, exponent: Any) -> Poly:
    if not isinstance(exponent, int | float):
        raise Unreadable
    return c.space.power(c(self), float(exponent))


_UNARY: dict[str, Callable[[Space, Poly], Poly]] = {
    "neg": lambda s, x: s.scale(x, -1),
    "square": lambda s, x: s.mul(x, x),
    "sqrt": lambda s, x: s.power(x, 0.5),
    "rsqrt": lambda s, x: s.power(x, -0.5),
    "reciprocal": lambda s, x: s.power(x, -1),
    "exp": lambda s, x: s.exp(x),
    "log": lambda s, x: s.log(x),
    "tanh": lambda s, x: s.tanh(x),
    "sigmoid": lambda s, x: s.sigmoid(x),
    "erf": lambda s, x: s.erf(x),
    "special_erf": lambda s, x: s.erf(x),
    "erfc": lambda s, x: s.add(s.const(1), s.erf(x), -1),
    "special_erfc": lambda s, x: s.add(s.const(1), s.erf(x), -1),
    "special_ndtr": lambda s, x: _normal_cdf(s, x),
    "silu": lambda s, x: s.mul(x, s.sigmoid(x)),
    "cos": lambda s, x: s.fn("cos", (x,), x.shape),
    "sin": lambda s, x: s.fn("sin", (x,), x.shape),
    "expm1": lambda s, x: s.add(s.exp(x), s.const(1), -1),
    "log1p": lambda s, x: s.log(s.add(x, s.const(1))),
}


def _normal_cdf(s: Space, x: Poly) -> Poly:
    return s.scale(s.add(s.const(1), s.erf(s.scale(x, math.sqrt(0.5)))), 0.5)


def _unary(fn: Callable[[Space, Poly], Poly]) -> Rule:
    def apply(c: Canon, node: Node, self: Any, **_: Any) -> Poly:
        return fn(c.space, c(self))

    return apply


for _name, _fn in _UNARY.items():
    RULES[f"aten::{_name}"] = _unary(_fn)


@rule("gelu")
def _gelu(c: Canon, node: Node, self: Any, approximate: str = "none") -> Poly:
    x, s = c(self), c.space
    if approximate == "none":
        return s.mul(x, _normal_cdf(s, x))
    inner = s.add(x, s.power(x, 3), 0.044715)
    return s.mul(x, s.sigmoid(s.scale(inner, 2 * math.sqrt(2 / math.pi))))


@rule("dropout")
def _dropout(c: Canon, node: Node, input: Any, p: float, train: bool) -> Poly:
    if train and p != 0:
        raise Unreadable
    return c(input)


@rule("to", "_to_copy", "type_as", "contiguous", "clone", "alias", "detach", "lift_fresh_copy")
def _same(c: Canon, node: Node, self: Any, **_: Any) -> Poly:
    source = self.meta.get("val")
    if not isinstance(source, torch.Tensor):
        raise Unreadable
    if source.is_complex() != node.meta["val"].is_complex():
        raise Unreadable
    if not (source.is_floating_point() or source.is_complex() or op_name(self) == "aten::one_hot"):
        raise Unreadable
    dtype = node.meta["val"].dtype
    if "cast" in c.keeps and torch.promote_types(source.dtype, dtype) != dtype:
        return c.space.fn("rounded", (c(self),), shape_of(node), (str(dtype),))
    return c(self)


@rule("ones_like")
def _ones(c: Canon, node: Node, self: Any, **_: Any) -> Poly:
    return c.space.const(1)


@rule("one_hot")
def _one_hot(c: Canon, node: Node, self: Any, num_classes: int = -1) -> Poly:
    return c.space.fn("one_hot", (c(self),), shape_of(node))
