"""`optimize(quantize=...)`: layers packed, proved, reported, left alone on request, and given back."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import opsmith
from opsmith.compiler.modules import quantize
from opsmith.compiler.modules.quantize import Packing
from opsmith.ops.packed_linear.formats import CHOICES
from tests.compiler.models import UNTIMED, WIDTH, Feed, ids, numbers, seeded


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(48)
        self.up = nn.Linear(48, 100)
        self.down = nn.Linear(100, 48, bias=False)
        self.head = nn.Linear(48, 17)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x + self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def call(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(x)  # type: ignore[no-any-return]


def test_without_kernels_weights_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    card = quantize.PACKED_LINEAR
    none = [dataclasses.replace(i, available=lambda: "none here") for i in card.implementations]
    monkeypatch.setattr(quantize, "PACKED_LINEAR", dataclasses.replace(card, implementations=none))
    model, x = net(), torch.randn(2, 3, 48)
    expected = call(model, x)
    opsmith.optimize(model, [x], quantize="int8", config=UNTIMED)
    layers = model.opsmith.report.quantized
    assert layers
    assert {layer.status for layer in layers} == {"left"}
    assert all("without kernels" in layer.why for layer in layers)
    torch.testing.assert_close(call(model, x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("format", CHOICES)
def test_a_model_computes_with_packed_weights_and_gets_its_own_back(format: str) -> None:
    model, x = net(), torch.randn(2, 5, 48)
    before, state = call(model, x), {k: v.clone() for k, v in model.state_dict().items()}
    config = opsmith.Config(tune=False, inductor=False, quantize_group=32)
    opsmith.optimize(model, x, config=config, quantize=format)
    report = model.opsmith.report
    assert [(layer.name, layer.status) for layer in report.quantized] == [
        ("up", "packed"),
        ("down", "packed"),
        ("head", "packed"),
    ]
    assert report.found["layer_norm"] == 1
    lost = max(layer.relative_error for layer in report.quantized)
    bound = {"bf16": 0.002, "int8": 0.005, "int8_dynamic": 0.005, "int4": 0.08}[format]
    assert 0 < lost < bound
    change = float((call(model, x) - before).norm() / before.norm())
    assert 0 < change < 3 * bound
    assert (
        f"quantized: 3 linear layers to {format}; rounding took {100 * lost:.2g} % of the weight of "
        in str(report)
    )
    assert ("opsmith.evaluate(model, text, against=original) measures" in str(report)) == (format == "int4")
    assert report.to_dict()["quantized"][0]["format"] == format
    assert {k: v.dtype for k, v in model.state_dict().items()} == {k: v.dtype for k, v in state.items()}
    opsmith.restore(model)
    assert call(model, x).equal(before)
    assert not any("forward" in vars(m) for m in model.modules())


def test_layers_that_are_left_alone_say_why() -> None:
    class Other(nn.Linear):
        pass

    model = net()
    model.up = Other(48, 100)
    model.down.weight.data[3, 4] = torch.inf
    config = opsmith.Config(quantize="int8", quantize_skip=["he*"], tune=False, inductor=False)
    opsmith.optimize(model, config=config)
    why = {layer.name: (layer.status, layer.why) for layer in model.opsmith.report.quantized}
    assert set(why) == {"up", "down", "head"}
    assert why["up"] == ("left", "its class, Other, may compute something else than nn.Linear")
    assert why["down"][0] == "left"
    assert "row 3 holds NaN or an infinity" in why["down"][1]
    assert why["head"] == ("left", "its name matches 'he*' of quantize_skip")
    assert "not quantized: up left: its class, Other, may" in str(model.opsmith.report)


class Turned(nn.Module):
    """A linear layer as GPT-2 has it: the weight is [K, N]."""

    def __init__(self, k: int, n: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(k, n) * k**-0.5)
        self.bias = nn.Parameter(torch.randn(n)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.weight
        return y if self.bias is None else y + self.bias


class Scaled(Turned):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 1.001


@pytest.mark.parametrize("format", CHOICES)
@pytest.mark.parametrize("release", [False, True])
def test_a_weight_that_lies_the_other_way_round_is_packed_as_well(format: str, release: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 100), Turned(100, 48), Scaled(48, 48), Turned(48, 33, bias=False))
    x = torch.randn(2, 5, 48)
    before, twin = call(model.eval(), x), copy.deepcopy(model)
    for at in (1, 3):  # the same as an nn.Linear
        layer = nn.Linear(*model[at].weight.shape, bias=model[at].bias is not None)
        layer.weight.data = model[at].weight.data.t().contiguous()
        if model[at].bias is not None:
            layer.bias.data = model[at].bias.data
        twin[at] = layer
    config = opsmith.Config(
        tune=False, inductor=False, quantize=format, quantize_group=32, quantize_release=release
    )
    for one in (model, twin):
        opsmith.optimize(one, x, config=config)
    packed = {layer.name: layer.relative_error for layer in model.opsmith.report.quantized}
    assert set(packed) == {"0", "1", "3"}
    for layer in twin.opsmith.report.quantized:
        assert packed[layer.name] == pytest.approx(layer.relative_error, rel=1e-12)
    assert call(model, x).equal(call(twin, x))
    assert model[1].weight.shape == (100, 48)
    assert model[1].weight.is_meta == release
    if not release:
        assert call(pickle.loads(pickle.dumps(model)), x).equal(before)
        opsmith.restore(model)
        assert call(model, x).equal(before)


def test_the_layers_of_gpt2_are_packed() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 61, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32}
    model: Any = seeded(lambda: GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)))
    opsmith.optimize(model, {"input_ids": ids(2, 7)}, quantize="int8", config=UNTIMED)
    names = [layer.name for layer in model.opsmith.report.quantized if layer.status == "packed"]
    assert [name for name in names if name.startswith("transformer.h.1.")] == [
        f"transformer.h.1.{name}" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    ]
    assert len(names) == 2 * 4 + 1


def test_a_wrong_product_is_found_and_rolled_back() -> None:
    model, x = net(), torch.randn(3, 48)
    packing = Packing()
    packing.pack(model, opsmith.Config(quantize="int8"))
    packed = packing.packed["up"]
    module = packed.owner

    def wrong(x: torch.Tensor) -> torch.Tensor:
        return type(packed).forward(packed, x) * 1.01

    packed.forward = wrong  # type: ignore[method-assign]
    module.forward = wrong  # type: ignore[method-assign]
    packing.check(lambda: model(x))
    status = {layer.name: layer.status for layer in packing.layers}
    assert status == {"up": "rolled back", "down": "packed", "head": "packed"}
    assert "above the bound" in packing.layers[0].why
    assert "forward" not in vars(module)
    packing.take_out()
    assert not any("forward" in vars(m) for m in model.modules())


def test_a_failed_call_leaves_the_model_as_it_was() -> None:
    model = net()
    with pytest.raises(ValueError, match="the model does not accept the example inputs"):
        opsmith.optimize(model, torch.randn(3, 47), quantize="int8")
    assert not any("forward" in vars(m) for m in model.modules())


@pytest.mark.parametrize(
    ("options", "field"),
    [({"quantize": "int2"}, "quantize"), ({"quantize": "int4", "quantize_group": 16}, "quantize_group")],
)
def test_a_config_that_makes_no_sense(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=f"config: {field}: "):
        opsmith.Config.parse(options)


def test_only_optimize_packs() -> None:
    with pytest.raises(Exception, match=r"only opsmith\.optimize changes a model's dtype, device or weights"):
        torch.compile(net(), backend="opsmith", options={"quantize": "int8"})(torch.randn(2, 48))


def _quantized(model: nn.Module, x: torch.Tensor, **options: Any) -> nn.Module:
    config = opsmith.Config(tune=False, inductor=False, quantize="int8", **options)
    return opsmith.optimize(model, x, config=config)


def test_weights_that_are_released_are_gone_and_the_model_works() -> None:
    model, x = net(), torch.randn(2, 5, 48)
    storages = [weakref.ref(layer.weight.untyped_storage()) for layer in (model.up, model.down)]
    tensors = [weakref.ref(layer.weight) for layer in (model.up, model.down)]
    kept = call(_quantized(copy.deepcopy(model), x), x)
    _quantized(model, x, quantize_release=True)
    assert [ref() for ref in (*storages, *tensors)] == [None] * 4
    assert call(model, x).equal(kept)
    assert model.up.weight.shape == (100, 48)
    assert {layer.released for layer in model.opsmith.report.quantized} == {4 * 4800, 4 * 17 * 48}
    assert "given back to the system: 0.0 MiB of weights" in str(model.opsmith.report)
    for refused in (opsmith.restore, copy.deepcopy, lambda model: opsmith.optimize(model, x)):
        with pytest.raises(ValueError, match=r"3 layers \(up, \.\.\.\) were given back to the system"):
            refused(model)
    with pytest.raises(ValueError, match="has nothing left to be pickled"):
        pickle.dumps(model)
    assert call(model, x).equal(kept)


def test_a_weight_that_others_use_is_kept() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(20, 48)
            self.mix = nn.Linear(48, 48)
            self.head = nn.Linear(48, 20, bias=False)
            self.head.weight = self.table.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.mix(self.table(ids)))

    torch.manual_seed(0)
    model, ids = Tied().eval(), torch.arange(6)[None]
    _quantized(model, ids, quantize_release=True)
    report = {layer.name: layer for layer in model.opsmith.report.quantized}
    assert report["mix"].released
    assert not report["head"].released
    assert report["head"].why == "its weight is kept: others in the model use it"
    assert model.table.weight is model.head.weight
    assert not model.head.weight.is_meta


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_pickled_model_is_one_that_was_never_optimized(dtype: torch.dtype | None) -> None:
    model, x = net(), torch.randn(2, 5, 48)
    opsmith.optimize(
        model, x.to(dtype), dtype=dtype, config=opsmith.Config(tune=False, inductor=False, quantize="int4")
    )
    again = pickle.loads(pickle.dumps(model))
    assert call(again, x.to(dtype)).equal(model.forward(x.to(dtype))) is False
    expected = net() if dtype is None else net().to(dtype)
    assert call(again, x.to(dtype)).equal(call(expected, x.to(dtype)))
    _quantized(again, x.to(dtype))
    assert {layer.status for layer in again.opsmith.report.quantized} == {"packed"}
    opsmith.restore(again)
    assert call(again, x.to(dtype)).equal(call(expected, x.to(dtype)))


def test_copies_of_a_model_and_of_its_layers_compute_with_packed_weights() -> None:
    model, x = net(), torch.randn(2, 5, 48)
    _quantized(model, x)
    expected, layer = call(model, x), call(model.up, x)
    twin, part = copy.deepcopy(model), copy.deepcopy(model.up)
    opsmith.restore(model)
    model.up.weight.data.zero_()
    assert call(twin, x).equal(expected)
    assert call(part, x).equal(layer)


def test_the_arithmetic_around_packed_layers_is_found() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 61, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96}
    model: Any = seeded(
        lambda: LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    )
    opsmith.optimize(model, quantize="int8", config=UNTIMED)
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    tokens = model.generate(ids(2, 7), max_new_tokens=6, **options)
    assert tokens.shape == (2, 13)
    assert model.opsmith.report.found["paged_attention"] == 2
    for graph in model.opsmith.graphs:
        found = [site.operator for site in graph.report.kept]
        assert [found.count(name) for name in ("rms_norm", "rope_qk", "silu_mul")] == [5, 2, 2]
        assert not graph.report.misses
    # What a packed layer fills is a buffer of the program, but for the logits, which are the caller's.
    text = model.opsmith.graphs[-1].plans[next(reversed(model.opsmith.graphs[-1].plans))].source
    # With those of one input in one call; what comes from the pages is in a buffer too.
    assert text.count("opsmith_packed_linear_default(buffers[") == 2 * 4
    assert text.count("    opsmith_paged_layer_default(buffers[") == 2  # and nothing is made
    assert text.count("aten_empty_memory_format") == 1


def test_a_plan_says_what_is_packed() -> None:
    model = seeded(Feed)
    opsmith.optimize(model, numbers(6, 4, WIDTH), quantize="int8", config=UNTIMED)
    assert "packed: 2 linear layers to int8" in str(model.opsmith.plan)
