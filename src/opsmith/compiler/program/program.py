"""A plan as a program: straight-line Python over chosen implementations and buffers that are used again.

One recording run at given sizes executes the rewritten graph step by step, chooses each site's implementation,
and sees which results share memory. From that follow the buffers (a result's buffer is free after the last use
of anything that shares it; what the caller gets is never one of them) and the source text, which is compiled
once and run at every later call with those sizes.

Where some sizes vary, as the length of a cache does with every token, one program serves them all: what does not
depend on them stays as it was recorded, the rest is called with what the sizes are by then.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_symbols
from torch.fx.node import map_arg

from opsmith.call.fast import direct
from opsmith.compiler.capture.casts import Regions
from opsmith.compiler.capture.mutation import filled
from opsmith.compiler.choose.weights import Weights
from opsmith.compiler.find.joined import joined
from opsmith.compiler.find.site import following
from opsmith.compiler.steps.bind import kernel_calls
from opsmith.compiler.steps.slots import Layout, Slots, entering, is_pure, is_size, memories, memory
from opsmith.compiler.steps.source import Writer, target_name
from opsmith.measure import pages
from opsmith.operator import Implementation, Operator

Chooser = Callable[[str, dict[str, Any]], tuple[Operator, Implementation]]


class Buffers:
    """Memory for one call at a time of whichever program of a graph: as much as the largest of them needs."""

    def __init__(self) -> None:
        self._storage: list[Tensor] = []  # by slot
        self._laid: weakref.WeakKeyDictionary[Program, list[Any]] = weakref.WeakKeyDictionary()

    def of(self, program: Program) -> list[Any]:
        """A program's buffers, laid out once until the memory has to grow."""
        found = self._laid.get(program)
        if found is None:
            for slot, (size, device) in enumerate(zip(program.slots, program.devices, strict=True)):
                there = self._storage[slot : slot + 1]
                if not there or there[0].nbytes < size or there[0].device != device:
                    self._laid.clear()  # whose memory goes
                    there.clear()
                    self._storage[slot : slot + 1] = [torch.empty(0)]
                    self._storage[slot] = torch.empty(size, dtype=torch.uint8, device=device)
            found = self._laid[program] = [
                torch.as_strided(self._storage[slot][offset:].view(dtype), size, stride)
                for slot, offset, dtype, size, stride in program.layouts
            ]
        return found


@dataclass(eq=False)
class Program:
    """A recorded program: its source, and the sets of buffers of the graph's calls that are not in flight."""

    taken: dict[str, int]  # by site: the (first) slot of its result
    source: str
    slots: list[int]  # bytes
    devices: list[torch.device]  # of the slots
    layouts: list[Layout]
    _run: Callable[..., Any]
    _free: list[Buffers]
    lines: dict[str, range] = field(default_factory=dict)  # by site: where it stands in the source
    fresh: bool = False  # whether most sites' results are allocated at every call, as their sizes vary

    def __call__(self, args: Sequence[Any]) -> Any:
        """Run; concurrent calls each take a set of buffers of their own."""
        try:
            buffers = self._free.pop()
        except IndexError:
            buffers = Buffers()
        result = self._run(args, buffers.of(self))
        self._free.append(buffers)
        return result

    def apart(self, args: Sequence[Any]) -> Any:
        """Run in memory of this call alone."""
        return self._run(args, Buffers().of(self))


class Open:
    """A site whose sizes vary: what was chosen at the recorded ones where it is able, else the public function."""

    def __init__(self, card: Operator, implementation: Implementation, swapped: dict[str, Tensor]):
        self.card, self.implementation, self._swapped = card, implementation, swapped

    def __call__(self, *, out: Any = None, **call: Any) -> Any:
        """Run on these sizes."""
        given = {} if out is None else {"out": out}
        if self.implementation.accepts(**call) is True:
            return self.implementation.fn(**{**call, **self._swapped}, **given)
        return self.card.function(**call, **given)


