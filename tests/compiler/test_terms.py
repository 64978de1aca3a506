"""The algebra: what is equal on paper has one normal form, and what has one normal form is equal in numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings, strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from opsmith.compiler.algebra import (
    rules as _rules,  # noqa: F401  registers them
    views,
)
from opsmith.compiler.algebra.canon import Canon
from opsmith.compiler.algebra.terms import MAX_MONOMIALS, Poly, Space, TooLarge, broadcast, is_row_constant

N = 8
S = Space()
X, Y = S.leaf("x", (4, N)), S.leaf("y", (4, N))
R = S.leaf("r", (4, 1))  # constant along a row
ONE, TWO = S.const(1), S.const(2)


def add(*terms: Poly) -> Poly:
    total = S.zero
    for t in terms:
        total = S.add(total, t)
    return total


def sub(a: Poly, b: Poly) -> Poly:
    return S.add(a, b, -1)


def div(a: Poly, b: Poly) -> Poly:
    return S.mul(a, S.power(b, -1))


def mean(a: Poly) -> Poly:
    return S.reduce("mean", a, N)


def total(a: Poly) -> Poly:
    return S.reduce("sum", a, N)


P, Q = div(ONE, add(X, Y)), div(ONE, add(X, ONE))


EQUAL: dict[str, tuple[Poly, Poly]] = {
    "addition commutes": (add(X, Y, ONE), add(ONE, Y, X)),
    "multiplication distributes": (S.mul(X, add(Y, ONE)), add(S.mul(X, Y), X)),
    "a difference of equals is zero": (sub(X, X), S.zero),
    "powers add": (S.mul(S.power(X, 3), S.power(X, -1)), S.power(X, 2)),
    "roots of powers of exponentials": (S.power(S.exp(X), 0.5), S.exp(S.scale(X, 0.5))),
    "the two formulas of the variance": (
        mean(S.power(sub(X, mean(X)), 2)),
        sub(mean(S.power(X, 2)), S.power(mean(X), 2)),
    ),
    "a sum over n is a mean": (S.scale(total(X), 1 / N), mean(X)),
    "the mean of what is centered is zero": (mean(sub(X, mean(X))), S.zero),
    "a row's constant leaves its mean": (mean(S.mul(R, X)), S.mul(R, mean(X))),
    "the mean of a constant is the constant": (mean(R), R),
    "the sum of a constant is n of it": (total(R), S.scale(R, N)),
    "softmax and safe softmax": (
        div(S.exp(sub(X, R)), total(S.exp(sub(X, R)))),
        div(S.exp(X), total(S.exp(X))),
    ),
    "softmax and the exponential of log-softmax": (
        S.exp(sub(X, S.log(total(S.exp(X))))),
        div(S.exp(X), total(S.exp(X))),
    ),
    "log undoes exp": (S.log(S.exp(X)), X),
    "exp undoes log": (S.exp(S.log(X)), X),
    "exp of a sum": (S.exp(add(X, Y)), S.mul(S.exp(X), S.exp(Y))),
    "exp of a constant": (S.exp(add(X, TWO)), S.scale(S.exp(X), math.e**2)),
    "sigmoid by its definition": (S.sigmoid(X), S.power(add(ONE, S.exp(S.scale(X, -1))), -1)),
    "tanh by sigmoid": (S.tanh(X), sub(S.scale(S.sigmoid(S.scale(X, 2)), 2), ONE)),
    "the two forms of the tanh-GELU": (
        S.mul(S.scale(X, 0.5), add(ONE, S.tanh(Y))),
        S.mul(X, S.sigmoid(S.scale(Y, 2))),
    ),
    "erf is odd": (S.erf(S.scale(X, -1)), S.scale(S.erf(X), -1)),
    "a root has its scale outside": (
        S.power(add(S.scale(X, 4), S.scale(Y, 4)), 0.5),
        S.scale(S.power(add(X, Y), 0.5), 2),
    ),
    "division by a root": (div(X, S.power(add(Y, ONE), 0.5)), S.mul(X, S.power(add(Y, ONE), -0.5))),
    "constants leave a matmul": (
        S.matmul(S.scale(X, 3), S.scale(Y, 2), (4, 4)),
        S.scale(S.matmul(X, Y, (4, 4)), 6),
    ),
    "what is constant along a row leaves a matmul": (
        S.matmul(S.mul(R, X), Y, (4, 4)),
        S.mul(R, S.matmul(X, Y, (4, 4))),
    ),
}

DIFFERENT: dict[str, tuple[Poly, Poly]] = {
    "an unbiased variance": (mean(S.power(X, 2)), S.scale(mean(S.power(X, 2)), N / (N - 1))),
    "epsilon outside the root": (add(S.power(Y, 0.5), S.const(1e-5)), S.power(add(Y, S.const(1e-5)), 0.5)),
    "two epsilons": (S.power(add(Y, S.const(1e-5)), -0.5), S.power(add(Y, S.const(1e-12)), -0.5)),
    "the root of a square is no identity": (S.power(S.power(X, 2), 0.5), X),
    "nor that of a squared reciprocal": (
        S.power(S.power(S.power(add(X, Y), -1), 2), 0.5),
        S.power(add(X, Y), -1),
    ),
    "nor half the logarithm of a square": (S.exp(S.scale(S.log(S.power(X, 2)), 0.5)), X),
    "nor the square of a logarithm": (S.exp(S.power(S.log(X), 2)), X),
    "nor the roots of a product": (S.mul(S.power(S.mul(P, Q), 0.5), S.power(div(P, Q), 0.5)), P),
    "nor the logarithms of one": (S.exp(S.scale(add(S.log(S.mul(X, Y)), S.log(div(X, Y))), 0.5)), X),
    "the mean of a product": (mean(S.mul(X, Y)), S.mul(mean(X), mean(Y))),
    "the exponential of a mean": (mean(S.exp(X)), S.exp(mean(X))),
    "softmax over another maximum": (
        div(S.exp(sub(X, Y)), total(S.exp(sub(X, Y)))),
        div(S.exp(X), total(S.exp(X))),
    ),
    "matmul does not commute": (S.matmul(X, Y, (4, 4)), S.matmul(Y, X, (4, 4))),
    "a column's constant stays in a matmul": (
        S.matmul(S.mul(Y, X), Y, (4, 4)),
        S.mul(Y, S.matmul(X, Y, (4, 4))),
    ),
    "how many things are summed": (S.reduce("sum", ONE, "n"), S.reduce("sum", ONE, "m")),
}


@pytest.mark.parametrize("law", EQUAL)
def test_laws(law: str) -> None:
    left, right = EQUAL[law]
    assert left is right


@pytest.mark.parametrize("case", DIFFERENT)
def test_what_is_not_equal_is_not(case: str) -> None:
    left, right = DIFFERENT[case]
    assert left is not right


def test_terms_know_their_shape_and_constants() -> None:
    assert S.const(3).constant == 3.0
    assert S.zero.constant == 0.0
    assert X.constant is None
    assert X.atom is not None
    assert S.scale(X, 2).atom is None
    assert S.mul(X, R).shape == (4, N)
    assert mean(X).shape == (4, 1)
    assert broadcast([(4, 1), (N,), ()]) == (4, N)
    assert is_row_constant(())
    assert is_row_constant((4, 1))
    assert not is_row_constant((1, 4))


@pytest.mark.parametrize(
    "new", [(7, 15), (1, 7, 3, 5), (7, 3, 1, 5), (7, 3, 5, 1), (7, 15, 1), (21, 5), (7, 3, 5, 1, 1)]
)
def test_a_view_of_a_permutation_has_its_shape(new: tuple[int, ...]) -> None:
    s = Space()
    turned = views.permute(s.leaf(object(), (3, 5, 7)), (2, 0, 1))
    assert views.reshape(turned, turned.shape, new).shape == new


def test_a_term_that_grows_beyond_an_operator_is_an_error_and_then_a_leaf() -> None:
    leaves = [S.leaf(f"l{i}", (4, N)) for i in range(6)]
    wide = add(*leaves)
    with pytest.raises(TooLarge):
        S.mul(wide, wide)
    with pytest.raises(TooLarge):
        add(*[S.leaf(f"m{i}", ()) for i in range(MAX_MONOMIALS + 1)])

    def fn(*t: torch.Tensor) -> torch.Tensor:
        total = t[0] + t[1] + t[2] + t[3] + t[4] + t[5]
        return torch.exp(total * total) + 1.0

    graph = make_fx(fn)(*[torch.zeros(2, 3) for _ in range(6)]).graph
    root = next(n for n in graph.nodes if n.op == "output").args[0]
    product = next(n for n in graph.nodes if "mul" in n.name)
    space = Space()
    canon = Canon(space, None, root)
    # Only the product is opaque; what is computed from it is still understood.
    assert canon(product) is canon.leaf(product)
    assert canon(root) is space.add(space.exp(canon.leaf(product)), space.const(1))


Expression = Callable[[dict[str, torch.Tensor]], torch.Tensor]
_INPUTS = {
    "x": torch.tensor([[0.3, -1.2, 0.8, 2.0], [-0.7, 0.1, 1.5, -0.4]], dtype=torch.float64),
    "y": torch.tensor([[1.1, 0.6, -0.9, 0.2], [0.5, -1.4, 0.7, 1.9]], dtype=torch.float64),
    "r": torch.tensor([[0.9], [-0.6]], dtype=torch.float64),
}
_UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "neg": torch.neg,
    "exp": torch.exp,
    "log": torch.log,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "square": torch.square,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "erf": torch.erf,
    "cube": lambda t: t**3,
    "half": lambda t: t * 0.5,
    "plus": lambda t: t + 1.0,
    "mean": lambda t: t.mean(-1, keepdim=True),
    "sum": lambda t: t.sum(-1, keepdim=True),
    "amax": lambda t: t.amax(-1, keepdim=True),
    "softmax": lambda t: torch.softmax(t, -1),
    "var": lambda t: t.var(-1, keepdim=True, correction=0),
    "logsumexp": lambda t: torch.logsumexp(t, -1, keepdim=True),
}
_BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
}

_trees = st.recursive(
    st.sampled_from(["x", "y", "r"]),
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(sorted(_UNARY)), inner),
        st.tuples(st.sampled_from(sorted(_BINARY)), inner, inner),
    ),
    max_leaves=4,
)


def _evaluate(tree: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    if isinstance(tree, str):
        return inputs[tree]
    if len(tree) == 2:
        return _UNARY[tree[0]](_evaluate(tree[1], inputs))
    return _BINARY[tree[0]](_evaluate(tree[1], inputs), _evaluate(tree[2], inputs))


def _rewritten(tree: Any, choose: Callable[[int], int]) -> Any:
    """The tree with some of its parts written in another, often equal, way."""
    if isinstance(tree, str):
        return tree
    parts = [_rewritten(t, choose) for t in tree[1:]]
    name = tree[0]
    same = (name, *parts)
    if len(parts) == 2:
        a, b = parts
        options = {
            "add": [same, ("add", b, a), ("sub", a, ("neg", b))],
            "sub": [same, ("add", a, ("neg", b)), ("neg", ("sub", b, a)), ("sub", b, a)],
            "mul": [same, ("mul", b, a), ("div", a, ("reciprocal", b))],
            "div": [same, ("mul", a, ("reciprocal", b)), ("div", b, a)],
        }[name]
    else:
        (a,) = parts
        options = {
            "square": [same, ("mul", a, a), ("exp", ("log", ("square", a)))],
            "cube": [same, ("mul", a, ("square", a))],
            "rsqrt": [same, ("reciprocal", ("sqrt", a)), ("sqrt", ("reciprocal", a))],
            "sqrt": [same, ("div", a, ("sqrt", a)), ("exp", ("half", ("log", a)))],
            "sigmoid": [
                same,
                ("reciprocal", ("plus", ("exp", ("neg", a)))),
                ("half", ("plus", ("tanh", ("half", a)))),
            ],
            "exp": [same, ("reciprocal", ("exp", ("neg", a))), ("square", ("exp", ("half", a)))],
            "log": [same, ("neg", ("log", ("reciprocal", a))), ("half", ("log", ("square", a)))],
            "mean": [same, ("mean", ("mean", a)), ("add", ("mean", ("half", a)), ("half", ("mean", a)))],
            "var": [same, ("sub", ("mean", ("square", a)), ("square", ("mean", a)))],
            "softmax": [
                same,
                ("exp", ("sub", a, ("logsumexp", a))),
                ("div", ("exp", ("sub", a, ("amax", a))), ("sum", ("exp", ("sub", a, ("amax", a))))),
            ],
            "neg": [same, a, ("sqrt", ("square", a))],
            "half": [same, ("exp", ("half", ("log", ("square", ("half", a)))))],
        }.get(name, [same])
    return options[choose(len(options))]


def _normal(trees: list[Any]) -> list[Poly]:
    """The normal forms of expressions of the same inputs."""

    def fn(x: torch.Tensor, y: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(_evaluate(t, {"x": x, "y": y, "r": r}) for t in trees)

    graph = make_fx(fn, pre_dispatch=True)(*_INPUTS.values()).graph
    canon = Canon(Space())
    roots = next(n for n in graph.nodes if n.op == "output").args[0]
    return [canon(root) for root in roots]


@settings(max_examples=200)
@given(tree=_trees, data=st.data())
def test_equal_normal_forms_are_equal_numbers(tree: Any, data: st.DataObject) -> None:
    other = _rewritten(tree, lambda n: data.draw(st.integers(0, n - 1)))
    assume(other != tree)
    left, right = _normal([tree, other])
    if left is not right:
        return
    a, b = _evaluate(tree, _INPUTS), _evaluate(other, _INPUTS)
    a, b = torch.broadcast_tensors(a, b)
    # Where one of the two spellings has no value (the logarithm of a negative number), it claims nothing.
    defined = a.isfinite() & b.isfinite()
    torch.testing.assert_close(a[defined], b[defined], rtol=1e-6, atol=1e-8)


def test_the_rewriting_above_finds_equal_pairs_and_unequal_ones() -> None:
    """Else the test before this one would hold trivially."""
    trees: list[tuple[Any, Any, bool]] = [
        (("var", "x"), ("sub", ("mean", ("square", "x")), ("square", ("mean", "x"))), True),
        (("softmax", "x"), ("exp", ("sub", "x", ("logsumexp", "x"))), True),
        (("sigmoid", "x"), ("half", ("plus", ("tanh", ("half", "x")))), True),
        (("sub", "x", "y"), ("sub", "y", "x"), False),
        (("neg", "x"), ("sqrt", ("square", "x")), False),
    ]
    for left, right, equal in trees:
        a, b = _normal([left, right])
        assert (a is b) == equal


def test_a_sum_along_another_axis_is_no_mean_along_it() -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.sum(0), x.mean(0), x.sum((0, 1)), x.mean((0, 1))

    graph = make_fx(fn, pre_dispatch=True)(torch.randn(3, 4, 5)).graph
    canon = Canon(Space())
    assert len({canon(root) for root in graph.find_nodes(op="output")[0].args[0]}) == 4


def test_a_complex_number_has_two_parts_and_a_variance_along_another_axis_is_read_as_none() -> None:
    def fn(x: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x * 2j).imag, (c * 1j).real, x.var(0, keepdim=True)

    example = torch.randn(3, 4)
    graph = make_fx(fn, pre_dispatch=True)(example, example.to(torch.complex64)).graph
    x, c = graph.find_nodes(op="placeholder")
    canon = Canon(Space())
    doubled, turned, variance = graph.find_nodes(op="output")[0].args[0]
    assert canon(doubled) is canon(x) * 2
    assert canon(turned) is -canon.space.fn("imag", canon.space.leaf(c, (3, 4)))
    assert canon(variance) is canon.leaf(variance)
