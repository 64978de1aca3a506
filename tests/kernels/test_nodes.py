"""Calls recorded by nodes in C++: the gradients of the Functions in Python, and all that PyTorch asks of a node."""

import gc
import weakref
from typing import Any

import pytest
import torch
from tests.kernels.conftest import at_once
from tests.kernels.recorded import CALLS, Onlooker, leaf, tensors
from torch._dynamo import compiled_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import opsmith.ops as ops
from opsmith.kernels import build, calls, nodes
from opsmith.ops import common


@pytest.fixture(autouse=True)
def _nodes():
    if not common.native_library() or calls.library() is None or nodes.library() is None:
        pytest.skip("calls are not recorded in C++ here")
    nodes.begin()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_those_of_the_function_in_python(name, dtype):
    node, call, shapes = CALLS[name]
    leaves = [leaf(*shape, dtype=dtype) for shape in shapes]
    ours = tensors(call(*leaves))
    with Onlooker(), common.always_native():
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
    F = torch.nn.functional
    torch.softmax(F.gelu(F.rms_norm(y * 2, (40,), v, 1e-6)) + y, -1).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    torch.testing.assert_close(w.grad, v.grad)


@pytest.mark.parametrize("name", CALLS)
def test_second_derivatives_are_an_error_that_names_the_operator(name):
    node, call, shapes = CALLS[name]
    leaves = [leaf(*shape) for shape in shapes]
    y = tensors(call(*leaves))[0]
    found = torch.autograd.grad(y.square().sum(), leaves[0], create_graph=True)[0]
    with pytest.raises(
        RuntimeError, match=f"trying to differentiate twice through opsmith::{node},.*reference"
    ):
        found.sum().backward()


def test_a_graph_is_used_once_unless_it_is_retained():
    x = leaf(3, 40)
    y = ops.gelu(x).sum()
    y.backward(retain_graph=True)
    first = x.grad.clone()
    y.backward()
    assert torch.equal(x.grad, 2 * first)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward()


def test_changed_tensors_are_noticed():
    x = leaf(3, 40) * 1
    y = ops.gelu(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    y = ops.softmax(leaf(3, 40))
    y.add_(1)  # a result that was saved
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*opsmith::softmax_backward"):
        y.sum().backward()
    x = leaf(3, 40)
    y = ops.gelu(x)
    y.mul_(2)  # one that was not
    y.sum().backward()
    z = x.detach().requires_grad_()
    (ops.gelu(z) * 2).sum().backward()
    assert torch.equal(x.grad, z.grad)


def test_hooks_are_called():
    x = leaf(3, 40)
    y = ops.softmax(x)
    order = []
    y.register_hook(lambda g: order.append("tensor") or 2 * g)
    y.grad_fn.register_prehook(lambda gs: order.append("before"))
    y.grad_fn.register_hook(lambda into, out: order.append("after"))
    y.retain_grad()
    y[:, 0].sum().backward()
    assert order == ["tensor", "before", "after"]
    z = x.detach().requires_grad_()
    torch.softmax(z, -1)[:, 0].sum().mul(2).backward()
    torch.testing.assert_close(x.grad, z.grad)
    assert y.grad[0, 0] == 2
    assert y.grad_fn.next_functions[0][0].variable is x


def test_hooks_for_saved_tensors_are_called():
    x, w = leaf(3, 40), leaf(40)
    packed = []

    def pack(t: torch.Tensor) -> int:
        packed.append(t)
        return len(packed) - 1

    expected = torch.autograd.grad(ops.rms_norm(x, w).sum(), (x, w))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda i: packed[i].clone()):
        y = ops.rms_norm(x, w)
    assert [tuple(t.shape) for t in packed] == [(3, 40), (3,), (40,)]
    for a, b in zip(torch.autograd.grad(y.sum(), (x, w)), expected, strict=True):
        assert torch.equal(a, b)
    with torch.autograd.graph.save_on_cpu():
        y = ops.softmax(x)
    y.sum().backward()


