"""Calls of a few elements take our kernels like others, and one of them where PyTorch takes several."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import opsmith
from opsmith.call.dispatch import SMALL, native_library, small_up_to
from opsmith.call.fast import direct
from opsmith.call.run import Call
from opsmith.kernels import triton
from opsmith.measure.pool import tensors_of
from opsmith.operator import Make, Sample, registry


class Recorded(TorchDispatchMode):
    """The names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def as_users_call() -> Iterator[None]:
    with small_up_to(SMALL):
        yield


OURS = {
    "gelu": lambda x: opsmith.ops.gelu(x),  # PyTorch's is oneDNN's, whose set-up is long
    "gelu with tanh": lambda x: opsmith.ops.gelu(x, tanh=True),
    "silu_mul": lambda x: opsmith.ops.silu_mul(x, x),
    "layer_norm": lambda x: opsmith.ops.layer_norm(x, x[0], x[0]),
    "layer_norm with a residual": lambda x: opsmith.ops.layer_norm(x, residual=x),
    "gelu_mul": lambda x: opsmith.ops.gelu_mul(x, x, tanh=True),
    "bias_gelu": lambda x: opsmith.ops.bias_gelu(x, x[0]),
    "rms_norm": lambda x: opsmith.ops.rms_norm(x, x[0]),
    "rms_norm with a residual": lambda x: opsmith.ops.rms_norm(x, residual=x),
    "attention": lambda x: opsmith.ops.attention(*[x[None, None]] * 3),
    "rope": lambda x: opsmith.ops.rope(x[None], x, x),
    "rope_qk": lambda x: opsmith.ops.rope_qk(x[None], x[None], x, x),
    "softmax": lambda x: opsmith.ops.softmax(x),
    "causal softmax": lambda x: opsmith.ops.softmax(x, causal=True),
}


