"""Strided tensors for kernels that step through them."""

from __future__ import annotations

import torch

__all__ = ["span"]


def span(t: torch.Tensor) -> torch.Tensor:
    """The memory from a tensor's first element to its last, gaps included, as one vector."""
    last = sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
    return t.as_strided((1 + last if t.numel() else 0,), (1,))
