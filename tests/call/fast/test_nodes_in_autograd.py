"""What PyTorch asks of a node, of those in C++: versions, hooks, retained graphs, checkpoints, who looks on."""

import gc
import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch
from tests.call.fast.recorded import CALLS, Onlooker, leaf, tensors
from tests.kernels.conftest import at_once
from torch._dynamo import compiled_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import opsmith.ops as ops

pytestmark = pytest.mark.usefixtures("recorded_in_cpp")


def test_a_graph_is_used_once_unless_it_is_retained():
    x = leaf(3, 40)
    y = ops.gelu(x).sum()
    y.backward(retain_graph=True)
    first = x.grad.clone()
    y.backward()
    assert torch.equal(x.grad, 2 * first)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward()


def _change(x):
    x.add_(1)


def _write_a_result_into(x):
    ops.gelu(torch.ones(3, 40), out=x.detach())


def _write_a_strided_result_into(x):
    ops.gelu(torch.ones(40, 3).t(), out=x.detach())


@pytest.mark.parametrize("change", [_change, _write_a_result_into, _write_a_strided_result_into])
def test_changed_tensors_are_noticed(change):
    x = leaf(3, 40) * 1
    y = ops.gelu(x)
    change(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_changed_results_are_noticed_where_they_were_saved():
    x = leaf(3, 40)
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


_FIRST = """
from tests.call.fast.recorded import CALLS, leaf, tensors
from torch.utils.checkpoint import checkpoint

for name, (_, call, shapes) in CALLS.items():
    try:
        leaves = [leaf(*shape) for shape in shapes]
        y = checkpoint(lambda *x: sum(y.sum() for y in tensors(call(*x))), *leaves, use_reentrant=False)
        y.backward()
    except Exception as error:
        print(name, error)
"""


def test_a_first_call_may_be_checkpointed() -> None:
    """Its second computation must save as many tensors, of the same shapes: the first may be before a node is there."""
    done = subprocess.run([sys.executable, "-c", _FIRST], capture_output=True, text=True, check=True)
    assert done.stdout == ""


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
