"""Folders of models in floats: what is missing in one is said, not made up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import opsmith
from opsmith import Config
from opsmith.checkpoints import CheckpointError, folder

transformers = pytest.importorskip("transformers")

INDEX = "model.safetensors.index.json"
SIZES = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


def llama(place: Path, **how: Any) -> Any:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, intermediate_size=96)).eval()
    model.save_pretrained(place, **how)
    return model


def without(place: Path, name: str) -> None:
    tensors = load_file(place / "model.safetensors")
    del tensors[name]
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})


def test_a_folder_is_loaded_as_well(tmp_path: Path) -> None:
    model = llama(tmp_path)
    loaded, ids = opsmith.load(tmp_path, config=Config(tune=False)), torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert loaded(ids).logits.allclose(model(ids).logits, atol=1e-5)
    assert "found: " in str(loaded.opsmith.report)
    with pytest.raises(CheckpointError, match="there is no folder"):
        opsmith.load(tmp_path / "none")


def test_a_tensor_that_is_missing_is_named(tmp_path: Path) -> None:
    llama(tmp_path)
    without(tmp_path, "model.norm.weight")
    with pytest.raises(CheckpointError, match=r"has no tensor for model\.norm\.weight and 0 others"):
        opsmith.load(tmp_path)


def test_what_transformers_wants_a_library_for_is_said_to_be_read_without(tmp_path: Path) -> None:
    llama(tmp_path)
    how = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}}
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | how))
    with pytest.raises(CheckpointError, match=r"optimum.*few bits, which opsmith\.load reads"):
        folder.load(tmp_path)


def test_a_head_that_the_folders_model_does_without_is_random_and_said_to_be(tmp_path: Path) -> None:
    transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"has no tensor for pooler\.dense\.bias and 1 others.*random"):
        folder.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda place: sorted(place.glob("*.safetensors"))[1].unlink(),
            r"has no 'model-00002-of-.*nor 0 others",
        ),
        (lambda place: (place / INDEX).write_text("[]"), r"index\.json is no JSON object, but a list"),
        (
            lambda place: (place / INDEX).write_text(json.dumps({"weight_map": {"a": "../b.safetensors"}})),
            r"has no '\.\./b\.safetensors', which",
        ),
    ],
)
def test_a_file_that_is_missing_is_named(
    change: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    llama(tmp_path, max_shard_size="30KB")
    folder.load(tmp_path)
    change(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        folder.load(tmp_path)
    llama(tmp_path)  # beside an index of before, which says nothing of one file
    folder.load(tmp_path)
