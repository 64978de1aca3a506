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
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx import Node
from torch.fx.node import map_arg

from opsmith.compiler.bind import Call, kernel_calls
from opsmith.compiler.filled import filled
from opsmith.compiler.select import Choice, Packer
from opsmith.compiler.sizes import varying
from opsmith.compiler.slots import Layout, Slots, is_pure, is_size, last_uses, memory
from opsmith.operator import Implementation, Operator

Chooser = Callable[[str, dict[str, Any]], tuple[Operator, Choice, Implementation]]


@dataclass
class Step:
    """One call of the program."""

    name: str
    target: str
    site: str | None = None
    choice: Choice | None = None
    slot: int | None = None


@dataclass
class Program:
    """A recorded program: its steps, its source, and the sets of buffers of the calls in flight."""

    steps: list[Step]
    source: str
    slots: list[int]  # bytes
    _devices: list[torch.device]  # of the slots
    _run: Callable[..., Any]
    _layouts: list[Layout]
    _free: list[list[Any]] = field(default_factory=list)
    called: list[str] = field(
        default_factory=list
    )  # sites, in the order of the calls of operators and kernels
    fresh: int = 0  # results of sites that are allocated at every call, as their sizes vary

    def __call__(self, args: Sequence[Any]) -> Any:
        """Run; concurrent calls each take a set of buffers of their own."""
        try:
            buffers = self._free.pop()
        except IndexError:
            buffers = self._allocate()
        result = self._run(args, buffers)
        self._free.append(buffers)
        return result

    def _allocate(self) -> list[Any]:
        storage = [
            torch.empty(size, dtype=torch.uint8, device=device)
            for size, device in zip(self.slots, self._devices, strict=True)
        ]

        return [
            torch.as_strided(storage[slot][offset:].view(dtype), size, stride)
            for slot, offset, dtype, size, stride in self._layouts
        ]


class Open:
    """A site whose sizes vary: what was chosen at the recorded ones where it is able, else the public function."""

    def __init__(self, card: Operator, implementation: Implementation, swapped: dict[str, torch.Tensor]):
        self.card = card
        self.implementation = implementation
        self.fn = implementation.fn
        self._swapped = swapped

    def __call__(self, *, out: Any = None, **call: Any) -> Any:
        """Run on these sizes."""
        if self.implementation.accepts(**call) is True:
            call.update(self._swapped)
            return self.fn(**call) if out is None else self.fn(**call, out=out)
        result = self.card.function(**call)
        if out is not None:
            several = isinstance(out, tuple)
            for mine, value in zip(out if several else (out,), result if several else (result,), strict=True):
                mine.copy_(value)
        return result


def record(
    graph: fx.Graph,
    attributes: Callable[[str], Any],
    args: Sequence[Any],
    choose: Chooser,
    packer: Packer,
    free: Collection[Any] = (),
) -> tuple[Program, Any]:
    """Run the graph once; the program for these sizes, whichever the symbols in `free` are, and the run's result."""
    return _Recorder(graph, attributes, args, choose, packer, free).run()


