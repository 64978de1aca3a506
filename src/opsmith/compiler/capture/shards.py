"""Weights that are spread over ranks (`DTensor`): a rank's graph computes with the part that it holds.

Models that transformers or `parallelize_module` spread ask each layer's weight for that part (`to_local`), multiply as
ever, and add up over ranks where a sum is spread. So the parts become inputs of the graph; what else is done to whole
DTensors (a vocabulary that is looked up in parts, logits that are gathered) stays PyTorch's.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx, nn
from torch.fx import Node
from torch.utils.weak import WeakIdKeyDictionary

from opsmith.call.dispatch import is_sharded


def is_gathered(model: nn.Module) -> bool:
    """Whether `fully_shard` gathers a model's weights for each call, into memory that it takes back."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(module, fsdp.FSDPModule) for module in model.modules())


def on_shards(node: Node) -> bool:
    """Whether a call computes with DTensors."""
    return node.op not in ("placeholder", "output") and any(
        is_sharded(n.meta.get("example_value")) for n in (node, *node.all_input_nodes)
    )


class Shards:
    """What this rank holds of a graph's sharded weights, as inputs behind the others."""

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
        graph = fx.Graph()
        graph.output(graph.graph_copy(gm.graph, {}))
        self._at: list[int] = []
        placeholders = graph.find_nodes(op="placeholder")
        last = placeholders[-1]
        for i, (node, value) in enumerate(zip(placeholders, inputs, strict=True)):
            asked = [
                n for n in node.users if (n.op, n.target, n.args) == ("call_method", "to_local", (node,))
            ]
            if not asked or not isinstance(value, nn.Parameter) or not is_sharded(value):
                continue
            with graph.inserting_after(last):
                last = graph.placeholder(f"{node.name}_shard")
            last.meta = dict(asked[0].meta)
            self._at.append(i)
            for call in asked:
                call.replace_all_uses_with(last)
                graph.erase_node(call)
        self.graph = fx.GraphModule(gm, graph)

    def added(self, inputs: Sequence[Any]) -> list[Any]:
        """The inputs with this rank's shard of each weight: one parameter for as long as the weight is the same."""
        return [*inputs, *[_shard(inputs[i]) for i in self._at]]


# One parameter for each weight, whichever graph asks: by that a report knows which graphs are of one layer.
_HELD: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _shard(weight: Any) -> nn.Parameter:
    held = weight.to_local()
    known: tuple[Tensor, nn.Parameter] | None = _HELD.get(weight)
    if known is None or known[0] is not held:
        _HELD[weight] = known = held, nn.Parameter(held, requires_grad=False)
    return known[1]
