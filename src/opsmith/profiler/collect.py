"""Run a program under a profiler, and keep what it saw: the tree of operators, on the program's own clock.

Two kinds of session. Timed ones ask for names and times only, take turns with repetitions that nobody watches, and the
difference is the overhead: a recorder of our own asks for a tenth of a microsecond an operator, PyTorch's profiler for
half a one. One further session, not timed, is PyTorch's, asks for shapes and follows the modules; an operator's place
in the order tells which is which.

On a GPU an operator's time is that of the kernels that it launched, and what is left of the wall time is when the GPU
had nothing to do.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch._C._profiler import _ExperimentalConfig, _RecordFunctionFast

from opsmith.profiler.costs import Inputs
from opsmith.profiler.marks import COPY, MODULE, RUN, SITE, Mark
from opsmith.profiler.recorder import Recorded, library, recording

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # its own log says on stderr that it starts and stops

REPETITION = "opsmith.repetition"  # our annotation in the profiler's tree around each of them

_ALONE = threading.Lock()  # held while a session records: PyTorch has one profiler, and another would end it
Kernel = tuple[int, int]  # of a GPU: when it began and ended, in nanoseconds


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
    kernels: list[Kernel] | None = None  # launched by it and all that it called, where a GPU was at work

    @property
    def nanoseconds(self) -> int:
        """What it took: on a GPU its kernels' time."""
        if self.kernels is None:
            return self.end - self.start
        return sum(end - start for start, end in self.kernels)

    @property
    def began(self) -> int:
        """When its work began."""
        return min((start for start, _ in self.kernels or ()), default=self.start)


@dataclass
class Watched:
    """What one repetition left: its window and its operators."""

    start: int
    end: int
    ops: list[Op]
    before: list[Op] = field(default_factory=list)  # ran ahead of it: the forward pass of a backward

    @property
    def seconds(self) -> float:
        return (self.end - self.start) * 1e-9


@contextlib.contextmanager
def session(shapes: bool) -> Iterator[Callable[[], list[Op]]]:
    """A profiler, with or without shapes; what it yields gives the operators, once it has stopped."""
    if _ALONE.locked():
        raise RuntimeError("profile: another profile is being recorded; end that before this one begins")
    gpu = _gpu()
    with _ALONE:
        if not shapes and not gpu:
            with recording() as found:
                if found is not None:
                    yield lambda: in_order(found)
                    return
        with torch.autograd.profiler.profile(
            use_kineto=True,
            record_shapes=shapes,
            use_device="cuda" if gpu else None,
            # Which kernel belongs to which operator is asked on a GPU only; without, an operator costs a fifth less.
            experimental_config=_ExperimentalConfig(disable_external_correlation=not gpu),
        ) as profiler:
            yield lambda: tree(profiler.kineto_results, gpu)


def preorder(ops: Iterable[Op]) -> Iterator[Op]:
    """Every call, parents before their children."""
    for op in ops:
        yield op
        yield from preorder(op.children)


def names_of(run: Watched) -> tuple[str, ...]:
    """All calls of a repetition by name, in order."""
    return tuple(op.name for op in preorder(run.ops))


def light() -> bool:
    """Whether a session without shapes is our recorder: one costs less to begin and to read than a repetition."""
    return not _gpu() and library() is not None


def _gpu() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def repetition() -> Any:
    """An annotation around one repetition: its window, on the profiler's own clock."""
    return _RecordFunctionFast(REPETITION)


