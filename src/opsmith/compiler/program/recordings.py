"""Calls on a GPU as one launch: the kernels of a call, recorded as a CUDA graph, are replayed for calls like it.

A decoder's step is some hundred kernels of a few microseconds, and each launch from Python takes tens. A replay reads
what it reads at the addresses of the recording: weights where they lie, and what differs from call to call, ids and
the slots of a cache, from copies that are filled before.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from opsmith import decoding
from opsmith.compiler.reasons import raised
from opsmith.compiler.steps.slots import memory
from opsmith.kernels import triton

MAX_RECORDINGS = 32  # of a graph
MAX_BYTES = 1 << 30  # of their results; the memory that works them out is shared
Run = Callable[[Sequence[Any]], Any]


def gpu_of(examples: Sequence[Any]) -> torch.device | None:
    """The GPU on which all inputs lie; None where some lie elsewhere."""
    devices = {e.device for e in examples if isinstance(e, Tensor)}
    (device,) = devices if len(devices) == 1 else (None,)
    return device if device is not None and device.type == "cuda" else None


def current(gpu: torch.device | None) -> AbstractContextManager[Any]:
    """This GPU as the current one, whose streams and events are asked for; none is no matter."""
    return torch.cuda.device(-1 if gpu is None else gpu)


class Gpu:
    """What recording asks of the current device."""

    def __init__(self) -> None:
        self._pool: Any = None  # memory that all recordings use in turn
        self._done: Any = None  # when the results of the last replay have been read

    def capturing(self) -> bool:
        """Whether somebody else records."""
        return torch.cuda.is_current_stream_capturing()

    def record(self, body: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """What replays the kernels of `body`, and what this returned."""
        if self._pool is None:
            self._pool, self._done = torch.cuda.graph_pool_handle(), torch.cuda.Event()
        graph, here, aside = torch.cuda.CUDAGraph(), torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                found = body()
            finally:
                graph.capture_end()
        here.wait_stream(aside)
        return graph.replay, found

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Behind the replay before, of another stream perhaps."""
        stream = torch.cuda.current_stream()
        stream.wait_event(self._done)
        try:
            yield
        finally:
            self._done.record(stream)


class Recording:
    """One recorded call.

    Args:
        run: what is recorded.
        args: the inputs of the call.
        looked: which of them are tensors that may differ the next time.
        moving: those of which that lie elsewhere at each call.
        gpu: who records.
    """

    def __init__(
        self, run: Run, args: Sequence[Any], looked: Sequence[int], moving: Collection[int], gpu: Gpu
    ) -> None:
        self._run = run  # whose constants the recording reads
        self._found = {i: args[i] for i in looked if i not in moving}
        laid, given = decoding.call.laid, list(args)
        with torch.inference_mode(False):  # what was made in it could not be written out of it
            self._own = {i: _once(args[i]).clone() for i in moving}
            self._laid = [] if laid is None else [t.clone() for t in laid.tensors()]
        self._layouts = {i: (args[i].shape, args[i].stride()) for i in moving}
        for i, own in self._own.items():
            given[i] = own.expand(args[i].shape)
            if given[i].stride() != args[i].stride():
                raise RuntimeError("an input has gaps between its numbers")

        def body() -> tuple[Any, Any]:
            with nullcontext() if laid is None else laid.of(self._laid):
                results = run(given)
            # One look at what all kernels report.
            return results, torch.cat([bad for bad, _ in asked]) if (asked := triton.later.asked) else None

        with triton.asked_later() as self._asked:
            self._replay, (self._results, self._reports) = gpu.record(body)
        if not isinstance(self._results, tuple | list):
            raise RuntimeError("its result is no tuple")
        places = [memory(t) for t in self._results if isinstance(t, Tensor) and t.numel()]
        self.bytes = sum(t.nbytes for t in self._results if isinstance(t, Tensor))
        others = {memory(t) for t in given if isinstance(t, Tensor)}
        if len(places) != len(set(places)) or others & set(places):
            raise RuntimeError("its results share memory with each other or with what it is given")

    def moved(self, args: Sequence[Any]) -> list[int]:
        """The inputs that the recording would not read."""
        found = [i for i, own in self._found.items() if args[i] is not own and not _same(args[i], own)]
        return found + [i for i, own in self._layouts.items() if (args[i].shape, args[i].stride()) != own]

    def replay(self, args: Sequence[Any]) -> Any:
        """The results of the recorded kernels on these inputs."""
        laid = decoding.call.laid
        for i, own in self._own.items():
            own.copy_(_once(args[i]))
        for own, t in zip(self._laid, [] if laid is None else laid.tensors(), strict=True):
            own.copy_(t)
        self._replay()
        results = [r.clone() if isinstance(r, Tensor) else r for r in self._results]
        if self._reports is not None:
            for found, (_, look) in zip(self._reports.tolist(), self._asked, strict=True):
                look(found)
        return type(self._results)(results)


def _once(t: Tensor) -> Tensor:
    """A tensor without the copies that `expand` shows of it."""
    for dim, step in enumerate(t.stride()):
        if not step and t.shape[dim] > 1:
            t = t.narrow(dim, 0, 1)
    return t


def _same(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


class Recordings:
    """What was recorded of the calls of one captured graph, for one call at a time.

    Args:
        looked: the inputs that are tensors and no weights, whose places are known otherwise.
        gpu: who records.
    """

    def __init__(self, looked: Sequence[int], gpu: Gpu | None = None) -> None:
        self.why = ""  # nothing is recorded
        self._looked, self._gpu, self._lock = looked, gpu or Gpu(), threading.Lock()
        self._known: OrderedDict[Hashable, Recording | dict[int, Any]] = OrderedDict()  # or inputs seen once
        self._moving: set[int] = set()  # inputs that were seen at two places

    def clear(self) -> None:
        with self._lock:
            self._known.clear()

    def __call__(self, key: Hashable, run: Run, args: Sequence[Any]) -> Any:
        """The result of `run(args)`: recorded when the like comes for the second time, and replayed from then on.

        Args:
            key: the numbers among the inputs.
            run: the same for a key until `clear`.
            args: the inputs.
        """
        laid = decoding.call.laid
        fixed = () if laid is None else laid.fixed()
        if self.why or fixed is None or self._gpu.capturing():
            return run(args)
        with self._lock:
            known = self._of((key, fixed), run, args)
            if known is not None:
                with self._gpu.turn():
                    return known.replay(args)
        return run(args)

    def _of(self, key: Hashable, run: Run, args: Sequence[Any]) -> Recording | None:
        known = self._known.get(key)
        if known is None:
            # Its kernels are compiled by running them.
            self._keep(key, {i: args[i] for i in self._looked})
            return None
        self._known.move_to_end(key)
        if isinstance(known, Recording):
            moved = known.moved(args)
            if not moved:
                return known
        else:
            moved = [i for i, t in known.items() if not _same(args[i], t)]
        self._moving.update(moved)
        try:
            found = Recording(run, args, self._looked, frozenset(self._moving), self._gpu)
        except Exception as error:  # the call itself says it again where it is the model's own
            self.why = raised(error)
            self._known.clear()
            return None
        self._keep(key, found)
        return found

    def _keep(self, key: Hashable, call: Recording | dict[int, Any]) -> None:
        """Enter a call, and let go of the oldest."""
        self._known[key] = call
        while len(self._known) > 1 and (
            len(self._known) > MAX_RECORDINGS
            or sum(known.bytes for known in self._known.values() if isinstance(known, Recording)) > MAX_BYTES
        ):
            self._known.popitem(last=False)
