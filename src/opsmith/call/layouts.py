"""Tensors as kernels take them: as rows, as vectors, and new memory for results."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from opsmith.call.fast import direct


def fresh(x: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """New contiguous memory for a result like x, or of another shape."""
    # empty_like takes a third of the time of empty with a shape.
    like = shape is None and x.is_contiguous()
    y = torch.empty_like(x) if like else x.new_empty(x.shape if shape is None else shape)
    return in_huge_pages(y)


def fresh_as(x: Tensor) -> Tensor:
    """New memory for a result that lies as x does, heads inside, say; contiguous where x's rows are not."""
    y = torch.empty_like(x)
    return in_huge_pages(y) if is_dense(y) else fresh(x)


def in_huge_pages(t: Tensor) -> Tensor:
    """The same tensor, its large new memory backed by pages of 2 MB at once, where that is possible."""
    return t if torch.compiler.is_dynamo_compiling() else direct.in_huge_pages(t)


def as_rows(x: Tensor) -> Tensor:
    """`x` as [rows, n] with a contiguous last dimension; a view wherever the strides allow one."""
    if x.dim() == 2 and x.stride()[1] == 1:
        return x
    n = x.shape[-1]
    rows = x.reshape(math.prod(x.shape[:-1]), n)  # numel() of symbolic sizes makes numbers of them
    return rows if n <= 1 or rows.stride()[1] == 1 else rows.contiguous()


def is_dense(t: Tensor) -> bool:
    """True where the elements of each row, along the last dimension, are next to each other."""
    return t.dim() == 0 or t.stride()[-1] == 1 or t.shape[-1] <= 1


def dense_rows(t: Tensor) -> Tensor:
    """The tensor with its last dimension contiguous; itself, where it is."""
    return t if is_dense(t) else t.contiguous()


def dense(vector: Tensor | None) -> Tensor | None:
    """A vector of weights as the kernels read it: its elements next to each other."""
    return vector if vector is None or vector.is_contiguous() else vector.contiguous()


def out_rows(out: Tensor) -> Tensor:
    """`out` as [rows, n] to be written through; an `out` that has no such view is refused."""
    if out.dim() == 2 and out.stride()[1] == 1:
        return out
    try:
        return out.view(math.prod(out.shape[:-1]), out.shape[-1])
    except RuntimeError:
        raise ValueError(
            f"out= must be viewable as rows, got strides {out.stride()}; pass a contiguous tensor"
        ) from None


def writable(out: Tensor) -> bool:
    """True where the kernels can write their rows into `out` itself, whose memory may have gaps between rows only."""
    if out.is_contiguous():
        return True
    if out.dim() == 0 or out.stride()[-1] != 1:
        return False
    step = 0
    for size, stride in zip(reversed(out.shape[:-1]), reversed(out.stride()[:-1]), strict=True):
        if size != 1:
            if stride == 0 or (step and stride != step):
                return False
            step = stride * size
    return True


def spread(mask: Tensor, shape: Sequence[int]) -> Tensor:
    """The mask in this shape, stride 0 where it is broadcast; only the last dimension becomes memory."""
    if mask.dim() == 0 or mask.shape[-1] != shape[-1]:
        mask = mask.expand(*mask.shape[:-1], shape[-1])
    if mask.stride()[-1] != 1 and mask.shape[-1] > 1:
        mask = mask.contiguous()
    return mask if mask.shape == shape else mask.expand(shape)


def nbytes(*tensors: Tensor | None) -> int:
    """The bytes of memory behind the tensors, what is broadcast with stride 0 counted once."""
    total = 0
    for t in tensors:
        if t is not None:
            spread = math.prod(size for size, step in zip(t.shape, t.stride(), strict=True) if step)
            total += (spread if t.numel() else 0) * t.element_size()
    return total
