"""Run a program under PyTorch's profiler, and keep what it saw: the tree of operators, on the program's own clock.

Two kinds of session. Timed ones ask for names and times only, a fraction of a microsecond an operator, and take turns
with repetitions that nobody watches: the difference is the overhead. One further session, not timed, asks for shapes
and follows the modules; an operator's place in the tree tells which is which.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._C._profiler import _RecordFunctionFast

from opsmith.compiler.plan import PlanStep
from opsmith.compiler.program import Program
from opsmith.operator import Operator, registry
from opsmith.profiler.align import align
from opsmith.profiler.costs import Inputs, Spec
from opsmith.profiler.kinds import card_of

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # its own log says on stderr that it starts and stops

# Annotations of ours in the profiler's tree.
REPETITION, MODULE, RUN, SITE = "opsmith.repetition", "opsmith.module.", "opsmith.run.", "site::"


@dataclass
class Op:
    """One operator that ran: nanoseconds since 1970, and what it was called with where that was asked for."""

    name: str
    start: int
    end: int
    children: list[Op] = field(default_factory=list)
    sequence: int = -1  # which node of autograd's it made, or, in a backward pass, ran
    backward: bool = False
    inputs: Inputs = ()
    module: str = ""
    run: int = -1  # which call of an outermost module it stands in
    mark: Mark | None = None


@dataclass
class Origin:
    """The site of an optimized model that a call belongs to: what it is, and why it runs as it does."""

    site: str
    part: int  # a site may be several kernels
    module: str
    step: PlanStep | None


@dataclass
class Mark:
    """A call of an operator of ours inside an optimized model."""

    card: Operator
    implementation: str
    call: dict[str, Any] = field(default_factory=dict)
    origin: Origin | None = None


@dataclass
class Run:
    """One call of a module that stands in no other: what a program's composites are recognized from."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass
class Watched:
    """What one repetition left: its window and its operators."""

    start: int
    end: int
    ops: list[Op]
    before: list[Op] = field(
        default_factory=list
    )  # what ran ahead of the window: the forward pass of a backward

    @property
    def seconds(self) -> float:
        """From its start to its end."""
        return (self.end - self.start) * 1e-9


class Modules:
    """Follows which module is at work, by name, while it is entered: an annotation around each call."""

    def __init__(self, root: nn.Module | None = None, keep_runs: int = 0):
        self.runs: list[Run] = []
        self._names: dict[int, str] = {}
        self._roots: list[nn.Module] = []  # held, so that no id comes to mean another module
        self._stack: list[str] = []
        self._keep = keep_runs
        if root is not None:
            self._learn(root, "")

    def _learn(self, root: nn.Module, prefix: str) -> None:
        self._roots.append(root)
        for name, module in root.named_modules():
            self._names.setdefault(id(module), f"{prefix}.{name}".strip("."))

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Inside, every module's call is noted."""
        original = nn.Module.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(module, *args, **kwargs)
            outermost = not self._stack
            if outermost and id(module) not in self._names:
                self._learn(module, "" if not self._roots else type(module).__name__)
            name = self._names.get(id(module))
            if name is None:
                name = f"{self._stack[-1]}.{type(module).__name__}".strip(".")
            label = f"{MODULE}{name}"
            if outermost and self._keep:
                if len(self.runs) < self._keep:
                    self.runs.append(Run(module, args, kwargs))
                    label = f"{RUN}{len(self.runs) - 1}"
                else:
                    label = f"{RUN}-1"
            self._stack.append(name)
            try:
                with _RecordFunctionFast(label):
                    return original(module, *args, **kwargs)
            finally:
                self._stack.pop()

        nn.Module.__call__ = call  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.__call__ = original  # type: ignore[method-assign]


