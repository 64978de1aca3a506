"""A graph with checkpointed layers, sharded values or masks by vmap: such a stretch, and what is between, by itself.

Activation checkpointing keeps a layer's inputs only, and computes the layer once more for the gradients. Dynamo writes
it as a call that takes the layer's graph, for a compiler that puts PyTorch's dispatcher to work on all of it. Here
PyTorch's own function makes that call, random numbers repeated, on what has become of the layer. What computes with
DTensors runs as it is, and so does a mask that vmap computes: its calls are not recorded as such.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx import Node
from torch.fx.passes.split_module import split_module
from torch.utils.checkpoint import checkpoint

from opsmith.compiler.capture.casts import Regions
from opsmith.compiler.capture.shards import on_shards

Run = Callable[..., Any]
Compile = Callable[[fx.GraphModule, Sequence[Any]], Run]
_CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint


def by_parts(gm: fx.GraphModule, examples: Sequence[Any], compile_graph: Compile) -> Run:
    """Compile Dynamo's graph, or, where stretches of it are graphs of their own, each of its parts."""
    numbers = _numbers(gm.graph)
    if not any(numbers.values()):
        return compile_graph(gm, examples)
    split = split_module(gm, gm, numbers.__getitem__, keep_original_order=True)
    values = dict(zip(split.graph.find_nodes(op="placeholder"), examples, strict=True))
    for call in split.graph.find_nodes(op="call_module"):
        part: Any = split.get_submodule(call.target)
        layers = part.graph.find_nodes(op="call_function", target=_CHECKPOINT)
        if not layers and int(call.target.removeprefix("submod_")) % 2:
            continue
        inputs = part.graph.find_nodes(op="placeholder")
        given = [values.get(a, p.meta.get("example_value")) for a, p in zip(call.args, inputs, strict=True)]
        run = _checkpointed(part, layers[0], given, compile_graph) if layers else compile_graph(part, given)
        split.set_submodule(call.target, _Part(run))
    return split.forward


class _Part(nn.Module):
    """A call as a graph can make it."""

    def __init__(self, run: Run):
        super().__init__()
        self.forward = run


def _numbers(graph: fx.Graph) -> dict[Node, int]:
    """Of each node, the part that it goes to: odd ones are a checkpointed layer or run as they are; 0 if all is one."""
    numbers: dict[Node, int] = {}
    last, apart = 0, _of_integers(graph)
    node: Any
    for node in graph.nodes:
        if node in apart or on_shards(node):
            last += 1 - last % 2
            numbers[node] = last
        elif node.target is _CHECKPOINT:
            last += last % 2
            numbers[node] = last + 1
            last += 2
        elif node.target is operator.getitem and node.args[0].target is _CHECKPOINT:
            numbers[node] = numbers[node.args[0]]  # parts hand over tensors only
        else:
            last += last % 2
            numbers[node] = last
    return numbers


def _of_integers(graph: fx.Graph) -> set[Node]:
    """What `torch.func` transforms, of integers: a mask by vmap. Nothing where other numbers are among it: a model may
    compute these so for Dynamo alone, and slower (Mamba's scan). Such a graph is left, and the model goes its own way.
    """
    inside, depth = set(), 0
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "")
        depth += name.endswith("_increment_nesting")
        if depth:
            inside.add(node)
        depth -= name.endswith("_decrement_nesting")
    values = [node.meta.get("example_value") for node in inside]
    return set() if any(isinstance(v, Tensor) and v.is_floating_point() for v in values) else inside


def _checkpointed(part: fx.GraphModule, layer: Any, given: Sequence[Any], compile_graph: Compile) -> Run:
    """The part of one layer, which is compiled unless its caller chooses by operator what is kept."""
    values = dict(zip(part.graph.find_nodes(op="placeholder"), given, strict=True))
    body: Any = part.get_submodule(layer.args[0].target)
    options: dict[str, Any] = {**layer.kwargs, "use_reentrant": False}
    if "_checkpoint_context_fn" in body.meta:
        run, options["context_fn"] = body.forward, body.meta["_checkpoint_context_fn"]
    else:
        with Regions() as regions:
            for node in takewhile(lambda n: n is not layer, part.graph.nodes):
                regions.follow(node.target, node.args)
            run = by_parts(body, [values.get(a, a) for a in layer.args[1:]], compile_graph)
    part.add_submodule("layer", _Part(partial(checkpoint, run, **options)))
    with part.graph.inserting_before(layer):
        call = part.graph.call_module("layer", layer.args[1:])
    layer.replace_all_uses_with(call)
    part.graph.erase_node(layer)
    part.recompile()
    return part.forward
