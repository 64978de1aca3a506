"""The text of a program: its lines, and the objects that they name; one writer for what runs and for what is timed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith.call.fast import direct
from opsmith.compiler.steps.bind import Kernels, kernel_calls
from opsmith.compiler.steps.slots import memory
from opsmith.operator import Implementation


class Writer:
    """Writes values and calls as Python text; what has no text of its own gets a name.

    Args:
        taken: names that mean something else in the program.
        stands: the expression for a value that the program keeps at a place of its own, else None.
    """

    def __init__(self, taken: Collection[str] = (), stands: Callable[[Any], str | None] = lambda value: None):
        self.names: dict[str, Any] = {}
        self._taken = {"args", "buffers", "slice", *taken}
        self._stands = stands
        self._bound: dict[int, str] = {}
        self._inputs: dict[int, str] = {}  # of the site being written: expressions for what is new every time

    def bind(self, value: Any, hint: str) -> str:
        """The name of an object, like `hint` where it gets it now."""
        if id(value) not in self._bound:
            name = "".join(c if c.isalnum() else "_" for c in hint)
            while name in self.names or name in self._taken:
                name += "_"
            # A program holds the memory of a weight, and not the parameter: that one goes with its model.
            held = value.detach() if isinstance(value, torch.nn.Parameter) else value
            self._bound[id(value)], self.names[name] = name, held
        return self._bound[id(value)]

    def text(self, value: Any) -> str:
        """An expression for a value."""
        stands = self._stands(value)
        if stands is not None:
            return stands
        if isinstance(value, Tensor):
            return self._inputs.get(id(value)) or self.bind(value, "weight")
        if isinstance(value, list | tuple):
            inner = ", ".join(self.text(v) for v in value)
            return f"[{inner}]" if isinstance(value, list) else f"({inner},)" if value else "()"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{k!r}: {self.text(v)}" for k, v in value.items()) + "}"
        if value is None or isinstance(value, bool | int | str):
            return repr(value)
        if isinstance(value, float) and value == value and abs(value) != float("inf"):
            return repr(value)
        if isinstance(value, slice):
            return f"slice({self.text(value.start)}, {self.text(value.stop)}, {self.text(value.step)})"
        return self.bind(value, str(value))

    def call(self, target: Any, args: Collection[Any], kwargs: Mapping[str, Any], label: str) -> str:
        """A call; `label` is the name of what is called."""
        parts = [self.text(a) for a in args] + [f"{k}={self.text(v)}" for k, v in kwargs.items()]
        return f"{self.bind(target, label)}({', '.join(parts)})"

    def site(
        self, name: str, fn: Any, label: str, call: Mapping[str, Any], out: Any, swapped: Mapping[str, Tensor]
    ) -> list[str]:
        """The line that calls a site's implementation; without `out` the result is new, and gets the name.

        Of the call the `swapped` weights have another form.
        """
        for key, weight in swapped.items():
            self.bind(weight, f"{name}_{key}")
        given = {**call, **swapped} | ({} if out is None else {"out": out})
        return [f"    {name + ' = ' if out is None else ''}{self.call(fn, (), given, label)}"]

    def kernels(
        self, name: str, found: Kernels, call: Mapping[str, Any], values: Mapping[str, Any]
    ) -> list[str]:
        """The lines that call a site's kernels instead; of the call, `values` are what it was rehearsed with."""
        self._inputs = {id(values[key]): self.text(call[key]) for key in found.inputs}
        for view, (func, args, kwargs) in found.views:
            self._inputs[id(view)] = self.call(direct.of(func), args, kwargs, target_name(func))
        lines = []
        for func, args, kwargs in found.calls:
            given = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | kwargs
            for key, value in given.items():
                stays = isinstance(value, Tensor) and id(value) not in self._inputs
                if stays and self._stands(value) is None:
                    self.bind(value, f"{name}_{key}")
            lines.append(f"    {self.call(direct.of(func), args, kwargs, target_name(func))}")
        self._inputs = {}
        return lines

    def compile(self, lines: Collection[str]) -> tuple[str, Callable[..., Any]]:
        """The text of a function `run(args, buffers)`, and the function."""
        source = "\n".join(("def run(args, buffers):", *lines)) + "\n"
        names = dict(self.names)
        exec(compile(source, "<opsmith plan>", "exec"), names)  # made of node names and bound objects only
        return source, names.pop("run")  # whose globals they are: a circle would outlive the program


def target_name(target: Any) -> str:
    """What a plan calls the target of a node."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return str(getattr(target, "__name__", target))


def alone(implementation: Implementation, call: Mapping[str, Any], new: bool) -> Callable[[], Any]:
    """A site as a program of its own, which calls it as one that holds it among others does.

    Args:
        implementation: what is called.
        call: its arguments, the weights as it wants them.
        new: whether the result is new at every call; where not, all stays in place, as far as that may be.
    """
    out = implementation.fn(**call) if implementation.takes_out and not new else None
    # By id, all tensors that are named, each with its number: they are held, so their ids stay their own.
    buffers: dict[int, tuple[int, Tensor]] = {}

    def stands(value: Any) -> str | None:
        if not isinstance(value, Tensor):
            return None
        return f"buffers[{buffers.setdefault(id(value), (len(buffers), value))[0]}]"

    writer = Writer({"y"}, stands)
    places = {memory(value) for value in (*call.values(), *(out if isinstance(out, tuple) else (out,)))}
    found = None
    if out is not None:
        found = kernel_calls(implementation.fn, {**call, "out": out}, lambda t: memory(t) in places)
    if found is not None:
        lines = writer.kernels("y", found, call, call)
    else:
        lines = writer.site("y", implementation.fn, implementation.name, call, out, {})
    _, run = writer.compile(lines)
    return partial(run, (), [t for _, t in buffers.values()])
