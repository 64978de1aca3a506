"""What a program's calls belong to: the module at work, and the site of an optimized model.

Annotations are laid into the profiler's tree while it watches: around each module's call, and around each function of
ours that an optimized model's program calls.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._C._profiler import _RecordFunctionFast

from opsmith.compiler.plan import PlanStep
from opsmith.compiler.program.program import Open, Program
from opsmith.operator import Operator, registry
from opsmith.proof.replay import call_of

MODULE, RUN, SITE = "opsmith.module.", "opsmith.run.", "site::"


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
            compiled = self.session.selector.inductor.compiled(card)
            if compiled is not None:
                known[id(compiled.fn)] = (card, compiled.name)
        changed: list[tuple[dict[str, Any], str, Any]] = []
        runs: list[tuple[Program, Callable[..., Any]]] = []
        for names, program, origins in self._programs():
            if program is not None:
                runs.append((program, program._run))
                program._run = self._starting(program._run, origins)
            for name, value in list(names.items()):
                if isinstance(value, Open):
                    who: tuple[Operator, str] | None = (value.card, value.implementation.name)
                else:
                    who = known.get(id(value)) if callable(value) else None
                if who is not None:
                    changed.append((names, name, value))
                    names[name] = self._noting(value, *who)
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
            for key, program in graph.programs.by_key.items():
                if program is None:
                    continue
                plan = {step.site: step for step in graph.plans[key].steps}
                origins: list[Origin] = []
                for site in program.called:
                    part = origins[-1].part + 1 if origins and origins[-1].site == site else 0
                    module = _module_of(graph.sites[site].root) if site in graph.sites else ""
                    origins.append(Origin(site, part, module, plan.get(site)))
                yield program._run.__globals__, program, origins
            if graph.rewritten is not None:
                yield type(graph.rewritten).forward.__globals__, None, []

    def _starting(self, run: Callable[..., Any], origins: list[Origin]) -> Callable[..., Any]:
        def started(args: Any, buffers: Any) -> Any:
            self.origins += origins
            return run(args, buffers)

        return started

    def _noting(self, fn: Callable[..., Any], card: Operator, implementation: str) -> Callable[..., Any]:
        label = f"{SITE}{card.name}::{implementation}"
        if not self.keep_calls:  # timed: what belongs to which is known by then, and every microsecond counts

            def timed(*args: Any, **kwargs: Any) -> Any:
                with _RecordFunctionFast(label):
                    return fn(*args, **kwargs)

            return timed

        def noted(*args: Any, **kwargs: Any) -> Any:
            with _RecordFunctionFast(label):
                result = fn(*args, **kwargs)
            call = {k: v for k, v in kwargs.items() if k != "out"}
            if not kwargs:
                call = dict(zip(_parameters(card), args, strict=False))
            self.noted.append(Mark(card, implementation, call))
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


def called(signature: str) -> dict[str, Any]:
    """The call that a plan's signature describes, its tensors without memory.

    >>> called("linear weight=cpu:float32[3,4] x=cpu:float32[2,4] activation=gelu")["x"].shape
    torch.Size([2, 4])
    """
    return call_of(signature.partition(" ")[2])
