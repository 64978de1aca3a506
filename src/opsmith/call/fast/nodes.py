"""Kernels whose calls are recorded by a node of autograd in C++, not by a Function in Python.

    declare(signature)    its gradient says what the backward takes
    begin()               from now on `direct.new_softmax` takes calls that record gradients too

A Function in Python costs 15 to 25 µs there and back, a node in C++ 3 to 5, so that a small call is never slower than
PyTorch's own. What the node does is read from the signature, which says of each of the backward's arguments what it is.

The library is for the very PyTorch and Python at hand, like the one that calls kernels directly. Where it cannot be
built, for subclasses, modes and transforms, and in compiled graphs, Functions in Python record.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from pathlib import Path

import torch
from torch import Tensor

from opsmith.call.fast import direct
from opsmith.call.signature import Constant, Made, Signature, Slope
from opsmith.kernels import build, libraries

SOURCE = Path(__file__).parent / "binding_nodes.cpp"


# What a node does. Of each argument of the backward: a letter for its source and one for its type, which argument of
# the forward it is of, what stands for that one, and the bits of a constant. Which inputs have which of them as
# gradients. What is kept, with a letter for its shape. What numbers of the forward must be.
Plan = tuple[
    list[tuple[str, str, int, int, int]], list[tuple[int, int]], list[tuple[int, str]], list[tuple[int, int]]
]

_waiting: dict[str, Signature] = {}
_seen = -1  # libraries of kernels when we last tried to attach those that wait
_lock = threading.Lock()


def declare(signature: Signature) -> None:
    """Say that a node may record a kernel's calls, whose signature has a gradient."""
    _waiting[signature.name] = signature


def begin() -> None:
    """Have every kernel that is loaded with its backward recorded in C++; the library is built first if need be."""
    global _seen
    if not _waiting or _seen == len(direct.loaded):
        return
    found = library()
    if found is None:
        _waiting.clear()
        return
    with _lock:
        _seen = len(direct.loaded)
        for name in [n for n, signature in _waiting.items() if _attach(found, signature)]:
            del _waiting[name]


def not_built_yet() -> list[build.Library]:
    """What records calls, for whoever is about to build what it needs too; nothing where it cannot be had."""
    wanted = direct.made_for_this_python("nodes", SOURCE)
    return [wanted] if wanted and not library.cache_info().currsize else []


@functools.cache
def library() -> ctypes.PyDLL | None:
    """The nodes, built if need be; None where they cannot be built or loaded."""
    wanted = direct.made_for_this_python("nodes", SOURCE)
    return None if direct.library() is None else direct.opened(wanted)


def _attach(found: ctypes.PyDLL, signature: Signature) -> bool:
    """Let calls of a kernel be recorded; False where it or its backward is not loaded."""
    assert signature.gradient is not None
    backward = signature.gradient.kernel
    boxed = direct.boxed(backward)
    if boxed is None or direct.boxed(signature.name) is None:
        return False
    plan = [ctypes.py_object(part) for part in plan_of(signature)]
    name = f"opsmith::{backward}".encode()
    getattr(direct, f"new_{signature.name}")
    for kernel in direct.making[signature.name]:
        found.opsmith_nodes_attach(
            ctypes.py_object(kernel), ctypes.c_void_p(boxed), name, *plan, signature.strided
        )
    return True


def plan_of(signature: Signature) -> Plan:
    """What the node of a kernel does, as its signature says."""
    assert signature.gradient is not None
    types = direct.types_of(getattr(torch.ops.opsmith, signature.gradient.kernel).default)
    assert types is not None
    place = {p.name: i for i, p in enumerate(signature.forward)}
    arguments, gradients = [], []
    for i, (p, type_) in enumerate(zip(signature.backward, types, strict=True)):
        source, of, instead, constant = p.source, -1, -1, 0
        if isinstance(source, Constant):
            letter, constant = "c", _bits(p.type, source.value)
        elif isinstance(source, Made):
            letter, of = "a" if source.always else "m", place[source.of]
            gradients += [(place[name], i) for name in (source.of, *source.shared)]
        elif isinstance(source, Slope):
            letter, of = "g", place[source.of]
        else:
            assert source is not None
            letter, of = "s" if p.type is Tensor else "n", place[source.of]
            instead = place[source.instead] if source.instead else -1
        arguments.append((letter, type_, of, instead, constant))
    kept = [(place[one.name], one.rows.value) for one in signature.kept]
    only = [(place[name], _bits(int, value)) for name, value in signature.gradient.only.items()]
    return arguments, gradients, kept, only


def _bits(kind: type, value: bool | int | float) -> int:
    """A number as kernels are given it."""
    form, number = ("d", float(value)) if kind is float else ("q", int(value))
    return int(struct.unpack("Q", struct.pack(form, number))[0])


libraries.follow(wanted=lambda gradients: not_built_yet() if gradients else [])
