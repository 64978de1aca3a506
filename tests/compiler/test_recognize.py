"""Operators are found by their arithmetic, in every spelling, and what only looks alike is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import opsmith.ops  # noqa: F401  the cards
from opsmith.compiler.capture.trace import capture
from opsmith.compiler.find.recognize import Recognized, recognize
from opsmith.operator import registry
from tests.compiler.models import Truth, optimized
from tests.compiler.spelling import NEAR_MISSES, SPELLINGS, inputs


def recognized(fn: Callable[..., Any], values: list[torch.Tensor], dynamic: bool) -> Recognized:
    found: list[Recognized] = []

    def backend(gm: Any, example_inputs: Any) -> Any:
        found.append(recognize(capture(gm, example_inputs).graph, registry().values()))
        return gm.forward

    torch._dynamo.reset()
    for value in values:  # as `optimize` does: the size of a feature vector is the model's, not the input's
        if value.is_floating_point():
            torch._dynamo.mark_static(value, value.dim() - 1)
    with torch.no_grad(), torch._dynamo.config.patch(specialize_float=True):
        torch.compile(fn, backend=backend, dynamic=dynamic, fullgraph=True)(*values)
    assert len(found) == 1
    return found[0]


def _ids(cases: list[tuple[str, str, Any, Any]]) -> list[str]:
    return [f"{c[0]}-{c[1]}" for c in cases]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("case", SPELLINGS, ids=_ids(SPELLINGS))
def test_every_spelling_is_found(case: tuple[str, str, Any, Any], dynamic: bool) -> None:
    operator, _, fn, specs = case
    found = recognized(fn, inputs(specs), dynamic)
    assert [s.card.name for s in found.sites] == [operator], [str(m) for m in found.misses]
    if operator == "linear" and case[1] == "gelu":
        assert found.sites[0].arguments["activation"] == "gelu"
    if operator == "gelu_mul":
        assert found.sites[0].arguments.get("tanh", False) == ("tanh" in case[1])
        assert len(found.sites[0].region) > 1
    if operator in ("layer_norm", "rms_norm"):
        assert ("residual" in found.sites[0].arguments) == ("residual" in case[1])
    if operator == "rms_norm":
        assert found.sites[0].arguments.get("weight_offset", 0.0) == (1.0 if "Gemma" in case[1] else 0.0)
    if case[1] in ("sdpa", "tril", "einsum, heads inside the scores"):
        assert found.sites[0].arguments["causal"] is True


class _Spelled(torch.nn.Module):
    def __init__(self, fn: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *values: torch.Tensor) -> torch.Tensor:
        return self.fn(*values)


_PROVED = [
    case
    for case in SPELLINGS
    if case[1].endswith((", heads out", ", heads in", ", heads apart", "length one", "length bounded"))
    or case[1] in ("logarithms", "softmax of a middle axis")
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", _PROVED, ids=_ids(_PROVED))
def test_what_is_found_is_proved(case: tuple[str, str, Any, Any], dtype: torch.dtype) -> None:
    values = [v.to(dtype) for v in inputs(case[3])]
    values[0][0, 0] = 0  # whose length is none
    truth, model = Truth(_Spelled(case[2])), optimized(_Spelled(case[2]), *values)
    assert model.opsmith.report.found == {case[0]: 1}
    assert not model.opsmith.report.rolled_back
    with torch.no_grad():
        truth.check(model(*values), *values)


@pytest.mark.parametrize("case", NEAR_MISSES, ids=_ids(NEAR_MISSES))
def test_near_misses_are_not_found_and_are_reported(case: tuple[str, str, Any, Any]) -> None:
    operator, _, fn, specs = case
    found = recognized(fn, inputs(specs), False)
    assert operator not in [s.card.name for s in found.sites]
    misses = [m for m in found.misses if m.operator == operator]
    assert misses, "a near miss must be reported"
    assert misses[0].expected
    assert misses[0].got
    assert "spelling.py:" in misses[0].where


def test_a_near_miss_is_named_where_it_came_closest() -> None:
    """Not by the views that stand behind it."""

    def gated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        weights = torch.softmax(q @ k.transpose(-1, -2) * 0.3, -1) * gate
        return (weights @ v).transpose(1, 2).reshape(2, 6, 24)

    found = recognized(gated, [*torch.randn(3, 2, 3, 6, 8), torch.rand(2, 1, 6, 6)], False)
    (miss,) = [m for m in found.misses if m.operator == "attention"]
    assert miss.node.startswith("matmul")


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_attention_whose_heads_are_joined_is_no_near_miss_of_a_layer(dynamic: bool) -> None:
    """Views alone stand behind what was found: there is no product there that could be a layer's."""

    def joined(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        weights = torch.softmax(q @ k.transpose(-1, -2) * 0.3, -1)
        mixed = (weights @ v).transpose(1, 2).contiguous()
        return mixed.view(2, k.shape[2] + v.shape[2] - 6, 24)  # what computes a size is no product either

    found = recognized(joined, [*torch.randn(3, 2, 3, 6, 8)], dynamic)
    assert [s.card.name for s in found.sites] == ["attention"]
    assert [str(m) for m in found.misses] == []


def test_a_number_that_a_norm_is_multiplied_by_is_no_norm_of_another_kind() -> None:
    """As T5 has it before an output layer that shares the embedding's weight."""

    def scaled(before: torch.Tensor, more: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x = before + more
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight * 0.125

    found = recognized(scaled, [*torch.randn(2, 2, 5, 32), torch.rand(32)], False)
    assert [s.card.name for s in found.sites] == ["rms_norm"]
    assert found.misses == []


def _unrotated(x: torch.Tensor, w: torch.Tensor, written: bool) -> torch.Tensor:
    """The attention of a layer without positions, whose queries and keys are normed (EXAONE 4)."""
    heads = [t.reshape(*t.shape[:2], 4, 16).transpose(1, 2) for t in x.chunk(3, -1)]
    q, k = (w * (t * torch.rsqrt(t.pow(2).mean(-1, keepdim=True) + 1e-5)) for t in heads[:2])
    if written:
        return torch.softmax(q @ k.transpose(-1, -2) * 0.25, -1) @ heads[2]
    return torch.nn.functional.scaled_dot_product_attention(q, k, heads[2])


@pytest.mark.parametrize("written", [False, True], ids=["sdpa", "written"])
def test_attention_of_normed_queries_and_keys_without_rotation(written: bool) -> None:
    found = recognized(
        lambda x, w: _unrotated(x, w, written), [torch.randn(2, 9, 192), torch.randn(16)], True
    )
    assert [s.card.name for s in found.sites] == ["rms_norm", "rms_norm", "attention"]


def test_zero_times_a_number_is_no_zero() -> None:
    """It is NaN where the number is infinite, and a model's sum says so."""

    def model(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x + bias, approximate="tanh") + x * 0.0

    (site,) = recognized(model, [torch.randn(2, 5, 32), torch.rand(32)], False).sites
    assert site.root.target is torch.ops.aten.gelu.default


def _gated(
    x: torch.Tensor, gate: torch.Tensor, other: torch.Tensor, weight: torch.Tensor
) -> list[torch.Tensor]:
    """What has a sigmoid in common with silu, gelu and gated products, and nothing else."""
    mixed = torch.sigmoid(gate) * x + other
    decayed = other * torch.exp(-8 * torch.sigmoid(gate)) + torch.sigmoid(x) * other
    return [mixed, decayed, x * torch.sigmoid(x @ weight), other + torch.sigmoid(gate[..., :1]) * x]


@pytest.mark.parametrize("part", range(4))
def test_a_sigmoid_alone_is_no_near_miss(part: int) -> None:
    found = recognized(lambda *values: _gated(*values)[part], inputs(((3, 8), (3, 8), (3, 8), (8, 8))), False)
    assert [str(m) for m in found.misses] == []


def _shifted(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Sines and cosines that are added: a position's embedding."""
    return x + torch.cat([angles.tanh().sin(), angles.tanh().cos()], -1)


def _summed(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """An activation of a sum whose second part takes a few steps of its own."""
    return torch.nn.functional.silu(x + other.cumsum(1).cumsum(1).cumsum(1))


def _normed(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """A norm that is found, and added to something."""
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    return other.cumsum(1).cumsum(1).cumsum(0) + other[0, 0] * normed


@pytest.mark.parametrize("call", [_shifted, _summed, _normed])
def test_what_an_operator_s_input_is_added_to_makes_no_near_miss(call: Any) -> None:
    shapes = ((2, 5, 16), (5, 8) if call is _shifted else (2, 5, 16))
    assert [str(m) for m in recognized(call, inputs(shapes), False).misses] == []


@pytest.mark.parametrize("product", [torch.matmul, lambda a, b: torch.einsum("bhld,bhdm->bhlm", a, b)])
def test_a_product_of_batches_is_no_near_miss_of_a_layer(product: Any) -> None:
    found = recognized(product, inputs(((2, 3, 5, 8), (2, 3, 8, 4))), False)
    assert [str(m) for m in found.misses] == []


def test_a_norm_of_a_sum_is_nearest_to_the_norm_that_it_is_of_the_sum() -> None:
    """Not to one that takes a mean away, of one of the two."""

    def outside(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x = x + y
        return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-6) * w

    (miss,) = recognized(outside, inputs(((2, 5, 32), (2, 5, 32), (32,))), True).misses
    assert (miss.operator, miss.expected) == ("rms_norm", "the power -0.5 of (eps + mean(x^2))")


def test_an_activation_behind_a_layer_that_approximates_another_is_a_near_miss() -> None:
    def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.linear(x, w)
        return 0.5 * y * (1 + torch.tanh(0.8 * (y + 0.044715 * y**3)))

    (miss,) = recognized(layer, [torch.randn(2, 5, 32), torch.randn(64, 32)], True).misses
    assert miss.operator == "gelu"


def test_weights_divided_by_their_sum_are_no_near_miss_of_a_norm() -> None:
    """As a router of experts gives them (DeepSeek-V3): no square is among them."""

    def routed(x: torch.Tensor) -> torch.Tensor:
        weights = x.sigmoid().gather(-1, x.topk(2, dim=-1).indices)
        return weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5

    assert [str(m) for m in recognized(routed, [torch.randn(6, 8)], False).misses] == []


def test_shifted_scores_are_no_near_miss_of_a_layer() -> None:
    """A product of queries and positions for each head, which is laid otherwise (XLNet)."""

    def shifted(q: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        scores = torch.einsum("ibnd,jbnd->bnij", q, r)
        return scores.reshape(2, 3, 12, 6)[:, :, 1:, :].reshape(2, 3, 6, 11)[..., :6]

    found = recognized(shifted, [torch.randn(6, 2, 3, 8), torch.randn(12, 2, 3, 8)], False)
    assert [str(m) for m in found.misses] == []
