"""What each ATen operator means in the algebra; see `canon`.

Rules are written as a person would write the operator. One that needs only its arguments' terms is `pointwise`; the
others are given the nodes, whose shapes they ask, and `c`, which reads a node as a term; that of one of several
results also the call, as `source`, and which of them it is, as `index`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from opsmith.compiler.algebra import pieces, views
from opsmith.compiler.algebra.canon import Canon, only, op_name, rule, shape_of, shape_of_value
from opsmith.compiler.algebra.terms import Atom, Dim, Poly, Shape, Space

Value = Poly | float
Pointwise = Callable[..., Poly]  # of the space, and of the operator's arguments in their order
# For a loss that ignores nothing: a class number that nothing has.
_NONE_IGNORED = -(2**63)
# In the place of a score this or less is believed to hide it: the others are far above.
HIDES = -1e4
# What bounds a root below is believed to keep a zero from dividing, as it does under the root.
TINY = 1e-8
_MORE_AXES = ("aten::unsqueeze", "aten::view", "aten::reshape")


def pointwise(*names: str) -> Callable[[Pointwise], Pointwise]:
    """Register an operator, and the one in place, by its arguments' terms; real numbers are given as they are."""

    def decorate(fn: Pointwise) -> Pointwise:
        def apply(c: Canon, node: Node, **given: Any) -> Poly:
            return fn(c.space, *[c(v) if isinstance(v, Node | complex) else v for v in given.values()])

        rule(*names, *(f"{name}_" for name in names))(apply)
        return fn

    return decorate


def larger(s: Space, a: Value, b: Value) -> Poly:
    """The larger of two values, whichever comes first.

    One function stands for all choices by size: the smaller of two values is minus the larger of their negatives, an
    absolute value the larger of a value and its negative, a clamp both.
    """
    a, b = s.of(a), s.of(b)
    if a is b:
        return a
    if a.constant is not None and b.constant is not None:
        return a if a.constant > b.constant else b
    return s.fn("larger", *sorted((a, b), key=lambda p: p.uid))


def unbounded(term: Poly) -> Poly:
    """A term whose roots have what bounds them below, and is tiny, under themselves."""

    def of(atom: Atom) -> Poly:
        for x, bound in (atom.args, atom.args[::-1]) if atom.name == "larger" and atom.leaf is None else ():
            roots = [m for m, c in x.terms if c > 0 and not m.expo and all(p % 1 for _, p in m.factors)]
            if 0 < (bound.constant or 0) <= TINY and len(roots) == len(x.terms) == 1:
                return (x * x + bound * bound) ** 0.5
        return term.space.from_atom(atom)

    return term.space.rebuilt(term, of, lambda exponent: exponent)


def smaller(s: Space, a: Value, b: Value) -> Poly:
    return -larger(s, -a, -b)


def clamp(s: Space, x: Poly, low: Value | None = None, high: Value | None = None) -> Poly:
    x = x if low is None else larger(s, x, low)
    return x if high is None else smaller(s, x, high)


def compared(s: Space, name: str, difference: Poly) -> Poly:
    """Whether a difference is `above` zero, `at_least` zero, or `equal` to it; whatever positive number scales it.

    So `x > y` and `y < x` are one term; `x >= y` is no negation of `x < y`, for neither holds where a value is not a
    number.
    """
    content = max((abs(c) for m, c in difference.terms if m is not s.one), default=1.0)
    return s.fn(name, difference * (1.0 / content))


def chosen(s: Space, condition: Poly, a: Value, b: Value) -> Poly:
    a, b = s.of(a), s.of(b)
    if a is b:
        return a
    atom = condition.atom
    if atom is not None and atom.name == "not":
        return chosen(s, atom.args[0], b, a)
    return s.fn("where", condition, a, b)


def negated(s: Space, condition: Poly) -> Poly:
    atom = condition.atom
    return atom.args[0] if atom is not None and atom.name == "not" else s.fn("not", condition)


def is_truth(value: Poly) -> bool:
    """Whether it is one where something holds and zero elsewhere, in whatever type."""
    return value.atom is not None and value.atom.name in ("causal", "not")


def _normal_cdf(s: Space, x: Poly) -> Poly:
    return (1 + s.erf(x * math.sqrt(0.5))) * 0.5


