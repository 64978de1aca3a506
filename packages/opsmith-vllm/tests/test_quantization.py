"""The quantization method: what it takes, and that a model computes with the weights it stands for."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import VOCABULARY, Run
from test_engine import FIRST, plain

from opsmith.ops import PackedLinear
from opsmith_vllm.quantization import OpsmithConfig

EAGER = {"enforce_eager": True, "block_size": 32}
WAVES = [FIRST]


def asked(**how: Any) -> dict[str, Any]:
    return {"hf_overrides": {"quantization_config": {"quant_method": "opsmith", **how}}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"format": "int3"}, "format must be one of int8, int8_dynamic, int4, got 'int3'"),
        ({"format": "int4", "group_size": 48}, "group_size must be one of 32, 64, 128, got 48"),
        ({"bits": 8}, "quantization_config takes quant_method, format, .*, got 'bits'"),
    ],
)
def test_what_it_does_not_offer_is_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OpsmithConfig.from_config({"quant_method": "opsmith", **config})


def test_int8_is_what_the_name_alone_means() -> None:
    assert (OpsmithConfig().format, OpsmithConfig.get_name()) == ("int8", "opsmith")


@pytest.mark.parametrize(
    "how", [{"format": "int8"}, {"format": "int4", "group_size": 32, "symmetric": False}]
)
def test_tokens_are_those_of_the_weights_that_the_packed_ones_stand_for(
    run: Run, llama: Path, tmp_path: Path, how: dict[str, Any]
) -> None:
    """Merged projections, biases and all, against a model that was saved with these weights."""
    own = run(dequantized(llama, tmp_path, how), WAVES, plugin="off", new_tokens=40, **EAGER)
    ours = run(llama, WAVES, plugin="quantization", new_tokens=40, **asked(**how), **EAGER)
    assert ours["layers"]["PackedLinear"] == 9  # qkv, o, gate_up and down of two layers, and the head
    assert ours["tokens"] == own["tokens"]
    assert ours["tokens"][0] != plain(run, llama)["tokens"][0]
    # Beside what stays as it is there are the packed weights alone: vLLM's own, in oneDNN's order, are no parameters.
    numbers, head = 2 * (256 * 64 + 64 * 128 + 192 * 64 + 64 * 96), VOCABULARY * 64
    beside = ours["weights"] - (plain(run, llama)["weights"] - 4 * head)
    assert head < beside <= 1.1 * head + numbers * (1.1 if how["format"] == "int8" else 0.65)


def test_layers_can_be_left_as_they_are(run: Run, gemma: Path) -> None:
    """With all parts in a compiled model, whose inputs are rounded too."""
    how = {**asked(format="int8_dynamic", ignore=["o_proj", "layers.1.", "lm_head"]), "block_size": 32}
    found = run(gemma, WAVES, new_tokens=40, **how)
    assert found["layers"]["PackedLinear"] == 9  # qkv, gate_up and down of three layers
    assert {"opsmith::packed_linear", "opsmith::rms_norm"} <= set(found["operators"])
    assert found["tokens"] == run(gemma, WAVES, new_tokens=40, **how, enforce_eager=True)["tokens"]


def test_a_head_is_packed_beside_the_embedding_whose_weight_it_shares(run: Run, gemma: Path) -> None:
    """Rows are looked up as they are: with all else ignored, the layers compute as before."""
    own, ignore = plain(run, gemma), ["layers."]
    ours = run(gemma, WAVES, new_tokens=40, **asked(ignore=ignore), **EAGER)
    assert ours["layers"]["PackedLinear"] == 1
    assert VOCABULARY * 64 < ours["weights"] - own["weights"] <= 1.1 * VOCABULARY * 64
    assert "opsmith::packed_linear" in ours["operators"]
    left = run(gemma, WAVES, new_tokens=40, **asked(ignore=[*ignore, "lm_head"]), **EAGER)
    assert "opsmith::packed_linear" not in left["operators"]
    assert left["tokens"][0] == own["tokens"][0]


def dequantized(folder: Path, place: Path, how: dict[str, Any]) -> Path:
    """The model with each projection's weight replaced by the one that its packed form stands for."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for name, layer in model.named_modules():
            if isinstance(layer, torch.nn.Linear):
                packed = PackedLinear.from_linear(layer, **({"format": "int8"} if name == "lm_head" else how))
                layer.weight.copy_(packed.dequantize())
    model.save_pretrained(place)
    return place