@pytest.mark.parametrize("name", CALLS)
def test_hooks_for_saved_tensors_may_fail(name):
    _, call, shapes = CALLS[name]
    leaves = [leaf(*shape) for shape in shapes]

    def refuse(t: torch.Tensor) -> Any:
        raise KeyError("not this one")

    hooks = torch.autograd.graph.saved_tensors_hooks
    with hooks(refuse, lambda t: t), pytest.raises(KeyError, match="not this"):
        call(*leaves)
    with hooks(lambda t: t, refuse):
        y = tensors(call(*leaves))[0]
    with pytest.raises(KeyError, match="not this"):
        y.sum().backward()


@pytest.mark.parametrize("which", range(5), ids=["q", "k", "v", "out", "row_sums"])
@pytest.mark.parametrize("change", [lambda t: t[:, :1], torch.Tensor.bfloat16, torch.Tensor.flatten])
def test_what_a_hook_gives_back_is_checked(which, change):
    count = iter(range(5))
    q, k, v = (leaf(2, 3, 5, 16) for _ in range(3))
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: (next(count), t), lambda kept: change(kept[1]) if kept[0] == which else kept[1]
    ):
        y = ops.attention(q, k, v)
    with pytest.raises(RuntimeError, match="attention_backward"):
        y.sum().backward()


@pytest.mark.parametrize("name", CALLS)
def test_checkpoints_compute_again(name):
    _, call, shapes = CALLS[name]
    leaves = [leaf(*shape) for shape in shapes]

    def run(*x: torch.Tensor) -> torch.Tensor:
        return sum(y.square().sum() for y in tensors(call(*(t * 2 for t in x))))

    expected = torch.autograd.grad(run(*leaves), leaves)
    got = torch.autograd.grad(checkpoint(run, *leaves, use_reentrant=False), leaves)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


def test_the_backward_is_seen_by_who_looks_on():
    x = leaf(3, 40)
    expected = torch.autograd.grad(ops.gelu(x).sum(), x)[0]
    y = ops.gelu(x).sum()
    with Onlooker() as onlooker:
        got = torch.autograd.grad(y, x)[0]
    assert torch.equal(got, expected)
    assert "opsmith.gelu_backward.default" in onlooker.seen
    y = ops.gelu(x).sum()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        y.backward()
    assert "opsmith::gelu_backward" in {event.key for event in profile.key_averages()}
    with FakeTensorMode(allow_non_fake_inputs=True):
        (fake,) = torch.autograd.grad(ops.gelu(x).sum(), x)
    assert tuple(fake.shape) == (3, 40)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.func.grad(lambda t: ops.gelu(t).sum())(x),
        lambda x: torch.func.vmap(ops.gelu)(x),
        lambda x: torch.func.functionalize(ops.gelu)(x),
        lambda x: torch.compile(ops.gelu, backend="eager", fullgraph=True)(x),
    ],
    ids=["grad", "vmap", "functionalize", "compile"],
)
def test_transforms_and_compilers_take_the_way_they_took(call):
    x = leaf(3, 40)
    assert ops.gelu(x).grad_fn.name() == "opsmith::gelu_backward"
    found = call(x)
    assert found.shape == x.shape
    assert found.grad_fn is None or not found.grad_fn.name().startswith("opsmith")


def test_compiled_autograd_calls_the_kernel():
    x, w = leaf(3, 40), leaf(40)
    expected = torch.autograd.grad((ops.rms_norm(x, w) * ops.softmax(x)).sum(), (x, w))
    for _ in range(2):  # the second from its cache
        y = (ops.rms_norm(x, w) * ops.softmax(x)).sum()
        x.grad = w.grad = None
        with compiled_autograd._enable(lambda graph: graph):
            y.backward()
        assert torch.equal(x.grad, expected[0])
        assert torch.equal(w.grad, expected[1])


def test_tangents_go_through_pytorch_together_with_gradients():
    w = leaf(40)
    with forward_ad.dual_level():
        x = forward_ad.make_dual(torch.randn(3, 40), torch.randn(3, 40))
        y, expected = ops.rms_norm(x, w, 1e-6), torch.nn.functional.rms_norm(x, (40,), w, 1e-6)
        torch.testing.assert_close(*(forward_ad.unpack_dual(t).tangent for t in (y, expected)))
        torch.testing.assert_close(*(torch.autograd.grad(t.sum(), w)[0] for t in (y, expected)))


