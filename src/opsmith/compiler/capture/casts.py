"""Autocast's casts as nodes of the graph: what they give is then an operator's input like any other.

Below autocast the dispatcher casts at the call, and a graph recorded above it shows a product of float32 tensors that
gives bfloat16: no operator of ours is that. Which calls cast what is not written down here a second time: each kind of
call is made once, without memory, and what it casts before all else is seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode


class Regions(AbstractContextManager["Regions"]):
    """A graph's regions of autocast, entered as its calls come, and left where one raises.

    PyTorch does neither: it records regions without being in them, and behind an error in one would go on to use casts
    of weights as they were.
    """

    def __init__(self) -> None:
        self.open: list[torch.autocast] = []

    def follow(self, target: Any, args: Sequence[Any]) -> bool:
        """Begin or end a region, where that is what a call does."""
        if target is torch.amp.autocast_mode._enter_autocast:
            self.open.append(torch.autocast(*args))
            self.open[-1].__enter__()
        elif target is torch.amp.autocast_mode._exit_autocast:
            self.open.pop().__exit__(None, None, None)
        else:
            return False
        return True

    def __exit__(self, *_: object) -> None:
        """End what an error left open."""
        while self.open:
            self.open.pop().__exit__(None, None, None)


class Recorder(fx.Interpreter):
    """Runs Dynamo's graph, to be recorded, in its regions of autocast."""

    def run(self, *args: Any, **_: Any) -> Any:
        with Regions() as self.regions:
            return super().run(*args)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return None if self.regions.follow(target, args) else super().call_function(target, args, kwargs)


def spell_out(graph: fx.Graph, weights: Sequence[bool]) -> None:
    """Write autocast's casts into a graph that was recorded under it.

    A weight is cast once for all its uses, as autocast's own cache does it. Other values are cast for each use where
    gradients are recorded, so that these add up in the dtype in which they do without us.

    Args:
        weights: of each placeholder, whether it is one.
    """
    once = {n for n, w in zip((n for n in graph.nodes if n.op == "placeholder"), weights, strict=True) if w}
    if not torch.is_grad_enabled():
        once = set(graph.nodes)
    made: dict[tuple[Node, torch.dtype], Node] = {}
    # Autocast's cache would keep tensors without memory, and hide the second cast of a weight.
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with Regions() as regions:
            for node in (n for n in list(graph.nodes) if n.op == "call_function"):
                if regions.follow(node.target, node.args) or not torch._C._is_any_autocast_enabled():
                    continue
                for source, dtype in _casts(node).items():
                    cast = made.get((source, dtype)) if source in once else None
                    if cast is None:
                        with graph.inserting_before(node):
                            cast = graph.call_function(torch.ops.aten.to.dtype, (source, dtype))
                        cast.meta = dict(node.meta, val=source.meta["val"].to(dtype))
                        made[source, dtype] = cast
                    node.replace_input_with(source, cast)
    finally:
        torch.set_autocast_cache_enabled(cached)


def _casts(node: Node) -> dict[Node, torch.dtype]:
    """What a call casts of its inputs before it does anything else."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable:
        return {}
    given = ((n, n.meta.get("val")) for n in node.all_input_nodes)
    values = {n: v for n, v in given if isinstance(v, Tensor) and v.is_floating_point()}
    result = node.meta.get("val")
    if not values or node.target.namespace != "aten" or node.target is torch.ops.aten.to.dtype:
        return {}
    if any(n.op == "get_attr" for n in node.all_input_nodes):
        return {}  # a constant has memory, and a call without memory takes none
    if isinstance(result, Tensor) and all(v.dtype == result.dtype for v in values.values()):
        return {}  # what is cast first is seen in the result, or does nothing to it
    seen = _First({id(v): n for n, v in values.items()})
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    with torch.no_grad(), seen:
        node.target(*args, **kwargs)
    return seen.found


class _First(TorchDispatchMode):
    """Notes the casts of known tensors that come before any other call."""

    def __init__(self, known: dict[int, Node]):
        super().__init__()
        self.known = known
        self.found: dict[Node, torch.dtype] = {}
        self.first = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default:
            source, dtype = self.known.get(id(args[0])), kwargs.get("dtype")
            if self.first and source is not None and dtype is not None:
                self.found[source] = dtype
        elif func.namespace != "prim":  # which asks about a tensor
            self.first = False
        return func(*args, **kwargs)
