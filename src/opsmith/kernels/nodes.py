"""Kernels whose calls are recorded by a node of autograd in C++, not by a Function in Python.

    declare("softmax")    its backward is softmax_backward, and what that takes is found by name
    begin()               from now on `calls.new_softmax` takes calls that record gradients too

A Function in Python costs 15 to 25 µs there and back, a node in C++ 3 to 5, so that a small call is never slower than
PyTorch's own. What the node does is read from the two schemas. Of the backward's arguments, `dy` is the gradient of the
forward's result y, and `x` what the forward took or made under this name, which the node keeps; a result `dx` is the
gradient of x, made where it is wanted.

The library is for the very PyTorch and Python at hand, like the one that calls kernels directly. Where it cannot be
built, for subclasses, modes and transforms, and in compiled graphs, the Functions in `ops/` record.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from opsmith.kernels import build, calls

SOURCE = Path(__file__).parent / "binding_nodes.cpp"

# The shapes of what a forward makes for its backward alone.
EACH_ROW, PAIR_OF_ROWS, TWO_EACH_ROW = "r", "p", "e"

Source = str | bool | int | float | tuple[str, str]


@dataclass(frozen=True)
class Rule:
    """What two schemas do not say of a kernel and its backward; `declare` explains it."""

    backward: str
    names: Mapping[str, Source] = field(default_factory=dict)
    kept: Mapping[str, str] = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)
    always: Sequence[str] = ()
    only: Mapping[str, bool | int] = field(default_factory=dict)
    strided: bool = False


@dataclass
class Plan:
    """What a node does, argument by argument of the backward, as binding_nodes.cpp takes it."""

    types: str
    kept: str  # a letter for each argument of the forward
    sources: str = ""
    of: list[int] = field(default_factory=list)
    instead: list[int] = field(default_factory=list)
    constants: list[int] = field(default_factory=list)
    gradients: list[tuple[int, int]] = field(default_factory=list)
    only: list[tuple[int, int]] = field(default_factory=list)  # an argument of the forward, and its value


_waiting: dict[str, Rule] = {}
_seen = -1  # libraries of kernels when we last tried to attach those that wait
_lock = threading.Lock()


def declare(
    kernel: str,
    backward: str | None = None,
    *,
    names: Mapping[str, Source] | None = None,
    kept: Mapping[str, str] | None = None,
    shared: Mapping[str, str] | None = None,
    always: Sequence[str] = (),
    only: Mapping[str, bool | int] | None = None,
    strided: bool = False,
) -> None:
    """Say that a node may record a kernel's calls.

    Args:
        kernel: the forward.
        backward: the kernel of the gradients, by default of the forward's name with "_backward".
        names: where an argument of the backward does not say by its own name what it is: the name that would, two of
            which the second is taken where the first is not there, or a constant.
        kept: results of the forward that only the backward reads, and their shapes.
        shared: further inputs whose gradient one of the backward's results is.
        always: inputs whose gradient is made even where nobody wants it, as the kernel writes it anyway.
        only: numbers that a call must have been given to be recorded: the backward is that of no other.
        strided: the backward takes every tensor whose last dimension is contiguous; a gradient that is made lies as
            the input does.
    """
    _waiting[kernel] = Rule(
        backward or f"{kernel}_backward", names or {}, kept or {}, shared or {}, always, only or {}, strided
    )


def begin() -> None:
    """Have every kernel that is loaded with its backward recorded in C++; the library is built first if need be."""
    global _seen
    if not _waiting or _seen == len(calls.loaded):
        return
    found = library()
    if found is None:
        _waiting.clear()
        return
    with _lock:
        _seen = len(calls.loaded)
        for name in [n for n, rule in _waiting.items() if _attach(found, n, rule)]:
            del _waiting[name]


def not_built_yet() -> list[build.Library]:
    """What records calls, for whoever is about to build what it needs too; nothing where it cannot be had."""
    wanted = calls.made_for_this_python("nodes", SOURCE)
    return [wanted] if wanted and not library.cache_info().currsize else []


@functools.cache
def library() -> ctypes.PyDLL | None:
    """The nodes, built if need be; None where they cannot be built or loaded."""
    wanted = calls.made_for_this_python("nodes", SOURCE)
    if wanted is None or calls.library() is None:
        return None
    try:
        return ctypes.PyDLL(str(build.build_libraries([wanted])[0]))
    except (build.BuildError, OSError):  # an older compiler, say, or another PyTorch's headers
        return None


def _attach(found: ctypes.PyDLL, name: str, rule: Rule) -> bool:
    """Let calls of a kernel be recorded; False where it or its backward is not loaded."""
    boxed = calls.boxed(rule.backward)
    if boxed is None or calls.boxed(name) is None:
        return False
    kernel = getattr(calls, f"new_{name}")
    forward, backward = (getattr(torch.ops.opsmith, n).default for n in (name, rule.backward))
    plan = plan_of(forward, backward, rule)
    count = len(plan.of)
    pairs = [number for pair in (*plan.gradients, *plan.only) for number in pair]
    found.opsmith_nodes_attach(
        ctypes.py_object(kernel),
        ctypes.c_void_p(boxed),
        backward.name().encode(),
        plan.types.encode(),
        plan.sources.encode(),
        (ctypes.c_int * count)(*plan.of),
        (ctypes.c_int * count)(*plan.instead),
        (ctypes.c_uint64 * count)(*plan.constants),
        plan.kept.encode(),
        (ctypes.c_uint64 * len(pairs))(*pairs),
        len(plan.gradients),
        len(plan.only),
        rule.strided,
    )
    return True


def plan_of(forward: Any, backward: Any, rule: Rule) -> Plan:
    """Read from two schemas where each argument of the backward comes from.

    Raises:
        ValueError: an argument's name says nothing.
    """
    place = {a.name: i for i, a in enumerate(forward._schema.arguments)}
    made, types = calls.types_of(forward), calls.types_of(backward)
    if made is None or types is None or "g" in made + types:
        raise ValueError(f"{forward}: a node cannot hand on all of its arguments")
    plan = Plan(types, kept="".join(rule.kept.get(name, " ") for name in place))
    plan.only = [(place[name], _bits(made[place[name]], value)) for name, value in rule.only.items()]
    for i, argument in enumerate(backward._schema.arguments):
        name = rule.names.get(argument.name, argument.name)
        source, of, instead, constant = "c", -1, -1, 0
        if isinstance(name, tuple):
            source, of, instead = "s", place[name[0]], place[name[1]]
        elif not isinstance(name, str):
            constant = _bits(types[i], name)
        elif types[i] in "yp":
            of = place[name.removeprefix("d")]
            source = "a" if name.removeprefix("d") in rule.always else "m"
            plan.gradients.append((of, i))
            plan.gradients.extend((place[other], i) for other, dx in rule.shared.items() if dx == name)
        elif name in place:
            source, of = ("s" if types[i] in "To" else "n"), place[name]
        elif name.startswith("d") and made[place.get(name[1:], 0)] in "yp":
            source, of = "g", place[name[1:]]
        elif argument.has_default_value():
            constant = _bits(types[i], argument.default_value)
        else:
            raise ValueError(f"{backward}: {argument.name!r} is nothing that {forward} takes or makes")
        plan.sources += source
        plan.of.append(of)
        plan.instead.append(instead)
        plan.constants.append(constant)
    return plan


def _bits(kind: str, value: Any) -> int:
    """A number as kernels are given it."""
    form, number = ("d", float(value)) if kind == "f" else ("q", int(value))
    return int(struct.unpack("Q", struct.pack(form, number))[0])