class Recorder:
    """A run of a graph, of which a program is made for these sizes, whichever the symbols in `free` are."""

    def __init__(
        self,
        gm: fx.GraphModule,
        args: Sequence[Any],
        choose: Chooser,
        weights: Weights,
        buffers: list[Buffers],
        free: Collection[Any] = (),
    ):
        self.gm, self.buffers = gm, buffers
        self.nodes = list(gm.graph.nodes)
        self.varies = varying(self.nodes, free) if free else set()
        self.lines: dict[str, range] = {}
        self.choose, self.weights = choose, weights
        self.env = entering(gm, args)
        self.placed: dict[Node, int] = {}  # by result: its (first) slot
        self.calls: dict[Node, tuple[Implementation, dict[str, Tensor]]] = {}
        self.open: dict[Node, Open] = {}
        self.candidates: dict[Node, tuple[Tensor, ...]] = {}
        self.constant: dict[Node, Any] = {}
        self.still = weights.places
        self.slots = Slots()

    def run(self) -> tuple[Program, Any]:
        """The program, and the run's result."""
        result = self._execute()
        self._fold()
        self.placed = self.slots.place(self.nodes, self.env, result, self.candidates, self.varies)
        living = self._living()
        source, run = self._source(living)
        seen = {n: slot for n, slot in self.placed.items() if n in living and n not in self.constant}
        program = Program(
            {n.meta["site"]: slot for n, slot in seen.items() if n in self.calls},
            source,
            self.slots.sizes,
            self.slots.devices,
            list(self.slots.layouts),
            run,
            self.buffers,
            lines=self.lines,
            fresh=2 * len(self.calls.keys() & self.varies) > len(self.calls),
        )
        return program, result

    def _execute(self) -> Any:
        """Run the graph. All values stay where they are, which says what shares memory; their numbers go when read."""
        lasting = {m for value in self.env.values() for m in memories(value)}
        fixed = {n for n in self.nodes if n.op == "get_attr" or is_size(n)}
        living: dict[int, tuple[Node, Tensor]] = {}  # by memory: what reads it last
        with Regions() as regions:
            for node in self.nodes:
                if node.op != "call_function" or regions.follow(node.target, node.args):
                    continue
                self.env[node] = self._call(node)
                # It may become a constant.
                if node in self.constant or fixed.issuperset(node.all_input_nodes):
                    fixed.add(node)
                    lasting |= memories(self.env[node]).keys()
                for m, t in memories(self.env[node]).items():
                    living[m] = max(max(node.users, default=node), living.get(m, (node, t))[0]), t
                for m in [m for m, (last, _) in living.items() if last <= node or m in lasting]:
                    _, t = living.pop(m)
                    if m not in lasting:
                        pages.forget(t)
        return map_arg(self.gm.graph.find_nodes(op="output")[0].args[0], self.env.__getitem__)

    def _call(self, node: Node) -> Any:
        args = map_arg(node.args, self.env.__getitem__)
        kwargs = map_arg(node.kwargs, self.env.__getitem__)
        site = node.meta.get("site")
        if site is None:
            weight = self.weights.made(node, args)
            if weight is not None:
                self.still.add(memory(weight))
                self.constant[node] = weight
                return weight
            result = node.target(*args, **kwargs)  # type: ignore[operator]
            if node.target is joined and all(n.op == "placeholder" for n in node.all_input_nodes):
                self.still.add(memory(result))
                self.constant[node] = result
            if node.target is filled and node not in self.varies:
                self.candidates[node] = (result,)
            return result
        card, implementation = self.choose(site, kwargs)
        packed = self.weights.swapped(implementation, kwargs)
        swapped = {k: v for k, v in packed.items() if v is not kwargs[k] or node.kwargs[k] in self.constant}
        self.calls[node] = (implementation, swapped)
        if node in self.varies or any(n in self.varies for n in node.all_input_nodes):
            self.open[node] = Open(card, implementation, swapped)
        self.still |= {memory(w) for w in swapped.values()} - {-1}  # no memory that can be seen
        result = implementation.fn(**packed)
        if implementation.takes_out and node not in self.varies:
            self.candidates[node] = result if isinstance(result, tuple) else (result,)
        return result

    def _fold(self) -> None:
        """What follows from fixed sizes alone (positions, causal masks) is computed once: it is in `env` already."""
        escaping = set(self.gm.graph.find_nodes(op="output")[0].all_input_nodes)
        fixed = {n for n in self.nodes if n.op == "get_attr" or (is_size(n) and n not in self.varies)}
        for node in self.nodes:
            if node.op != "call_function" or node in self.calls or node in escaping or not is_pure(node):
                continue
            if all(n in self.constant or n in fixed for n in node.all_input_nodes):
                self.constant[node] = self.env[node]
        # A constant that is changed in place, or seen through a view that is, is none.
        for node in self.nodes:
            if node.op == "output" or (node.op == "call_function" and not is_pure(node)):
                seen = {memory(self.env.get(n)) for n in node.all_input_nodes}
                seen.discard(0)  # of empty ones, as a new cache begins with, which have nothing to change
                for n in [n for n, v in self.constant.items() if memory(v) in seen]:
                    del self.constant[n]

    def _in_slot(self, node: Node) -> bool:
        """True for a value that stands in a slot: a site's result, or a view of one."""
        value = self.env.get(node)
        own = node in self.calls or (node.op == "call_function" and is_pure(node))
        return own and node not in self.varies and isinstance(value, Tensor) and value in self.slots

    def _stays(self, t: Tensor) -> bool:
        """True for memory that is the same at every call: a slot, or a weight as long as it does not change."""
        return t in self.slots or memory(t) in self.still

    def _stands(self, value: Any) -> str | None:
        """Where a value is found in the program: a buffer, or a name of its own."""
        if isinstance(value, Node):
            if not self._in_slot(value):
                return str(value.name)
            value = self.env[value]
        if isinstance(value, Tensor) and value in self.slots:
            return f"buffers[{self.slots.buffer(value)}]"
        return None

    def _source(self, living: Mapping[Node, list[str]]) -> tuple[str, Callable[..., Any]]:
        writer = Writer({n.name for n in self.nodes}, self._stands)
        lines = []
        if placeholders := self.gm.graph.find_nodes(op="placeholder"):
            lines.append(f"    ({', '.join(n.name for n in placeholders)},) = args")
        for node in (n for n in self.nodes if n in living):
            if node.op == "get_attr" or node in self.constant:
                lines.append(f"    {node.name} = {writer.bind(self.env[node], node.name + '_value')}")
            elif node in self.calls:
                site = self._site(node, writer)
                first = 1 + len(lines)  # behind the line with the function's name
                self.lines[node.meta["site"]] = range(first, first + len(site))
                lines += site
            elif node.target is filled and self._in_slot(node):
                lines.append(self._filled(node, writer))
            elif node.target is operator.getitem and not self._in_slot(node):
                lines.append(f"    {node.name} = {writer.text(node.args[0])}[{writer.text(node.args[1])}]")
            elif node.op == "call_function" and not self._in_slot(node):
                call = writer.call(node.target, node.args, node.kwargs, target_name(node.target))
                lines.append(f"    {node.name} = {call}")
            elif node.op == "output":
                lines.append(f"    return {writer.text(node.args[0])}")
            if node.op != "output" and living[node]:
                lines.append(f"    del {', '.join(living[node])}")
        return writer.compile(lines)

    def _site(self, node: Node, writer: Writer) -> list[str]:
        """A site's lines: its kernels' calls, where it consists of these, or else the implementation's own."""
        implementation, swapped = self.calls[node]
        label = f"{target_name(node.target)}_{implementation.name}"
        out = None
        if node in self.placed:
            results = self.candidates[node]
            out = results if isinstance(self.env[node], tuple) else results[0]
        if node in self.open:
            return writer.site(node.name, self.open[node], label, node.kwargs, out, {})
        if out is not None:
            values = {**map_arg(node.kwargs, self.env.__getitem__), **swapped, "out": out}
            found = kernel_calls(implementation.fn, values, self._stays)
            if found is not None:
                return writer.kernels(node.name, found, {**node.kwargs, **swapped}, values)
        return writer.site(node.name, implementation.fn, label, node.kwargs, out, swapped)

    def _filled(self, node: Node, writer: Writer) -> str:
        """The kernel's call alone: what it fills is a buffer."""
        kernel, out, _, _, *args = node.args
        assert isinstance(kernel, torch._ops.OpOverload)
        return f"    {writer.call(direct.of(kernel), args, {**node.kwargs, str(out): node}, target_name(kernel))}"

    def _living(self) -> dict[Node, list[str]]:
        """The nodes whose values the program reads, and those that do more than return one; of each the names to
        forget behind it, so that memory is given back as early as eager would.
        """
        read: set[Node] = set()
        living: dict[Node, list[str]] = {}
        for node in reversed(self.nodes):
            acts = node.op == "call_function" and node not in self.calls and not is_pure(node)
            if acts or node in read or node.op in ("output", "placeholder"):
                last = {node, *self._reads(node)} - read  # what no later step reads
                read |= last
                named = (n for n in sorted(last) if not self._in_slot(n) and n not in self.placed)
                living[node] = [n.name for n in named if n.op == "call_function"]
        return living

    def _reads(self, node: Node) -> set[Node]:
        """What a node's line in the program mentions: not the weights that were packed."""
        if node in self.constant:
            return set()
        if node not in self.calls:
            return set(node.all_input_nodes)
        swapped = {} if node in self.open else self.calls[node][1]
        read: set[Node] = set()
        map_arg({k: v for k, v in node.kwargs.items() if k not in swapped}, read.add)
        return read


def varying(nodes: Sequence[Node], free: Collection[Any]) -> set[Node]:
    """The nodes whose sizes, strides or number depend on these symbols; of one without a value, the inputs do."""
    told = {n for n in nodes if "val" in n.meta}
    found = {n for n in told if not free_symbols(n.meta["val"]).isdisjoint(free)}
    return found | following(found, [n for n in nodes if n not in told])
