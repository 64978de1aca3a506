"""Tokens a second of a Llama of 1.1 B parameters, as Hugging Face runs it and optimized; random weights, bfloat16.

Example: python benchmarks/llama.py --format int8 --format int4 --prompt 512 --tokens 16
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
    "vocab_size": 32000,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "intermediate_size": 5632,
    "max_position_embeddings": 4096,
    "eos_token_id": None,
}


@torch.no_grad()
def build(layers: int) -> Any:
    """A Llama whose layers hold the first one's random weights, each in memory of its own: drawing all takes 20 s."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_default_dtype(torch.bfloat16)
    one = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=1))
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=layers)).eval()
    torch.set_default_dtype(torch.float32)
    model.to_empty(device="cpu")
    model.load_state_dict(one.state_dict(), strict=False)
    for layer in model.model.layers[1:]:
        layer.load_state_dict(one.model.layers[0].state_dict())
    model.model.rotary_emb = one.model.rotary_emb  # its frequencies are in no state_dict
    return model


@torch.no_grad()
def decode(model: Any, prompt: torch.Tensor, tokens: int) -> tuple[float, float]:
    """Seconds for a prompt, and the median of those for each of so many greedy tokens after it."""
    start = time.perf_counter()
    out = model(prompt, use_cache=True, logits_to_keep=1)
    first = time.perf_counter() - start
    times = []
    for _ in range(tokens):
        chosen = out.logits[:, -1:].argmax(-1)
        start = time.perf_counter()
        out = model(chosen, past_key_values=out.past_key_values, use_cache=True)
        times.append(time.perf_counter() - start)
    return first, statistics.median(times)


def main(
    formats: Annotated[
        list[str] | None, typer.Option("--format", help="Packed formats to measure beside bfloat16.")
    ] = None,
    layers: Annotated[int, typer.Option(min=1)] = 22,
    prompt: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 512,
    tokens: Annotated[int, typer.Option(help="Tokens to decode.")] = 16,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
) -> None:
    """Interleave the models, and print medians as JSON, with what the weights of a token take at the read roof."""
    torch.manual_seed(0)
    eager = build(layers)
    ids = torch.randint(1, SIZES["vocab_size"], (1, prompt))
    models = {"eager": eager}
    prepared = {}
    for name in ("bfloat16", *(formats or ())):
        start = time.perf_counter()
        models[name] = opsmith.optimize(
            copy.deepcopy(eager, {id(p): p for p in eager.parameters()}),  # the weights themselves are shared
            quantize=None if name == "bfloat16" else name,  # type: ignore[arg-type]
        )
        decode(models[name], ids, 3)  # captured, measured and proved within
        prepared[name] = time.perf_counter() - start
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    reads = []
    for _ in range(rounds):
        reads.append(measure.measure_roofs(kinds=("read",)).bandwidth("read"))
        for name, model in models.items():
            samples[name].append(decode(model, ids, tokens))
    used = sum(p.numel() for p in eager.parameters()) - eager.model.embed_tokens.weight.numel()
    result = {
        "machine": measure.describe().fingerprint(),
        "layers": layers,
        "prompt": prompt,
        "seconds_to_optimize": prepared,
        "prompt_seconds": {n: statistics.median(s[0] for s in ss) for n, ss in samples.items()},
        "tokens_per_second": {n: 1 / statistics.median(s[1] for s in ss) for n, ss in samples.items()},
        "at_the_read_roof": {"bfloat16": statistics.median(reads) / (2 * used)},
        "samples": samples,
    }
    typer.echo(json.dumps(result, indent=1))


if __name__ == "__main__":
    typer.run(main)