_POINTWISE: dict[str, Pointwise] = {  # names, and their rule
    "add": lambda s, x, y, alpha: x + y * alpha,
    "sub": lambda s, x, y, alpha: x - y * alpha,
    "rsub": lambda s, x, y, alpha: y - x * alpha,
    # Zero times infinity is no zero.
    "mul": lambda s, x, y: p if (p := x * y).terms or not x.terms else s.fn("mul", x, s.of(y)),
    "addcmul": lambda s, x, a, b, value: x + a * b * value,
    "ones_like": lambda s, x, *_: s.const(1),
    "zeros zeros_like new_zeros": lambda s, *_: s.zero,
    "neg": lambda s, x: -x,
    "square": lambda s, x: x * x,
    "sqrt": lambda s, x: x**0.5,
    "rsqrt": lambda s, x: x**-0.5,
    "reciprocal": lambda s, x: x**-1,
    "exp": lambda s, x: s.exp(x),
    "log": lambda s, x: s.log(x),
    "tanh": lambda s, x: s.tanh(x),
    "sigmoid": lambda s, x: s.sigmoid(x),
    "erf special_erf": lambda s, x: s.erf(x),
    "erfc special_erfc": lambda s, x: 1 - s.erf(x),
    "special_ndtr": _normal_cdf,
    "silu": lambda s, x: x * s.sigmoid(x),
    "cos": lambda s, x: s.fn("cos", x),
    "sin": lambda s, x: s.fn("sin", x),
    "expm1": lambda s, x: s.exp(x) - 1,
    "log1p": lambda s, x: s.log(1 + x),
    "maximum": larger,
    "minimum": smaller,
    "clamp clamp_min hardtanh": clamp,
    "clamp_max": lambda s, x, high: clamp(s, x, high=high),
    "relu": lambda s, x: larger(s, x, 0),
    "relu6": lambda s, x: clamp(s, x, 0, 6),
    "abs": lambda s, x: larger(s, x, -x),
    "hardsigmoid": lambda s, x: clamp(s, x + 3, 0, 6) / 6,
    "hardswish": lambda s, x: x * clamp(s, x + 3, 0, 6) / 6,
    "leaky_relu": lambda s, x, slope: chosen(s, compared(s, "above", x), x, x * slope),
    "complex": lambda s, real, imag: real + s.i * imag,
    "polar": lambda s, size, angle: size * (s.fn("cos", angle) + s.i * s.fn("sin", angle)),
    "logical_not bitwise_not": negated,
    "real": lambda s, x: pieces.parts(x)[0],
    "imag": lambda s, x: pieces.parts(x)[1],
}
for _names, _fn in _POINTWISE.items():
    pointwise(*_names.split())(_fn)


@pointwise("div")
def _div(s: Space, x: Poly, y: Value, rounding_mode: Any = None) -> Poly:
    only(rounding_mode is None)
    return x / y


@pointwise("pow")
def _pow(s: Space, x: Value, exponent: Any) -> Poly:
    only(not isinstance(exponent, Poly))
    return s.power(s.of(x), exponent)


@pointwise("gelu")
def _gelu(s: Space, x: Poly, approximate: str) -> Poly:
    if approximate == "none":
        return x * _normal_cdf(s, x)
    return x * s.sigmoid((x + x**3 * 0.044715) * (2 * math.sqrt(2 / math.pi)))


@pointwise("elu")
def _elu(s: Space, x: Poly, alpha: Value, scale: Value, input_scale: Value) -> Poly:
    below = s.exp(smaller(s, x * input_scale, 0)) - 1
    return chosen(s, compared(s, "above", x), x * scale, below * alpha * scale)


@pointwise("dropout")
def _dropout(s: Space, x: Poly, p: float, train: bool) -> Poly:
    only(not train or p == 0)
    return x


@rule("to", "_to_copy", "type_as", "contiguous", "clone", "alias", "detach", "lift_fresh_copy")
def _same(c: Canon, node: Node, self: Any, **_: Any) -> Poly:
    source, dtype = self.meta.get("val"), node.meta["val"].dtype
    only(isinstance(source, Tensor) and source.is_complex() == dtype.is_complex)
    numbers = all(d.is_floating_point or d.is_complex for d in (source.dtype, dtype))
    only(numbers or op_name(self) == "aten::one_hot" or is_truth(c(self)))
    if "cast" in c.keeps and torch.promote_types(source.dtype, dtype) != dtype:
        return c.space.fn("rounded", c(self), shape=shape_of(node), attrs=(str(dtype),))
    return c(self)


