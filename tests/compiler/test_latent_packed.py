"""Latent attention of models whose projections are in few bits: found, proved, generating what they would have.

Truth is the model itself with the same packed layers, or the one whose weights are the values that these stand for.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import opsmith
from opsmith import Config
from opsmith.ops import PackedLinear

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from tests.checkpoints.test_quantized import mixture
from tests.compiler.models import WHOLE_MODEL, Truth
from tests.compiler.test_latent import GREEDY, deepseek, prompts, rewritten, there_and_back

FORMS: dict[str, dict[str, Any]] = {
    "fp8": {"format": "fp8"},
    "int8": {"format": "int8"},
    "int8_dynamic": {"format": "int8_dynamic"},
    "int4": {"format": "int4", "group_size": 32},
    "q8_0": {"format": "q8_0"},
}
PROJECTIONS = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")


def packed(model: Any, form: str, layers: tuple[str, ...] = PROJECTIONS) -> Any:
    """The model with layers of its attention in few bits, as its own."""
    for path, layer in list(model.named_modules()):
        parent, _, name = path.rpartition(".")
        if isinstance(layer, nn.Linear) and name in layers:
            setattr(model.get_submodule(parent), name, PackedLinear.from_linear(layer, **FORMS[form]))
    return model


def kept(model: Any, weights: str) -> None:
    """Every layer keeps latent rows, its weights are called this, and no call went elsewhere."""
    report = model.opsmith.report
    assert [(one.status, one.weights) for one in report.latent] == [("kept", weights)] * 2, report
    assert report.fallbacks == {}
    chains = {"mla_kv_epilogue", "mla_q_epilogue"} if weights in FORMS else {"mla_preprocess"}
    assert {name for name in report.found if "mla" in name} == chains | {"mla_attention"}


@pytest.mark.parametrize(("kind", "form"), [("fp8", "fp8"), ("gptq", "int4")])
def test_a_folder_in_few_bits_generates_from_latent_rows(kind: str, form: str, tmp_path: Path) -> None:
    right = mixture(tmp_path, kind, "deepseek_v3")
    ids = torch.randint(1, 96, (2, 9), generator=torch.Generator().manual_seed(0))
    how = GREEDY | {"eos_token_id": None, "pad_token_id": 0}
    want = right.generate(ids, **how)
    model = opsmith.load(tmp_path, config=Config(tune=False))
    before = {name: t.clone() for name, t in model.state_dict().items()}
    made = model.generate(ids, **how, return_dict_in_generate=True)
    assert made.sequences.equal(want)
    kept(model, form)
    assert {type(layer).__name__ for layer in made.past_key_values.layers} == {"LatentLayer"}
    assert f"projections of {form} as the model has them" in model.opsmith.plan.table()
    # Nothing of this is saved: the layers are those that were read.
    assert all(t.equal(before[name]) for name, t in model.state_dict().items())
    opsmith.save(model, tmp_path / "again")
    again = opsmith.load(tmp_path / "again", config=Config(tune=False))
    assert again.generate(ids, **how).equal(want)
    kept(again, form)


@pytest.mark.parametrize(
    ("name", "form", "mode"),
    [
        ("V2", "fp8", "joint"),
        ("V2 without q_lora", "int4", "split"),
        ("V3, ranks alike", "q8_0", "split"),
        ("V3", "int8", "tiled"),
    ],
)
def test_it_generates_what_the_packed_model_generates(name: str, form: str, mode: str) -> None:
    model, inputs = packed(deepseek(name), form), prompts(4, 9)
    want = model.generate(**inputs, **GREEDY)
    rewritten(model, mla_cache=mode)
    assert model.generate(**inputs, **GREEDY).equal(want)
    kept(model, form)


@pytest.mark.parametrize(
    ("layers", "weights", "rounded"),
    [
        (PROJECTIONS, "fp8", set()),
        (("q_b_proj", "o_proj"), "fp8", {"q_a_proj", "kv_a_proj_with_mqa"}),
        (("kv_b_proj", "o_proj"), "weight_int8", set()),  # by the operator, which takes the plain ones
    ],
)
def test_what_is_packed_is_not_rounded_again(
    layers: tuple[str, ...], weights: str, rounded: set[str]
) -> None:
    model, inputs = packed(deepseek(), "fp8", layers), prompts(2, 9)
    with torch.no_grad():
        want = model(**inputs).logits
        skip = ["*.mlp.*", "lm_head"]
        rewritten(model, quantize="int8", quantize_skip=skip, quantize_release=weights == "fp8")
        got = model(**inputs).logits
    kept(model, weights)
    assert {name.rpartition(".")[2] for name in model.opsmith.packing.packed} == rounded
    same = layers is PROJECTIONS
    assert [one.lost > 0 for one in model.opsmith.report.latent] == [weights != "fp8"] * 2
    error = float((got - want).norm() / want.norm())
    assert error < (1e-5 if same else 0.1)


@pytest.mark.parametrize("name", ["V2", "V3"])
def test_a_cache_goes_to_the_packed_model_and_back(name: str) -> None:
    """Both models order the rotated dimensions of a row in another way, and ours keeps them as the weights do."""
    kept(there_and_back(packed(deepseek(name), "fp8")), "fp8")


def test_packed_layers_that_round_their_inputs_lose_what_the_report_says() -> None:
    model, inputs = packed(deepseek(), "int8_dynamic"), prompts(2, 9)
    with torch.no_grad():
        want = model(**inputs).logits[:, -1]
        rewritten(model, mla_cache="int8_tiled")
        got = model(**inputs).logits[:, -1]
    kept(model, "int8_dynamic")
    assert all(0 < one.lost < 0.05 for one in model.opsmith.report.latent)
    assert 0 < (got - want).norm() / want.norm() < 0.1


def test_in_bfloat16_it_is_as_close_to_the_packed_values_as_the_model() -> None:
    model, inputs = packed(deepseek(), "fp8").to(torch.bfloat16), prompts(3, 9)
    truth = Truth(model)
    truth.exact.config._experts_implementation = "eager"  # the grouped one takes no float64
    rewritten(model)
    with torch.no_grad():
        got, eager, exact = (m(**inputs).logits for m in (model, truth.eager, truth.exact))
    kept(model, "fp8")
    some = inputs["attention_mask"].bool()
    verdict = WHOLE_MODEL.check(got[some], eager[some], exact[some])
    assert verdict.ok, verdict.why


def test_packed_weights_that_change_are_noticed() -> None:
    model, tokens = packed(deepseek(), "int8"), prompts(2, 6, padded=False)["input_ids"]
    changed = {
        name: t * 0.9 if "self_attn" in name and t.is_floating_point() else t
        for name, t in model.state_dict().items()
    }
    other = copy.deepcopy(model)
    other.load_state_dict(changed)
    rewritten(model)
    with torch.no_grad():
        before = model(tokens).logits
        model.load_state_dict(changed)
        after, want = model(tokens).logits, other(tokens).logits
        assert not before.allclose(after, atol=1e-3)
        torch.testing.assert_close(after, want, rtol=1e-4, atol=1e-4)
        assert opsmith.restore(model)(tokens).logits.equal(want)
    assert not any("forward" in vars(m) for m in model.modules())
