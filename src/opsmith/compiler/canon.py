"""Graph nodes as terms: what each ATen operator means in the algebra of `terms`.

`Canon` reads a node of a traced graph, and what feeds it, into a polynomial. Where it stops is a leaf: inputs,
weights, integer arithmetic, operators without a rule, and the nodes of `cut`. Casts between floating-point
types, dropout out of training, copies and layout changes that cancel leave no trace.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Node

from opsmith.compiler import views
from opsmith.compiler.terms import Poly, Shape, Space, TooLarge

Rule = Callable[..., Poly]
RULES: dict[str, Rule] = {}

MAX_DEPTH = 28
# An operator that feeds another is a boundary; softmax and matmul are not, for they are parts of attention.
BOUNDARIES = frozenset(
    f"aten::{n}"
    for n in (
        "linear",
        "layer_norm",
        "native_layer_norm",
        "rms_norm",
        "gelu",
        "scaled_dot_product_attention",
        "embedding",
        "addmm",
    )
)


def shape_of(node: Any) -> Shape:
    """The sizes of a node's value, symbolic ones as expressions (comparing those adds no guard)."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    if not isinstance(value, torch.Tensor):
        return ()
    return tuple(dim_of(d) for d in value.shape)


def dim_of(d: Any) -> Any:
    """A size as an int or a sympy expression."""
    if isinstance(d, torch.SymInt):
        expr = d.node.expr
        return int(expr) if expr.is_Integer else expr
    return int(d)


def op_name(node: Node) -> str:
    """`aten::add` for an `aten.add.Tensor` call, else an empty string."""
    return str(node.target._schema.name) if isinstance(node.target, torch._ops.OpOverload) else ""


class Canon:
    """Terms of the nodes of one graph, relative to `cut` (nodes that are leaves whatever they compute)."""

    def __init__(
        self,
        space: Space,
        cut: Mapping[Node, Poly] | None = None,
        root: Node | None = None,
        opaque: frozenset[Node] = frozenset(),
    ):
        self.space = space
        self.root = root
        self.opaque = opaque  # changed in place: not what their formulas say
        self.memo: dict[Node, Poly] = dict(cut or {})
        self.nodes: dict[Poly, list[Node]] = {}
        for node, poly in self.memo.items():
            self.nodes.setdefault(poly, []).append(node)
        self._depth = 0

    def __call__(self, value: Any) -> Poly:
        """The term of a node or of a number."""
        if not isinstance(value, Node):
            if isinstance(value, bool | int | float):
                return self.space.const(float(value))
            return self.space.leaf(value, ())
        if value not in self.memo:
            self._depth += 1
            try:
                self.memo[value] = self._read(value)
            except TooLarge:
                self.memo[value] = self.leaf(value)
            finally:
                self._depth -= 1
            self.nodes.setdefault(self.memo[value], []).append(value)
        return self.memo[value]

    def leaf(self, node: Node) -> Poly:
        """The node as an opaque value."""
        return self.space.leaf(node, shape_of(node))

    def node_of(self, poly: Poly) -> Node | None:
        """The first node known to compute exactly this term."""
        found = self.nodes.get(poly)
        return found[0] if found else None

    def _read(self, node: Node) -> Poly:
        if node.op == "get_attr":
            constant = node.meta.get("constant")
            return self.space.const(constant) if constant is not None else self.leaf(node)
        if node.op != "call_function" or (node in self.opaque and node is not self.root):
            return self.leaf(node)
        if node.target is operator.getitem:
            return self._getitem(node)
        name = op_name(node)
        rule = RULES.get(name)
        if rule is None or self._depth > MAX_DEPTH or (name in BOUNDARIES and node is not self.root):
            return self.leaf(node)
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and not value.is_floating_point() and name not in _BOOLEAN:
            return self.leaf(node)
        try:
            return rule(self, node, **arguments(node))
        except Unreadable:
            return self.leaf(node)

    def _getitem(self, node: Node) -> Poly:
        source, index = node.args[0], node.args[1]
        assert isinstance(source, Node)
        name = op_name(source)
        args = arguments(source) if name else {}
        if name == "aten::max" and index == 0 and "dim" in args:
            return amax(self, source, args["self"], args["dim"], args.get("keepdim", False))
        if name == "aten::var_mean" and last_axis(source, args.get("dim")):
            x, keep = args["self"], args.get("keepdim", False)
            rule = RULES["aten::mean"] if index == 1 else RULES["aten::var"]
            extra = {} if index == 1 else {"correction": args.get("correction")}
            return rule(self, node, self=x, dim=args["dim"], keepdim=keep, **extra)
        if name == "aten::native_layer_norm" and index == 0:
            return RULES["aten::layer_norm"](self, source, **args)
        return self.leaf(node)


