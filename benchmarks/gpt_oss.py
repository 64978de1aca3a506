"""GPT-OSS's layers at their published sizes, from a folder with experts in mxfp4 as it was published.

The folder is written first: the sizes of GPT-OSS of 20 billion weights, seeded random numbers, 32 experts in 24 layers.

    python benchmarks/gpt_oss.py --json oss.json                       # all of it: 14 GB on disk, and in memory
    python benchmarks/gpt_oss.py --layers 4 --against --json oss.json  # beside transformers, which unpacks experts
    python benchmarks/gpt_oss.py --tiny --against                      # checks that all of this runs

Contestants load the folder in processes of their own and generate the same tokens, with --against in turns: then their
logits are held to those of transformers in float32, and an error may be twice that of transformers in bfloat16.
"""

from __future__ import annotations

import datetime
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from safetensors.torch import save_file

from opsmith import measure
from opsmith.cli.llm import contestant, generator
from opsmith.cli.llm.contestant import Contestant
from opsmith.cli.models import allowed, error_of
from opsmith.measure.stats import paired_ratio

SIZES: dict[str, Any] = {"num_hidden_layers": 24, "num_local_experts": 32}  # else it is the larger one's
TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_local_experts": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "pad_token_id": 0,
    "eos_token_id": None,
}
OURS = {
    "opsmith": None,
    "opsmith, int8 beside": "int8",
}  # what the layers are quantized to that the folder has in floats
EAGER, EXACT = "transformers", "float32"


