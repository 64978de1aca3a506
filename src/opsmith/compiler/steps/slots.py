"""A program's memory: which results share a buffer, from when until when, and what is the same at every call."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import Node
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from opsmith.compiler.capture.mutation import filled
from opsmith.compiler.find.joined import joined

Layout = tuple[int, int, torch.dtype, tuple[int, ...], tuple[int, ...]]  # slot, bytes into it; sizes, strides


class Slots:
    """Slots for the results of a recorded run, by first fit over their lifetimes."""

    def __init__(self) -> None:
        self.sizes: list[int] = []  # bytes
        self.devices: list[torch.device] = []
        # What is read and written in slots, and its index among the buffers.
        self.layouts: dict[Layout, int] = {}
        self._of: dict[int, int] = {}  # by the memory of a recorded result: the slot in its place

    def place(
        self,
        nodes: Sequence[Node],
        env: Mapping[Node, Any],
        result: Any,
        candidates: Mapping[Node, tuple[Tensor, ...]],
        varies: Collection[Node],
    ) -> dict[Node, int]:
        """The (first) slot of each result: the free slot nearest in size is grown rather than a new one opened."""
        last = last_uses(nodes, env, result, candidates, varies)
        until: list[int] = []
        first: dict[Node, int] = {}
        for order, node in enumerate(nodes):
            if node not in last:
                continue
            for t in candidates[node]:
                need = t.untyped_storage().nbytes()
                free = [i for i, end in enumerate(until) if end < order and self.devices[i] == t.device]
                slot = min(free, key=lambda i: (abs(self.sizes[i] - need), i), default=len(self.sizes))
                if slot == len(self.sizes):
                    self.sizes.append(0)
                    until.append(-1)
                    self.devices.append(t.device)
                self.sizes[slot] = max(self.sizes[slot], need)
                until[slot] = last[node]  # no earlier than here: not free for the node's next result
                self._of[memory(t)] = slot
                first.setdefault(node, slot)
        self.sizes = [-(-s // 64) * 64 for s in self.sizes]
        return first

    def __contains__(self, value: Any) -> bool:
        return memory(value) in self._of

    def buffer(self, t: Tensor) -> int:
        """The index, among the buffers, of what this recorded tensor stands for."""
        offset = int(t.storage_offset()) * t.element_size()
        layout = (self._of[memory(t)], offset, t.dtype, tuple(t.shape), t.stride())
        return self.layouts.setdefault(layout, len(self.layouts))


def last_uses(
    nodes: Sequence[Node],
    env: Mapping[Node, Any],
    result: Any,
    candidates: Mapping[Node, tuple[Tensor, ...]],
    varies: Collection[Node],
) -> dict[Node, int]:
    """For each result that could be a buffer, the last step that reads its memory; absent if it escapes.

    What shares memory was seen in the recorded run. A value that `varies` may do so at other sizes only, so each
    that is made of a buffer by something that can be a view counts as one.
    """
    owner = {memory(t): node for node, tensors in candidates.items() for t in tensors}
    order = {n: i for i, n in enumerate(nodes)}
    last = {node: order[node] for node in candidates}
    inputs = {memory(v) for n, v in env.items() if n.op in ("placeholder", "get_attr")}
    shared: dict[Node, set[Node]] = {}  # the results whose memory a value may be in
    for node in nodes:
        value = result if node.op == "output" else env.get(node)
        sources = {owner[m] for t in _tensors(value) if (m := memory(t)) in owner}
        if node.op == "output" or (node in varies and node not in candidates and may_be_view(node)):
            sources |= {o for n in node.all_input_nodes for o in shared.get(n, ())}
        shared[node] = sources
        escapes = node.op == "output" or any(memory(t) in inputs for t in _tensors(value))
        for source in sources & last.keys():
            last[source] = max([last[source], order[node], *(order[u] for u in node.users)])
            if escapes:
                del last[source]
    return last


def may_be_view(node: Node) -> bool:
    """True for a call whose result may share memory with an argument."""
    if node.op != "call_function":
        return False
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target is not filled
    composite = node.target.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    return composite or any(r.alias_info is not None for r in node.target._schema.returns)


def entering(gm: fx.GraphModule, args: Sequence[Any]) -> dict[Node, Any]:
    """The values that a run of a graph starts from: its inputs, and what it holds itself."""
    held = {n: operator.attrgetter(str(n.target))(gm) for n in gm.graph.find_nodes(op="get_attr")}
    return dict(zip(gm.graph.find_nodes(op="placeholder"), args, strict=True)) | held


def is_size(node: Node) -> bool:
    """True for an input that is a number."""
    return node.op == "placeholder" and not isinstance(node.meta.get("val"), Tensor)


def is_pure(node: Node) -> bool:
    """True for an ATen call that neither writes to an input nor draws random numbers."""
    if not isinstance(node.target, torch._ops.OpOverload):
        of_numbers = getattr(node.target, "__module__", "") in ("_operator", "math")
        return of_numbers or node.target in (filled, joined)
    return not node.target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in node.target.tags


def _tensors(value: Any) -> list[Tensor]:
    tensors = [v for v in pytree.tree_leaves(value) if isinstance(v, Tensor)]
    lies = (t for t in tensors if t.layout == torch.strided and not t.is_mkldnn)
    return [t for t in lies if not is_traceable_wrapper_subclass(t)]  # a DTensor, say, only has parts that do


def memory(value: Any) -> int:
    """A number for the memory of a (first) tensor; -1 where there is none that can be seen."""
    return next(iter(memories(value)), -1)


def memories(value: Any) -> dict[int, Tensor]:
    """The tensors in a value that lie in memory, by a number for it."""
    return {t.untyped_storage().data_ptr(): t for t in _tensors(value)}
