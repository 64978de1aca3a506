"""A call's way around Dynamo, from one token of a `generate` to the next.

Dynamo asks thousands of questions before a call: has an attribute changed, the configuration, a global? Of a small
decoder's token that is a tenth of the time, and more than it seems: the answers lie all over memory, and what the token
before read of weights has driven them out of the caches. Within one loop of `generate` its first token is asked about;
those behind it, of the same sizes, go to the same graph with the weights that the model has by then.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch import Tensor, nn

Run = Callable[..., Any]


@dataclass(frozen=True)
class Way:
    """How a graph's inputs follow from a call and its model, and the call's result from the graph's results."""

    run: Run
    size: int  # how many inputs
    # A module's parameters or buffers for each input, and for each other name that one of these has in the model.
    holders: Sequence[Mapping[str, Any]] = field(compare=False)
    names: Sequence[Any]
    found: Sequence[int] = field(compare=False)  # which objects these are
    given: Mapping[int, tuple[int, tuple[int, ...]]]  # by input: which argument it is, and its strides
    kind: type  # of the result
    # Of the result, whether the graph made it or the call gave it, and which of theirs it is.
    parts: Mapping[str, tuple[bool, int]]

    def call(self, values: Sequence[Any]) -> Any:
        """The call's result; None where something is not as it was."""
        inputs = list(map(getitem, self.holders, self.names))
        if tuple(map(id, inputs)) != self.found:
            return None
        for at, (argument, strides) in self.given.items():
            if values[argument].stride() != strides:
                return None
            inputs[at] = values[argument]
        made = self.run(*inputs[: self.size])
        return self.kind(**{name: (made if own else values)[i] for name, (own, i) in self.parts.items()})


def _way(
    model: nn.Module, run: Run, inputs: Sequence[Any], made: Sequence[Any], values: Sequence[Any], result: Any
) -> Way | None:
    """The way of a call through one graph, if it is known where all of its inputs and of the result come from."""
    held = defaultdict(list)
    for module in _modules(model):
        for holder in (module._parameters, module._buffers):
            for name, t in holder.items():
                held[id(t)].append((holder, name))
    arguments = {id(v): i for i, v in enumerate(values)}
    parts = {i: (False, at) for i, at in arguments.items()} | {id(t): (True, i) for i, t in enumerate(made)}
    given, places, others = {}, [], []
    for at, value in enumerate(inputs):
        if not isinstance(value, Tensor):  # a size
            places.append(({value: value}, value))
        elif id(value) in held:
            places.append(held[id(value)][0])
            others += held[id(value)][1:]
        elif id(value) in arguments:
            given[at] = arguments[id(value)], value.stride()
            places.append(({at: None}, at))
        else:
            return None
    counts = any(type(v) in (int, float) for v in values)  # which may be other ones in the next call
    if counts or not isinstance(result, dict) or not all(id(part) in parts for part in result.values()):
        return None
    holders, names = zip(*places, *others, strict=True)
    found = tuple(id(holder[name]) for holder, name in zip(holders, names, strict=True))
    pieces = {name: parts[id(part)] for name, part in result.items()}
    return Way(run, len(inputs), holders, names, found, given, type(result), pieces)


def _modules(model: nn.Module) -> Iterator[nn.Module]:
    """A model's modules, and those that stand in for one."""
    for module in model.modules():
        yield module
        stand_in = getattr(vars(module).get("forward"), "__self__", None)
        if isinstance(stand_in, nn.Module):
            yield from stand_in.modules()


def _attributes(model: nn.Module) -> list[tuple[str, int, int]]:
    """All that modules hold, and how much that holds: what a call exchanges or adds to is seen."""
    return [
        (name, id(value), len(value) if isinstance(value, Sized) and not isinstance(value, Tensor) else 0)
        for module in _modules(model)
        for name, value in vars(module).items()
    ]


class Bypass(threading.local):
    """What a thread has learned of the ways around Dynamo of one model's calls."""

    def __init__(self) -> None:
        self._loop: int | None = None
        # By all that Dynamo captures anew for, and by sizes; None where there is no way.
        self._ways: dict[Any, Way | None] = {}
        self._last: tuple[Any, Way] | None = None  # the loop's last call, where another one may go that way
        self._calls: list[tuple[Run, Sequence[Any], Any]] | None = None  # of graphs, in a call to learn from

    def enter(self, loop: int | None) -> bool:
        """Begin a call of one of generate's loops, or of none; whether its last call was asked about, and is a way."""
        if loop != self._loop:
            self._loop, self._last = loop, None
        return self._last is not None

    def call(self, key: Any, values: Sequence[Any]) -> Any:
        """The result of a call like the loop's last one; None where Dynamo is to be asked."""
        last, self._last = self._last, None
        result = last[1].call(values) if last is not None and last[0] == key else None
        if result is not None:
            self._last = last
        return result

    def saw(self, run: Run, inputs: Sequence[Any], made: Any) -> None:
        """Note what a graph was given and made, where a call is learned from."""
        if self._calls is not None:
            self._calls.append((run, inputs, made))

    def learn(self, model: nn.Module, key: Any, values: Sequence[Any], run: Callable[[], Any]) -> Any:
        """A call through Dynamo. What two of them agree in is a way for those that follow in the same loop."""
        known = self._ways.get(key, ...)
        if self._loop is None or known is None or torch.is_grad_enabled():
            return run()
        before, self._calls = _attributes(model), []
        try:
            result = run()
            alone = len(self._calls) == 1 and _attributes(model) == before
            self._ways[key] = way = _way(model, *self._calls[0], values, result) if alone else None
            self._last = (key, way) if way is not None and way == known else None
            return result
        finally:
            self._calls = None
