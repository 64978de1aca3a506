"""`optimize(quantize="int4", calibration=...)` and formats by layer: what is gained, kept and refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import opsmith
from opsmith.compiler.modules import calibrate
from opsmith.compiler.modules.calibrate import calls_of, gathered
from opsmith.compiler.modules.quantize import Packing
from opsmith.compiler.modules.stand_in import QuantizedLayer
from opsmith.compiler.report import Report
from tests.compiler.models import UNTIMED, VOCABULARY, Feed, ids, llama, numbers, seeded

UNPROVED = UNTIMED.model_copy(update={"verify": False})
TEXT = ids(1, 700)


def decoder() -> Any:
    """A small Llama whose hidden states lie in few directions, as a trained one's do, and whose layers add to them."""
    made = seeded(llama)
    with torch.no_grad():
        for layer in made.modules():
            if isinstance(layer, nn.Linear):
                layer.weight.mul_(10)
        table = made.model.embed_tokens.weight
        table.copy_(numbers(VOCABULARY, 4, seed=3) @ numbers(4, table.shape[1], seed=4))
    return made


def packed(model: Any, calibration: Any = None, **fields: Any) -> dict[str, QuantizedLayer]:
    """What packing a model to int4 says of each layer."""
    packing = Packing()
    calls = None if calibration is None else calls_of(model, calibration)
    packing.pack(model, opsmith.Config(quantize="int4", **fields), calibration=calls)
    return {layer.name: layer for layer in packing.layers}


def test_rounding_for_a_text_changes_results_less_on_another_one() -> None:
    original, plain, made = decoder(), decoder(), decoder()
    layers = packed(plain)
    calibrated = packed(made, calibration=TEXT)
    assert {name for name, layer in calibrated.items() if layer.result_error is None} == {"lm_head"}
    assert all(layer.result_error is None for layer in layers.values())
    other = ids(1, 300, seed=5)
    before = opsmith.evaluate(plain, other, against=original, window=64).kl
    after = opsmith.evaluate(made, other, against=original, window=64).kl
    assert before is not None
    assert after is not None
    assert after < 0.5 * before
    said = str(Report([], quantized=list(calibrated.values())))
    assert "14 linear layers to int4 and 1 linear layer to int8; rounding took" in said
    assert "% of the results on the calibration text of model.layers." in said


def test_memory_bounds_how_many_layers_are_looked_at_together(monkeypatch: pytest.MonkeyPatch) -> None:
    one = decoder()
    layers = {n: m for n, m in one.named_modules() if isinstance(m, nn.Linear) and m is not one.lm_head}
    together = list(gathered(one, calls_of(one, TEXT), layers))
    assert [len(found) for found in together] == [14]
    first = together[0]
    attention = [first[f"model.layers.0.self_attn.{n}_proj"] for n in "qkv"]
    assert attention[0] is attention[1] is attention[2]
    assert first["model.layers.0.mlp.gate_proj"] is first["model.layers.0.mlp.up_proj"]
    monkeypatch.setattr(calibrate, "_MEMORY", 4 * 32 * 32 * 3)
    parts = list(gathered(one, calls_of(one, TEXT), layers))
    assert len(parts) > 4
    for found in parts:
        for name, inputs in found.items():
            torch.testing.assert_close(inputs.sum, first[name].sum)
            assert inputs.rows == 700


def test_sums_are_those_of_the_layers_inputs() -> None:
    one = decoder()
    seen = []
    down = one.model.layers[1].mlp.down_proj
    with down.register_forward_pre_hook(
        lambda _, args: seen.append(args[0].detach().flatten(0, -2).double())
    ):
        found = next(gathered(one, calls_of(one, TEXT), {"down": down}))
    x = torch.cat(seen)
    error = (found["down"].sum.double() - x.t() @ x).abs()
    assert (error <= 1e-6 * (x.abs().t() @ x.abs())).all()  # some cancel
    assert len(x) == found["down"].rows == 700
    assert not down._forward_pre_hooks


