"""RMSNorm on an NPU: `rms_norm.cpp`."""

from __future__ import annotations

import torch

from opsmith.kernels.ascend.launch import Launch
from opsmith.kernels.ascend.norm import dense, element_bytes

__all__ = ["launch"]


def launch(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    residual: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
) -> Launch:
    """The call that `opsmith.ops.rms_norm` makes."""
    x, residual, weight = x.contiguous(), dense(residual), dense(weight)
    y = torch.empty_like(x)
    summed = None if residual is None else torch.empty_like(x)
    columns = x.shape[-1]
    sizes = (x.numel() // max(columns, 1), columns, *element_bytes(x, weight))
    flags = (residual is not None, weight is not None, eps, weight_offset, round_before_weight)
    return Launch(
        "rms_norm",
        {"x": x, "residual": residual, "weight": weight},
        {"y": y, "summed": summed},
        (*sizes, *flags),
        y if summed is None else (y, summed),
    )