class Marks:
    """Notes every call of an operator of ours in an optimized model's programs.

    Functions are wrapped while they are watched. Kernels that a program calls by itself are not: the profiler sees
    them, and their order in the program says whose they are.
    """

    def __init__(self, model: Any):
        from opsmith.compiler import Session

        session = getattr(model, "opsmith", None)
        self.session = session if isinstance(session, Session) else None
        self.noted: list[Mark] = []
        self.origins: list[Origin] = []  # of the programs that ran
        self.keep_calls = False

    def clear(self) -> None:
        """Forget what was noted."""
        self.noted.clear()
        self.origins.clear()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, the functions that the programs call note when they ran."""
        if self.session is None:
            yield
            return
        known: dict[int, tuple[Operator, str]] = {}
        for card in registry().values():
            known[id(card.function)] = (card, "opsmith")
            for implementation in card.implementations:
                known.setdefault(id(implementation.fn), (card, implementation.name))
            compiled = self.session.selector._inductor.get(card.name)
            if compiled is not None:
                known[id(compiled.fn)] = (card, compiled.name)
        changed: list[tuple[dict[str, Any], str, Any]] = []
        runs: list[tuple[Program, Callable[..., Any]]] = []
        for names, program, origins in self._programs():
            if program is not None:
                runs.append((program, program._run))
                program._run = self._starting(program._run, origins)
            for name, value in list(names.items()):
                if id(value) in known and callable(value):
                    changed.append((names, name, value))
                    names[name] = self._noting(value, *known[id(value)])
        try:
            yield
        finally:
            for names, name, value in changed:
                names[name] = value
            for program, run in runs:
                program._run = run

    def _programs(self) -> Iterator[tuple[dict[str, Any], Program | None, list[Origin]]]:
        assert self.session is not None
        for graph in self.session.graphs:
            for key, program in graph._programs.items():
                if program is None:
                    continue
                plan = {step.site: step for step in graph.plans[key].steps}
                origins: list[Origin] = []
                for site in program.called:
                    part = origins[-1].part + 1 if origins and origins[-1].site == site else 0
                    module = _module_of(graph.sites[site].root) if site in graph.sites else ""
                    origins.append(Origin(site, part, module, plan.get(site)))
                yield program._run.__globals__, program, origins
            if graph._rewritten is not None:
                yield type(graph._rewritten).forward.__globals__, None, []

    def _starting(self, run: Callable[..., Any], origins: list[Origin]) -> Callable[..., Any]:
        def started(args: Any, buffers: Any) -> Any:
            self.origins += origins
            return run(args, buffers)

        return started

    def _noting(self, fn: Callable[..., Any], card: Operator, implementation: str) -> Callable[..., Any]:
        label = f"{SITE}{card.name}::{implementation}"

        def noted(*args: Any, **kwargs: Any) -> Any:
            with _RecordFunctionFast(label):
                result = fn(*args, **kwargs)
            mark = Mark(card, implementation)
            if self.keep_calls:
                mark.call = {k: v for k, v in kwargs.items() if k != "out"}
                if not kwargs:
                    mark.call = dict(zip(_parameters(card), args, strict=False))
            self.noted.append(mark)
            return result

        return noted


def _parameters(card: Operator) -> list[str]:
    return list(inspect.signature(card.function).parameters)


def _module_of(node: Any) -> str:
    """The module that a captured node came from, by name; empty where nobody knows."""
    stack = node.meta.get("nn_module_stack") or {}
    for path, _ in reversed(list(stack.values())):
        text = re.sub(r"\[\'?([\w.]+)\'?\]", r".\1", str(path))
        return re.sub(
            r"^L?\.?(self|model|fn|mod)?\.?(_modules\.)?", "", text.replace("._modules.", ".")
        ).strip(".")
    return ""


@contextlib.contextmanager
def session(shapes: bool) -> Iterator[Callable[[], list[Op]]]:
    """PyTorch's profiler; what it yields gives the operators, once it has stopped."""
    profiler = torch.autograd.profiler.profile(use_kineto=True, record_shapes=shapes)
    profiler.__enter__()
    stopped = False
    try:
        yield lambda: _tree(profiler) if stopped else []
    finally:
        profiler.__exit__(None, None, None)
        stopped = True


def repetition() -> Any:
    """An annotation around one repetition: its window, on the profiler's own clock."""
    return _RecordFunctionFast(REPETITION)


