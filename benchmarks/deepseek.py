"""Tokens a second of a DeepSeek-V3 of middling size, as Hugging Face runs it and optimized; random weights.

Example: python benchmarks/deepseek.py --prompt 256 --prompt 1024 --tokens 16
"""

from __future__ import annotations

import copy
import json
import statistics
import time
from typing import Annotated, Any

import torch
import typer

import opsmith
from opsmith import measure

SIZES: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "intermediate_size": 2816,
    "moe_intermediate_size": 512,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 16384,
    "eos_token_id": None,
}


@torch.no_grad()
def decode(model: Any, prompt: torch.Tensor, tokens: int) -> tuple[float, float]:
    """Seconds for a prompt, and for each of so many greedy tokens after it."""
    start = time.perf_counter()
    out = model(prompt, use_cache=True, logits_to_keep=1)
    middle = time.perf_counter()
    for _ in range(tokens):
        chosen = out.logits[:, -1:].argmax(-1)
        out = model(chosen, past_key_values=out.past_key_values, use_cache=True)
    return middle - start, (time.perf_counter() - middle) / tokens


def main(
    prompt: Annotated[
        list[int] | None, typer.Option(help="Tokens of a prompt; may be given several times.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens to decode.")] = 16,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    tune: Annotated[bool, typer.Option(help="Time the implementations of every operator.")] = False,
) -> None:
    """Interleave both models, and print medians as JSON."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    eager = DeepseekV3ForCausalLM(DeepseekV3Config(**SIZES)).to(torch.bfloat16).eval()
    ours = opsmith.optimize(copy.deepcopy(eager), config=opsmith.Config(tune=tune, inductor=False))
    models = {"eager": eager, "opsmith": ours}
    found = []
    for length in prompt or [256, 1024]:
        ids = torch.randint(1, SIZES["vocab_size"], (1, length))
        for model in models.values():
            decode(model, ids, 2)  # captured, and measured within
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
        for _ in range(rounds):
            for name, model in models.items():
                times[name].append(decode(model, ids, tokens))
        medians = {
            name: {
                "prompt": statistics.median(t[0] for t in ts),
                "token": statistics.median(t[1] for t in ts),
            }
            for name, ts in times.items()
        }
        found.append({"prompt": length, "seconds": medians, "samples": times})
    machine = measure.describe().to_json()
    layer = ours.opsmith.report.latent[0]
    cache = {"values": layer.values, "bytes": layer.token_bytes, "plain_values": layer.plain_values}
    typer.echo(json.dumps({"machine": machine, "cache": cache, "runs": found}, indent=1))


if __name__ == "__main__":
    typer.run(main)
