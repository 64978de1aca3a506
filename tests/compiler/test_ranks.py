"""A model that transformers spread over two processes: optimized, it says what it said, and both choose alike."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import opsmith
from opsmith.kernels import isa
from tests.compiler.models import llama
from tests.compiler.ranks import tokens
from tests.compiler.test_latent import deepseek

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama on disk, and in folders of it a DeepSeek-V2, a V3, whose projections stay whole, and an odd one."""
    torch.manual_seed(0)
    place = tmp_path_factory.mktemp("sharded")
    llama().save_pretrained(place)
    deepseek("V2").save_pretrained(place / "latent")
    deepseek("V3").save_pretrained(place / "whole")
    config = llama().config
    config.intermediate_size += 1
    config.num_hidden_layers = 1  # all layers of a model are as uneven
    transformers.LlamaForCausalLM(config).save_pretrained(place / "odd")
    return place


def ranks(*arguments: str, second: dict[str, str]) -> list[dict[str, Any]]:
    """What two ranks found, the second in another environment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "HF_HUB_OFFLINE": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.compiler.ranks", *arguments],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank), **environment},
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, environment in enumerate(({}, second))
    ]
    try:
        said = [process.communicate(timeout=900)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    return [json.loads(text.splitlines()[-1]) for text in said]


def test_a_sharded_model_says_what_it_said_and_its_ranks_choose_alike(folder: Path) -> None:
    alone = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    latent = transformers.AutoModelForCausalLM.from_pretrained(folder / "latent").eval()
    folders = folder, folder / "latent", folder / "whole", folder / "odd"
    first, second = ranks(*map(str, folders), second={})
    for found, why in ((first, "rank 1: planted"), (second, "planted")):
        attention, pages = found["parted latent"], found["parted pages"]
        assert [status for status, _ in attention["latent"]] == ["kept", "rolled back"]
        assert attention["latent"][1][1] == why
        assert set(attention["packed"].values()) == {why}
        assert pages == {
            "same": True,
            "packed": {},
            "latent": [],
            "fallbacks": {why: pages["fallbacks"][why]},
        }
        assert found["late"]["tokens"] == tokens(alone)
        assert (
            "its weights were spread over ranks after optimize; optimize it again" in found["late"]["report"]
        )
        assert found["late"]["plan"] == 0  # nothing that one of them chose
        assert found["latent"] == tokens(latent)
        assert "experts: 1 mixtures in one kernel each" in found["latent report"]
        assert "self_attn: its weights are spread over ranks (and 1 more)" in found["latent report"]
        assert found["optimized"] == found["eager"] == found["restored"] == tokens(alone)
        assert "a sharded model takes no budget" in found["budget"]
        assert "rank 1 has the setting example_inputs [[1, 6]], rank 0 [[2, 6]]" in found["asked"][0]
        assert "rank 1 has the setting warmup {'prompt': 5}, rank 0 {'prompt': 4}" in found["asked"][1]
        assert "left as it was" not in found["uneven"], found["uneven"]
        eager, ours = found["learned"]
        assert ours["losses"] == pytest.approx(eager["losses"], rel=1e-5)
        assert "only training is optimized" in ours["report"]
        assert "budget" not in ours["report"]
        assert re.search(r"found: .*linear", ours["report"]), ours["report"]
        assert "its weight is spread over ranks" in found["quantized"], found["quantized"]
    assert first["choices"] == second["choices"]
    assert first["used"] == second["used"]
    assert first["logits"] == second["logits"]
    counted = Counter(name.rpartition("_")[0] for name in dict(first["choices"]))
    assert {"rms_norm", "linear", "rope_qk", "silu_mul"} <= set(counted), counted
    assert "left as it was" not in first["report"], first["report"]
    layers = alone.config.num_hidden_layers
    assert f" {2 * layers + 1} rms_norm," in first["report"], first["report"]  # however many graphs have them
    assert first["sums"] == 2 * layers * first["graphs"]  # collectives are where they were
    assert "rank 0 chooses together with [1], and one of these is gone" in first["optimized alone"]
    assert first["alone"]  # once the second rank has died, a call is an error, and waits for nobody


@pytest.mark.skipif(isa.tier() == "portable", reason="there is no lesser tier")
def test_ranks_with_other_kernels_are_refused_on_all() -> None:
    for found in ranks(second={"OPSMITH_ISA": "portable"}):
        assert found["together"] == [0, 1]
        assert f"rank 1 has kernels portable, rank 0 {isa.tier()}; OPSMITH_ISA" in found["error"]


def test_a_model_of_one_process_asks_no_ranks(folder: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    opsmith.optimize(model, config=opsmith.Config(tune=False))
    assert model.opsmith.selector.ranks is None
