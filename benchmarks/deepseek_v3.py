"""A token through layers of DeepSeek-V3 at their published sizes, with one thing switched off at a time.

One dense layer and two of experts, seeded random weights, a vocabulary of 1024: embeddings and the output layer, which
no layer is, would else be a fifth of it. The published layers have 256 experts; a token is sent to 8 of `--experts`.

    python benchmarks/deepseek_v3.py --json v3.json --svg v3.svg
    python benchmarks/deepseek_v3.py --weights fp8     # of all layers, in blocks as it was published
    python benchmarks/deepseek_v3.py --tiny            # checks that all of this runs

Each contestant is timed in turns with the whole of opsmith; both compute with the same weights in the same memory:

    eager                   transformers, nothing of ours (fp8: its code, which calls our packed layers and experts)
    plain attention         no latent attention: keys and values of all heads, from all rows, for every token

and with bfloat16:

    two chains              `mla_preprocess` as two fused chains around the products
    thirteen operators      `mla_preprocess` as operators of this library, one by one
    thirteen of PyTorch     the same of PyTorch's
    transformers' experts   the experts as transformers computes them

and with fp8, where two chains stand around packed products:

    unpacked projections    all projections of attention but the last in bfloat16, for `mla_preprocess`

64 experts are 6.6 thousand million numbers: 13.2 GB in bfloat16, half of it in float8, and some GB for what a
contestant packs and absorbs. Where memory is short, `--experts 32` halves it.
"""

from __future__ import annotations

import copy
import datetime
import json
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import mla_rungs
import torch
import typer
from torch import nn

import opsmith
from opsmith import measure
from opsmith.checkpoints.empty import model_of, put, put_experts
from opsmith.compiler.modules.latent import site
from opsmith.compiler.modules.linear_layers import layer_of
from opsmith.compiler.modules.mixtures import experts_of
from opsmith.measure.stats import paired_ratio
from opsmith.ops import PackedExperts, PackedLinear

SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 7168,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 64,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "max_position_embeddings": 4096,
    "eos_token_id": None,
}
TINY = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 128,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "n_routed_experts": 16,
}


@dataclass(frozen=True)
class Contestant:
    """What of opsmith is another's."""

    settings: dict[str, Any] = field(default_factory=dict)
    rung: Any = None  # in the place of `mla_preprocess`
    experts: bool = True  # are ours
    ours: bool = True
    weights: tuple[str, ...] = ("bfloat16", "fp8")  # with which it is something else than opsmith
    unpacked: bool = False  # the projections of attention whose results `mla_preprocess` gives


OURS = Contestant()
OTHERS = {
    "eager": Contestant(ours=False),
    "two chains": Contestant(rung=mla_rungs.two_chains, weights=("bfloat16",)),
    "thirteen operators": Contestant(rung=mla_rungs.thirteen_of_ours, weights=("bfloat16",)),
    "thirteen of PyTorch": Contestant(rung=mla_rungs.thirteen_in_pytorch, weights=("bfloat16",)),
    "plain attention": Contestant({"mla_cache": "off"}),
    "transformers' experts": Contestant(experts=False, weights=("bfloat16",)),
    "unpacked projections": Contestant(unpacked=True, weights=("fp8",)),
}


