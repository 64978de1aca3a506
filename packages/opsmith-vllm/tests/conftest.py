"""Models of random weights, and engines that run them, each in its own process and without a network."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

ENGINE = Path(__file__).with_name("engine.py")
OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1"}
Run = Callable[..., dict[str, Any]]

VOCABULARY = 128


def environment(plugin: str) -> dict[str, str]:
    """Of a process with an engine whose plugin has these parts."""
    return {**os.environ, **OFFLINE, "OPSMITH_VLLM": plugin, "VLLM_CPU_KVCACHE_SPACE": "1"}


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """`run(model, waves, plugin="all", new_tokens=16, **options)`: what an engine gives; the same job runs once."""
    folder, done = tmp_path_factory.mktemp("engines"), {}

    def one(
        model: Path,
        waves: list[list[list[int]]],
        *,
        plugin: str = "all",
        new_tokens: int = 16,
        logprobs: bool = False,
        abort: list[list[int]] | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        job = {"model": str(model), "waves": waves, "new_tokens": new_tokens, "options": options}
        job |= {"logprobs": logprobs, "abort": abort}
        key = json.dumps([job, plugin])
        if key not in done:
            result = folder / f"{len(done)}.json"
            # An engine in the process of its caller, whose modules can be looked at; the server's test has the others.
            env = {**environment(plugin), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
            text = json.dumps({**job, "result": str(result)})
            ended = subprocess.run(
                [sys.executable, str(ENGINE)],
                input=text,
                text=True,
                capture_output=True,
                env=env,
                timeout=1800,
            )
            assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
            done[key] = {**json.loads(result.read_text()), "log": ended.stdout + ended.stderr}
        return done[key]

    return one


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of random weights: merged projections, grouped heads, biases."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        attention_bias=True,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    return saved(transformers.LlamaForCausalLM, config, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma 3 of random weights: norms of heads, sliding windows, two rotary tables, a tied head."""
    config = transformers.Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        query_pre_attn_scalar=32,
        max_position_embeddings=512,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention"] * 2,
        initializer_range=0.2,
    )
    return saved(transformers.Gemma3ForCausalLM, config, tmp_path_factory.mktemp("gemma"))


def saved(kind: Any, config: Any, folder: Path) -> Path:
    """A model of seeded random weights, in a folder."""
    torch.manual_seed(0)
    model = kind(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias") or "norm" in name:  # which begin as zeros and ones
                weight += 0.1 * torch.randn_like(weight)
            if "embed" in name:  # a tied head would say what it was given
                weight *= 0.1
    model.save_pretrained(folder)
    return folder


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Random token ids."""
    made = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCABULARY, (length,), generator=made).tolist() for length in lengths]
