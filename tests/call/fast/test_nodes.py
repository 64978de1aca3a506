"""Calls recorded by nodes in C++: the gradients of the Functions in Python, and which calls they take."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.call.fast.recorded import CALLS, SAME_KERNELS, Onlooker, leaf, tensors

import opsmith.ops as ops
from opsmith.call import dispatch
from opsmith.call.dispatch import always_native
from opsmith.call.fast import direct, nodes
from opsmith.call.signature import Gradient, Saved
from opsmith.kernels import build
from opsmith.ops.gelu import SIGNATURE as GELU
from opsmith.ops.linear import FEW_ROWS

pytestmark = pytest.mark.usefixtures("recorded_in_cpp")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SAME_KERNELS)
def test_gradients_are_those_of_the_function_in_python(name, dtype):
    node, call, shapes = CALLS[name]
    leaves = [leaf(*shape, dtype=dtype) for shape in shapes]
    ours = tensors(call(*leaves))
    with Onlooker(), dispatch.always_native():
        others = tensors(call(*leaves))
    assert {y.grad_fn.name() for y in ours} == {f"opsmith::{node}"}
    assert not any(y.grad_fn.name().startswith("opsmith") for y in others)
    seeds = [torch.randn_like(y) for y in ours]
    for y, other in zip(ours, others, strict=True):
        assert torch.equal(y, other)
    for got, expected in zip(
        torch.autograd.grad(ours, leaves, seeds), torch.autograd.grad(others, leaves, seeds), strict=True
    ):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("name", CALLS)
def test_gradients_that_arrive_in_any_layout(name):
    _, call, shapes = CALLS[name]
    leaves = [leaf(*shape) for shape in shapes]
    results = tensors(call(*leaves))
    for y in results:
        strided = torch.randn(*y.shape, 2)[..., 0]
        got = torch.autograd.grad(y, leaves, strided, retain_graph=True, allow_unused=True)
        expected = torch.autograd.grad(y, leaves, strided.contiguous(), retain_graph=True, allow_unused=True)
        for a, b in zip(got, expected, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)
    sum(y.sum() for y in results).backward()  # ones that are expanded
    assert all(torch.isfinite(t.grad).all() for t in leaves)


@pytest.mark.parametrize("name", [n for n in CALLS if len(CALLS[n][2]) > 1])
def test_only_what_is_wanted_is_computed(name):
    _, call, shapes = CALLS[name]
    values = [torch.randn(shape) for shape in shapes]
    all_leaves = [v.clone().requires_grad_() for v in values]
    expected = torch.autograd.grad(sum(y.square().sum() for y in tensors(call(*all_leaves))), all_leaves)
    for i in range(len(values)):
        some = [v.clone().requires_grad_(k == i) for k, v in enumerate(values)]
        found = tensors(call(*some))
        (got,) = torch.autograd.grad(sum(y.square().sum() for y in found if y.requires_grad), some[i])
        torch.testing.assert_close(got, expected[i])


@pytest.mark.parametrize("dtype", dispatch.NATIVE_DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "n"),
    # One row; rows for all steps of a sum; many; a row wider than a panel; more factors than are taken at once.
    [((1,), 1), ((33,), 5), ((1, 64), 300), ((7, 9), 6), ((3, 5, 7), 4), ((300, 20), 3), ((2, 1100), 11)],
    ids=str,
)
def test_gradients_of_a_product_are_as_exact_as_pytorchs(shape, n, dtype):
    leaves = [leaf(*s, dtype=dtype) for s in (shape, (n, shape[-1]), (n,))]
    y = ops.linear(*leaves)
    assert y.grad_fn.name() == "opsmith::linear_rows_backward"
    dy = torch.randn_like(y)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    expected = torch.autograd.grad(F.linear(*wide), wide, dy.double())
    found = (torch.autograd.grad(y, leaves, dy), torch.autograd.grad(F.linear(*leaves), leaves, dy))
    for ours, eagers, exact in zip(*found, expected, strict=True):
        ulp = exact.abs().max() * torch.finfo(dtype).eps
        assert (ours - exact).abs().max() <= 2 * (eagers - exact).abs().max() + ulp


def test_a_product_whose_backward_is_another_is_not_for_the_node():
    x, weight = leaf(3, 40), leaf(7, 40)
    gelu = ops.linear(x, weight, activation="gelu")
    assert not gelu.grad_fn.name().startswith("opsmith::linear")
    assert direct.new_linear_rows(x, weight, None, None, 1) is None
    assert direct.new_linear_rows(x, weight, None, leaf(3, 7), 0) is None
    y = direct.new_linear_rows(x, weight, None, torch.ones(3, 7), 0)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), weight)[0], x.detach().sum(0).expand(7, 40))


def test_products_that_pytorch_computes_sooner_are_left_to_it():
    """The second has more of them than small calls have, and than our kernels for few rows are quick at."""
    for rows, node in ((8, "opsmith::linear_rows_backward"), (80, "AddmmBackward0")):
        y = ops.linear(leaf(rows, 512), leaf(512, 512), leaf(512))
        assert y.grad_fn.name() == node


@pytest.mark.parametrize("needs_grad", [True, False])
def test_what_a_kernel_need_not_write_is_not_made(needs_grad):
    x, bias = leaf(3, 40), leaf(40).requires_grad_(needs_grad)
    y = ops.bias_gelu(x, bias).sum()
    with Onlooker() as onlooker:
        torch.autograd.grad(y, x)
    given = onlooker.given["opsmith.gelu_backward.default"]
    assert given["dx"] is not None
    assert given.get("dbias") is None


@pytest.mark.parametrize("which", [0, 1])
def test_one_of_two_results_may_have_no_gradient(which):
    x, r = leaf(3, 40), leaf(3, 40)
    found = ops.rms_norm(x, residual=r)[which]
    with Onlooker():
        expected = ops.rms_norm(x, residual=r)[which]
    for a, b in zip(
        torch.autograd.grad(found.sum(), (x, r)), torch.autograd.grad(expected.sum(), (x, r)), strict=True
    ):
        assert torch.equal(a, b)


def test_one_tensor_may_be_two_inputs():
    x = leaf(3, 40)
    ops.silu_mul(x, x).sum().backward()
    y = x.detach().requires_grad_()
    (torch.nn.functional.silu(y) * y).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    got = torch.autograd.grad(ops.rms_norm(x, residual=x)[0].square().sum(), x)[0]
    s = (2 * y.detach()).requires_grad_()
    expected = torch.autograd.grad(torch.nn.functional.rms_norm(s, (40,), eps=1e-6).square().sum(), s)[0]
    torch.testing.assert_close(got, 2 * expected, atol=1e-4, rtol=1e-4)


def test_results_are_differentiated_further():
    x, w = leaf(3, 40), leaf(40)
    ops.softmax(ops.gelu(ops.rms_norm(x * 2, w)) + x).square().sum().backward()
    y, v = (t.detach().requires_grad_() for t in (x, w))
    torch.softmax(F.gelu(F.rms_norm(y * 2, (40,), v, 1e-6)) + y, -1).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    torch.testing.assert_close(w.grad, v.grad)


@pytest.mark.parametrize("name", CALLS)
def test_second_derivatives_are_an_error_that_names_the_operator(name):
    node, call, shapes = CALLS[name]
    leaves = [leaf(*shape) for shape in shapes]
    y = tensors(call(*leaves))[0]
    found = torch.autograd.grad(y.square().sum(), leaves[0], create_graph=True)[0]
    for twice in (
        lambda: torch.autograd.grad(found.sum(), leaves[0], retain_graph=True),
        found.sum().backward,
    ):
        with pytest.raises(
            RuntimeError, match=f"trying to differentiate twice through opsmith::{node},.*reference"
        ):
            twice()


FUNCTIONS = {  # calls that no node takes: of other layouts, or with gradients in Python
    "gelu": lambda x: ops.gelu(x.t()),
    "softmax": lambda x: ops.softmax(x.t()),
    "rms_norm": lambda x: ops.rms_norm(x.t()),
    "linear": lambda x: ops.linear(x, torch.ones(64, 64)),
    "cross_entropy": lambda x: ops.cross_entropy(x, torch.arange(64), reduction="none"),
    "moe_route": lambda x: ops.moe_route(x, 4)[1],
    "experts": lambda x: ops.experts(
        *(x, torch.ones(4, 64, 64), torch.ones(4, 64, 32)),
        *(torch.arange(64)[:, None] % 4, torch.ones(64, 1)),
        activation="silu",
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_second_derivatives_are_an_error_where_functions_record_too(name):
    x = leaf(64, 64)
    with always_native():
        y = FUNCTIONS[name](2 * x)
    found = torch.autograd.grad(y.sum(), x, create_graph=True)[0]  # by a gradient that needs none itself
    for twice in (
        lambda: torch.autograd.grad(found.sum(), x, retain_graph=True, allow_unused=True),
        found.sum().backward,
    ):
        with pytest.raises(RuntimeError, match=f"differentiate twice through opsmith::{name},.*reference"):
            twice()


def test_inputs_whose_gradient_no_kernel_has():
    x, cos, sin = leaf(1, 2, 5, 8), leaf(5, 8), torch.randn(5, 8)
    assert not ops.rope(x, cos, sin).grad_fn.name().startswith("opsmith")
    q = torch.randn(1, 2, 5, 8)
    learned = leaf(5, 5)
    y = ops.attention(q, q, q, mask=learned)
    assert not y.grad_fn.name().startswith("opsmith")
    expected = torch.softmax(q @ q.mT * 8**-0.5 + learned, -1) @ q
    for a, b in zip(
        torch.autograd.grad(y.square().sum(), learned),
        torch.autograd.grad(expected.square().sum(), learned),
        strict=True,
    ):
        torch.testing.assert_close(a, b)
    with torch.inference_mode():
        w = torch.randn(40)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
        ops.rms_norm(leaf(3, 40), w)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"k": (2, 2, 5, 16), "v": (2, 2, 5, 16)}, "multiple of the 2 heads"),
        ({"k": (2, 3, 5, 8)}, "k must have shape"),
        ({"v": (2, 3, 4, 16)}, "v must have shape"),
        ({"q": (3, 5, 16)}, "q must have shape"),
        ({"mask": torch.ones(4, 5, dtype=torch.bool)}, "mask must broadcast"),
        ({"window": 0}, "window must be at least 1"),
        ({"softcap": -1.0}, "softcap must be positive"),
    ],
)
def test_wrong_calls_of_attention_say_why(wrong, why):
    given = dict.fromkeys("qkv", (2, 3, 5, 16)) | wrong
    call = {name: leaf(*value) if name in "qkv" else value for name, value in given.items()}
    with pytest.raises(ValueError, match=f"attention: .*{why}"):
        ops.attention(**call)


@pytest.mark.parametrize("error", [build.BuildError("no headers"), OSError("not for this process")])
def test_without_the_library_functions_in_python_record(monkeypatch, error):
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    monkeypatch.setattr(nodes.build, "build_libraries", fail)
    assert nodes.library.__wrapped__() is None
    monkeypatch.setattr(nodes, "library", nodes.library.__wrapped__)
    monkeypatch.setattr(nodes, "_waiting", {"gelu": GELU})
    monkeypatch.setattr(nodes, "_seen", -1)
    nodes.begin()
    assert not nodes._waiting  # nor is it asked for again


def test_a_plan_is_read_from_the_signature():
    arguments, gradients, kept, only = nodes.plan_of(GELU)
    letters = [(source, type_, of) for source, type_, of, _, _ in arguments]  # dy, x, bias, tanh, dx, dbias
    assert letters == [
        *(("g", "T", 3), ("s", "T", 0), ("s", "o", 1), ("n", "b", 2), ("m", "y", 0), ("m", "p", 1))
    ]
    assert (gradients, kept, only) == ([(0, 4), (1, 5)], [], [])
    arguments, _, _, only = nodes.plan_of(FEW_ROWS)
    assert "".join(type_ for _, type_, *_ in arguments) == "TTTppp"
    assert "".join(source for source, *_ in arguments) == "gssmmm"
    assert only == [(4, 0)]


def test_a_gradient_of_what_is_not_there_is_an_error():
    with pytest.raises(ValueError, match="gelu: the gradient's kernel takes 'cos', which is no argument"):
        dataclasses.replace(GELU, gradient=Gradient("rope", (Saved("cos"),), ()))
