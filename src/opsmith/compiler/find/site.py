"""An operator found in a graph: what it is called with, what it replaces, and a dry run of the call."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from opsmith.compiler.algebra.canon import dim_of, op_name, read_by, shape_of
from opsmith.compiler.find.operands import evaluate, nodes_in
from opsmith.operator import Operator

After = tuple[tuple[Callable[..., Any], tuple[Any, ...]], ...]


@dataclass
class Site:
    """One operator found in the graph."""

    card: Operator
    pattern: str
    arguments: dict[str, Any]  # the call of the card's function; tensors are Operands
    outputs: tuple[Node, ...]  # the nodes that the call's results replace
    region: set[Node]
    # What makes the model's layout of a result: calls on it, with further arguments.
    after: After = ()
    parts: tuple[Site, ...] = ()  # the sites that this one is made of, which run where they are faster
    columns: tuple[int, ...] = ()  # how many columns of the one result each output is, where they are that

    @property
    def root(self) -> Node:
        """The node whose value is the operator's (first) result."""
        return self.outputs[0]

    @property
    def inputs(self) -> list[Node]:
        """The nodes that the call reads."""
        return [node for value in self.arguments.values() for node in nodes_in(value)]

    def call(self, value: Callable[[Node], Any]) -> dict[str, Any]:
        """The call on these values of its inputs."""
        return {k: evaluate(v, value) for k, v in self.arguments.items()}

    def results(self, result: Any) -> tuple[Any, ...]:
        """A call's results in the model's layout: tensors, or proxies of a graph's nodes where it is one."""
        results = [result]
        if self.columns:
            ends = accumulate(self.columns)
            parts = [(end - n, end) for n, end in zip(self.columns, ends, strict=True)]
            results = [torch.ops.aten.slice.Tensor(result, -1, *part) for part in parts]
        elif len(self.outputs) > 1 and not isinstance(result, Tensor):  # one tensor alone is wrong
            results = [result[i] for i in range(len(self.outputs))]
        for call, more in self.after:
            results = [call(r, *more) for r in results]
        return tuple(results)


def where(node: Node) -> str:
    """The model's source line of a node, as `file.py:12`; in PyTorch's own layers alone, the layer; or nothing."""
    # Behind our own frame, in which a model is called.
    below = (node.stack_trace or "").rpartition("opsmith/compiler/entry.py")[2]
    lines = re.findall(r'File "(?:.*/)?(.*)", line (\d+)', below)
    layers = [name.partition(".")[2] for name, _ in node.meta.get("nn_module_stack", {}).values()]
    return "({}:{})".format(*lines[-1]) if lines else f"({layers[-1]})" if layers else ""


def cuts(root: Node, region: Iterable[Node]) -> list[Node]:
    """The values that could be the operator's main input: of the root's shape and dtype, nearest first."""
    sources = dict.fromkeys(source for node in region for source in read_by(node))
    tensors = [(n, v) for n in sources if isinstance(v := n.meta.get("val"), Tensor)]
    dtype = root.meta["val"].dtype
    return [n for n, value in tensors if value.dtype == dtype and shape_of(n) == shape_of(root)]


def between(
    root: Node, inputs: Iterable[Node], enough: float = math.inf, ends: Collection[str] = ()
) -> list[Node]:
    """The nodes from the root (included) to the inputs (excluded), nearest first, as soon as there are `enough`.

    What feeds an operator that `ends` names is left out.
    """
    stop, region, queue = set(inputs), {root: None}, [root]
    while queue and len(region) < enough:
        node = queue.pop(0)
        for source in node.all_input_nodes if node is root or op_name(node) not in ends else ():
            if source not in stop and source not in region and source.op == "call_function":
                region[source] = None
                queue.append(source)
    return list(region)


def following(values: Iterable[Node], region: Iterable[Node]) -> set[Node]:
    """The nodes of a region that something is made of these values in."""
    known = set(values)
    for node in sorted(region):
        if not known.isdisjoint(node.all_input_nodes):
            known.add(node)
    return known.intersection(region)


def hint(node: Node, known: Mapping[Any, int] | None = None) -> Any:
    """A value without storage and without symbols, for a dry run of an operator; of symbols what is `known`."""
    value = node.meta["val"]
    if not isinstance(value, Tensor):
        return value
    return torch.empty([_number(d, known) for d in value.shape], dtype=value.dtype, device="meta")


def _number(d: Any, known: Mapping[Any, int] | None = None) -> int:
    if known and isinstance(d, torch.SymInt):
        size = dim_of(d)
        size = size if isinstance(size, int) else size.xreplace(known)
        if isinstance(size, int) or size.is_number:
            return int(size)
    return int(d.node.hint) if isinstance(d, torch.SymInt) and d.node.has_hint() else int(d)


def check(site: Site) -> tuple[str, str] | None:
    """A dry run on the operator's own checks: None, or what it expected and what came."""
    try:
        result = site.card.function(**site.call(hint))
    except (ValueError, TypeError, IndexError, RuntimeError) as error:
        return ("a call that the operator accepts", str(error).splitlines()[0])
    for got, node in zip(site.results(result), site.outputs, strict=True):
        want = hint(node)
        if not isinstance(got, Tensor):
            return ("an operator with one result", f"one with {len(got)}: call it")
        if got.shape != want.shape or got.dtype != want.dtype:
            return (f"a result of {want.dtype} {tuple(want.shape)}", f"{got.dtype} {tuple(got.shape)}")
    return None
