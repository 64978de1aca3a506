"""What the launches of `rms_norm.cpp` and `layer_norm.cpp` share: rows, and a weight that may be absent."""

from __future__ import annotations

import torch

__all__ = ["dense", "element_bytes", "like"]


def dense(t: torch.Tensor | None) -> torch.Tensor | None:
    """The tensor without gaps."""
    return None if t is None else t.contiguous()


def element_bytes(x: torch.Tensor, *vectors: torch.Tensor | None) -> tuple[int, int]:
    """Bytes of an element of x, and of the vectors, which are of one type, or of x's where there are none."""
    sizes = {t.element_size() for t in vectors if t is not None} or {x.element_size()}
    return x.element_size(), max(sizes)


def like(*vectors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """The vectors without gaps and in one type: float32 where they differ."""
    types = {t.dtype for t in vectors if t is not None}
    return tuple(dense(t if t is None or len(types) == 1 else t.float()) for t in vectors)
