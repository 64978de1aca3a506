"""Packed layers of one input as one call: found by structure, equal to what each gives, and held in memory once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import opsmith
from opsmith.compiler.config import Config
from opsmith.compiler.find import joined
from opsmith.compiler.modules.quantize import Packing
from opsmith.ops import PackedLinear
from opsmith.ops.packed_linear.formats import CHOICES
from tests.compiler.models import ids, seeded


class Attention(nn.Module):
    """Fewer heads of keys than of queries; a bias for these alone, as some models have it."""

    def __init__(self, width: int = 128, few: int = 64) -> None:
        super().__init__()
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, few, bias=False)
        self.v = nn.Linear(width, few)
        self.out = nn.Linear(width, width)
        self.used: Callable[..., Any] = lambda y, q, k, v: y

    def forward(self, x: torch.Tensor) -> Any:
        b, n, _ = x.shape
        flat = self.q(x), self.k(x), self.v(x)
        q, k, v = (t.view(b, n, -1, 32).transpose(1, 2) for t in flat)
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).reshape(b, n, -1)
        return self.used(self.out(y), *flat)


class Gated(nn.Module):
    def __init__(self, width: int = 128, wide: int = 192) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, wide, bias=False) for _ in range(2))
        self.down = nn.Linear(wide, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


def attention(used: Callable[..., Any] | None = None, **sizes: int) -> Attention:
    torch.manual_seed(0)
    model = Attention(**sizes).eval()
    if used is not None:
        model.used = used
    return model


def packed(model: nn.Module, *x: torch.Tensor, format: str = "int8", **options: Any) -> nn.Module:
    config = opsmith.Config(tune=False, inductor=False, quantize_group=32, **options)
    return opsmith.optimize(model, x or None, config=config, quantize=format)


def call(model: nn.Module, x: torch.Tensor) -> Any:
    with torch.no_grad():
        return model(x)


def layer_by_layer(model: nn.Module, x: torch.Tensor) -> Any:
    with torch.no_grad():
        return model.forward(x)


def same(mine: torch.Tensor, other: torch.Tensor, format: str = "int8") -> bool:
    """Up to the last bits of attention and activations, which are other kernels than PyTorch's.

    The layers behind these may round them: a last bit may become a step.
    """
    step = 1e-5 if format in ("int8", "int4") else 3e-3
    return float((mine - other).norm()) <= step * float(other.norm())


def groups(model: Any) -> list[tuple[str, ...]]:
    return list(dict.fromkeys(layer.joined for layer in model.opsmith.report.quantized if layer.joined))


def kept(model: Any) -> list[str]:
    return [
        s.pattern for s in model.opsmith.report.sites if s.operator == "packed_linear" and s.status == "kept"
    ]


@pytest.mark.parametrize(("format", "shape"), [*((f, (2, 5, 128)) for f in CHOICES), ("int4", (1, 1, 128))])
def test_queries_keys_and_values_are_one_call_and_one_memory(format: str, shape: tuple[int, ...]) -> None:
    model, x = attention(), torch.randn(shape)
    packed(model, x, format=format)
    assert groups(model) == [("q", "k", "v")]
    assert kept(model) == ["3 layers of one input"]
    assert model.opsmith.report.found["packed_linear"] == 1
    assert "joined: 1 group of layers of one input, as q, k, v" in str(model.opsmith.report)
    assert same(call(model, x), layer_by_layer(model, x), format)
    assert [s.error for s in model.opsmith.report.sites if s.operator == "packed_linear"] == [
        0.0
    ]  # to the last bit
    assert "joined" not in model.opsmith.plan.source
    layers = [layer.forward.__self__ for layer in (model.q, model.k, model.v)]
    for name in ("weight", "scale"):
        tensors = [getattr(layer, name) for layer in layers if getattr(layer, name) is not None]
        memory = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        assert sum(memory.values()) == sum(t.nbytes for t in tensors)


@pytest.mark.parametrize("format", ["bf16", "int4"])
def test_gate_and_up_are_one_call(format: str) -> None:
    torch.manual_seed(0)
    model, x = Gated().eval(), torch.randn(3, 4, 128)
    packed(model, x, format=format)
    assert groups(model) == [("gate", "up")]
    assert model.opsmith.report.found == {"silu_mul": 1, "packed_linear": 1}
    assert same(call(model, x), layer_by_layer(model, x), format)


def test_a_layer_whose_panel_is_not_full_comes_last_and_two_of_these_stay_apart() -> None:
    x = torch.randn(2, 5, 128)
    model = attention()
    model.q, model.out = nn.Linear(128, 96 + 10), nn.Linear(32, 128)
    model.forward = lambda x: model.q(x)[..., :64] + model.k(x) * model.v(x)  # type: ignore[method-assign]
    packed(model, x)
    assert groups(model) == [("k", "v", "q")]
    assert same(call(model, x), layer_by_layer(model, x))
    torch.manual_seed(0)
    odd = Gated(wide=100).eval()
    packed(odd, x)
    assert groups(odd) == kept(odd) == []
    assert same(call(odd, x), layer_by_layer(odd, x))


def test_layers_of_different_formats_and_of_different_inputs_stay_apart() -> None:
    model, x = attention(), torch.randn(2, 5, 128)
    packed(model, x, quantize_skip=["k"])
    assert groups(model) == kept(model) == []
    assert same(call(model, x), layer_by_layer(model, x))
    torch.manual_seed(0)
    other = nn.ModuleDict({n: nn.Linear(128, 64) for n in "abcd"}).eval()
    other.forward = lambda x: other.a(x) * other.b(x) + other.c(x + 1) * other.d(x)  # type: ignore[method-assign]
    packed(other, x)
    assert groups(other) == [("a", "b")]
    assert same(call(other, x), layer_by_layer(other, x))


def test_a_part_that_is_read_elsewhere_is_and_one_that_is_returned_stays_its_own() -> None:
    def changed(y: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        some = k[:, 1:]
        return y + k.mul_(2).sum() + some.sum()

    x = torch.randn(2, 5, 128)
    for used in (
        lambda y, q, k, v: y + q * k.sum() + v.reshape(-1).view(2, -1)[:, :1, None],
        lambda y, q, k, v: y + k.mul_(2).sum(),  # which nobody sees by another name
    ):
        model = attention(used)
        packed(model, x)
        assert groups(model) == [("q", "k", "v")]
        assert same(call(model, x), layer_by_layer(model, x))
    for used in (lambda y, q, k, v: (y, v[:, 1:]), changed):
        model = attention(used)
        packed(model, x)
        assert groups(model) == []
        mine, other = call(model, x), layer_by_layer(model, x)
        if isinstance(mine, tuple):
            assert mine[1].equal(other[1])
            assert mine[1].untyped_storage().nbytes() == 2 * 5 * 64 * 4
            mine, other = mine[0], other[0]
        assert same(mine, other)


def test_a_view_that_the_new_strides_do_not_allow_is_a_copy() -> None:
    model = attention(lambda y, q, k, v: y + q.view(2, -1).sum() + torch.as_tensor(1.0))
    x = torch.randn(2, 5, 128)
    packed(model, x)
    assert groups(model) == [("q", "k", "v")]
    assert "eager runs" not in str(model.opsmith.plan)
    assert same(call(model, x), layer_by_layer(model, x))


def test_state_is_what_it_was_and_a_joined_layer_has_one_of_its_own() -> None:
    model, x = attention(), torch.randn(2, 5, 128)
    before, state = call(model, x), copy.deepcopy(model.state_dict())
    packed(model, x, format="int4")
    assert all(v.equal(state[k]) for k, v in model.state_dict().items())
    for layer in (model.q, model.k, model.v):
        mine = layer.forward.__self__
        twin = PackedLinear(
            128, mine.out_features, mine.bias is not None, format="int4", group_size=mine.group_size
        )
        twin.load_state_dict(mine.state_dict())
        assert twin(x).equal(call(layer, x))
        assert twin.scale is not None
        assert twin.scale.is_contiguous()
    model.load_state_dict(state)
    opsmith.restore(model)
    assert call(model, x).equal(before)
    assert not any("forward" in vars(m) for m in model.modules())


def test_copies_are_joined_anew() -> None:
    model, x = attention(), torch.randn(2, 5, 128)
    packed(model, x)
    expected = call(model, x)
    twin = copy.deepcopy(model)
    assert call(twin, x).equal(expected)
    assert groups(twin) == [("q", "k", "v")]
    part = copy.deepcopy(model.k)
    opsmith.restore(model)
    assert part.forward.__self__.weight.equal(twin.k.forward.__self__.weight)


def test_gradients_are_those_of_the_layers() -> None:
    model, x = attention(), torch.randn(2, 5, 128, requires_grad=True)
    packed(model.requires_grad_(False), x.detach())
    model.train()
    (mine,) = torch.autograd.grad(model(x).square().sum(), x)
    (other,) = torch.autograd.grad(model.forward(x).square().sum(), x)
    assert torch.allclose(mine, other, rtol=1e-5, atol=1e-5)
    assert model.opsmith.report.graphs[-1].kept
    assert not any(s.operator == "packed_linear" for s in model.opsmith.report.graphs[-1].sites)


def test_where_apart_is_faster_each_layer_is_called_by_itself() -> None:
    model, x = attention(), torch.randn(2, 5, 128)
    packed(model, x, pin={"packed_linear": "eager"})
    assert groups(model) == [("q", "k", "v")]  # in memory, where each is found as well
    assert [
        s.implementation for s in model.opsmith.plan.shapes[0].steps if s.operator == "packed_linear"
    ] == ["eager"]
    assert model.opsmith.plan.source.count("opsmith_packed_linear_default(") == 3
    assert same(call(model, x), layer_by_layer(model, x))


@pytest.mark.parametrize("format", ["bf16", "int4"])
def test_one_call_that_is_wrong_gives_way_to_the_layers(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = joined._CARD.implementations[0]

    def wrong(*args: Any, **options: Any) -> torch.Tensor:
        return right.fn(*args, **options).mul_(1.01)  # type: ignore[no-any-return]

    monkeypatch.setattr(
        joined._CARD, "implementations", [replace(right, fn=wrong), joined._CARD.implementations[1]]
    )
    model, x = attention(), torch.randn(2, 5, 128)
    packed(model, x, format=format)
    (site,) = [s for s in model.opsmith.report.sites if s.operator == "packed_linear"]
    assert site.status == "kept"
    assert "native: error" in site.why
    assert same(call(model, x), layer_by_layer(model, x), format)


def test_results_that_differ_in_a_last_bit_are_held_to_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    right = joined._CARD.implementations[0]

    def near(*args: Any, **options: Any) -> torch.Tensor:
        return right.fn(*args, **options).mul_(1 + 2**-23)  # type: ignore[no-any-return]

    monkeypatch.setattr(
        joined._CARD, "implementations", [replace(right, fn=near), joined._CARD.implementations[1]]
    )
    for format in ("bf16", "int8", "int4"):
        model, x = attention(), torch.randn(2, 5, 128)
        packed(model, x, format=format)
        (site,) = [s for s in model.opsmith.report.sites if s.operator == "packed_linear"]
        assert (site.status, site.why) == ("kept", "")
        assert 0 < site.error <= site.bound


def test_a_model_generates_what_its_layers_do() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": 61,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
    }
    make = lambda: LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))  # noqa: E731
    model, plain = seeded(make), seeded(make)
    Packing().pack(plain, Config(quantize="int4"))
    packed(model, format="int4")
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 12}
    assert model.generate(ids(2, 7), **options).equal(plain.generate(ids(2, 7), **options))
    # Both graphs, that of the prompt and that of a token, have found the same groups.
    assert [len(g.kept) for g in model.opsmith.report.graphs] == [2 + 2 + 5 + 4 + 1] * 2
    assert len(groups(model)) == 4
    assert "eager runs" not in str(model.opsmith.plan)


def test_what_a_model_changes_about_itself_is_noticed() -> None:
    model, x = Gated().eval(), torch.randn(3, 128)
    model.factor = 2.0
    plain = model.forward
    model.forward = lambda x: plain(x) * model.factor  # type: ignore[method-assign]
    packed(model, x)
    assert same(call(model, x), layer_by_layer(model, x))
    model.factor = 3.0
    assert same(call(model, x), layer_by_layer(model, x))
    packed_call = model.up.forward
    model.up.forward = lambda x: packed_call(x) + 1  # type: ignore[method-assign]
    assert same(call(model, x), layer_by_layer(model, x))
    model.up = nn.Linear(128, 192)
    assert same(call(model, x), layer_by_layer(model, x))


@pytest.mark.parametrize("zeros", [False, True])
def test_scales_may_be_columns_of_a_larger_tensor(zeros: bool) -> None:
    from opsmith.ops import packed_linear

    torch.manual_seed(0)
    layer = PackedLinear.from_linear(nn.Linear(200, 70), format="int4", group_size=32, symmetric=not zeros)
    x = torch.randn(5, 200)
    assert layer.scale is not None

    def wider(t: torch.Tensor | None) -> torch.Tensor | None:
        return None if t is None else torch.cat((t, t, t), 1)[:, 70:140]

    options: dict[str, Any] = {"format": "int4", "group_size": 32}
    mine = packed_linear(x, layer.weight, wider(layer.scale), wider(layer.zero), layer.bias, **options)
    assert mine.equal(layer(x))