def write(place: Path, sizes: dict[str, Any]) -> None:
    """A folder of these sizes, a file for each layer."""
    from transformers import GptOssConfig, GptOssForCausalLM

    from opsmith.checkpoints.empty import empty

    torch.manual_seed(0)
    config = GptOssConfig(**sizes)
    tensors: dict[str, torch.Tensor] = {}
    where: dict[str, str] = {}

    def flush() -> None:
        file = f"model-{len(set(where.values()))}.safetensors"
        save_file(tensors, place / file, metadata={"format": "pt"})
        where.update(dict.fromkeys(tensors, file))
        tensors.clear()

    for name, like in empty(lambda: GptOssForCausalLM(config)).named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            e, k, n = like.shape
            tensors[f"{name}_blocks"] = torch.randint(0, 256, (e, n, k // 32, 16), dtype=torch.uint8)
            # Of all sixteen numbers the root of the mean square is 2.9: weights of about 0.02.
            tensors[f"{name}_scales"] = torch.randint(119, 122, (e, n, k // 32), dtype=torch.uint8)
        else:
            own = torch.ones(like.shape) if name.endswith("norm.weight") else torch.randn(like.shape) * 0.02
            tensors[name] = own.bfloat16()
        if name.endswith("post_attention_layernorm.weight"):  # the last of a layer
            flush()
    flush()
    (place / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    how = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    data = config.to_dict() | {"quantization_config": how, "architectures": ["GptOssForCausalLM"]}
    (place / "config.json").write_text(json.dumps(data | {"dtype": "bfloat16"}))


def serve(place: Path, name: str) -> None:
    """The process of a contestant: it loads the folder, and answers."""
    import transformers

    import opsmith

    answer = contestant.answers()
    start = time.perf_counter()
    if name in OURS:
        model = opsmith.load(place, dtype="bfloat16", quantize=OURS[name])
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            place,
            dtype=torch.float32 if name == EXACT else torch.bfloat16,
            quantization_config=transformers.Mxfp4Config(dequantize=True),
        ).eval()
    answer({"seconds": time.perf_counter() - start})
    contestant.serve(model, answer)


def started(place: Path, name: str, workspace: Path) -> Contestant:
    command = [sys.executable, __file__, "--serve"]
    return Contestant(name, command, {"folder": str(place), "name": name}, workspace / "log")


def logits(one: Contestant, ids: list[list[int]], workspace: Path) -> torch.Tensor:
    one.ask(ids=ids, new=1, logits=str(workspace / "logits.npy"))
    return torch.from_numpy(np.load(workspace / "logits.npy"))


def main(
    layers: Annotated[int, typer.Option(help="How many.")] = SIZES["num_hidden_layers"],
    against: Annotated[bool, typer.Option(help="Beside transformers, in bfloat16.")] = False,
    prompt: Annotated[int, typer.Option(help="Tokens before those that are timed.")] = 512,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of a round.")] = 24,
    rounds: Annotated[int, typer.Option(min=3)] = 5,
    tiny: Annotated[bool, typer.Option(help="Small layers, which show that it runs and no more.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
    folder: Annotated[Path | None, typer.Option(help="A folder that is there.")] = None,
    serves: Annotated[str, typer.Option("--serve", hidden=True)] = "",
) -> None:
    """Time all contestants; print and write what was found."""
    if serves:
        spec = json.loads(serves)
        return serve(Path(spec["folder"]), spec["name"])
    sizes = SIZES | {"num_hidden_layers": 2 if tiny else layers} | (TINY if tiny else {})
    with tempfile.TemporaryDirectory() as made, tempfile.TemporaryDirectory() as held:
        place, workspace = folder or Path(made), Path(held)
        if folder is None:
            write(place, sizes)
        config = json.loads((place / "config.json").read_text())
        torch.manual_seed(1)
        ids = torch.randint(1, config["vocab_size"], (1, prompt)).tolist()
        names = [*([EAGER] if against else []), *OURS]
        exact = None
        if against:
            one = started(place, EXACT, workspace)
            exact = logits(one, ids, workspace).double()
            one.close()
        result: dict[str, Any] = {}
        for some in [names] if against else [[name] for name in names]:  # two of all layers have no room
            found = run(place, some, ids, exact, tokens, rounds, workspace)
            result = found | {"contestants": result.get("contestants", {}) | found["contestants"]}
    result |= {"sizes": {"layers": config["num_hidden_layers"], "experts": config["num_local_experts"]}}
    if json_file:
        json_file.write_text(json.dumps(result, indent=1) + "\n")


def run(
    place: Path,
    names: list[str],
    ids: list[list[int]],
    exact: torch.Tensor | None,
    new: int,
    rounds: int,
    workspace: Path,
) -> dict[str, Any]:
    """The contestants' times, and what their logits are off by where the exact ones are known."""
    from transformers import AutoConfig

    running = {name: started(place, name, workspace) for name in names}
    rows: dict[str, dict[str, Any]] = {
        name: {"load_seconds": one.hello["seconds"]} for name, one in running.items()
    }
    limit = 0.0
    for name, one in running.items():
        if exact is None:
            break
        error = error_of(logits(one, ids, workspace), exact)
        limit = limit or allowed(error, torch.bfloat16)
        # Rounding what the folder has in bfloat16 to int8 takes more than arithmetic does.
        rounded = OURS.get(name) is not None
        if not rounded and not error.rms <= limit:
            raise RuntimeError(f"{name} computes something else: its error is {error.rms:.2g} of {limit:.2g}")
        rows[name]["error"] = error.rms
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    reads = []
    for turn in range(rounds + 1):
        reads.append(measure.measure_roofs(kinds=("read",)).bandwidth("read"))
        for name, one in running.items():
            answer = one.ask(ids=ids, new=new)
            if turn:  # what is captured first is not counted
                answers[name].append(answer)
    for one in running.values():
        one.close()
    read, config = statistics.median(reads), AutoConfig.from_pretrained(place)
    for name, its in answers.items():
        samples = {"first": [a["first"] for a in its], "token": [statistics.median(a["steps"]) for a in its]}
        token = statistics.median(samples["token"])
        cache = generator.cache_bytes(config, 1, len(ids[0]) + new // 2, 2)
        rows[name] |= {
            "first_seconds": statistics.median(samples["first"]),
            "token_seconds": token,
            "bytes_read": its[-1]["weight_bytes"] + cache,
            "of_read_roof": (its[-1]["weight_bytes"] + cache) / token / read,
            "peak_bytes": max(a["peak_bytes"] for a in its),
            "samples": samples,
        }
        base = rows[names[0]].get("samples")
        if name != names[0] and base:
            rows[name]["ratios"] = {
                what: paired_ratio(name, names[0], samples[what], base[what]).to_json() for what in samples
            }
        off = f", error {rows[name]['error']:.1e}" if exact is not None else ""
        typer.echo(
            f"{name}: loaded in {rows[name]['load_seconds']:.0f} s, prompt {rows[name]['first_seconds']:.2f} s, "
            f"{1 / token:.1f} tokens/s, {rows[name]['of_read_roof']:.2f} of the read roof, "
            f"{rows[name]['peak_bytes'] / 1e9:.1f} GB{off}"
        )
    return {
        "machine": measure.describe().to_json(),
        "date": datetime.date.today().isoformat(),
        "prompt": len(ids[0]),
        "tokens": new,
        "read_bandwidth": read,
        "contestants": rows,
    }


if __name__ == "__main__":
    typer.run(main)