class Unreadable(Exception):
    """This call has no meaning in the algebra (another axis, a rounding division): its node is a leaf."""


_BOOLEAN = frozenset({"aten::tril", "aten::triu", "aten::one_hot", "aten::logical_not", "aten::bitwise_not"})


def arguments(node: Node) -> dict[str, Any]:
    """A call's arguments by the names of its schema, defaults included."""
    assert isinstance(node.target, torch._ops.OpOverload)
    schema = node.target._schema
    named = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    named.update(zip((a.name for a in schema.arguments), node.args, strict=False))
    named.update(node.kwargs)
    return named


def last_axis(node: Node, dim: Any) -> bool:
    """True when `dim` names the last axis, alone, of the node's first argument."""
    x = node.args[0]
    rank = len(shape_of(x))
    dims = [dim] if isinstance(dim, int) else dim
    return (
        isinstance(dims, list | tuple)
        and len(dims) == 1
        and isinstance(dims[0], int)
        and dims[0] % max(rank, 1) == rank - 1
    )


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register what an ATen operator means."""

    def decorate(fn: Rule) -> Rule:
        for name in names:
            RULES[f"aten::{name}"] = fn
        return fn

    return decorate


def amax(c: Canon, node: Node, x: Node, dim: Any, keepdim: bool) -> Poly:
    """The maximum along the last axis: an atom that a softmax cancels."""
    if not last_axis(node, dim):
        return c.space.fn("max", (c(x),), shape_of(node), ("dim", str(dim)))
    shape = (*shape_of(x)[:-1], 1)
    result = c.space.fn("max", (c(x),), shape)
    return result if keepdim else views.reshape(c.space, result, shape, shape[:-1])


# --- arithmetic --------------------------------------------------------------------------------------------


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
    "relu": lambda s, x: s.fn("relu", (x,), x.shape),
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


# --- reductions --------------------------------------------------------------------------------------------


def _reduce(c: Canon, node: Node, name: str, x: Any, dim: Any, keepdim: bool) -> Poly:
    if dim is None or not isinstance(x, Node):
        raise Unreadable
    shape = shape_of(x)
    if not last_axis(node if node.target is not operator.getitem else node.args[0], dim):  # type: ignore[arg-type]
        # Another axis: an atom of its own, so that no law for the last axis applies and the report can name it.
        kept = "sum" if any(m.expo for m, _ in c(x).terms) else "mean"
        size = (
            1.0 if kept == name or not isinstance(dim, int) or not isinstance(shape[dim], int) else shape[dim]
        )
        return c.space.scale(c.space.fn(kept, (c(x),), shape_of(node), ("dim", str(dim))), float(size))
    result = c.space.reduce(name, c(x), shape[-1])
    return result if keepdim else views.reshape(c.space, result, (*shape[:-1], 1), shape[:-1])


@rule("mean", "sum")
def _mean(c: Canon, node: Node, self: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Poly:
    name = "sum" if op_name(node) == "aten::sum" else "mean"
    return _reduce(c, node, name, self, dim, keepdim)


@rule("amax")
def _amax(c: Canon, node: Node, self: Any, dim: Any = (), keepdim: bool = False) -> Poly:
    return amax(c, node, self, dim, keepdim)


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
    shape, s = shape_of(self), c.space
    if correction is None:
        correction = 1 if unbiased in (None, True) else 0
    size = shape[-1]
    mean = _reduce(c, node, "mean", self, dim, True)
    squares = s.reduce("mean", s.mul(c(self), c(self)), size)
    result = s.add(squares, s.mul(mean, mean), -1)
    if correction:
        if not isinstance(size, int) or size <= correction:
            raise Unreadable
        result = s.scale(result, size / (size - correction))
    if op_name(node) == "aten::std":
        result = s.power(result, 0.5)
    return result if keepdim else views.reshape(s, result, (*shape[:-1], 1), shape[:-1])


@rule("logsumexp")
def _logsumexp(c: Canon, node: Node, self: Any, dim: Any, keepdim: bool = False) -> Poly:
    if not last_axis(node, dim):
        raise Unreadable
    shape = shape_of(self)
    result = c.space.log(c.space.reduce("sum", c.space.exp(c(self)), shape[-1]))
    return result if keepdim else views.reshape(c.space, result, (*shape[:-1], 1), shape[:-1])


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
    x, s = c(self), c.space
    return s.add(x, s.log(s.reduce("sum", s.exp(x), shape_of(self)[-1])), -1)


@rule("layer_norm", "native_layer_norm")
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


# --- what leaves values as they are ------------------------------------------------------------------------


@rule("dropout")
def _dropout(c: Canon, node: Node, input: Any, p: float, train: bool) -> Poly:
    if train and p != 0:
        raise Unreadable
    return c(input)


@rule("to", "_to_copy", "type_as", "contiguous", "clone", "alias", "detach", "lift_fresh_copy")
def _same(c: Canon, node: Node, self: Any, **_: Any) -> Poly:
    source = self.meta.get("val")
    if not (
        isinstance(source, torch.Tensor) and (source.is_floating_point() or op_name(self) == "aten::one_hot")
    ):
        raise Unreadable
    return c(self)


@rule("one_hot")
def _one_hot(c: Canon, node: Node, self: Any, num_classes: int = -1) -> Poly:
    return c.space.fn("one_hot", (c(self),), shape_of(node))


# --- choices -----------------------------------------------------------------------------------------------


def boolean_mask(c: Canon, keep: Any, inverted: bool, fill: float) -> Poly:
    """What is added to scores to mask them: zero where kept, `fill` elsewhere; -inf is a boolean mask."""
    s, shape = c.space, shape_of(keep)
    mask = c(keep)
    if inverted:
        atom = mask.atom
        mask = atom.args[0] if atom is not None and atom.name == "not" else s.fn("not", (mask,), shape)
    return s.fn("keep", (mask,), shape) if fill == -math.inf else s.fn("fill", (mask,), shape, (fill,))


@rule("masked_fill")
def _masked_fill(c: Canon, node: Node, self: Any, mask: Any, value: Any) -> Poly:
    fill = c(value).constant
    if fill is None or fill > -1e4:
        raise Unreadable
    return c.space.add(c(self), boolean_mask(c, mask, True, fill))


@rule("where")
def _where(c: Canon, node: Node, condition: Any, self: Any, other: Any) -> Poly:
    kept, filled = c(self), c(other)
    inverted = kept.constant is not None and kept.constant <= -1e4
    if inverted:
        kept, filled = filled, kept
    if filled.constant is None or filled.constant > -1e4:
        raise Unreadable
    return c.space.add(kept, boolean_mask(c, condition, inverted, filled.constant))


@rule("logical_not", "bitwise_not")
def _not(c: Canon, node: Node, self: Any) -> Poly:
    atom = c(self).atom
    if atom is not None and atom.name == "not":
        return atom.args[0]
    return c.space.fn("not", (c(self),), shape_of(node))


__all__ = [
    "RULES",
    "Canon",
    "Unreadable",
    "arguments",
    "dim_of",
    "op_name",
    "rule",
    "shape_of",
]
