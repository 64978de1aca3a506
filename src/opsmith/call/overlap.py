"""Where an output may lie: kernels read their inputs while they write, so it shares memory with none of them.

The exception is an input with an element for each of the result's, which is read before its place is written: an
operator names these, and the output may be one of them, element for element. PyTorch's own operators keep this rule.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

_PLAIN = (Tensor, torch.nn.Parameter)  # others may have no memory, or not here
_MOST_WORK = 100_000  # steps of numpy's search, microseconds for strides that occur


def refuse_overlap(op: str, out: Tensor, onto: Collection[str], read: Mapping[str, Any]) -> None:
    """Refuse an output that shares memory with what is read, or that has several elements in one place."""
    # While a graph is captured, and inside torch.func's transforms, memory has no address.
    if torch.compiler.is_dynamo_compiling() or torch._C._are_functorch_transforms_active():
        return
    first = out.data_ptr() if type(out) in _PLAIN else 0
    if not first:  # empty, or without memory: on the meta device, say
        return
    end = _end(out, first)
    if not out.is_contiguous() and _folded(out):
        raise ValueError(
            f"{op}: several elements of out are in one place, strides {out.stride()} for shape {tuple(out.shape)}; "
            "pass a tensor of its own"
        )
    for name, t in read.items():
        if type(t) not in _PLAIN or (t is out and name in onto):
            continue
        start = t.data_ptr()
        if start >= end or _end(t, start) <= first or (name in onto and _same_place(out, t)):
            continue
        if not share(out, t):
            continue
        itself = f", or {name} itself" if name in onto else ""
        raise ValueError(
            f"{op}: out {tuple(out.shape)} shares memory with {name} {tuple(t.shape)}, which is read while out is "
            f"written; pass a tensor of its own{itself}"
        )


def _end(t: Tensor, start: int) -> int:
    """The address behind its last byte."""
    if t.is_contiguous():
        return start + t.nbytes
    last = sum((size - 1) * step for size, step in zip(t.shape, t.stride(), strict=True))
    return start + (last + 1) * t.element_size()


def _folded(t: Tensor) -> bool:
    """Whether two elements may be one; strides that interleave, which nobody writes to, count as such."""
    reach = 0
    for step, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size > 1:
            if step <= reach:
                return True
            reach += step * (size - 1)
    return False


def _same_place(out: Tensor, t: Tensor) -> bool:
    return (
        out.data_ptr() == t.data_ptr()
        and out.shape == t.shape
        and out.dtype == t.dtype
        and all(a == b or size == 1 for a, b, size in zip(out.stride(), t.stride(), out.shape, strict=True))
    )


def share(out: Tensor, t: Tensor) -> bool:
    """Whether they have a byte in common: columns of one matrix reach into each other's span, and have none."""
    try:
        return bool(np.shares_memory(_Memory(out), _Memory(t), max_work=_MOST_WORK))  # type: ignore[arg-type]
    except RuntimeError:  # TooHardError
        return True


class _Memory:
    """What numpy asks for an array: a place and a layout, on any device, as nothing is read."""

    def __init__(self, t: Tensor) -> None:
        size = t.element_size()
        self.__array_interface__ = {
            "data": (t.data_ptr(), True),
            "shape": tuple(t.shape),
            "strides": tuple(step * size for step in t.stride()),
            "typestr": f"|V{size}",
            "version": 3,
        }