@pytest.mark.skipif(not native_library() or triton.INTERPRETED, reason="C++ kernels are not what runs here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", list(OURS))
def test_one_call_of_ours_is_faster_than_several_of_pytorch(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(1, 64, dtype=dtype)
    with Recorded() as seen:
        OURS[name](x)
    inputs = {
        f"aten.{view}" for view in ("select.int", "unsqueeze.default", "lift_fresh.default", "view.default")
    }
    computed = {n for n in seen.names if "empty" not in n} - inputs
    assert len(computed) == 1
    assert all(n.startswith("opsmith.") for n in computed)
    if name.startswith("rope"):  # whose tables are constants
        return
    with Recorded() as seen:
        OURS[name](x.requires_grad_())
    assert any(n.startswith("opsmith.") for n in seen.names)


def leaves(sample: Sample, grad: bool) -> tuple[list[Any], dict[str, Any], list[torch.Tensor]]:
    """The sample's arguments, with floating-point tensors that want gradients if asked."""
    inputs: list[torch.Tensor] = []

    def leaf(value: Any) -> Any:
        if not (grad and isinstance(value, torch.Tensor) and value.is_floating_point()):
            return value
        inputs.append(value.detach().clone().requires_grad_())
        return inputs[-1]

    args = [leaf(a) for a in sample.args]
    return args, {k: leaf(v) for k, v in sample.kwargs.items()}, inputs


def wide(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


@pytest.mark.parametrize("grad", [False, True], ids=["values", "gradients"])
@pytest.mark.parametrize(
    "name",
    [
        "gelu",
        "bias_gelu",
        "silu_mul",
        "gelu_mul",
        "layer_norm",
        "rms_norm",
        "softmax",
        "linear",
        "embedding",
        "attention",
        "rope",
        "cross_entropy",
    ],
)
def test_the_short_way_gives_what_the_reference_gives(name: str, grad: bool) -> None:
    card = registry()[name]
    for sample in card.samples(Make(torch.float32)):
        args, kwargs, inputs = leaves(sample, grad)
        got, want = card.function(*args, **kwargs), card.reference(*args, **kwargs)
        exact = card.reference(*map(wide, args), **{k: wide(v) for k, v in kwargs.items()})
        for mine, value, number in zip(*map(tensors_of, (got, want, exact)), strict=True):
            own = (value - number).detach().abs()  # PyTorch's error, at a mean of 1e4 no small one
            least = 2e-5 + 2 * (float(own.max()) if own.numel() else 0.0)
            torch.testing.assert_close(mine.double(), number, rtol=2e-5, atol=least)
            assert mine.requires_grad is value.requires_grad
        if grad:
            gradients = (
                torch.autograd.grad(sum(t.sum() for t in tensors_of(y)), inputs, allow_unused=True)
                for y in (got, want, exact)
            )
            for mine, value, number in zip(*gradients, strict=True):
                assert (mine is None) is (number is None)
                if mine is None:
                    continue
                least = 1e-4 + 2 * float((value - number).abs().max() if number.numel() else 0.0)
                torch.testing.assert_close(mine, number, rtol=1e-4, atol=least)


# A call that is refused and asked again in the long way costs twenty of the short ones.
WIDTHS = "paged_attention", "attention", "attention_varlen"  # values wider than keys are refused


CALLS_AT_ONCE = [
    one
    for name, module in list(sys.modules.items())
    if name.startswith("opsmith.ops.")
    for one in vars(module).values()
    if isinstance(one, Call)
]


@pytest.mark.skipif(not native_library() or triton.INTERPRETED, reason="C++ kernels are not what runs here")
@pytest.mark.parametrize("name", [card.name for card in registry().values()])
def test_kernels_refuse_no_usual_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[str] = []

    def watched(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return kernel(*args, **kwargs)
            except RuntimeError as error:
                refused.append(str(error).splitlines()[0])
                raise

        return call

    for one in CALLS_AT_ONCE:
        at_once = direct._declared_kernel(one.signature, None, 0)

        def watched_call(*given: Any, one: Call = one, at_once: Any = at_once) -> Any:
            made = None if given[-1] is not None else watched(at_once)(*given[:-1])
            return one.traced(*given) if made is None else made

        monkeypatch.setattr(one.fast, "call", watched_call)
    for schema in (s for card in registry().values() for s in card.schemas):
        new = f"new_{schema.partition('(')[0]}"
        monkeypatch.setattr(direct, new, watched(getattr(direct, new)))
    with torch.no_grad():
        for sample in registry()[name].samples(Make(torch.bfloat16)):
            given = list(tensors_of((sample.args, list(sample.kwargs.values()))))
            if all(t.is_contiguous() for t in given) and not (
                name in WIDTHS and len({t.shape[-1] for t in given[1:3]}) > 1
            ):
                registry()[name].function(*sample.args, **sample.kwargs)
    assert refused == []


X, W = torch.randn(1, 8), torch.randn(3, 8)
REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "gelu of numbers": (lambda: opsmith.ops.gelu(2.0), TypeError, "must be a tensor"),
    "gelu of integers": (lambda: opsmith.ops.gelu(X.long(), tanh=True), TypeError, "floating-point"),
    "bias that broadcasts": (lambda: opsmith.ops.bias_gelu(X, X[:, :1]), ValueError, "bias must have shape"),
    "bias that promotes": (lambda: opsmith.ops.bias_gelu(X.half(), X[0]), TypeError, "bias must be float16"),
    "up that broadcasts": (lambda: opsmith.ops.silu_mul(X, X[:, :1]), ValueError, "up must have shape"),
    "up that promotes": (lambda: opsmith.ops.silu_mul(X.half(), X), TypeError, "up must be float16"),
    "no bias": (lambda: opsmith.ops.bias_gelu(X, None), TypeError, "bias must be a tensor"),
    "a number and a bias": (lambda: opsmith.ops.bias_gelu(X[0, 0], X[0, :1]), ValueError, "dimension"),
    "numbers": (lambda: opsmith.ops.silu_mul(X[0, 0], X[0, 0]), ValueError, "dimension"),
    "numbers, tanh": (lambda: opsmith.ops.gelu_mul(X[0, 0], X[0, 0], tanh=True), ValueError, "dimension"),
    "up of fewer dimensions": (lambda: opsmith.ops.silu_mul(X, X[0]), ValueError, "up must have shape"),
    "up, tanh": (lambda: opsmith.ops.gelu_mul(X, X[0], tanh=True), ValueError, "up must have shape"),
    "up of float64": (lambda: opsmith.ops.gelu_mul(X, X.double()), TypeError, "up must be float32"),
    "half of an odd size": (lambda: opsmith.ops.silu_mul(X[:, :7]), ValueError, "even size"),
    "integers": (lambda: opsmith.ops.silu_mul(X.long(), X.long()), TypeError, "floating-point"),
    "up elsewhere": (lambda: opsmith.ops.silu_mul(X, X.to("meta")), ValueError, "up is on meta"),
    "up for a native call": (lambda: opsmith.ops.gelu_mul(X, X.to("meta")), ValueError, "up is on meta"),
    "softmax of integers": (lambda: opsmith.ops.softmax(X.long()), TypeError, "floating-point"),
    "softmax of a number": (lambda: opsmith.ops.softmax(torch.tensor(1.0)), ValueError, "dimension"),
    "no such dim": (lambda: opsmith.ops.softmax(X, 2), ValueError, "dim must be in"),
    "no such method": (lambda: opsmith.ops.softmax(X, method="best"), ValueError, "method must be one of"),
    "norm of integers": (lambda: opsmith.ops.layer_norm(X.long()), TypeError, "floating-point"),
    "norm of a number": (lambda: opsmith.ops.layer_norm(torch.tensor(1.0)), ValueError, "dimension"),
    "a weight too long": (
        lambda: opsmith.ops.layer_norm(X, X[0].repeat(2)),
        ValueError,
        "weight must have shape",
    ),
    "a weight of rows": (lambda: opsmith.ops.layer_norm(X, X), ValueError, "weight must have shape"),
    "rms of integers": (lambda: opsmith.ops.rms_norm(X.long()), TypeError, "floating-point"),
    "rms of a number": (lambda: opsmith.ops.rms_norm(X[0, 0]), ValueError, "dimension"),
    "a weight of rows for rms": (lambda: opsmith.ops.rms_norm(X, X), ValueError, "weight must have shape"),
    "a weight that promotes": (
        lambda: opsmith.ops.rms_norm(X, X[0].half()),
        TypeError,
        "weight must be float32",
    ),
    "a residual of fewer dimensions": (
        lambda: opsmith.ops.rms_norm(X, residual=X[0]),
        ValueError,
        "residual must have shape",
    ),
    "a number as residual": (
        lambda: opsmith.ops.layer_norm(X, residual=1.0),
        TypeError,
        "residual must be a tensor",
    ),
    "a residual to layer_norm": (
        lambda: opsmith.ops.layer_norm(X, residual=X[0]),
        ValueError,
        "residual must have shape",
    ),
    "a residual that promotes": (
        lambda: opsmith.ops.rms_norm(X, residual=X.half()),
        TypeError,
        "residual must be float32",
    ),
    "classes as floats": (
        lambda: opsmith.ops.cross_entropy(X, torch.tensor([1.0])),
        TypeError,
        "target must hold classes",
    ),
    "probabilities": (lambda: opsmith.ops.cross_entropy(X, X), TypeError, "probabilities"),
    "classes that come second": (
        lambda: opsmith.ops.cross_entropy(X[None], torch.zeros(1, 8, dtype=torch.long)),
        ValueError,
        "classes are the last dimension",
    ),
    "no such class": (
        lambda: opsmith.ops.cross_entropy(X, torch.tensor([8])),
        ValueError,
        "got 8 at position 0",
    ),
    "too many targets": (
        lambda: opsmith.ops.cross_entropy(X, torch.tensor([1, 2])),
        ValueError,
        "target must have the shape",
    ),
    "loss of integers": (
        lambda: opsmith.ops.cross_entropy(X.long(), torch.tensor([1])),
        TypeError,
        "floating-point",
    ),
    "too much smoothing": (
        lambda: opsmith.ops.cross_entropy(X, torch.tensor([1]), label_smoothing=1.5),
        ValueError,
        "label_smoothing must be in",
    ),
    "attention to other heads": (
        lambda: opsmith.ops.attention(
            torch.randn(1, 3, 2, 8), torch.randn(1, 2, 2, 8), torch.randn(1, 2, 2, 8)
        ),
        ValueError,
        "must be a multiple",
    ),
    "attention to keys elsewhere": (
        lambda: opsmith.ops.attention(X[None, None], X[None, None].to("meta"), X[None, None]),
        ValueError,
        "k is on meta",
    ),
    "a rotation of nothing": (
        lambda: opsmith.ops.rope(X[None], X, X, rotary_dim=0),
        ValueError,
        r"an even number in \[2, 8\].*got 0",
    ),
    "a table of int8": (
        lambda: opsmith.ops.rope_int8(X[None].to(torch.int8), X[None, :, 0], *[X.to(torch.int8)] * 2),
        TypeError,
        "cos must be a floating-point tensor",
    ),
    "a padding row that is none": (
        lambda: opsmith.ops.embedding(torch.tensor([1]), W, padding_idx=3),
        ValueError,
        "padding_idx must be in",
    ),
    "no weight at all": (lambda: opsmith.ops.layer_norm(X, 1.0), TypeError, "weight must be a tensor"),
    "a vector as weight": (lambda: opsmith.ops.linear(X, W[0]), ValueError, "weight must have shape"),
    "a bias of one": (lambda: opsmith.ops.linear(X, W, W[0, :1]), ValueError, "bias must have shape"),
    "a bias of rows": (lambda: opsmith.ops.linear(X, W, W[:, :1].t()), ValueError, "bias must have shape"),
    "another K": (lambda: opsmith.ops.linear(X[:, :7], W), ValueError, "weight must have shape"),
    "linear of integers": (lambda: opsmith.ops.linear(X.long(), W.long()), TypeError, "floating-point"),
    "a weight elsewhere": (lambda: opsmith.ops.linear(X, W.to("meta")), ValueError, "weight is on meta"),
    "no such activation": (
        lambda: opsmith.ops.linear(X, W, activation="tan"),
        ValueError,
        "activation must be",
    ),
    "another dtype": (lambda: opsmith.ops.linear(X, W.double()), TypeError, "weight must be float32"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_the_short_way_refuses_what_the_long_one_refuses(name: str) -> None:
    call, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        call()
