"""Does a model under `fully_shard` learn the same with opsmith? Losses of the same steps, on the ranks of torchrun.

    torchrun --nproc-per-node 2 benchmarks/fsdp.py --json benchmarks/results/fsdp.json
    torchrun --nproc-per-node 2 benchmarks/fsdp.py --steps 4    # checks that all of this runs

A small Llama predicts bytes of the documentation, in float32, and with parameters in bfloat16 and activations computed
again in the backward. Learning multiplies what rounding begins: by how much, eager says, from weights that are larger
by one unit in the last place. A checkpoint of the spread model (torch.distributed.checkpoint) is read by one that is
whole; their losses are told too.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import opsmith
from opsmith import measure

TEXT = Path(__file__).parents[1] / "examples/data/opsmith_docs.txt"
SIZES = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2, "vocab_size": 256}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
BATCH, LENGTH = 4, 128  # of each rank
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def batches(steps: int) -> Iterator[torch.Tensor]:
    """Other bytes for each rank."""
    text = torch.tensor(list(TEXT.read_bytes()))
    random = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        first = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=random)
        yield text[first + torch.arange(LENGTH)]


def spread(model: LlamaForCausalLM, half: bool) -> LlamaForCausalLM:
    how: dict[str, Any] = {"mp_policy": HALF} if half else {}
    for layer in model.model.layers:
        fully_shard(layer, **how)
    return fully_shard(model, **how)


def learn(model: nn.Module, steps: int) -> list[float]:
    """The loss of each step, over all ranks."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-4), []
    for ids in batches(steps):
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        told = loss.detach().float() / dist.get_world_size()
        dist.all_reduce(told)
        losses.append(told.item())
    return losses


def read_whole(spread_model: nn.Module, whole: LlamaForCausalLM) -> list[float]:
    """The loss of the same bytes from the model that is spread, and from the whole one that read its checkpoint."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    dcp.save({"model": get_model_state_dict(spread_model)}, checkpoint_id=folder[0])
    state = {"model": get_model_state_dict(whole)}
    dcp.load(state, checkpoint_id=folder[0])
    set_model_state_dict(whole, state["model"])
    dist.barrier()  # all have read it
    if dist.get_rank() == 0:
        shutil.rmtree(str(folder[0]))
    ids = next(batches(1))
    return [model(ids, labels=ids, use_cache=False).loss.item() for model in (spread_model, whole)]


def compared(steps: int, half: bool) -> dict[str, Any]:
    """The losses of each way to learn from the same start."""
    torch.manual_seed(0)
    start = LlamaForCausalLM(LlamaConfig(**SIZES))
    if half:
        start.activation_checkpointing_enable({"use_reentrant": False})
    start.train()
    eager, ours = copy.deepcopy(start), opsmith.optimize(spread(copy.deepcopy(start), half))
    nudged = copy.deepcopy(start)
    with torch.no_grad():
        for weight in nudged.parameters():
            weight *= 1 + torch.finfo(weight.dtype).eps
    losses = {
        "eager": learn(spread(eager, half), steps),
        "eager, nudged": learn(spread(nudged, half), steps),
        "opsmith": learn(ours, steps),
    }
    return {"losses": losses, "checkpoint": read_whole(ours, start), "report": str(ours.opsmith.report)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    machine = measure.describe().to_json()  # before this writes anything
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=5))
    found = {
        "float32": compared(options.steps, half=False),
        "bfloat16, checkpointing": compared(options.steps, half=True),
    }
    if dist.get_rank() == 0:
        for name, one in found.items():
            for way, losses in one["losses"].items():
                apart = max(abs(a - b) for a, b in zip(losses, one["losses"]["eager"], strict=True))
                print(f"{name}, {way}: at most {apart:.1e} from eager's losses, {losses[-1]:.4f} at the end")
            print(f"read from a checkpoint: {one['checkpoint']}")
            print(one["report"])
        if options.json:
            told: dict[str, Any] = {"machine": machine, "date": datetime.date.today().isoformat()}
            told |= {"ranks": dist.get_world_size(), "steps": options.steps, "runs": found}
            options.json.write_text(json.dumps(told, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
