"""DeepSeek's MLA pre-processing as it was published: 4 tokens, 128 heads, ten loops.

Example: python examples/mla_preprocess.py --quant per_token
"""

from __future__ import annotations

import runpy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from opsmith import measure
from opsmith.ops import MLACache, MLAWeights, mla_preprocess

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
RUNGS = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "mla_rungs.py"))["RUNGS"]


@dataclass(frozen=True)
class Sizes:
    """DeepSeek-V3's, and the published call's tokens."""

    tokens: int = 4
    hidden: int = 7168
    heads: int = 128
    nope: int = 128
    rope: int = 64
    kv_lora: int = 512
    q_lora: int = 1536
    blocks: int = 2
    block_size: int = 128


def make_inputs(s: Sizes, dtype: torch.dtype, quant: str | None) -> dict[str, Any]:
    """Everything that `mla_preprocess` is called with, from one seed."""
    g = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype).normal_(0, shape[-1] ** -0.5, generator=g)

    def gain(n: int) -> torch.Tensor:
        return torch.empty(n, dtype=dtype).uniform_(0.5, 1.5, generator=g)

    w = MLAWeights(
        weight(s.kv_lora + s.rope + s.q_lora, s.hidden),
        weight(s.heads * (s.nope + s.rope), s.q_lora),
        weight(s.heads, s.nope, s.kv_lora),
        gamma0=gain(s.hidden),
        gamma1=gain(s.q_lora),
        gamma2=gain(s.kv_lora),
        heads=s.heads,
        nope=s.nope,
        rope=s.rope,
        kv_lora=s.kv_lora,
        q_lora=s.q_lora,
    )
    positions = torch.arange(100, 100 + s.tokens)[:, None]
    angles = (positions * 10000.0 ** (-torch.arange(0, s.rope, 2) / s.rope)).repeat(1, 2)
    return {
        "x": torch.empty((s.tokens, s.hidden), dtype=dtype).normal_(generator=g),
        "w": w if quant is None else w.quantize(quant),
        "cos": angles.cos().to(dtype),
        "sin": angles.sin().to(dtype),
        "slot_mapping": torch.randperm(s.blocks * s.block_size, generator=g)[: s.tokens],
    }


def show(name: str, t: torch.Tensor) -> str:
    """A tensor in one line."""
    few = ", ".join(f"{v:.4g}" for v in t.flatten()[:3].tolist())
    return f"  {name:<13} {str(t.dtype).removeprefix('torch.'):<9} {list(t.shape)!s:<17} [{few}, ...]"


def new_cache(s: Sizes, dtype: torch.dtype) -> MLACache:
    return MLACache.allocate("split", s.blocks, s.block_size, kv_lora=s.kv_lora, rope=s.rope, dtype=dtype)


def rungs(s: Sizes, inputs: dict[str, Any], loops: int) -> dict[str, Callable[[], Any]]:
    """Each rung as a call of so many loops; those that don't take these weights are left out."""
    found: dict[str, Callable[[], Any]] = {}
    for name, call in RUNGS.items():
        if inputs["w"].quant is not None and name == "thirteen operators, ours":
            continue
        cache = new_cache(s, inputs["x"].dtype)

        def run(call: Callable[..., Any] = call, cache: MLACache = cache) -> Any:
            for _ in range(loops):
                result = call(**inputs, cache=cache)
            return result[:2]

        found[name] = run
    return found


def main(
    tokens: Annotated[int, typer.Option(min=1)] = 4,
    heads: Annotated[int, typer.Option(min=1)] = 128,
    loops: Annotated[int, typer.Option(min=1)] = 10,
    hidden: Annotated[int, typer.Option(min=1)] = 7168,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    quant: Annotated[str | None, typer.Option(help="per_token, per_tensor or weight_int8.")] = None,
) -> None:
    """Make the inputs, show the outputs, time the rungs."""
    s = Sizes(tokens=tokens, heads=heads, hidden=hidden)
    inputs = make_inputs(s, DTYPES[dtype], quant)
    typer.echo("inputs")
    for name in ("x", "cos", "sin", "slot_mapping"):
        typer.echo(show(name, inputs[name]))
    typer.echo(
        f"  weights       {inputs['w'].nbytes / 1e6:.1f} MB, read once a call ({inputs['w'].quant or dtype})"
    )
    cache = new_cache(s, DTYPES[dtype])
    q_out, q_rope = mla_preprocess(**inputs, cache=cache)
    typer.echo("outputs")
    typer.echo(show("q_out", q_out))
    typer.echo(show("q_rope", q_rope))
    slot = int(inputs["slot_mapping"][0])
    row = cache.latent[slot // s.block_size, slot % s.block_size, 0]
    typer.echo(show(f"cache[{slot}]", row))
    result = measure.compare(rungs(s, inputs, loops), rounds=5, budget_s=30.0, warmup=1)
    typer.echo(f"milliseconds a call, the median of 5 times {loops} loops, interleaved")
    for name in result.names:
        typer.echo(f"  {name:<28} {result.median(name) / loops * 1e3:8.3f}")


if __name__ == "__main__":
    typer.run(main)
