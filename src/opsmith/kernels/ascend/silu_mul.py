"""The gated SiLU on an NPU: `silu_mul.cpp`."""

from __future__ import annotations

import torch

from opsmith.kernels.ascend.launch import Launch

__all__ = ["launch"]


def launch(gate: torch.Tensor, up: torch.Tensor | None = None) -> Launch:
    """The call that `opsmith.ops.silu_mul` makes."""
    columns = gate.shape[-1]
    gate = gate.contiguous()
    if up is None:
        columns //= 2
        y = gate.new_empty(*gate.shape[:-1], columns)
        sizes = (y.numel() // max(columns, 1), columns, 1)
    else:
        up, y = up.contiguous(), torch.empty_like(gate)
        sizes = (1, y.numel(), 0)
    return Launch("silu_mul", {"gate": gate, "up": up}, {"y": y}, (*sizes, gate.element_size()), y)