@rule("full", "scalar_tensor")
def _full(c: Canon, node: Node, **given: Any) -> Poly:
    value: Any = given.get("fill_value", given.get("s"))
    only(not shape_of(node) and isinstance(value, int | float))  # a number by itself, as GPT-2 has its scale
    return c.space.const(float(value))


@rule("one_hot")
def _one_hot(c: Canon, node: Node, self: Any, num_classes: int) -> Poly:
    return c.space.fn("one_hot", c(self), shape=shape_of(node))


def hidden(s: Space, keep: Poly, shape: Shape, fill: float) -> Poly:
    """What is added to scores to hide them: zero where kept, `fill` elsewhere; -inf is a boolean mask."""
    name, attrs = ("keep", ()) if fill == -math.inf else ("fill", (fill,))
    return s.fn(name, keep, shape=shape, attrs=attrs)


@rule("where")
def _where(c: Canon, node: Node, condition: Any, self: Any, other: Any) -> Poly:
    a, b, holds = c(self), c(other), c(condition)
    for kept, fill, keep in ((b, a.constant, negated(c.space, holds)), (a, b.constant, holds)):
        if fill is not None and fill <= HIDES:
            return kept + hidden(c.space, keep, shape_of(condition), fill)
        if fill == 0 and (shown := _shown(c.space, kept, keep, shape_of(node)[-1])) is not None:
            return shown
    return chosen(c.space, holds, a, b)


def _shown(s: Space, weights: Poly, keep: Poly, size: Dim) -> Poly | None:
    """The softmax of scores that a mask hides some of, where zeros took these places.

    A row that is hidden wholly is zeros, as under a boolean mask; so whatever hid the others, it is one.
    """
    scores = weights.terms[0][0].expo if len(weights.terms) == 1 else None
    if scores is None or weights is not softmax(s, scores, size):
        return None
    for mono, times in scores.terms:
        mask = mono.atom
        if mask is not None and times == 1 and mask.name in ("keep", "fill") and mask.args[0] is keep:
            boolean = hidden(s, keep, mask.shape, -math.inf)
            return softmax(s, scores - s.from_atom(mask) + boolean, size)
    return None


@rule("masked_fill")
def _masked_fill(c: Canon, node: Node, self: Any, mask: Any, value: Any) -> Poly:
    return _where(c, node, mask, value, self)


_COMPARED = {"gt": ("above", 1), "lt": ("above", -1), "ge": ("at_least", 1), "le": ("at_least", -1)}


@rule("eq", "ne", *_COMPARED)
def _compare(c: Canon, node: Node, self: Any, other: Any) -> Poly:
    name = op_name(node).removeprefix("aten::")
    asked = (name, other) == ("gt", 0) or (name in ("eq", "ne") and other in (0, 1))
    if asked and is_truth(c(self)):
        return c(self) if (name == "eq") == (other == 1) else negated(c.space, c(self))
    for given in (v.meta.get("val") for v in (self, other) if isinstance(v, Node)):
        only(isinstance(given, Tensor) and given.is_floating_point())  # integers are only counted
    difference = c(self) - c(other)
    if name in _COMPARED:
        what, sign = _COMPARED[name]
        return compared(c.space, what, difference * sign)
    # Either way round it is the same question: so is its square.
    equal = compared(c.space, "equal", difference * difference)
    return equal if name == "eq" else negated(c.space, equal)


def _is_last(x: Any, dim: Any) -> bool:
    """True when `dim` names the last axis of x, alone."""
    axes, last = [dim] if isinstance(dim, int) else dim, len(shape_of(x)) - 1
    return last >= 0 and isinstance(axes, list | tuple) and list(axes) in ([-1], [last])


def _reduced(c: Canon, x: Any, dim: Any, keepdim: bool, of: Callable[[Poly, Dim], Poly]) -> Poly:
    """What a function of terms and the last axis's size makes of x, with that axis or without."""
    only(_is_last(x, dim))
    rows = shape_of(x)[:-1]
    result = of(c(x), shape_of(x)[-1])
    return result if keepdim else views.reshape(result, (*rows, 1), rows)


