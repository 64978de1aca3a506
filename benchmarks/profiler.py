"""What must hold of a profile, on four small models, eager and optimized: what recording costs, and what is known.

    python benchmarks/profiler.py [--models minilm,gpt2] [--ways eager,optimized] [--json FILE]

Of every phase: the overhead, measured by the profile itself on repetitions in turn; the part of the time that has a
class; the part of matmul and attention that has a cost; the rows' sum over the wall time; rows above 105% of a roof.
Then one model written with fused modules and as plain arithmetic: the bill must be the same. Exit status 1 where a bar
is missed.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import opsmith
from opsmith import measure
from opsmith.profiler import Profile
from opsmith.profiler.data import ATTENTION, MATMUL, Phase

TOKENS = 128
WIDE: dict[str, Any] = {
    "vocab_size": 8000,
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "intermediate_size": 1536,
    "max_position_embeddings": 512,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 8,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 256,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
MINILM = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
GPT2 = {"vocab_size": 8000, "n_embd": 512, "n_layer": 4, "n_head": 8, "n_positions": 512}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "minilm": lambda: transformers.BertModel(transformers.BertConfig(**MINILM)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**WIDE, num_key_value_heads=2)),
    "deepseek": lambda: transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(**{**WIDE, **LATENT})
    ),
}
OVERHEAD, CLASSIFIED, COVERED, SUM = 0.10, 0.97, 0.95, 0.02


def facts(phase: Phase) -> dict[str, Any]:
    """What a phase says of itself, and the bars that it misses."""
    found: dict[str, Any] = {
        "phase": phase.name,
        "wall_ms": phase.wall * 1e3,
        "plain_ms": phase.plain * 1e3,
        "repetitions": len(phase.samples),
        "overhead": phase.overhead,
        "overhead_from": phase.overhead_from,
        "overhead_error": phase.overhead_error,
        "noise": phase.noise,
        "classified": phase.classified,
        "covered": phase.covered(MATMUL, ATTENTION),
        "sum_over_wall": phase.total / phase.wall,
        "over_roof": [f"{row.operator} {row.shape}: {row.of_roof:.2f}" for row in phase.over_roof],
        "notes": phase.notes,
    }
    found["missed"] = [
        bar
        for bar, held in {
            "overhead": phase.overhead < OVERHEAD,
            "classified": phase.classified >= CLASSIFIED,
            "cost": found["covered"] >= COVERED,
            "sum": abs(found["sum_over_wall"] - 1) <= SUM,
            "roof": not phase.over_roof,
        }.items()
        if not held
    ]
    return found


def phases(name: str, optimized: bool, budget_s: float) -> Iterator[dict[str, Any]]:
    """Each phase of one model, profiled by itself."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    inputs = {"input_ids": torch.randint(0, 8000, (1, TOKENS))}
    if optimized:
        opsmith.optimize(model, inputs)
    for phase in ("forward", "decode", "train"):
        if name == "minilm" and phase == "decode":
            continue
        profile = opsmith.profile(model, inputs, phase=phase, budget_s=budget_s, name=name)
        yield {"model": name, "optimized": optimized, **facts(profile.phases[0])}


class Norm(nn.Module):
    """RMSNorm: one PyTorch call, or six."""

    def __init__(self, width: int, fused: bool) -> None:
        super().__init__()
        self.fused, self.weight = fused, nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fused:
            return nn.functional.rms_norm(x, self.weight.shape, self.weight, 1e-6)
        y: torch.Tensor = self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
        return y


class Block(nn.Module):
    """A layer of a transformer, with PyTorch's fused calls or as plain arithmetic."""

    def __init__(self, width: int, heads: int, fused: bool) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.first, self.second = Norm(width, fused), Norm(width, fused)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, width = x.shape
        q, k, v = (t.view(b, n, self.heads, -1).transpose(1, 2) for t in self.qkv(self.first(x)).chunk(3, -1))
        if self.fused:
            y = nn.functional.scaled_dot_product_attention(q, k, v)
        else:
            y = torch.softmax(q @ k.transpose(-1, -2) * (width // self.heads) ** -0.5, -1) @ v
        x = x + self.out(y.transpose(1, 2).reshape(b, n, width))
        h = self.up(self.second(x))
        h = nn.functional.gelu(h) if self.fused else h * 0.5 * (1 + torch.erf(h * 0.5**0.5))
        done: torch.Tensor = x + self.down(h)
        return done


def bill(profile: Profile) -> dict[str, list[float]]:
    """Calls, GFLOP, least MB and milliseconds of each operator."""
    found: dict[str, list[float]] = {}
    for row in profile.phases[0].rows:
        entry = found.setdefault(row.operator, [0.0, 0.0, 0.0, 0.0])
        for i, value in enumerate((row.calls, row.flops / 1e9, row.bytes / 1e6, row.seconds * 1e3)):
            entry[i] += value
    return found


def two_ways(phase: str, budget_s: float) -> dict[str, Any]:
    """The bill of one model written in two ways; different where an operator's calls, operations or bytes are."""
    bills = []
    for fused in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(*(Block(512, 8, fused) for _ in range(4)))
        x = torch.randn(1, 256, 512)
        bills.append(bill(opsmith.profile(model, (x,), phase=phase, budget_s=budget_s)))
    named = sorted(name for name in bills[0] if name in ("linear", "attention", "rms_norm", "gelu", "add"))
    different = [n for n in named if n not in bills[1] or bills[0][n][:3] != bills[1][n][:3]]
    return {"phase": phase, "fused": bills[0], "plain": bills[1], "different": different}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--ways", default="eager,optimized")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each phase")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result: dict[str, Any] = {
        "machine": measure.describe().to_json(),
        "torch": torch.__version__,
        "phases": [],
    }
    missed = False
    print(
        f"{'model':10}{'way':10}{'phase':9}{'ms':>8}{'overhead':>9}{'noise':>7}{'classed':>9}{'cost':>7}{'sum':>7}"
    )
    for name in filter(None, options.models.split(",")):
        for way in options.ways.split(","):
            for row in phases(name, way == "optimized", options.seconds):
                result["phases"].append(row)
                missed = missed or bool(row["missed"])
                print(
                    f"{name:10}{way:10}{row['phase']:9}{row['wall_ms']:8.2f}{row['overhead']:9.1%}{row['noise']:7.1%}"
                    f"{row['classified']:9.1%}{row['covered']:7.1%}{row['sum_over_wall']:7.3f}  "
                    f"{', '.join(row['missed'] + row['over_roof'])}",
                    flush=True,
                )
            torch._dynamo.reset()
            gc.collect()
    result["two_ways"] = [two_ways(phase, options.seconds) for phase in ("forward", "train")]
    for both in result["two_ways"]:
        missed = missed or bool(both["different"])
        said = "DIFFERENT" if both["different"] else "the same"
        print(f"\n{both['phase']}: calls, GFLOP, least MB, ms; fused, then plain: {said}")
        for name in sorted({*both["fused"], *both["plain"]}):
            cells = (
                " ".join(f"{v:10.4g}" for v in both[way].get(name, [])) or " " * 43
                for way in ("fused", "plain")
            )
            print(f"  {name:24}" + "   ".join(cells))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    sys.exit(missed)


if __name__ == "__main__":
    main()