@pytest.mark.parametrize(
    "given",
    [
        TEXT,
        TEXT[0],
        TEXT[0].tolist(),
        [TEXT[0, :512], TEXT[0, 512:]],
        [{"input_ids": TEXT[:, :512]}, {"input_ids": TEXT[:, 512:]}],
    ],
)
def test_what_may_be_given(given: Any) -> None:
    calls = calls_of(decoder(), given)
    assert torch.cat([call["input_ids"] for call in calls], 1).equal(TEXT)


def test_the_output_layer_keeps_eight_bits_and_others_have_formats_by_name() -> None:
    layers = packed(decoder())
    assert {n: layer.format for n, layer in layers.items() if layer.format != "int4"} == {"lm_head": "int8"}
    formats = {"*v_proj": "int8", "model.layers.1.*": "bf16", "lm_head": "int4"}
    layers = packed(decoder(), quantize_formats=formats)
    assert {layer.status for layer in layers.values()} == {"packed"}
    for name, layer in layers.items():
        if name.endswith("v_proj"):
            assert layer.format == "int8"
        elif ".layers.1." in name:
            assert layer.format == "bf16"
        else:
            assert layer.format == "int4"


def test_a_model_with_layers_of_several_formats_is_proved() -> None:
    one, tokens = decoder(), ids(2, 9)
    changes = {"quantize_formats": {"*v_proj": "int8"}, "quantize_symmetric": False, "quantize_group": 64}
    opsmith.optimize(one, {"input_ids": tokens}, config=UNTIMED.model_copy(update=changes), quantize="int4")
    report = one.opsmith.report
    assert {layer.status for layer in report.quantized} == {"packed"}
    assert not report.rolled_back
    groups = {layer.joined for layer in report.quantized if layer.joined}
    assert ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj") in groups


def test_a_copy_is_rounded_for_the_same_inputs() -> None:
    one, x = seeded(Feed), numbers(2, 5, 32)
    with torch.no_grad():
        before = one(x)
        opsmith.optimize(one, x, config=UNPROVED, quantize="int4", calibration={"x": numbers(200, 32)})
        twin = copy.deepcopy(one)
        assert twin(x).equal(one(x))
        errors = [[layer.result_error for layer in m.opsmith.report.quantized] for m in (one, twin)]
        assert errors[0] == errors[1]
        assert None not in errors[0]
        opsmith.restore(one)
        assert one(x).equal(before)


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (
            ValueError,
            "calibration is what int4 weights are rounded for",
            {"quantize": "int8", "calibration": TEXT},
        ),
        (ValueError, "calibration is what int4 weights are rounded for", {"calibration": TEXT}),
        (ValueError, "there is no token in it", {"quantize": "int4", "calibration": []}),
        (TypeError, r"calibration: ids must be integers", {"quantize": "int4", "calibration": TEXT.float()}),
        (
            ValueError,
            "calibration: the model does not take it",
            {"quantize": "int4", "calibration": TEXT + 100},
        ),
        (ValueError, "does not say where its tokenizer is", {"quantize": "int4", "calibration": "a text"}),
        (
            ValueError,
            "quantize_formats names the formats",
            {"config": opsmith.Config(quantize_formats={"*": "int8"})},
        ),
    ],
)
def test_what_makes_no_sense_leaves_the_model_as_it_was(
    error: type[Exception], message: str, options: dict[str, Any]
) -> None:
    one = decoder()
    with pytest.raises(error, match=message):
        opsmith.optimize(one, **options)
    assert not hasattr(one, "opsmith")
    assert not any("forward" in vars(m) or m._forward_pre_hooks for m in one.modules())


def test_inputs_that_are_not_finite_are_named() -> None:
    one = decoder()
    one.model.norm.weight.data.fill_(1.0)
    one.model.layers[0].mlp.down_proj.weight.data.fill_(torch.inf)
    with pytest.raises(
        ValueError, match="calibration: the model does not take it: Inputs: inputs must be finite"
    ):
        opsmith.optimize(one, config=UNPROVED, quantize="int4", calibration=TEXT)
    assert not any("forward" in vars(m) for m in one.modules())