class _Recorder:
    def __init__(
        self,
        graph: fx.Graph,
        attributes: Callable[[str], Any],
        args: Sequence[Any],
        choose: Chooser,
        packer: Packer,
        free: Collection[Any],
    ):
        self.nodes = list(graph.nodes)
        self.varies = varying(self.nodes, free) if free else set()
        self.order = {n: i for i, n in enumerate(self.nodes)}
        self.attributes = attributes
        self.called: list[str] = []
        self.args = args
        self.choose = choose
        self.packer = packer
        self.env: dict[Node, Any] = {}
        self.steps: dict[Node, Step] = {}
        self.calls: dict[Node, tuple[Implementation, dict[str, torch.Tensor]]] = {}
        self.open: dict[Node, Open] = {}
        self.candidates: dict[Node, tuple[torch.Tensor, ...]] = {}
        self.constant: dict[Node, Any] = {}
        self.weights = {memory(w) for w in packer.constants.values()}
        self.slots = Slots()

    def run(self) -> tuple[Program, Any]:
        result = self._execute()
        self._fold()
        last = last_uses(self.nodes, self.env, result, self.candidates, self.varies)
        for node, slot in self.slots.place(self.nodes, self.candidates, last).items():
            self.steps[node].slot = slot
        needed = self._needed()
        source, names = self._source(needed)
        code = compile(source, "<opsmith plan>", "exec")
        exec(code, names)  # the text above, made of node names and bound objects only
        steps = [
            self.steps[n] for n in self.nodes if n in self.steps and n in needed and n not in self.constant
        ]
        program = Program(
            steps,
            source,
            self.slots.sizes,
            self.slots.devices,
            names["run"],
            list(self.slots.layouts),
            called=self.called,
            fresh=len(self.calls.keys() & self.varies),
        )
        return program, result

    def _execute(self) -> Any:
        inputs = iter(self.args)
        for node in self.nodes:
            if node.op == "placeholder":
                self.env[node] = next(inputs)
            elif node.op == "get_attr":
                self.env[node] = self.attributes(str(node.target))
            elif node.op == "call_function":
                self.env[node] = self._call(node)
            elif node.op == "output":
                return map_arg(node.args[0], self.env.__getitem__)
        raise RuntimeError("a graph without an output")

    def _call(self, node: Node) -> Any:
        args = map_arg(node.args, self.env.__getitem__)
        kwargs = map_arg(node.kwargs, self.env.__getitem__)
        site = node.meta.get("site")
        if site is None:
            if node.target is not operator.getitem:
                self.steps[node] = Step(node.name, _target_name(node.target))
            weight = self.packer.cast(node, args)
            if weight is not None:
                self.weights.add(memory(weight))
                self.constant[node] = weight
                return weight
            result = node.target(*args, **kwargs)  # type: ignore[operator]
            if node.target is filled and node not in self.varies:
                self.candidates[node] = (result,)
            return result
        card, choice, implementation = self.choose(site, kwargs)
        packed = self.packer(implementation, kwargs)
        swapped = {k: v for k, v in packed.items() if v is not kwargs[k]}
        self.calls[node] = (implementation, swapped)
        if node in self.varies or any(n in self.varies for n in node.all_input_nodes):
            self.open[node] = Open(card, implementation, swapped)
        self.weights |= {memory(w) for w in swapped.values()} - {-1}  # no memory that can be seen
        self.steps[node] = Step(node.name, _target_name(node.target), site, choice)
        result = implementation.fn(**packed)
        if implementation.takes_out and node not in self.varies:
            self.candidates[node] = result if isinstance(result, tuple) else (result,)
        return result

    def _fold(self) -> None:
        """What follows from fixed sizes alone (positions, causal masks) is computed once: it is in `env` already."""
        escaping = {n for o in self.nodes if o.op == "output" for n in o.all_input_nodes}
        for node in self.nodes:
            if node.op != "call_function" or node in self.calls or node in escaping or not is_pure(node):
                continue
            known = (
                n in self.constant or (is_size(n) and n not in self.varies) for n in node.all_input_nodes
            )
            if all(known):
                self.constant[node] = self.env[node]
        # A constant that is changed in place, or seen through a view that is, is none.
        for node in self.nodes:
            if node.op == "output" or (node.op == "call_function" and not is_pure(node)):
                seen = {memory(self.env.get(n)) for n in node.all_input_nodes}
                for n in [n for n, v in self.constant.items() if memory(v) in seen]:
                    del self.constant[n]

    def _in_slot(self, node: Node) -> bool:
        """True for a value that stands in a slot: a site's result, or a view of one."""
        value = self.env.get(node)
        own = node in self.calls or (node.op == "call_function" and is_pure(node))
        return own and node not in self.varies and isinstance(value, torch.Tensor) and value in self.slots

    def _stays(self, t: torch.Tensor) -> bool:
        """True for memory that is the same at every call: a slot, or a weight as long as it does not change."""
        return t in self.slots or memory(t) in self.weights

    def _source(self, needed: set[Node]) -> tuple[str, dict[str, Any]]:
        names: dict[str, Any] = {}
        local = {"args", "buffers", "slice", *(n.name for n in self.nodes)}
        bound: dict[int, str] = {}
        dead = self._dead_after(needed)
        lines = ["def run(args, buffers):"]
        placeholders = [n.name for n in self.nodes if n.op == "placeholder"]
        if placeholders:
            lines.append(f"    ({', '.join(placeholders)},) = args")

        def bind(value: Any, hint: str) -> str:
            if id(value) not in bound:
                name = "".join(c if c.isalnum() else "_" for c in hint)
                while name in names or name in local:
                    name += "_"
                bound[id(value)], names[name] = name, value
            return bound[id(value)]

        def text(value: Any) -> str:
            if isinstance(value, Node):
                return text(self.env[value]) if self._in_slot(value) else value.name
            if isinstance(value, torch.Tensor) and value in self.slots:
                return f"buffers[{self.slots.buffer(value)}]"
            if isinstance(value, torch.Tensor):
                return bind(value, "weight")
            if isinstance(value, list | tuple):
                inner = ", ".join(text(v) for v in value)
                return f"[{inner}]" if isinstance(value, list) else f"({inner},)" if value else "()"
            if isinstance(value, dict):
                return "{" + ", ".join(f"{k!r}: {text(v)}" for k, v in value.items()) + "}"
            if value is None or isinstance(value, bool | int | str):
                return repr(value)
            if isinstance(value, float) and value == value and abs(value) != float("inf"):
                return repr(value)
            if isinstance(value, slice):
                return f"slice({text(value.start)}, {text(value.stop)}, {text(value.step)})"
            return bind(value, str(value))

        for node in self.nodes:
            if node not in needed:
                continue
            if node.op == "get_attr" or node in self.constant:
                lines.append(f"    {node.name} = {bind(self.env[node], node.name + '_value')}")
            elif node in self.calls:
                site = self._site(node, bind, text)
                self.called += [self.steps[node].site or node.name] * len(site)
                lines += site
            elif node.target is filled and self._in_slot(node):
                lines.append(self._filled(node, bind, text))
            elif self._in_slot(node):
                pass
            elif node.op == "call_function" and node.target is operator.getitem:
                lines.append(f"    {node.name} = {text(node.args[0])}[{text(node.args[1])}]")
            elif node.op == "call_function":
                parts = [text(a) for a in node.args] + [f"{k}={text(v)}" for k, v in node.kwargs.items()]
                target = bind(node.target, _target_name(node.target))
                lines.append(f"    {node.name} = {target}({', '.join(parts)})")
            elif node.op == "output":
                lines.append(f"    return {text(node.args[0])}")
            if dead.get(node):
                lines.append(f"    del {', '.join(dead[node])}")
        return "\n".join(lines) + "\n", names

    def _site(self, node: Node, bind: Any, text: Any) -> list[str]:
        """A site's lines: the implementation's call or, where all it works on stays in place, its kernels' calls."""
        implementation, swapped = self.calls[node]
        results = self.candidates.get(node, ())
        opened = self.open.get(node)
        out = self.steps[node].slot is not None
        if out and opened is None:
            given = {**map_arg(node.kwargs, self.env.__getitem__), **swapped}
            given["out"] = results if isinstance(self.env[node], tuple) else results[0]
            calls = kernel_calls(implementation.fn, given, self._stays)
            if calls is not None:
                return [self._kernel(node, call, bind, text) for call in calls]
        fixed = swapped if opened is None else {}
        parts = [
            f"{k}={bind(fixed[k], f'{node.name}_{k}') if k in fixed else text(v)}"
            for k, v in node.kwargs.items()
        ]
        if out:
            parts.append(f"out={text(results if isinstance(self.env[node], tuple) else results[0])}")
        name = bind(opened or implementation.fn, f"{_target_name(node.target)}_{implementation.name}")
        return [f"    {'' if out else node.name + ' = '}{name}({', '.join(parts)})"]

    def _kernel(self, node: Node, call: Call, bind: Any, text: Any) -> str:
        func, args, kwargs = call
        values = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | kwargs
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and memory(value) in self.weights:
                bind(value, f"{node.name}_{name}")
        parts = [text(a) for a in args] + [f"{k}={text(v)}" for k, v in kwargs.items()]
        return f"    {bind(func._op, _target_name(func))}({', '.join(parts)})"

    def _filled(self, node: Node, bind: Any, text: Any) -> str:
        """The kernel's call alone: what it fills is a buffer."""
        kernel, out, _, _, *args = node.args
        parts = [text(a) for a in args] + [f"{k}={text(v)}" for k, v in node.kwargs.items()]
        assert isinstance(kernel, torch._ops.OpOverload)
        return f"    {bind(kernel._op, _target_name(kernel))}({', '.join(parts)}, {out}={text(node)})"

    def _needed(self) -> set[Node]:
        """The nodes whose values the program reads, and those that do more than return one."""
        needed: set[Node] = set()
        for node in reversed(self.nodes):
            effect = node.op in ("output", "placeholder") or (
                node.op == "call_function" and not is_pure(node)
            )
            if node in self.calls:
                effect = False
            if not effect and not any(node in self._reads(u) for u in node.users if u in needed):
                continue
            needed.add(node)
        return needed

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

    def _dead_after(self, needed: set[Node]) -> dict[Node, list[str]]:
        """Names to forget after each step, so that memory is given back as early as eager would."""
        dead: dict[Node, list[str]] = {}
        for node in self.nodes:
            if node.op != "call_function" or node not in needed:
                continue
            users = [u for u in node.users if u in needed and node in self._reads(u)]
            end = max(users, key=self.order.__getitem__) if users else node
            if self._in_slot(node) or (node in self.steps and self.steps[node].slot is not None):
                continue  # it has no name
            if end.op != "output":
                dead.setdefault(end, []).append(node.name)
        return dead


def _target_name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return str(getattr(target, "__name__", target))
