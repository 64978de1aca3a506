"""The Triton kernels of all operators, registered with PyTorch's dispatcher under the names the C++ kernels have.

An operator's Python code calls `torch.ops.opsmith.NAME` and never learns which of them ran: C++ on a CPU, these on
a GPU. With `TRITON_INTERPRET=1` in the environment they also take the CPU's place, run by Triton's interpreter,
so that the whole test suite of the operators holds them to their cards on a machine without a GPU.

A file `triton*.py` of an operator's folder, or one in its folder `triton`, may define `KERNELS`, a mapping from the
name of an operator in `opsmith::` to a function of its schema.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"  # whose tensors these kernels take

_FAMILIES = Path(__file__).resolve().parents[2] / "ops"
_LIBRARY = torch.library.Library("opsmith", "IMPL")


_F = TypeVar("_F", bound=Callable[..., Any])


def constant(fn: _F) -> _F:
    """What a function says is a constant in a compiled graph: as torch.compiler.assume_constant_result, which would
    import Dynamo, a second at every start."""
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


Look = Callable[[int], None]  # raises where a kernel reported so


class _Later(threading.local):
    asked: list[tuple[Tensor, Look]] | None = None


later = _Later()


@contextmanager
def asked_later() -> Iterator[list[tuple[Tensor, Look]]]:
    """What kernels report while a CUDA graph is recorded, and who looks at it: nobody can, before a replay."""
    before, later.asked = later.asked, []
    try:
        yield later.asked
    finally:
        later.asked = before


@functools.cache
def installed() -> bool | str:
    """True when Triton can be imported, else what to do."""
    return importlib.util.find_spec("triton") is not None or "Triton is not installed: pip install triton"


@functools.cache
def load() -> frozenset[str]:
    """Register all Triton kernels, once; returns the names of the operators they implement."""
    if installed() is not True:
        return frozenset()
    names: set[str] = set()
    for file in sorted([*_FAMILIES.glob("*/triton*.py"), *_FAMILIES.glob("*/triton/*.py")]):
        path = file.relative_to(_FAMILIES.parent).with_suffix("")
        kernels = getattr(importlib.import_module(".".join(["opsmith", *path.parts])), "KERNELS", {})
        for name, function in kernels.items():
            _LIBRARY.impl(name, function, DEVICE.upper())
        names.update(kernels)
    return frozenset(names)


@constant
def offers(name: str) -> bool | str:
    """True when a Triton kernel implements this operator here, else the reason why not."""
    found = installed()
    if found is not True:
        return found
    return name in load() or f"{name} has no Triton kernel"
