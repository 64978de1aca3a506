"""Softmax on an NPU: `softmax.cpp`."""

from __future__ import annotations

import math

import torch

from opsmith.kernels.ascend.launch import Launch

__all__ = ["launch"]


def launch(
    x: torch.Tensor,
    dim: int = -1,
    *,
    scale: float = 1.0,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    method: str = "auto",
) -> Launch:
    """The call that `opsmith.ops.softmax` makes, along the last dimension.

    A boolean mask is made additive first; an additive one must be of x's type.
    """
    x = x.contiguous()
    y = torch.empty_like(x)
    if mask is not None:
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, dtype=x.dtype, device=x.device).masked_fill_(~mask, -math.inf)
        if x.dim() > 4:  # more leading dimensions than the kernel finds its way in
            mask = mask.expand(x.shape)
    # [outer, middle, inner, columns]
    shape = (1, 1, 1, *x.shape)[-4:] if x.dim() <= 4 else (x.shape[:-2].numel(), 1, *x.shape[-2:])
    columns = x.shape[-1]
    strides = (0, 0, 0)
    if mask is not None:
        mask = mask.expand(*mask.shape[:-1], columns).contiguous()  # each of its rows is whole
        spread = mask.expand(x.shape).view(shape)
        steps = [s if n > 1 else 0 for s, n in zip(spread.stride(), spread.shape, strict=True)]
        strides = (steps[0], steps[1], steps[2])
    return Launch(
        "softmax",
        {"x": x, "mask": mask},
        {"y": y},
        (
            *(x.numel() // max(columns, 1), *shape[1:], x.element_size()),
            *(mask is not None, *strides, causal, method == "fast", scale),
        ),
        y,
    )