def settle() -> None:
    """Wait for the GPU, where one is in use: its work belongs to the repetition that asked for it."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def in_order(found: Recorded) -> list[Op]:
    """The operators of a recording, each right behind what it began in, as a walk through the tree meets them."""
    ops: list[Op] = []
    for name, start, end in found:
        inside = ops and ops[-1].name == REPETITION and start < ops[-1].end
        (ops[-1].children if inside else ops).append(Op(name, start, end))
    return ops


def tree(results: Any, gpu: bool = False) -> list[Op]:
    """The operators of a session, in order: those of the thread that began first."""
    kernels = _kernels(results.events()) if gpu else None
    main = None
    found: list[Op] = []
    for root in results.experimental_event_tree():
        if _is_op(root):
            main = root.start_tid if main is None else main
            if root.start_tid == main:
                found += _ops(root, "", -1, kernels)
    copies = [e for e in results.events() if e.name() == COPY and e.device_type() == DeviceType.CPU]
    for op in (op for op in found if op.name == REPETITION):
        op.end -= sum(e.duration_ns() for e in copies)  # the profiler's own work is none of the program's
    return sorted(found, key=lambda op: op.start)


def _kernels(events: Any) -> dict[int, list[Kernel]] | None:
    """What ran on a GPU (kernels, copies, fills) by the operator that launched it; None where nothing did."""
    found: dict[int, list[Kernel]] = {}
    for event in events:
        if event.device_type() == DeviceType.CUDA and not event.is_user_annotation():
            kernel = (event.start_ns(), event.end_ns())
            found.setdefault(event.linked_correlation_id(), []).append(kernel)
    return found or None


def _is_op(event: Any) -> bool:
    return str(event.typed[0]).endswith("TorchOp")


def _ops(event: Any, module: str, run: int, kernels: dict[int, list[Kernel]] | None) -> list[Op]:
    """The operators of an event; the annotations of modules give way to what they enclose."""
    name = event.name
    if name.startswith(MODULE):
        module = name[len(MODULE) :]
    elif name.startswith(RUN):
        run = int(name[len(RUN) :])
    children = [
        op for c in event.children if _is_op(c) and c.name != COPY for op in _ops(c, module, run, kernels)
    ]
    if name.startswith((MODULE, RUN)):
        return children
    fields = event.typed[1]
    start = event.start_time_ns
    backward = str(fields.scope).endswith("BACKWARD_FUNCTION") or name.startswith("autograd::engine")
    inputs = [_input(i) for i in fields.inputs]
    op = Op(name, start, start + event.duration_time_ns, children, fields.sequence_number, backward, inputs)
    op.module, op.run = module, run
    if kernels is not None:
        op.kernels = [*kernels.get(event.correlation_id, ()), *(k for c in children for k in c.kernels or ())]
    return [op]


def _input(value: Any) -> Any:
    if hasattr(value, "sizes"):
        if len(value.strides) != len(value.sizes):  # packed by oneDNN, in an order of its own
            return torch.empty(value.sizes, dtype=value.dtype, device="meta")
        return torch.empty_strided(value.sizes, value.strides, dtype=value.dtype, device="meta")
    if isinstance(value, list):
        return [_input(v) for v in value]
    return value


def watched(ops: list[Op], known: Sequence[Mark] = (), calls: Iterable[dict[str, Any]] = ()) -> list[Watched]:
    """The repetitions of a session, each with what ran ahead of it, and the calls of ours with their marks.

    Args:
        known: the marks by their numbers, where the calls are to have them.
        calls: of public functions, in order.
    """
    noted = iter(calls)
    for op in preorder(ops):
        if op.name.startswith(SITE):
            op.sequence = next((u.sequence for u in op.children if u.sequence >= 0), -1)
            mark = known[int(op.name.removeprefix(SITE))] if known else None
            op.mark = replace(mark, call=next(noted, {})) if mark and mark.step is None else mark
    found: list[Watched] = []
    ahead: list[Op] = []
    for op in ops:
        if op.name == REPETITION:
            found.append(Watched(op.start, op.end, op.children, ahead))
            ahead = []
        else:
            ahead.append(op)
    return found


def align(events: Sequence[str], calls: Sequence[str]) -> list[int | None]:
    """For each event the place of its call in a sequence; None for one that the sequence does not have.

    >>> align(["aten::mm", "aten::empty", "aten::add"], ["aten::mm", "aten::add"])
    [0, None, 1]
    """
    found: list[int | None] = [None] * len(events)
    head = 0
    while head < min(len(events), len(calls)) and events[head] == calls[head]:
        found[head] = head
        head += 1
    tail = 0
    while tail < min(len(events), len(calls)) - head and events[-1 - tail] == calls[-1 - tail]:
        found[len(events) - 1 - tail] = len(calls) - 1 - tail
        tail += 1
    middle = events[head : len(events) - tail], calls[head : len(calls) - tail]
    if all(middle):
        for block in difflib.SequenceMatcher(None, *middle, autojunk=False).get_matching_blocks():
            for k in range(block.size):
                found[head + block.a + k] = head + block.b + k
    return found
