"""What is particular to experts: whose weights are read, biases, GPT-OSS, packed weights, ids that are not there."""

from __future__ import annotations

import copy
import math
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from opsmith.operator import Tolerance
from opsmith.ops import PackedExperts, PackedLinear, experts
from opsmith.ops.embedding import IdError
from opsmith.ops.experts import definition, packed_definition
from opsmith.ops.experts.middle import ACTIVATIONS
from opsmith.ops.packed_linear.formats import FORMATS

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


def packed(weight: torch.Tensor, format: str) -> PackedExperts:
    def one(weight: torch.Tensor) -> PackedLinear:
        layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        layer.weight.data = weight
        return PackedLinear.from_linear(layer, format=format, group_size=128 if format == "fp8" else 32)

    return PackedExperts.of(map(one, weight), len(weight))


def judged(got: torch.Tensor, x: torch.Tensor, first: Any, last: Any, *given: Any, **how: Any) -> None:
    """Hold a result to what the definition makes of the same packed weights in float64, as cards are held to it."""
    plain = first.dequantize(torch.float64), last.dequantize(torch.float64)
    ids, weights = given
    eager = definition(x, *(t.to(x.dtype) for t in plain), ids, weights, *how.values(), 0, math.inf)
    wide = [None if t is None else t.double() for t in how.values()]
    right = definition(x.double(), *plain, ids, weights.double(), *wide, 0, math.inf)
    verdict = Tolerance().check(got, eager, right)
    assert verdict.ok, verdict.why


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 9, 120])  # 120: more rows of an expert than a tile has
@pytest.mark.parametrize("format", [name for name in FORMATS if name != "int8_dynamic"])
def test_packed_experts(format: str, tokens: int, dtype: torch.dtype) -> None:
    # Neither of 5 times 16 gates and ups nor of 72 rows is made of whole panels; 40 is not of whole groups.
    (gate_up, down), (ids, weights) = layers(5, 72, 40), routed(tokens, 2, 5)
    x, first, last = torch.randn(tokens, 72).to(dtype), packed(gate_up, format), packed(down, format)
    bias = torch.randn(5, 80).to(dtype), torch.randn(5, 72).to(dtype)
    got = experts(x, first, last, ids, weights, bias=bias)
    judged(got, x, first, last, ids, weights, first_bias=bias[0], last_bias=bias[1])


@pytest.mark.parametrize("tokens", [1, 40])
def test_rounded_inputs_of_packed_experts(tokens: int) -> None:
    (gate_up, down), (ids, weights) = layers(), routed(tokens)
    x, first, last = torch.randn(tokens, 48), packed(gate_up, "int8_dynamic"), packed(down, "int8_dynamic")
    got = experts(x, first, last, ids, weights)
    by_hand = torch.zeros_like(x)
    for t in range(tokens):
        for e, weight in zip(ids[t].tolist(), weights[t], strict=True):
            gate, up = first[e](x[t : t + 1]).chunk(2, -1)
            by_hand[t] += weight * last[e](F.silu(gate) * up)[0]
    # A number next to the middle between two may be rounded to either.
    torch.testing.assert_close(got, by_hand, rtol=0.02, atol=0.02)
    with pytest.raises(ValueError, match="rounding x has no gradient"):
        experts(x.requires_grad_(), first, last, ids, weights)


def test_packed_experts_of_two_formats_in_rounds() -> None:
    # 1500 tokens of 8 experts each are more rows than share one loop: the sums go on in the next.
    (gate_up, down), (ids, weights) = layers(8, 256, 256), routed(1500, 8, 8)
    x, first, last = torch.randn(1500, 256), packed(gate_up, "q4_k"), packed(down, "q6_k")
    judged(
        experts(x, first, last, ids, weights),
        *(x, first, last, ids, weights),
        **dict.fromkeys(("first_bias", "last_bias")),
    )


def test_packed_experts_that_nobody_asked_for_are_not_read_and_nan_stays() -> None:
    (gate_up, down), (ids, weights) = layers(), routed(4, count=5)
    x, first, last = torch.randn(4, 48), packed(gate_up, "int8"), packed(down, "int8")
    expected = experts(x, first, last, ids, weights)
    assert first.scale is not None
    first.scale[5] = torch.nan
    assert torch.equal(experts(x, first, last, ids, weights), expected)
    x[2, 7] = torch.nan
    got = experts(x, first, last, ids, weights)
    assert bool(got[2].isnan().all())
    others = [0, 1, 3]
    assert torch.equal(got[others], expected[others])
    assert experts(x[:0], first, last, ids[:0], weights[:0]).shape == (0, 48)


