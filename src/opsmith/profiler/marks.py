"""What a program's calls belong to: the module at work, and the site of an optimized model.

Annotations are laid into the profiler's tree while it watches: around each module's call, and around each site of an
optimized model's programs.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._profiler import _RecordFunctionFast
from torch.utils import _pytree as pytree

from opsmith.compiler.meanwhile import meanwhile
from opsmith.compiler.plan import PlanStep
from opsmith.compiler.program.graph import CompiledGraph
from opsmith.compiler.program.program import Program
from opsmith.operator import Operator, registry
from opsmith.proof.replay import call_of

MODULE, RUN, SITE, COPY = "opsmith.module.", "opsmith.run.", "site::", "opsmith.copy"
LARGEST = 1 << 28  # bytes that are copied so that one call can be run again


@dataclass
class Mark:
    """A call of an operator of ours inside an optimized model; of a program's site, why it runs as it does."""

    card: Operator
    implementation: str
    call: dict[str, Any] = field(default_factory=dict)
    module: str = ""
    step: PlanStep | None = None


@dataclass
class Run:
    """One call of a module that stands in no other, or why it is not copied: what composites are recognized from."""

    module: nn.Module
    copied: tuple[nn.Module, tuple[Any, ...], dict[str, Any]] | Exception | None


def _copied(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """A call as it is before it runs, nothing of it the caller's but for the weights; or the error."""
    given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    try:
        if sum(t.nbytes for t in (*given, *module.buffers())) > LARGEST:
            raise ValueError("a call's arguments and buffers are too large to be copied for it")
        with torch.inference_mode(False), torch.no_grad():
            known = {id(t): t.detach().clone() for t in given} | {id(p): p for p in module.parameters()}
            return copy.deepcopy((module, args, kwargs), known)
    except Exception as error:  # whatever a user's object does where it is copied
        return error


class Modules:
    """Follows which module is at work, by name, while it is entered: an annotation around each call."""

    def __init__(self, root: nn.Module | None = None):
        self.runs: list[Run] = []
        self._names: dict[int, str] = {}
        self._roots: list[nn.Module] = []  # held, so that no id comes to mean another module
        self._stack: list[str] = []
        self._keep = 4 if root is None else 0
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
                    with _RecordFunctionFast(COPY):
                        self.runs.append(Run(module, _copied(module, args, kwargs)))
                    label = f"{RUN}{len(self.runs) - 1}"
                else:
                    label = f"{RUN}-1"
            self._stack.append(name)
            try:
                with _RecordFunctionFast(label):
                    return original(module, *args, **kwargs)
            finally:
                self._stack.pop()

        with meanwhile([nn.Module], "__call__", call):
            yield


class Marks:
    """Annotates every call of an operator of ours in an optimized model: its programs' sites, and public functions.

    A label ends in the number of its mark, so that one recording can be read by another's marks.
    """

    def __init__(self, model: Any):
        from opsmith.compiler import Session

        session = getattr(model, "opsmith", None)
        self.session = session if isinstance(session, Session) else None
        self.known: list[Mark] = []
        self.calls: list[dict[str, Any]] = []  # of the public functions, in order, while they are kept
        self.keep_calls = False
        # Annotated once: what is held keeps its id.
        self._programs: dict[int, tuple[Program, Callable[..., Any]]] = {}
        self._functions: dict[str, Callable[..., Any]] = {}

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, the calls are annotated."""
        cards = {id(card.function): card for card in registry().values()}
        with contextlib.ExitStack() as stack:
            for graph in self.session.graphs if self.session is not None else ():
                for key, program in graph.programs.by_key.items():
                    if program is not None:
                        if id(program) not in self._programs:
                            labels = self._labels(graph, graph.plans[key].steps)
                            self._programs[id(program)] = program, _annotated(program, labels)
                        stack.callback(setattr, program, "_run", program._run)
                        program._run = self._programs[id(program)][1]
                names = type(graph.rewritten).forward.__globals__ if graph.rewritten is not None else {}
                for name, value in list(names.items()):
                    if (card := cards.get(id(value))) is not None:
                        stack.callback(names.__setitem__, name, value)
                        if card.name not in self._functions:
                            self._functions[card.name] = self._noting(value, card)
                        names[name] = self._functions[card.name]
            yield

    def _labels(self, graph: CompiledGraph, steps: Sequence[PlanStep]) -> dict[str, str]:
        labels = {}
        for step in steps:
            known = graph.sites.get(step.site)
            call = call_of(step.signature.partition(" ")[2])
            module = _module_of(known.site.root) if known is not None else ""
            mark = Mark(registry()[step.operator], step.implementation, call, module, step)
            labels[step.site] = self._label(mark)
        return labels

    def _label(self, mark: Mark) -> str:
        self.known.append(mark)
        return f"{SITE}{len(self.known) - 1}"

    def _noting(self, fn: Callable[..., Any], card: Operator) -> Callable[..., Any]:
        label, names = self._label(Mark(card, "opsmith")), inspect.signature(card.function).parameters

        def noted(*args: Any, **kwargs: Any) -> Any:
            with _RecordFunctionFast(label):
                result = fn(*args, **kwargs)
            if self.keep_calls:
                call = {k: v for k, v in kwargs.items() if k != "out"}
                self.calls.append(call or dict(zip(names, args, strict=False)))
            return result

        return noted


def _annotated(program: Program, labels: Mapping[str, str]) -> Callable[..., Any]:
    """The function of a program with an annotation around the lines of each site."""
    lines = program.source.splitlines()
    for site, place in program.lines.items():
        for i in place:
            head = f"    with opsmith_site({labels[site]!r}):\n" if i == place.start else ""
            lines[i] = f"{head}    {lines[i]}"
    names = {**program._run.__globals__, "opsmith_site": _RecordFunctionFast}
    exec(compile("\n".join(lines), "<opsmith plan, annotated>", "exec"), names)
    run: Callable[..., Any] = names["run"]
    return run


def _module_of(node: Any) -> str:
    """The module that a captured node came from, by name; empty where nobody knows."""
    stack = node.meta.get("nn_module_stack") or {}
    path = str(next(reversed(stack.values()))[0]) if stack else ""
    text = re.sub(r"\[\'?([\w.]+)\'?\]", r".\1", path).replace("._modules.", ".")
    return re.sub(r"^L?\.?(self|model|fn|mod)?\.?(_modules\.)?", "", text).strip(".")
