"""LayerNorm on an NPU: `layer_norm.cpp`."""

from __future__ import annotations

import torch

from opsmith.kernels.ascend.launch import Launch
from opsmith.kernels.ascend.norm import dense, element_bytes, like

__all__ = ["launch"]


def launch(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: torch.Tensor | None = None,
) -> Launch:
    """The call that `opsmith.ops.layer_norm` makes."""
    x, residual = x.contiguous(), dense(residual)
    weight, bias = like(weight, bias)
    y = torch.empty_like(x)
    summed = None if residual is None else torch.empty_like(x)
    columns = x.shape[-1]
    sizes = (x.numel() // max(columns, 1), columns, *element_bytes(x, weight, bias))
    return Launch(
        "layer_norm",
        {"x": x, "residual": residual, "weight": weight, "bias": bias},
        {"y": y, "summed": summed},
        (*sizes, residual is not None, weight is not None, bias is not None, eps),
        y if summed is None else (y, summed),
        {} if weight is not None or bias is None else {"weight": "DTYPE_BIAS"},
    )