def test_gradients_past_packed_experts_and_layers_as_a_list() -> None:
    x, (gate_up, down), (ids, weights) = torch.randn(9, 48, requires_grad=True), layers(), routed(9)
    first, last = packed(gate_up, "int4"), packed(down, "int4")
    leaves = (x, weights.requires_grad_())
    y = experts(x, torch.nn.ModuleList(first), list(last), ids, weights)
    mine = torch.autograd.grad(y.square().sum(), leaves)
    plain = experts(x, first.dequantize(), last.dequantize(), ids, weights)
    for one, other in zip(mine, torch.autograd.grad(plain.square().sum(), leaves), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_packed_experts_in_a_graph() -> None:
    (gate_up, down), (ids, weights) = layers(), routed(9)
    x, first, last = torch.randn(9, 48), packed(gate_up, "int8"), packed(down, "q8_0")

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = first, last

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * experts(x, self.first, self.last, ids, weights)

    torch.compiler.reset()
    compiled = torch.compile(Layer(), backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), 2 * experts(x, first, last, ids, weights))
    # Where no values are known, as for a graph on another device: every expert is asked, and weighed by who was sent.
    given = (*first.packed, *last.packed, ids, weights, None, None, 32, 8, 0, 0, 8, 32, 2, 0, math.inf)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["opsmith.ops.experts"], "has_values", lambda *given: False)
        got = packed_definition(x, *given)
    torch.testing.assert_close(got, experts(x, first, last, ids, weights), rtol=1e-4, atol=1e-5)
    torch.library.opcheck(torch.ops.opsmith.experts_packed.default, (x, *given), {"y": torch.empty_like(x)})


def test_packed_experts_are_saved_and_cast_as_what_they_are(tmp_path: Any) -> None:
    first = packed(layers()[0], "q4_0")
    again = copy.deepcopy(first).bfloat16()
    assert again.scale is not None
    assert again.scale.dtype == torch.float16
    torch.save(first.state_dict(), tmp_path / "state")
    again.weight.zero_()
    again.load_state_dict(torch.load(tmp_path / "state"))
    assert again.dequantize().equal(first.dequantize())
    assert first[2].dequantize().equal(first.dequantize()[2])
    with pytest.raises(TypeError, match="give it to opsmith"):
        first(torch.ones(3, 48))


def test_what_packed_experts_refuse() -> None:
    (gate_up, down), (ids, weights) = layers(), routed(5)
    x, first, last = torch.randn(5, 48), packed(gate_up, "int8"), packed(down, "int8")
    for wrong, error, message in (
        ({"x": torch.ones(5, 47)}, ValueError, r"x must have shape \[T, 48\], got \(5, 47\)"),
        ({"x": x.long()}, TypeError, "x must be floating-point|got int64"),
        ({"gate_up": packed(gate_up[:5], "int8")}, ValueError, r"\(6, 48, 64\), E, D and 2I, .*got \(5, 48"),
        ({"down": down}, TypeError, "down must be packed as the other weight is, got Tensor"),
        ({"down": torch.nn.Linear(3, 3)}, TypeError, "Linear"),
        ({"ids": ids.int() + 6}, IdError, r"ids must be in \[0, 6\)"),
        ({"ids": ids.float()}, TypeError, "ids must be int64 or int32, got float32"),
        ({"weights": weights[:4]}, ValueError, r"weights must have shape \[5, 2\]"),
        ({"bias": (None, torch.ones(6, 47))}, ValueError, r"bias\[1\] must have shape \(6, 48\)"),
        ({"bias": (torch.ones(6, 64).half(), None)}, TypeError, r"bias\[0\] must be float32 like x"),
        ({"activation": "relu"}, ValueError, "activation must be one of silu"),
        ({"limit": 0.0}, ValueError, "limit must be above 0"),
    ):
        call = {"x": x, "gate_up": first, "down": last, "ids": ids, "weights": weights}
        with pytest.raises(error, match=message):
            experts(**(call | wrong))  # type: ignore[arg-type]
    one = PackedLinear.from_linear(torch.nn.Linear(48, 64), format="int8")
    for layers_, count, error, message in (
        ([first[0], one], 2, ValueError, r"expected 2 layers of .*bias=False.* got \(.*bias=True.*\) at 1"),
        ([first[0], last[0]], 2, ValueError, r"in_features=48, .* got \(in_features=32"),
        ([first[0]], 2, ValueError, "expected 2 layers, one at least, got 1"),
        ([first[0]] * 3, 2, ValueError, "expected 2 layers of .* at 2"),
        ([], 0, ValueError, "expected 0 layers, one at least, got 0"),
        ([torch.nn.Identity()], 1, TypeError, "expected packed layers, got Identity"),
    ):
        with pytest.raises(error, match=message):
            PackedExperts.of(layers_, count)  # type: ignore[arg-type]


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
        (
            {"down": [torch.nn.Identity()] * 6},
            TypeError,
            "gate_up must be packed as the other weight is, got Tensor",
        ),
    ],
)
def test_errors_name_what_was_expected_and_what_came(change: Any, error: Any, message: str) -> None:
    (gate_up, down), (ids, weights) = layers(), routed(5)
    call = {"x": torch.randn(5, 48), "gate_up": gate_up, "down": down, "ids": ids, "weights": weights}
    with pytest.raises(error, match=f"experts: {message}"):
        experts(**(call | change))
