"""What choices between values mean in the algebra: conditions, masks, the larger of two values; see `canon`.

One function stands for all of them: the smaller of two values is minus the larger of their negatives, an absolute
value the larger of a value and its negative, a clamp both. Conditions compare a difference with zero, so that `x > y`
and `y < x` are one term; `x >= y` is no negation of `x < y`, for neither holds where a value is not a number.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

from opsmith.compiler.algebra.canon import Canon, Unreadable, op_name, rule, shape_of
from opsmith.compiler.algebra.terms import Poly, Space, broadcast


def larger(s: Space, a: Poly, b: Poly) -> Poly:
    """The larger of two values, whichever comes first."""
    if a is b:
        return a
    if a.constant is not None and b.constant is not None:
        return a if a.constant > b.constant else b
    first, second = sorted((a, b), key=lambda p: p.uid)
    return s.fn("larger", (first, second), broadcast((a.shape, b.shape)))


def smaller(s: Space, a: Poly, b: Poly) -> Poly:
    """The smaller of two values."""
    return s.scale(larger(s, s.scale(a, -1), s.scale(b, -1)), -1)


def clamp(s: Space, x: Poly, low: Poly | None, high: Poly | None) -> Poly:
    """A value held between two others."""
    if low is not None:
        x = larger(s, x, low)
    return x if high is None else smaller(s, x, high)


def compared(s: Space, name: str, a: Poly, b: Poly) -> Poly:
    """Whether a - b is `above` zero, `at_least` zero, or `equal` to it; whatever positive number it is scaled by."""
    difference = s.add(a, b, -1)
    content = max((abs(c) for m, c in difference.terms if m is not s.one), default=1.0)
    return s.fn(name, (s.scale(difference, 1.0 / content),), broadcast((a.shape, b.shape)))


def chosen(s: Space, condition: Poly, a: Poly, b: Poly) -> Poly:
    """a where the condition holds, else b."""
    if a is b:
        return a
    atom = condition.atom
    if atom is not None and atom.name == "not":
        return chosen(s, atom.args[0], b, a)
    return s.fn("where", (condition, a, b), broadcast((condition.shape, a.shape, b.shape)))


def boolean_mask(c: Canon, keep: Any, inverted: bool, fill: float) -> Poly:
    """What is added to scores to mask them: zero where kept, `fill` elsewhere; -inf is a boolean mask."""
    s, shape = c.space, shape_of(keep)
    mask = negated(c, keep) if inverted else c(keep)
    return s.fn("keep", (mask,), shape) if fill == -math.inf else s.fn("fill", (mask,), shape, (fill,))


def negated(c: Canon, condition: Any) -> Poly:
    """The opposite of a condition."""
    value = c(condition)
    if value.atom is not None and value.atom.name == "not":
        return value.atom.args[0]
    return c.space.fn("not", (value,), shape_of(condition))


@rule("masked_fill")
def _masked_fill(c: Canon, node: Node, self: Any, mask: Any, value: Any) -> Poly:
    fill = c(value)
    if fill.constant is not None and fill.constant <= -1e4:
        return c.space.add(c(self), boolean_mask(c, mask, True, fill.constant))
    return chosen(c.space, c(mask), fill, c(self))


@rule("where")
def _where(c: Canon, node: Node, condition: Any, self: Any, other: Any) -> Poly:
    kept, filled = c(self), c(other)
    inverted = kept.constant is not None and kept.constant <= -1e4
    if inverted:
        kept, filled = filled, kept
    if filled.constant is None or filled.constant > -1e4:
        return chosen(c.space, c(condition), c(self), c(other))
    return c.space.add(kept, boolean_mask(c, condition, inverted, filled.constant))


@rule("logical_not", "bitwise_not")
def _not(c: Canon, node: Node, self: Any) -> Poly:
    return negated(c, self)


_COMPARED = {"gt": ("above", 1), "lt": ("above", -1), "ge": ("at_least", 1), "le": ("at_least", -1)}


@rule(*_COMPARED)
def _compare(c: Canon, node: Node, self: Any, other: Any) -> Poly:
    _of_floats(self, other)
    name, sign = _COMPARED[op_name(node).removeprefix("aten::")]
    a, b = (c(self), c(other))[::sign]
    return compared(c.space, name, a, b)


@rule("eq", "ne")
def _equal(c: Canon, node: Node, self: Any, other: Any) -> Poly:
    _of_floats(self, other)
    s = c.space
    difference = s.add(c(self), c(other), -1)
    # Either way round it is the same question: so is its square.
    equal = compared(s, "equal", s.mul(difference, difference), s.zero)
    return equal if op_name(node) == "aten::eq" else s.fn("not", (equal,), equal.shape)


def _of_floats(*values: Any) -> None:
    """Integers are counted, not computed with: what compares them is a leaf."""
    for given in (v.meta.get("val") for v in values if isinstance(v, Node)):
        if not isinstance(given, torch.Tensor) or not given.is_floating_point():
            raise Unreadable


@rule("maximum", "minimum")
def _of_two(c: Canon, node: Node, self: Any, other: Any) -> Poly:
    choose = larger if op_name(node) == "aten::maximum" else smaller
    return choose(c.space, c(self), c(other))


@rule("clamp", "clamp_min", "clamp_max", "hardtanh")
def _clamp(c: Canon, node: Node, self: Any, **bounds: Any) -> Poly:
    low, high = (bounds.get(name, bounds.get(f"{name}_val")) for name in ("min", "max"))
    return clamp(c.space, c(self), None if low is None else c(low), None if high is None else c(high))


@rule("relu", "relu6")
def _relu(c: Canon, node: Node, self: Any) -> Poly:
    s = c.space
    return clamp(s, c(self), s.zero, s.const(6) if op_name(node) == "aten::relu6" else None)


@rule("abs")
def _abs(c: Canon, node: Node, self: Any) -> Poly:
    return larger(c.space, c(self), c.space.scale(c(self), -1))


@rule("hardsigmoid", "hardswish")
def _hard(c: Canon, node: Node, self: Any) -> Poly:
    s, x = c.space, c(self)
    gate = s.scale(clamp(s, s.add(x, s.const(3)), s.zero, s.const(6)), 1 / 6)
    return s.mul(x, gate) if op_name(node) == "aten::hardswish" else gate


@rule("leaky_relu")
def _leaky(c: Canon, node: Node, self: Any, negative_slope: Any = 0.01) -> Poly:
    s, x = c.space, c(self)
    return chosen(s, compared(s, "above", x, s.zero), x, s.mul(x, c(negative_slope)))


@rule("elu")
def _elu(c: Canon, node: Node, self: Any, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Poly:
    s, x = c.space, c(self)
    below = s.exp(smaller(s, s.mul(x, c(input_scale)), s.zero))
    below = s.mul(s.mul(s.add(below, s.const(1), -1), c(alpha)), c(scale))
    return chosen(s, compared(s, "above", x, s.zero), s.mul(x, c(scale)), below)
