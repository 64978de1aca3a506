"""One rank of a sharded model, as `torchrun` starts it: what it finds goes to standard output as JSON.

RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python -m tests.compiler.ranks FOLDER
"""

from __future__ import annotations

import datetime
import gc
import json
import os
import sys
import warnings
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import opsmith
from opsmith.compiler.choose.ranks import Ranks
from opsmith.compiler.modules import quantize as packed_layers
from opsmith.compiler.modules.latent import prove as prove_latent
from opsmith.compiler.modules.paged import prove as prove_paged

IDS = torch.arange(2, 14).view(2, 6)


def tokens(model: Any) -> Any:
    """What it says, prompt and all."""
    return model.generate(
        IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=6, do_sample=False
    ).tolist()


def in_parts(folder: str) -> Any:
    """A model as transformers spreads it."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    spread = DistributedConfig(tp_plan="auto")
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=spread).eval()


def work(folder: str, latent: str, whole: str, odd: str) -> dict[str, Any]:
    """Load a model in parts, optimize it, generate; then the same in int8, and with a rank that dies.

    Before it, one of latent attention and experts, and proofs that fail on the second rank alone.
    """
    parted = {"parted latent": failing(whole, quantize="int8"), "parted pages": failing(folder)}
    model = opsmith.optimize(in_parts(latent), config=opsmith.Config(tune=False))
    found: dict[str, Any] = {"latent": tokens(model), "latent report": str(model.opsmith.report), **parted}
    model = in_parts(folder)
    found["eager"] = tokens(model)
    try:
        opsmith.optimize(model, budget=5)
    except ValueError as error:
        found["budget"] = str(error)
    found["asked"] = []
    for asked in ({"example_inputs": IDS[dist.get_rank() :]}, {"warmup": {"prompt": 4 + dist.get_rank()}}):
        try:
            opsmith.optimize(model, **asked)
        except ValueError as error:
            found["asked"].append(str(error))
    found["uneven"] = uneven(odd)
    opsmith.optimize(model, {"input_ids": IDS})
    found["optimized"] = tokens(model)
    with torch.no_grad():
        found["logits"] = model(IDS).logits[:, -1].tolist()
    shapes = model.opsmith.plan.shapes
    found["choices"] = [(s.site, s.implementation) for shape in shapes for s in shape.steps]
    found["used"] = [shape.used for shape in shapes]
    found["report"] = str(model.opsmith.report)
    found["late"] = late(folder)
    found["sums"] = sum(
        "all_reduce" in str(node.target)
        for graph in model.opsmith.graphs
        for node in graph.rewritten.graph.nodes
    )
    found["graphs"] = len(model.opsmith.graphs)
    opsmith.restore(model)
    found["restored"] = tokens(model)
    found["learned"] = [learned(folder, ours) for ours in (False, True)]
    opsmith.optimize(model, quantize="int8", verify=False, config=opsmith.Config(tune=False))
    found["quantized"] = str(model.opsmith.report)
    in_eager = in_parts(folder)
    if dist.get_rank() == 1:
        print(json.dumps(found), flush=True)
        os._exit(9)
    try:
        tokens(model)
    except RuntimeError as error:
        found["alone"] = str(error)
    try:
        opsmith.optimize(in_eager, {"input_ids": IDS})
    except RuntimeError as error:
        found["optimized alone"] = str(error)
    return found


def failing(folder: str, quantize: str | None = None) -> dict[str, Any]:
    """A model whose last latent attention, packed layers and pages fail their proofs on the second rank."""

    def latent(site: Any, seen: Any) -> Any:
        verdict = identify(site, seen)
        planted = dist.get_rank() == 1 and site.name.endswith("1.self_attn")
        return replace(verdict, ok=False, why="planted") if planted else verdict

    identify, why = prove_latent.identify, "planted" * (dist.get_rank() == 1)
    with (
        mock.patch.object(prove_latent, "identify", latent),
        mock.patch.object(prove_paged, "_wrong", return_value=why),
        mock.patch.object(packed_layers, "_wrong", return_value=why),
    ):
        model = in_parts(folder)
        eager = tokens(model)
        # Packed layers need an example to be proved on; all else is captured by the calls that `tokens` makes.
        inputs = {"input_ids": IDS} if quantize else None
        opsmith.optimize(model, inputs, quantize=quantize, config=opsmith.Config(tune=False))
        same, report = tokens(model) == eager, model.opsmith.report
    rolled = {layer.name: layer.why for layer in report.quantized if layer.status == "rolled back"}
    latents = [(layer.status, layer.why) for layer in report.latent]
    return {"same": same, "packed": rolled, "latent": latents, "fallbacks": report.fallbacks}


def late(folder: str) -> dict[str, Any]:
    """A model that is spread after `optimize`, which knew nothing of ranks: what it says, and its report."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from transformers import AutoModelForCausalLM

    model = opsmith.optimize(AutoModelForCausalLM.from_pretrained(folder).eval())
    plan = {"layers.*.mlp.up_proj": ColwiseParallel(), "layers.*.mlp.gate_proj": ColwiseParallel()}
    mesh = init_device_mesh("cpu", (2,))
    parallelize_module(model.model, mesh, {**plan, "layers.*.mlp.down_proj": RowwiseParallel()})
    return {
        "tokens": tokens(model),
        "plan": len(model.opsmith.plan.shapes),
        "report": str(model.opsmith.report),
    }


def uneven(folder: str) -> str:
    """Of a model whose ranks hold parts of other sizes, by the plan of the first one, which has none of the others'."""
    model = opsmith.optimize(in_parts(folder), IDS)
    plans = [model.opsmith.plan]
    dist.broadcast_object_list(plans)
    opsmith.optimize(model, IDS, plan=plans[0])
    return str(model.opsmith.report)


def learned(folder: str, ours: bool) -> dict[str, Any]:
    """Three steps of a model under fully_shard, and what it says then. The second rank alone has a batch of one."""
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    model.config.use_cache = False
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    if ours:
        opsmith.optimize(model)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for step in range(3):
        of = slice(dist.get_rank() * (step == 1), None)
        loss = model(IDS[of] + dist.get_rank(), labels=IDS[of]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        losses.append(model(IDS, labels=IDS).loss.item())
    return {"losses": losses, "report": str(model.opsmith.report) if ours else ""}


def tiers() -> dict[str, Any]:
    """What ranks of other kernels are told, and which ranks share a model that has meshes of one and two dimensions."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    both = init_device_mesh("cpu", (1, 2), mesh_dim_names=("gathered", "spread"))
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
    for layer, mesh in zip(model, (both["gathered"], both), strict=True):
        layer.weight = torch.nn.Parameter(distribute_tensor(layer.weight, mesh, [Replicate()] * mesh.ndim))
    found: dict[str, Any] = {"together": Ranks.of(model).gather(dist.get_rank())}
    try:
        Ranks(init_device_mesh("cpu", (2,))).check({})
    except ValueError as error:
        found["error"] = str(error)
    return found


def main() -> None:
    """Be one rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # As in conftest.py: some of what Dynamo takes would go into looking for garbage and into timing guards.
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    torch._C._dynamo.guards.profile_guard_manager = lambda *_: 0.0
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    print(json.dumps(work(*sys.argv[1:]) if sys.argv[1:] else tiers()), flush=True)
    os._exit(0)  # the other rank may be gone, and is not waited for


if __name__ == "__main__":
    main()
