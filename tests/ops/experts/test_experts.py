"""What is particular to experts: whose weights are read, biases, GPT-OSS, packed weights, ids that are not there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from opsmith.ops import PackedLinear, experts
from opsmith.ops.embedding import IdError
from opsmith.ops.experts import definition
from opsmith.ops.experts.middle import ACTIVATIONS

Layers = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def layers(count: int = 6, d: int = 48, hidden: int = 32, dtype: torch.dtype = torch.float32) -> Layers:
    gate_up, down = torch.randn(count, 2 * hidden, d) * d**-0.5, torch.randn(count, d, hidden) * hidden**-0.5
    return gate_up.to(dtype), down.to(dtype)


def routed(tokens: int, k: int = 2, count: int = 6) -> Layers:
    return torch.rand(tokens, count).topk(k).indices, torch.rand(tokens, k)


def by_token(x: Any, gate_up: Any, down: Any, ids: Any, weights: Any, act: Any = F.silu) -> torch.Tensor:
    """One token and one expert after the other, as the formula says it."""
    y = torch.zeros_like(x)
    for t, token in enumerate(x):
        for e, weight in zip(ids[t].tolist(), weights[t], strict=True):
            gate, up = (gate_up[e] @ token).chunk(2)
            y[t] += weight * (down[e] @ (act(gate) * up))
    return y


@pytest.mark.parametrize("tokens", [1, 5, 60])  # few for each expert, and many
def test_it_is_the_formula(tokens: int) -> None:
    x, (gate_up, down), (ids, weights) = torch.randn(tokens, 48), layers(), routed(tokens)
    expected = by_token(*(t.double() for t in (x, gate_up, down)), ids, weights.double())
    torch.testing.assert_close(
        experts(x, gate_up, down, ids, weights).double(), expected, rtol=1e-5, atol=1e-6
    )


def test_experts_that_nobody_asked_for_are_not_read() -> None:
    x, (gate_up, down), (ids, weights) = torch.randn(4, 48), layers(), routed(4, count=5)
    expected = experts(x, gate_up, down, ids, weights)
    gate_up[5], down[5] = torch.nan, torch.nan
    assert torch.equal(experts(x, gate_up, down, ids, weights), expected)


def test_a_token_gets_the_same_whoever_comes_after_it() -> None:
    x, (gate_up, down), (ids, weights) = torch.randn(16, 48), layers(), routed(16)
    whole = experts(x, gate_up, down, ids, weights)
    assert torch.equal(experts(x, gate_up, down, ids, weights), whole)
    alone = experts(x[:1], gate_up, down, ids[:1], weights[:1])
    torch.testing.assert_close(alone, whole[:1], rtol=1e-6, atol=1e-6)


def oss(x: Any, gate_up: Any, down: Any, bias: Any, ids: Any, weights: Any, limit: float) -> torch.Tensor:
    """GptOssExperts, of rows."""
    y = torch.zeros_like(x)
    for e in ids.unique():
        token, place = torch.where(ids == e)
        between = x[token] @ gate_up[e].T + bias[0][e]
        gate, up = between[..., ::2].clamp(max=limit), between[..., 1::2].clamp(-limit, limit)
        out = ((up + 1) * gate * torch.sigmoid(1.702 * gate)) @ down[e].T + bias[1][e]
        y.index_add_(0, token, out * weights[token, place, None])
    return y


@pytest.mark.parametrize("tokens", [3, 100])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_form_of_gpt_oss_and_its_gradients(tokens: int, transposed: bool) -> None:
    x, (gate_up, down), (ids, weights) = torch.randn(tokens, 48), layers(), routed(tokens)
    if transposed:  # as GPT-OSS stores them
        gate_up, down = (t.mT.contiguous().mT for t in (gate_up, down))
    leaves = [x, gate_up, down, torch.randn(6, 64), torch.randn(6, 48), weights]

    def gradients(dtype: torch.dtype, ours: bool) -> list[torch.Tensor]:
        x, gate_up, down, first, last, weights = own = [t.to(dtype).requires_grad_() for t in leaves]
        if ours:
            how = {"activation": "swiglu_oss", "bias": (first, last), "limit": 1.5}
            y = experts(x, gate_up, down, ids, weights, **how)
        else:
            y = oss(x, gate_up, down, (first, last), ids, weights, 1.5)
        return [y, *torch.autograd.grad(y, own, torch.linspace(-1, 1, y.numel(), dtype=dtype).view(y.shape))]

    for mine, exact in zip(gradients(torch.float32, True), gradients(torch.float64, False), strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_is_beyond_the_limit_gets_no_gradient(activation: str) -> None:
    (gate_up, down), (ids, weights) = layers(), routed(30)
    x = (5 * torch.randn(30, 48)).requires_grad_()
    (mine,) = torch.autograd.grad(
        experts(x, gate_up, down, ids, weights, activation=activation, limit=0.5).sum(), x
    )
    double = x.detach().double().requires_grad_()
    exact = definition(
        double,
        gate_up.double(),
        down.double(),
        ids,
        weights.double(),
        None,
        None,
        ACTIVATIONS[activation],
        0.5,
    )
    torch.testing.assert_close(
        mine.double(), torch.autograd.grad(exact.sum(), double)[0], rtol=1e-4, atol=1e-5
    )


def test_weights_that_are_frozen_get_no_gradient() -> None:
    (gate_up, down), (ids, weights) = layers(), routed(7)
    x = torch.randn(7, 48, requires_grad=True)
    experts(x, gate_up, down, ids, weights).sum().backward()
    assert gate_up.grad is None
    assert x.grad is not None
    double = x.detach().double().requires_grad_()
    by_token(double, gate_up.double(), down.double(), ids, weights.double()).sum().backward()
    torch.testing.assert_close(x.grad.double(), double.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("format", ["bf16", "int8", "int8_dynamic", "int4"])
def test_packed_experts(format: str) -> None:
    x, (gate_up, down), (ids, weights) = torch.randn(9, 48), layers(), routed(9)

    def packed(weight: torch.Tensor) -> torch.nn.ModuleList:
        found = []
        for one in weight:
            layer = torch.nn.Linear(one.shape[1], one.shape[0], bias=False)
            layer.weight.data = one
            found.append(PackedLinear.from_linear(layer, format=format, group_size=32))
        return torch.nn.ModuleList(found)

    first, last = packed(gate_up), packed(down)
    bias = torch.randn(6, 64), torch.randn(6, 48)
    plain = [torch.stack([layer.dequantize() for layer in one]) for one in (first, last)]
    got = experts(x, first, last, ids, weights, bias=bias)
    rounding = 0.05 if format == "int8_dynamic" else 1e-4
    torch.testing.assert_close(got, experts(x, *plain, ids, weights, bias=bias), rtol=rounding, atol=rounding)
    if format != "int8_dynamic":
        x.requires_grad_()
        (mine,) = torch.autograd.grad(experts(x, first, last, ids, weights).sum(), x)
        (theirs,) = torch.autograd.grad(experts(x, *plain, ids, weights).sum(), x)
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("wrong", [6, -1, 1 << 40])
@pytest.mark.parametrize("training", [False, True])
def test_an_expert_that_is_not_there_is_named(wrong: int, training: bool) -> None:
    x, (gate_up, down), (ids, weights) = torch.randn(5, 48, requires_grad=training), layers(), routed(5)
    ids[3, 1] = wrong
    with pytest.raises(
        IdError, match=rf"experts: ids must be in \[0, 6\), .*got {wrong} at position \(3, 1\)"
    ):
        experts(x, gate_up, down, ids, weights)
    with pytest.raises(ValueError, match=f"got {wrong} at"):
        experts(x.double(), gate_up.double(), down.double(), ids, weights.double())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"x": torch.ones(5, 47)},
            ValueError,
            r"down must have shape \[E, 47, I\] to fit x, got \(6, 48, 32\)",
        ),
        ({"gate_up": torch.ones(6, 63, 48)}, ValueError, r"gate_up must have 64 rows .*got \(6, 63, 48\)"),
        (
            {"gate_up": torch.ones(5, 64, 48)},
            ValueError,
            r"gate_up must have shape \[6, 2I, 48\].*got \(5, 64",
        ),
        ({"down": torch.ones(6, 48, 32).half()}, TypeError, "down must be float32 like x, got float16"),
        ({"ids": torch.ones(5, 2)}, TypeError, "ids must be int64 or int32, got float32"),
        ({"weights": torch.ones(5, 3)}, ValueError, r"weights must have shape \[5, 2\].*got \(5, 3\)"),
        ({"activation": "relu"}, ValueError, "activation must be one of silu, .*got 'relu'"),
        ({"limit": -1.0}, ValueError, "limit must be above 0, got -1.0"),
        ({"bias": torch.ones(6, 64)}, TypeError, "bias must be two tensors, .*got Tensor"),
        (
            {"bias": (torch.ones(6, 64), torch.ones(6, 47))},
            ValueError,
            r"bias\[1\] must have shape \[6, 48\]",
        ),
        ({"down": [torch.nn.Identity()] * 6}, TypeError, "gate_up must be 6 packed layers, .*got a tensor"),
    ],
)
def test_errors_name_what_was_expected_and_what_came(change: Any, error: Any, message: str) -> None:
    (gate_up, down), (ids, weights) = layers(), routed(5)
    call = {"x": torch.randn(5, 48), "gate_up": gate_up, "down": down, "ids": ids, "weights": weights}
    with pytest.raises(error, match=f"experts: {message}"):
        experts(**(call | change))