class Running:
    """A contestant at work, on weights that are another model's too."""

    def __init__(self, base: Any, of: Contestant, tune: bool) -> None:
        shared = {id(t): t for t in (*base.parameters(), *base.buffers())}
        self.of, self.model, self.cache = of, copy.deepcopy(base, shared), None
        for path, layer in list(self.model.named_modules()) if of.unpacked else ():
            if type(layer) is PackedLinear and ".self_attn." in path and not path.endswith(".o_proj"):
                put(self.model, path, layer_of(layer.dequantize().to(torch.bfloat16)))
        if of.ours:
            chosen = self.model.config._experts_implementation
            config = opsmith.Config(tune=tune, inductor=False, **of.settings)
            opsmith.optimize(self.model, config=config)
            if not of.experts:
                self.model.set_experts_implementation(chosen)

    @torch.no_grad()
    def step(self, ids: torch.Tensor) -> torch.Tensor:
        """The logits of tokens that follow those that it had."""
        with ExitStack() as held:
            if self.of.rung is not None:
                held.enter_context(mock.patch.object(site, "mla_preprocess", self.of.rung))
            out = self.model(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.cache = out.past_key_values
        return out.logits.float()  # type: ignore[no-any-return]

    def start(self, ids: torch.Tensor) -> torch.Tensor:
        """The logits of the last token of a prompt, by a step of its own."""
        self.cache = None
        self.step(ids[:, :-1])
        return self.step(ids[:, -1:])

    def seconds(self, ids: torch.Tensor) -> float:
        """What each of some tokens takes, one after the other."""
        start = time.perf_counter()
        for one in ids.split(1, dim=1):
            self.step(one)
        return (time.perf_counter() - start) / ids.shape[1]


def made(sizes: dict[str, Any], weights: str) -> Any:
    """The model: transformers', whose layers, the output layer aside, are packed ones where weights are float8."""
    from transformers import DeepseekV3Config

    torch.manual_seed(0)
    model = model_of(DeepseekV3Config(**sizes), torch.bfloat16)

    def packed(n: int, k: int) -> PackedLinear:
        numbers = torch.randint(0, 256, (n, k), dtype=torch.uint8)
        numbers[numbers & 127 == 127] = 0  # which are no numbers
        scale = torch.full(
            (-(-n // 128), -(-k // 128)), 0.02 / 128
        )  # the root of the mean square is about 128
        return PackedLinear.from_float8(numbers.view(torch.float8_e4m3fn), scale)

    if weights == "fp8":
        for path, layer in list(model.named_modules()):
            if type(layer) is nn.Linear and path != "lm_head":
                put(model, path, packed(*layer.weight.shape))
        for path, module in list(experts_of(model)):
            e, n, k = module.gate_up_proj.shape
            both = ((n, k), (k, n // 2))
            put_experts(
                model, path, *(PackedExperts.of((packed(*shape) for _ in range(e)), e) for shape in both)
            )
    for path, t in list(model.named_parameters()):
        numbers = (
            torch.ones(t.shape) if t.dim() == 1 else torch.empty(t.shape, dtype=t.dtype).normal_(0, 0.02)
        )
        put(model, path, nn.Parameter(numbers.to(t.dtype), requires_grad=False))
    return model.eval()


def main(
    weights: Annotated[str, typer.Option(help="bfloat16 or fp8.")] = "bfloat16",
    experts: Annotated[int, typer.Option(help="Of a layer, in eight groups.")] = SIZES["n_routed_experts"],
    prompt: Annotated[int, typer.Option(help="Tokens before those that are timed.")] = 512,
    tokens: Annotated[int, typer.Option(help="Tokens of a round.")] = 8,
    rounds: Annotated[int, typer.Option(min=3)] = 7,
    only: Annotated[list[str] | None, typer.Option(help="A contestant; may be given several times.")] = None,
    tune: Annotated[bool, typer.Option(help="Time the implementations of every operator.")] = False,
    tiny: Annotated[bool, typer.Option(help="Small layers, which show that it runs and no more.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
    svg: Annotated[Path | None, typer.Option()] = None,
) -> None:
    """Time all contestants; print and write what was found."""
    if weights not in ("bfloat16", "fp8"):
        raise typer.BadParameter(f"--weights is bfloat16 or fp8, got {weights}")
    sizes = SIZES | {"n_routed_experts": experts} | (TINY if tiny else {})
    if tiny:
        prompt = min(prompt, 64)
    names = [name for name, one in OTHERS.items() if weights in one.weights]
    if unknown := set(only or ()) - set(names):
        raise typer.BadParameter(f"--only is one of {', '.join(names)}, got {unknown.pop()}")
    base = made(sizes, weights)
    ours = Running(base, OURS, tune)
    ids = torch.randint(1, sizes["vocab_size"], (1, prompt))
    right = ours.start(ids)
    kept = [layer for layer in ours.model.opsmith.report.latent if layer.status == "kept"]
    if len(kept) != sizes["num_hidden_layers"]:
        raise RuntimeError(f"latent attention of {len(kept)} layers is kept:\n{ours.model.opsmith.report}")
    found = []
    for name in only or names:
        other = Running(base, OTHERS[name], tune)
        ours.start(ids)
        difference = float((other.start(ids) - right).norm() / right.norm())
        if not difference < 0.1:  # of bfloat16's products it is a hundredth; of another model's one
            raise RuntimeError(f"{name} computes something else: its logits differ by {difference:.2g}")
        samples: dict[str, list[float]] = {"opsmith": [], name: []}
        for timed in (False, *[True] * rounds):  # what is captured first is not counted
            following = torch.randint(1, sizes["vocab_size"], (1, tokens))
            for who, running in (("opsmith", ours), (name, other)):
                seconds = running.seconds(following)
                if timed:
                    samples[who].append(seconds)
        ratio = paired_ratio("opsmith", name, samples["opsmith"], samples[name]).to_json()
        found.append({"name": name, "difference": difference, "ratio": ratio, "samples": samples})
        times = " against ".join(f"{statistics.median(s) * 1e3:.2f} ms" for s in samples.values())
        typer.echo(
            f"{name}: {1 / ratio['median']:.2f} times as long; {times}; logits differ by {difference:.1e}"
        )
        del other
    result = {
        "machine": measure.describe().to_json(),
        "date": datetime.date.today().isoformat(),
        "weights": weights,
        "sizes": sizes,
        "prompt": prompt,
        "tokens": tokens,
        "runs": found,
    }
    if json_file:
        json_file.write_text(json.dumps(result, indent=1) + "\n")
    if svg:
        picture(result, svg)


def picture(result: dict[str, Any], file: Path) -> None:
    """A bar for each contestant: how long a token takes, of what it takes with all of opsmith."""
    from opsmith.cli import pictures

    runs = result["runs"][::-1]
    figure, axes = pictures.pyplot().subplots(figsize=(8, 0.5 * len(runs) + 1.2), layout="constrained")
    long = [1 / run["ratio"]["median"] for run in runs]
    ends = [(1 / run["ratio"]["hi"], 1 / run["ratio"]["lo"]) for run in runs]
    spread = [
        [x - low for x, (low, _) in zip(long, ends, strict=True)],
        [high - x for x, (_, high) in zip(long, ends, strict=True)],
    ]
    bars = axes.barh([run["name"] for run in runs], long, xerr=spread, color="#5b8db8", ecolor="#333333")
    axes.bar_label(bars, [f"{x:.2f}" for x in long], padding=6)
    axes.margins(x=0.1)
    axes.axvline(1, color="#333333", linewidth=0.8)
    axes.set_xlabel(f"time of a token, of what it takes with all of opsmith ({result['weights']} weights)")
    pictures.save("--svg", figure, file)


if __name__ == "__main__":
    typer.run(main)
