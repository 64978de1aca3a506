"""Contestants that are more than one call: what needs preparing off the clock, and what repeats itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Prepared:
    """A contestant of which only the second half is timed: a backward, whose forward has to run first.

    `prepare(*inputs)` runs off the clock and returns the call that is timed, each time anew.

    >>> Prepared(lambda x: x.exp().sum)(torch.zeros(3))
    tensor(3.)
    """

    prepare: Callable[..., Callable[[], object]]

    def __call__(self, *inputs: Any) -> object:
        return self.prepare(*inputs)()


@dataclass(frozen=True)
class Repeated:
    """A contestant that does the work `times` times in one call; its inputs are its own."""

    run: Callable[[], object]
    times: int

    def __call__(self, *_: Any) -> object:
        return self.run()


def captured(
    call: Callable[..., object], sets: Sequence[tuple[Any, ...]], *, cuda: Any = torch.cuda, warmup: int = 3
) -> Repeated:
    """A CUDA graph of the call on each of these sets of inputs in turn: no launch is paid for, no set is warm.

    Args:
        call: what takes the inputs; it must not wait for the device.
        sets: inputs; together above five times the L2 cache, or the graph's next replay finds them there.
        cuda: torch.cuda, or what stands in for it in a test.
        warmup: calls before the capture, on a stream of their own, as PyTorch asks for.

    Raises:
        RuntimeError: the call does something that cannot be captured.
    """
    here, aside = cuda.current_stream(), cuda.Stream()
    aside.wait_stream(here)
    with cuda.stream(aside):
        for _ in range(warmup):
            call(*sets[0])
    here.wait_stream(aside)
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        for inputs in sets:
            call(*inputs)  # the result is dropped, so that the graph's next call may use its memory

    def replay(read: object = (call, sets)) -> object:  # held for as long as the graph reads from it
        return graph.replay()

    return Repeated(replay, len(sets))


def as_replayed(call: Callable[[], object], device: torch.device, times: int = 1) -> Callable[..., object]:
    """A call as a recording replays it, on a GPU; as it is elsewhere, and where it cannot be recorded.

    Of a short one several in a row, or its launch would be what is timed.
    """
    if device.type != "cuda":
        return call
    try:
        return captured(call, [()] * times)
    except Exception:  # it waits for the device, say; what it raises by itself it raises again
        torch.cuda.synchronize(device)
        return call
