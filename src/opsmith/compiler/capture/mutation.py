"""Changes in place: made into values where nobody else can see them, and otherwise kept in mind.

A captured graph keeps the model's in-place operators. `x = a @ b; x += c` changes memory that only `x` knows,
which is the same as a new value, so it is written as one; and so is a new tensor with the kernel of ours that fills it,
as a packed linear layer is. What is left (a cache, a counter, a write through a view) is a fact that recognition, the
study and the timing of a graph have to respect.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import Node
from torch.fx.node import map_arg

from opsmith.compiler.algebra.canon import arguments, op_name


@dataclass
class Effects:
    """What a graph does besides computing its results."""

    memory: dict[Node, int] = field(default_factory=dict)  # nodes of one number share memory
    writes: dict[Node, frozenset[int]] = field(default_factory=dict)  # the memory that a node writes to
    random: bool = False

    def inputs(self, graph: fx.Graph) -> list[int]:
        """The positions of the inputs that a run changes."""
        changing = self.changing()
        return [i for i, n in enumerate(graph.find_nodes(op="placeholder")) if n in changing]

    def changing(self) -> frozenset[Node]:
        """Nodes whose memory is changed at some time."""
        changed: frozenset[int] = frozenset().union(*self.writes.values())
        return frozenset(n for n, m in self.memory.items() if m in changed)

    def opaque(self) -> frozenset[Node]:
        """Nodes whose value is not what their formula says: those, but views, which show what is there at any time."""
        shown = {n for n, m in self.memory.items() for of in n.all_input_nodes if self.memory.get(of) == m}
        return self.changing() - (shown - self.writes.keys())

    def disturbed(self, region: Iterable[Node], outputs: Collection[Node]) -> bool:
        """True when one call at the end of the region could see other values than the region's nodes did."""
        region = {*region, *outputs}
        for node, written in self.writes.items():
            # A change before all that reads what is changed, and before all outputs, is seen by both.
            reads = [n for n in region if written & {self.memory.get(m) for m in (n, *n.all_input_nodes)}]
            if node in region or (reads and min(*outputs, *reads) < node < max(region)):
                return True
        return False


class Rehearsal:
    """The inputs of a graph for as many runs as are needed: copies of what a run changes, put back before each."""

    def __init__(self, args: Sequence[Any], changed: Collection[int]):
        self.given = args
        self._changed = changed
        self._args = [a.clone() if i in changed else a for i, a in enumerate(args)]

    def again(self, *, numbers: bool = True) -> list[Any]:
        """The inputs as they came; without `numbers`, what holds floating-point numbers is left as it is.

        A counter that ran on would soon point behind its cache. What stands in the cache changes no time, while to
        put it back would take some.
        """
        for i in self._changed:
            if numbers or not self._args[i].is_floating_point():
                self._args[i].copy_(self.given[i])
        return self._args


def effects(graph: fx.Graph) -> Effects:
    found = Effects({n: m for n in graph.nodes if (m := _memory(n)) is not None})
    for node in graph.nodes:
        written = frozenset(found.memory[n] for n in _written(node) if n in found.memory)
        if written:
            found.writes[node] = written
        found.random = found.random or _draws(node)
    return found


def _draws(node: Node) -> bool:
    """True for a call that draws random numbers; attention without dropout is tagged so, and draws none."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    return bool(arguments(node).get("dropout_p", 1.0) != 0.0)


def filled(
    kernel: torch._ops.OpOverload,
    out: str,
    make: torch._ops.OpOverload,
    made_of: tuple[Sequence[Any], Mapping[str, Any]],
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """The tensor that `make` allocates and the kernel writes to, as its argument `out`."""
    sizes, options = made_of
    y: Tensor = make(*sizes, **options)
    kernel(*args, **kwargs, **{out: y})
    return y


def localize(graph: fx.Graph) -> None:
    """Write every change in place of memory that has one name only from then on as a call that returns a new value."""
    memory = {n: _memory(n) for n in graph.nodes}
    for number, node in enumerate(list(memory)):
        target, call = _as_value(node)
        if call is None or target.op != "call_function":
            continue
        shared = [n for n, m in memory.items() if m is not None and m == memory[target]]
        before = (n for n in shared if n < node and n is not target)
        if any(n.op != "call_function" or any(u > node for u in n.users) for n in before):
            continue
        with graph.inserting_before(node):
            value = graph.call_function(*call)
        value.meta = dict(target.meta if value.target is filled else node.meta)
        # From here on the old name stands for the new value.
        target.replace_all_uses_with(value, partial(operator.lt, node))
        node.replace_all_uses_with(value)
        graph.erase_node(node)
        del memory[node]
        for n in (value, *(n for n in shared if n in memory and n > value)):
            memory[n] = n.meta["memory"] = -1 - number


def _memory(node: Node) -> int | None:
    """A number for the memory behind a node's value: that of its fake storage, unless it was made a value here."""
    value: Any = node.meta.get("val")
    strided = isinstance(value, Tensor) and value.layout == torch.strided
    return int(node.meta.get("memory", value.untyped_storage()._cdata)) if strided else None


# Whose schemas do not say that they update the running statistics, in training.
_STATISTICS = {
    "aten::batch_norm": "training",
    "aten::native_batch_norm": "training",
    "aten::instance_norm": "use_input_stats",
}


def _written(node: Node) -> list[Node]:
    """The arguments that a node changes."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    schema = node.target._schema
    if schema.name in _STATISTICS:
        given = arguments(node)
        running = (given.get("running_mean"), given.get("running_var"))
        return [n for n in running if isinstance(n, Node) and given.get(_STATISTICS[schema.name])]
    if not schema.is_mutable:
        return []
    written: list[Node] = []
    for argument in schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            map_arg(arguments(node).get(argument.name), written.append)
    return written


_EMPTY = {"aten::empty", "aten::empty_like", "aten::new_empty"}


def _as_value(node: Node) -> tuple[Any, tuple[Any, tuple[Any, ...], dict[str, Any]] | None]:
    """The one thing that a call changes, and the call that returns that as a new value, where there is one."""
    changed = _written(node)
    if len(changed) != 1:
        return None, None
    (new,) = changed
    if not op_name(node).startswith("opsmith::") or node.target._schema.returns:  # type: ignore[union-attr]
        pure = _functional(node) if new is node.args[0] else None
        return new, None if pure is None else (pure, node.args, node.kwargs)
    out = next((k for k, v in node.kwargs.items() if v is new), "")
    given = {k: v for k, v in node.kwargs.items() if k != out}
    read: list[Node] = []
    map_arg((node.args, given), read.append)
    if op_name(new) not in _EMPTY or new in read or any(u < node for u in new.users):
        return new, None
    return new, (filled, (node.target, out, new.target, (new.args, new.kwargs), *node.args), given)


def _functional(node: Node) -> torch._ops.OpOverload | None:
    """The operator that returns what this one writes over its first argument."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return None
    name = target._schema.name.partition("::")[2]
    if not name.endswith("_") or name.endswith("__"):
        return None
    dtype = node.meta["val"].dtype
    given = [n.meta.get("val") for n in node.all_input_nodes]
    wide = {v.dtype for v in given if isinstance(v, Tensor) and v.dim()}
    # The operator in place keeps its dtype where the other one would promote.
    if any(torch.promote_types(dtype, other) != dtype for other in wide):
        return None
    pure = getattr(getattr(torch.ops.aten, name[:-1], None), target._overloadname, None)
    if pure is None:
        return None
    same = [a.name for a in pure._schema.arguments] == [a.name for a in target._schema.arguments]
    return pure if same and not pure._schema.is_mutable else None
