"""Rotary embedding on an NPU: `rope.cpp`."""

from __future__ import annotations

import torch

from opsmith.kernels.ascend.launch import Launch

__all__ = ["launch"]


def launch(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    positions: torch.Tensor | None = None,
    rotary_dim: int | None = None,
    out: torch.Tensor | None = None,
) -> Launch:
    """The call that `opsmith.ops.rope` makes; with `out=x`, x without gaps, in place.

    Raises:
        ValueError: a position has no row in the tables; the kernel does not look.
    """
    x = x.contiguous()
    y = torch.empty_like(x) if out is None else out
    dims = x.shape[-1] if rotary_dim is None else rotary_dim
    if positions is not None and cos.dim() == 3:
        cos, sin = cos[0], sin[0]  # each token names its row
    cos, sin = cos.contiguous(), sin.contiguous()
    if x.dim() == 3:
        batches, (tokens, heads, width) = 1, x.shape
        strides = (x.numel(), width, heads * width)
    else:
        batches, heads, tokens, width = x.shape
        strides = (heads * tokens * width, tokens * width, width)
    if positions is not None:
        positions = positions.contiguous()
        if positions.numel() and not 0 <= int(positions.min()) <= int(positions.max()) < cos.shape[-2]:
            raise ValueError(f"rope: positions must lie in [0, {cos.shape[-2]}), the rows of cos and sin")
    table_stride = cos.shape[-2] * cos.shape[-1] if cos.dim() == 3 and cos.shape[0] > 1 else 0
    position_stride = tokens if positions is not None and positions.numel() > tokens else 0
    if batches > 1 and not table_stride and not position_stride:
        # Every batch uses the same rows of the tables: its heads are but more heads.
        batches, heads = 1, batches * heads
    return Launch(
        "rope",
        {"x": x, "cos": cos, "sin": sin, "positions": positions},
        {"y": y},
        (
            *(batches, heads, tokens, width, dims, cos.shape[-1]),
            *strides,
            *(table_stride, position_stride, interleaved, positions is not None),
            *(x.element_size(), cos.element_size()),
        ),
        y,
        {} if positions is not None else {"positions": "int32_t"},
    )
