"""RMSNorm with an int8 result on an NPU: `rms_norm_quant.cpp`."""

from __future__ import annotations

import torch

from opsmith.kernels.ascend.launch import Launch

__all__ = ["launch"]


def launch(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    scale: torch.Tensor | float | None = None,
    offset: torch.Tensor | float | None = None,
) -> Launch:
    """The call that `opsmith.ops.rms_norm_quant` makes."""
    x = x.contiguous()
    columns, fixed = x.shape[-1], scale is not None
    rows = x.numel() // max(columns, 1)
    q = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    s = torch.empty(0 if fixed else x.shape[:-1], dtype=torch.float32, device=x.device)
    step, shift = (
        torch.as_tensor(0.0 if v is None else v, dtype=torch.float32, device=x.device).reshape(1)
        if fixed
        else None
        for v in (scale, offset)
    )
    weight, bias = (t if t is None else t.contiguous() for t in (weight, bias))
    sizes = (rows, columns, columns, x.element_size(), weight is not None, bias is not None, fixed, eps)
    return Launch(
        "rms_norm_quant",
        {"x": x, "weight": weight, "bias": bias, "scale": step, "offset": shift},
        {"q": q, "s": s},
        sizes,
        q if fixed else (q, s),
    )