def settle() -> None:
    """Wait for the GPU, where one is in use: its work belongs to the repetition that asked for it."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _tree(profiler: Any) -> list[Op]:
    main = None
    found: list[Op] = []
    for root in profiler.kineto_results.experimental_event_tree():
        if _is_op(root):
            main = root.start_tid if main is None else main
            if root.start_tid == main:
                found += _ops(root, "", -1)
    return sorted(found, key=lambda op: op.start)


def _is_op(event: Any) -> bool:
    return str(event.typed[0]).endswith("TorchOp")


def _ops(event: Any, module: str, run: int) -> list[Op]:
    """The operators of an event; the annotations of modules give way to what they enclose."""
    name = event.name
    if name.startswith(MODULE):
        module = name[len(MODULE) :]
    elif name.startswith(RUN):
        run = int(name[len(RUN) :])
    children = [op for c in event.children if _is_op(c) for op in _ops(c, module, run)]
    if name.startswith((MODULE, RUN)):
        return children
    fields = event.typed[1]
    start = event.start_time_ns
    backward = str(fields.scope).endswith("BACKWARD_FUNCTION") or name.startswith("autograd::engine")
    inputs = [_input(i) for i in fields.inputs]
    op = Op(name, start, start + event.duration_time_ns, children, fields.sequence_number, backward, inputs)
    op.module, op.run = module, run
    return [op]


def _input(value: Any) -> Any:
    if hasattr(value, "sizes"):
        return Spec(tuple(value.sizes), tuple(value.strides), value.dtype)
    if isinstance(value, list):
        return [_input(v) for v in value]
    return value


def watched(ops: list[Op], marks: list[Mark], origins: list[Origin] | None = None) -> list[Watched]:
    """The repetitions of a session, each with what ran ahead of it, and the calls of ours known by their marks."""
    noted = iter(marks)
    for op in _all(ops):
        if op.name.startswith(SITE):
            op.mark = next(noted, None)
            op.sequence = next((u.sequence for u in op.children if u.sequence >= 0), -1)
    if origins:
        _give(list(_outermost(ops)), origins)
    found: list[Watched] = []
    ahead: list[Op] = []
    for op in ops:
        if op.name == REPETITION:
            found.append(Watched(op.start, op.end, op.children, ahead))
            ahead = []
        else:
            ahead.append(op)
    return found


def _outermost(ops: list[Op]) -> Iterator[Op]:
    """Calls of ours that stand in no other: those that a program made."""
    for op in ops:
        if op.name.startswith((SITE, "opsmith::")):
            yield op
        else:
            yield from _outermost(op.children)


def _give(ours: list[Op], origins: list[Origin]) -> None:
    """Each call of ours its site, in order; where there are more calls than the programs', those of one operator."""
    if len(ours) == len(origins):
        places: list[int | None] = list(range(len(ours)))
    else:
        places = align([_operator(op) for op in ours], [o.step.operator if o.step else "" for o in origins])
    for op, place in zip(ours, places, strict=True):
        if place is not None:
            _place(op, origins[place])


def _operator(op: Op) -> str:
    if op.mark is not None:
        return op.mark.card.name
    card = card_of(op.name)
    return card.name if card is not None else op.name


def _place(op: Op, origin: Origin) -> None:
    step = origin.step
    card = registry().get(step.operator) if step is not None else None
    if step is None or card is None:
        return
    op.mark = Mark(card, step.implementation, called(step.signature), origin)


def called(signature: str) -> dict[str, Any]:
    """The call that a plan's signature describes, its tensors without memory.

    >>> called("linear weight=cpu:float32[3,4] x=cpu:float32[2,4] activation=gelu")["x"].shape
    torch.Size([2, 4])
    """
    call: dict[str, Any] = {}
    for part in signature.split(" ")[1:]:
        name, _, text = part.partition("=")
        tensor = re.fullmatch(r"\w+:(\w+)\[([\d,]*)\](?:@([\d,]+))?", text)
        if tensor:
            sizes = [int(n) for n in tensor[2].split(",") if n]
            dtype = getattr(torch, tensor[1])
            call[name] = torch.empty(sizes, dtype=dtype, device="meta")
            if tensor[3]:
                call[name] = torch.empty_strided(
                    sizes, list(map(int, tensor[3].split(","))), dtype=dtype, device="meta"
                )
        elif text in ("True", "False"):
            call[name] = text == "True"
        else:
            with contextlib.suppress(ValueError):
                call[name] = float(text)
                continue
            call[name] = text
    return call


def _all(ops: list[Op]) -> Iterator[Op]:
    for op in ops:
        yield op
        yield from _all(op.children)