@rule("amax", "amin", "max[]", "min[]")
def _extreme(
    c: Canon, node: Node, self: Any, dim: Any, keepdim: bool, source: Node | None = None, index: int = 0
) -> Poly:
    """The maximum along the last axis is an atom that a softmax cancels; the minimum is minus that of the negative."""
    only(index == 0)
    sign = -1 if op_name(source or node) in ("aten::amin", "aten::min") else 1
    if not _is_last(self, dim):
        return c.space.fn("max", c(self) * sign, shape=shape_of(node), attrs=("dim", str(dim))) * sign
    shape = (*shape_of(self)[:-1], 1)
    return _reduced(c, self, dim, keepdim, lambda x, _: c.space.fn("max", x * sign, shape=shape) * sign)


@rule("mean", "sum")
def _mean(c: Canon, node: Node, self: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Poly:
    s, name = c.space, op_name(node).removeprefix("aten::")
    only(dim is not None and isinstance(self, Node))
    if _is_last(self, dim):
        written = "sum" in c.keeps
        return _reduced(c, self, dim, keepdim, lambda x, n: s.reduce(name, x, n, as_written=written))
    # Another axis: an atom of its own, so that no law for the last axis applies and the report can name it.
    return s.fn(name, c(self), shape=shape_of(node), attrs=("dim", str(dim)))


@rule("linalg_vector_norm")
def _length(c: Canon, node: Node, self: Any, ord: Any, dim: Any, keepdim: bool, **_: Any) -> Poly:
    only(ord == 2)
    s, written = c.space, "sum" in c.keeps
    return _reduced(c, self, dim, keepdim, lambda x, n: s.reduce("sum", x * x, n, as_written=written) ** 0.5)


def _variance(s: Space, x: Poly, size: Dim) -> Poly:
    return s.reduce("mean", x * x, size) - s.reduce("mean", x, size) ** 2


@rule("var", "std")
def _var(c: Canon, node: Node, self: Any, dim: Any = None, keepdim: bool = False, **how: Any) -> Poly:
    if (correction := how.get("correction")) is None:
        correction = 1 if how.get("unbiased") in (None, True) else 0

    def spread(x: Poly, size: Dim) -> Poly:
        only(not correction or (isinstance(size, int) and size > correction))
        variance = _variance(c.space, x, size) * (size / (size - correction) if correction else 1)
        return variance**0.5 if op_name(node) == "aten::std" else variance

    return _reduced(c, self, dim, keepdim, spread)


@rule("var_mean[]")
def _var_mean(
    c: Canon, node: Node, index: int, self: Any, keepdim: bool = False, dim: Any = None, **how: Any
) -> Poly:
    if index == 0:
        return _var(c, node, self, dim, keepdim=keepdim, **how)
    return _reduced(c, self, dim, keepdim, lambda x, size: c.space.reduce("mean", x, size))


@rule("logsumexp")
def _logsumexp(c: Canon, node: Node, self: Any, dim: Any, keepdim: bool) -> Poly:
    s = c.space
    return _reduced(c, self, dim, keepdim, lambda x, size: s.log(s.reduce("sum", s.exp(x), size)))


@rule("softmax", "_softmax", "_safe_softmax")
def _softmax(c: Canon, node: Node, self: Any, dim: Any, **_: Any) -> Poly:
    shape = shape_of(self)
    axes = list(range(len(shape)))
    axes[dim], axes[-1] = axes[-1], axes[dim]  # another axis is the last one of a permutation
    scores = views.permute(c(self), tuple(axes))
    return views.permute(softmax(c.space, scores, shape[dim]), tuple(axes))


def softmax(s: Space, x: Poly, size: Dim) -> Poly:
    atom = x.atom
    if atom is not None and atom.name == "reshape" and atom.shape[-1:] == atom.args[0].shape[-1:]:
        inner = atom.args[0]  # the rows of a softmax may be viewed in any way
        return views.reshape(softmax(s, inner, size), inner.shape, atom.shape)
    return s.exp(x) / s.reduce("sum", s.exp(x), size)


@rule("log_softmax", "_log_softmax")
def _log_softmax(c: Canon, node: Node, self: Any, dim: Any, **_: Any) -> Poly:
    return _reduced(c, self, dim, True, lambda x, size: log_softmax(c.space, x, size))


def log_softmax(s: Space, x: Poly, size: Dim) -> Poly:
    return x - s.log(s.reduce("sum", s.exp(x), size))


def _affine(c: Canon, x: Poly, weight: Any, bias: Any = None) -> Poly:
    x = x if weight is None else x * c(weight)
    return x if bias is None else x + c(bias)


@rule("layer_norm", "native_layer_norm[]")
def _layer_norm(
    c: Canon, node: Node, input: Any, normalized_shape: Any, weight: Any, bias: Any, eps: float, **which: Any
) -> Poly:
    only(len(normalized_shape) == 1 and which.get("index", 0) == 0)
    x, s, size = c(input), c.space, shape_of(input)[-1]
    y = (x - s.reduce("mean", x, size)) * (_variance(s, x, size) + eps) ** -0.5
    return _affine(c, y, weight, bias)


@rule("rms_norm")
def _rms_norm(
    c: Canon, node: Node, input: Any, normalized_shape: Any, weight: Any, eps: float | None
) -> Poly:
    only(len(normalized_shape) == 1)
    x = c(input)
    if eps is None:  # PyTorch takes that of the type it computes in
        eps = torch.finfo(torch.promote_types(input.meta["val"].dtype, torch.float32)).eps
    y = x * (c.space.reduce("mean", x * x, shape_of(input)[-1]) + eps) ** -0.5
    return _affine(c, y, weight)


@rule("cross_entropy_loss", "nll_loss", "nll_loss_nd")
def _loss(c: Canon, node: Node, self: Any, target: Any, weight: Any, **settings: Any) -> Poly:
    """The loss of class numbers under scores, or under logarithms of probabilities, with its settings."""
    ids, shape = target.meta["val"], shape_of(self)
    only(weight is None and len(shape) == ids.dim() + 1 <= 2 and not ids.is_floating_point())
    settings.setdefault("label_smoothing", 0.0)
    only(all(isinstance(v, int | float) for v in settings.values()))
    scores = c(self)
    if op_name(node) == "aten::cross_entropy_loss":
        scores = log_softmax(c.space, scores, shape[-1])
    return c.space.fn("nll", scores, c(target), shape=shape_of(node), attrs=tuple(settings.values()))


@rule("gather")
def _gather(c: Canon, node: Node, self: Any, dim: int, index: Any, **_: Any) -> Poly:
    """One score of each row, by its class number: a loss without a sign, where the scores are logarithms."""
    rows = shape_of(self)[:-1]
    ids = index.args[0] if op_name(index) in _MORE_AXES else None
    only(_is_last(self, dim) and shape_of(index) == (*rows, 1) and shape_of(ids) == rows)
    losses = c.space.fn("nll", c(self), c(ids), shape=rows, attrs=(0, _NONE_IGNORED, 0.0))
    return views.reshape(-losses, rows, (*rows, 1))


@rule("matmul", "mm", "bmm")
def _matmul(c: Canon, node: Node, self: Any, **right: Any) -> Poly:
    (other,) = right.values()  # which has one name or another
    only(len(shape_of(self)) > 1 and len(shape_of(other)) > 1)
    return product(c, self, other, shape_of(node))


def product(c: Canon, a: Any, b: Any, shape: Shape) -> Poly:
    """a @ b. A left operand whose leading dimensions are folded, and can't be unfolded inside, is unfolded outside."""
    s, left, right = c.space, c(a), c(b)
    atom = left.atom
    if atom is not None and atom.name == "reshape" and len(atom.args[0].terms) and atom.args[0].atom is None:
        inner = atom.args[0]
        full = inner.shape
        if len(full) > len(atom.shape) and full[-1] == atom.shape[-1]:
            old = shape_of(b)
            unfolded = views.reshape(right, old, (*full[:-2], *old[-2:]))
            wide = (*full[:-1], shape[-1])
            return views.reshape(s.matmul(inner, unfolded, wide), wide, shape)
    return s.matmul(left, right, shape)


@rule("addmm", "baddbmm")
def _addmm(c: Canon, node: Node, self: Any, beta: Any, alpha: Any, **matrices: Any) -> Poly:
    only(isinstance(alpha, int | float) and isinstance(beta, int | float))
    a, b = matrices.values()  # one matrix each, or a batch of them
    result: Poly = product(c, a, b, shape_of(node)) * alpha
    return result if beta == 0 else result + c(self) * beta


@rule("linear")
def _linear(c: Canon, node: Node, input: Any, weight: Any, bias: Any) -> Poly:
    result = c.space.matmul(c(input), views.permute(c(weight), (1, 0)), shape_of(node))
    return result if bias is None else result + c(bias)


@rule("einsum")
def _einsum(c: Canon, node: Node, equation: str, tensors: Any, path: Any) -> Poly:
    """A contraction of two operands: permuted, and several axes as one, to a batched matmul, and back."""
    inputs, _, output = equation.replace(" ", "").partition("->")
    parts = inputs.split(",")
    only(len(parts) == 2 and output)
    # Each `...` is spelled out with capital letters, aligned to the right as broadcasting does.
    more = [len(shape_of(t)) - len(p.replace("...", "")) for p, t in zip(parts, tensors, strict=True)]
    spelled = zip((*parts, output), (*more, max(more)), strict=True)
    left, right, output = (p.replace("...", "ABCDEFGH"[8 - n :]) for p, n in spelled)
    only(all(len(set(p)) == len(p) for p in (left, right, output)))
    batch = [i for i in left if i in right and i in output]
    inner = [i for i in left if i in right and i not in output]
    rows = [i for i in left if i not in right and i in output]
    cols = [i for i in right if i not in left and i in output]
    order = batch + rows + cols
    only(inner and rows and cols and {*left, *right} == {*order, *inner} and len(output) == len(order))
    shapes = [shape_of(t) for t in (*tensors, node)]
    sizes = dict(zip(left + right + output, itertools.chain(*shapes), strict=True))
    outer, many, deep, wide = ([sizes[i] for i in axes] for axes in (batch, rows, inner, cols))
    a = views.permute_rows(c(tensors[0]), tuple(left.index(i) for i in batch + rows + inner))
    a = views.reshape(a, (*outer, *many, *deep), (*outer, *many, math.prod(deep)))
    b = views.permute(c(tensors[1]), tuple(right.index(i) for i in batch + inner + cols))
    # Batches may share their matrices: one head of keys for all of the queries.
    alike = (1,) * (len(rows) - 1) if batch else ()
    b = views.reshape(b, (*outer, *deep, *wide), (*outer, *alike, math.prod(deep), math.prod(wide)))
    made = c.space.matmul(a, b, whole := (*outer, *many, math.prod(wide)))
    made = views.reshape(made, whole, (*outer, *many, *wide))
    return views.permute(made, tuple(order.index(i) for i in output))


@rule("scaled_dot_product_attention")
def _sdpa(c: Canon, node: Node, query: Any, key: Any, value: Any, attn_mask: Any, **how: Any) -> Poly:
    q, k, v = shape_of(query), shape_of(key), shape_of(value)
    only(how["dropout_p"] == 0 and len(q) == len(k))
    if (scale := how["scale"]) is None:
        only(isinstance(q[-1], int))
        scale = q[-1] ** -0.5
    # Fewer heads of keys serve groups of queries where that is asked for; a single one is broadcast anyway.
    only(len(q) <= 3 or k[-3] in (q[-3], 1) or how["enable_gqa"])
    s, square = c.space, (q[-2], k[-2])
    scores = s.matmul(c(query), views.transpose(c(key), len(k)), (*q[:-1], k[-2])) * float(scale)
    if how["is_causal"]:
        # PyTorch aligns a rectangle to its upper left corner; only a square means what `causal` means here.
        causal = s.fn("causal" if q[-2] == k[-2] else "upper_left", shape=square)
        scores += s.fn("keep", causal, shape=square)
    if attn_mask is not None:
        boolean = not attn_mask.meta["val"].is_floating_point()
        mask = c(attn_mask)
        scores += hidden(s, mask, shape_of(attn_mask), -math.inf) if boolean else mask
    return s.matmul(softmax(s, scores, k[-2]), c(value), (*q[:-1], v[-1]))


@rule("tril", "triu")
def _triangle(c: Canon, node: Node, self: Any, diagonal: int) -> Poly:
    """A square of ones, or above the diagonal of minus infinity, as what a causal mask keeps or hides."""
    upper, square = op_name(node) == "aten::triu", shape_of(node)[-2:]
    only(diagonal == upper and len(square) == 2 and square[0] == square[1] and isinstance(self, Node))
    fill: Any = self.args[1] if op_name(self) == "aten::full" else None
    causal = c.space.fn("causal", shape=square)
    if fill == 1 or op_name(self) in ("aten::ones", "aten::ones_like", "aten::new_ones"):
        return c.space.fn("not", causal) if upper else causal
    only(upper and isinstance(fill, float) and fill <= HIDES)
    return hidden(c.space, causal, square, fill)


@rule("embedding")
def _embedding(
    c: Canon, node: Node, weight: Any, indices: Any, padding_idx: int, scale_grad_by_freq: bool, sparse: bool
) -> Poly:
    only(not (scale_grad_by_freq or sparse))
    padding = (padding_idx,) if padding_idx >= 0 else ()  # a row without a gradient
    return c.space.fn("gather", c(weight), c(indices), shape=shape_of(node), attrs=padding)


@rule("index")
def _index(c: Canon, node: Node, self: Any, indices: Any) -> Poly:
    ids = indices[0]
    only(len(indices) == 1 and isinstance(ids, Node) and len(shape_of(self)) == 2)
    only(ids.meta["val"].dtype not in (torch.bool, torch.uint8))
    return c.space.fn("gather", c(self), c(ids), shape=shape_of(node))


@rule("index_select")
def _index_select(c: Canon, node: Node, self: Any, dim: int, index: Any) -> Poly:
    only(dim == 0 and len(shape_of(self)) == 2 and len(shape_of(index)) == 1)
    source = index
    while op_name(source) in ("aten::view", "aten::reshape", "aten::flatten"):
        source = source.args[0]
    ids = views.reshape(c(source), shape_of(source), shape_of(index))
    c.nodes.setdefault(ids, []).append(index)
    return c.space.fn("gather", c(self), ids, shape=shape_of(node))


@rule("view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "flatten", "unflatten")
def _reshape(c: Canon, node: Node, self: Any, **_: Any) -> Poly:
    x, before, after = c(self), shape_of(self), shape_of(node)
    if len(before) > 1 and after[-1:] == (before[-2] * before[-1],) != before[-1:]:
        *rows, count, size = before
        # An axis of copies and the last one, or the last one and copies of each element, become one.
        source = x.atom.args[0] if x.atom is not None and x.atom.name == "expand" else x
        for axis, kind, n, each in ((-1, "zip", size, count), (-2, "cat", count, size)):
            if isinstance(n, int) and len(source.shape) == len(before) and source.shape[axis] == 1:
                part = views.reshape(source, source.shape, (*rows, each))
                x, before = pieces.join(kind, [part] * n, (each,) * n, (*rows, n * each)), (*rows, n * each)
                break
    return views.reshape(x, before, after)


@rule("transpose", "t", "numpy_T", "mT", "adjoint")
def _transpose(c: Canon, node: Node, self: Any, dim0: int = -2, dim1: int = -1) -> Poly:
    perm = list(range(len(shape_of(self))))
    only(len(perm) == 2 or (len(perm) > 2 and op_name(node) != "aten::numpy_T"))
    perm[dim0], perm[dim1] = perm[dim1], perm[dim0]
    return views.permute(c(self), tuple(perm))


@rule("permute")
def _permute(c: Canon, node: Node, self: Any, dims: Any) -> Poly:
    rank = len(shape_of(self))
    return views.permute(c(self), tuple(int(d) % rank for d in dims))


@rule("expand", "expand_as", "broadcast_to")
def _expand(c: Canon, node: Node, self: Any, **_: Any) -> Poly:
    before, after = shape_of(self), shape_of(node)
    if before == after or (before[:-1] == after[:-1] and before[-1:] == (1,)):
        return c(self)  # what has one value for a row has it for every element
    return c.space.fn("expand", c(self), shape=after, attrs=(after,))


def _along_last(x: Any, dim: Any) -> int:
    """The size of the last axis, if that is the one meant."""
    only(_is_last(x, dim) and isinstance(shape_of(x)[-1], int))
    return int(shape_of(x)[-1])


@rule("slice")
def _slice(c: Canon, node: Node, self: Any, dim: int, start: Any, end: Any, step: Any = 1) -> Poly:
    whole = shape_of(self)[-1] if _is_last(self, dim) else 0
    if not isinstance(whole, int) and start in (None, 0) and isinstance(end, int) and end < 0 and step == 1:
        return pieces.take(c(self), ("block", 0, whole + end), whole)
    size = _along_last(self, dim)
    only(all(v is None or isinstance(v, int) for v in (start, end, step)))
    first, stop, step = slice(start, end, step).indices(size)
    if step == 1:
        return pieces.take(c(self), ("block", first, max(stop - first, 0)), size)
    only(stop >= size and first < step)
    return pieces.take(c(self), ("turn", first, step), size)


@rule("narrow")
def _narrow(c: Canon, node: Node, self: Any, dim: int, start: Any, length: Any) -> Poly:
    size = _along_last(self, dim)
    only(isinstance(start, int) and isinstance(length, int))
    first = start % size if size else 0
    return _slice(c, node, self, dim, first, first + length)


@rule("split[]", "split_with_sizes[]", "chunk[]")
def _split(c: Canon, node: Node, source: Node, index: int, self: Any, dim: int, **_: Any) -> Poly:
    _along_last(self, dim)
    lengths = [shape_of_value(v)[-1] for v in source.meta["val"]]
    only(all(isinstance(n, int) for n in lengths))
    return _slice(c, node, self, dim, sum(lengths[:index]), sum(lengths[: index + 1]))


@rule("cat", "concat", "concatenate")
def _cat(c: Canon, node: Node, tensors: Any, dim: int) -> Poly:
    only(_is_last(node, dim))
    sizes = tuple(shape_of(t)[-1] for t in tensors)
    return pieces.join("cat", [c(t) for t in tensors], sizes, shape_of(node))


@rule("stack")
def _stack(c: Canon, node: Node, tensors: Any, dim: int) -> Poly:
    """Pairs in a new last axis, or halves in a new axis before it: what is joined, seen with one axis more."""
    rank = len(shape_of(node))
    only(rank > 1 and dim % rank >= rank - 2)
    return _stacked(c, node, [c(t) for t in tensors], "zip" if dim % rank == rank - 1 else "cat")


def _stacked(c: Canon, node: Node, parts: list[Poly], kind: str) -> Poly:
    *rows, count, size = shape_of(node)
    if kind == "zip":
        count, size = size, count
    whole = (*rows, count * size)
    joined = pieces.join(kind, parts, (size,) * count, whole)
    return views.reshape(joined, whole, shape_of(node))


@rule("repeat_interleave")
def _repeat_interleave(c: Canon, node: Node, self: Any, repeats: Any, dim: Any = None, **_: Any) -> Poly:
    size = _along_last(self, dim)
    only(isinstance(repeats, int))
    return pieces.join("zip", [c(self)] * repeats, (size,) * repeats, shape_of(node))


@rule("repeat", "tile")
def _repeat(c: Canon, node: Node, self: Any, **times: Any) -> Poly:
    *others, last = next(iter(times.values()))  # `repeats` or `dims`
    size = _along_last(self, -1)
    only(len(others) < len(shape_of(self)) and all(n == 1 for n in others) and isinstance(last, int))
    return pieces.join("cat", [c(self)] * last, (size,) * last, shape_of(node))


@rule("select", "unbind[]")
def _component(c: Canon, node: Node, self: Any, dim: int, index: int, **_: Any) -> Poly:
    shape = shape_of(self)
    only(isinstance(index, int))
    at = (dim % len(shape), index)
    if (found := pieces.components(c(self), shape, at[0])) is not None:
        return found[index]
    # One that no law takes apart; twice the same is one term all the same.
    return c.space.fn("select", c(self), shape=(*shape[: at[0]], *shape[at[0] + 1 :]), attrs=at)


@rule("view_as_complex")
def _view_as_complex(c: Canon, node: Node, self: Any) -> Poly:
    real, imag = (_component(c, node, self, -1, i) for i in (0, 1))
    return real + c.space.i * imag


@rule("view_as_real")
def _view_as_real(c: Canon, node: Node, self: Any) -> Poly:
    return _stacked(c, node, list(pieces.parts(c(self))), "zip")