def test_a_gradient_with_a_tangent_is_refused():
    x = leaf(3, 40)
    y = ops.softmax(x)
    with forward_ad.dual_level():
        arriving = forward_ad.make_dual(torch.randn(3, 40), torch.randn(3, 40))
        with pytest.raises(NotImplementedError, match=r"opsmith::softmax_backward.*forward-mode"):
            torch.autograd.grad(y, x, arriving)


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


@pytest.mark.filterwarnings("ignore:Error detected in opsmith")
def test_anomaly_mode_names_the_node():
    x = leaf(3, 40)
    with torch.autograd.set_detect_anomaly(True):
        y = ops.gelu(x)
        with pytest.raises(RuntimeError, match="Function 'opsmith::gelu_backward' returned nan"):
            y.backward(torch.full_like(y, torch.nan))


def test_nothing_is_kept_longer_than_the_graph():
    x = leaf(3, 40) * 1
    y = ops.softmax(x)  # whose node keeps its own result
    seen = [weakref.ref(t) for t in (x, y)]
    before = torch.ones(1)._use_count()
    del x, y
    gc.collect()
    assert [r() for r in seen] == [None, None]
    assert torch.ones(1)._use_count() == before
    z = leaf(3, 40)
    count = z._use_count()
    ops.gelu(z).sum().backward()
    assert z._use_count() == count


def test_threads_go_back_at_once():
    w = leaf(512)
    x = torch.randn(64, 512)
    (expected,) = torch.autograd.grad(ops.rms_norm(x, w).sum(), w)
    at_once(lambda: torch.equal(torch.autograd.grad(ops.rms_norm(x, w).sum(), w)[0], expected))


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"k": (2, 2, 5, 16), "v": (2, 2, 5, 16)}, "multiple of the 2 heads"),
        ({"k": (2, 3, 5, 8)}, "k must have shape"),
        ({"v": (2, 3, 4, 16)}, "v must have shape"),
        ({"q": (3, 5, 16)}, "q must have at least 4 dimension"),
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


def test_a_large_gradient_is_searched_for_tokens_without_one():
    """By the Function in Python, which the node leaves such calls to."""
    q, k, v = (leaf(2, 128, 8, 64) for _ in range(3))
    y = ops.attention(*(t.transpose(1, 2) for t in (q, k, v)))
    assert y.grad_fn.name() == "_AttentionBackward"
    dy = torch.randn_like(y).masked_fill(torch.arange(128)[:, None] > 20, 0.0)
    got = torch.autograd.grad(y, (q, k, v), dy)
    assert not got[0][:, 21:].any()
    y = ops.attention(*(t.transpose(1, 2) for t in (q, k, v)), causal=True)
    assert y.grad_fn.name() == "opsmith::attention_backward"


@pytest.mark.parametrize("error", [build.BuildError("no headers"), OSError("not for this process")])
def test_without_the_library_functions_in_python_record(monkeypatch, error):
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    monkeypatch.setattr(nodes.build, "build_libraries", fail)
    assert nodes.library.__wrapped__() is None
    monkeypatch.setattr(nodes, "library", nodes.library.__wrapped__)
    monkeypatch.setattr(nodes, "_waiting", {"gelu": nodes.Rule("gelu_backward")})
    monkeypatch.setattr(nodes, "_seen", -1)
    nodes.begin()
    assert not nodes._waiting  # nor is it asked for again


def test_a_plan_is_read_from_the_schemas():
    op = torch.ops.opsmith
    plan = nodes.plan_of(op.gelu.default, op.gelu_backward.default, nodes.Rule("gelu_backward"))
    assert (plan.types, plan.sources) == ("TTobyp", "gssnmm")  # dy, x, bias, tanh, dx, dbias
    assert plan.of == [3, 0, 1, 2, 0, 1]
    assert plan.gradients == [(0, 4), (1, 5)]
    with pytest.raises(ValueError, match=r"'cos' is nothing that opsmith\.softmax"):
        nodes.plan_of(op.softmax.default, op.rope.default, nodes.Rule("rope", {"x": "dy"}))
