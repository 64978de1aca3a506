"""RMSNorm in Triton: both norms' kernels, without means."""

from __future__ import annotations

import torch

from opsmith.kernels.triton.norm import backward, forward


def rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    round_before_weight: bool,
    *,
    y: torch.Tensor,
    summed: torch.Tensor | None = None,
    rstd: torch.Tensor | None = None,
) -> None:
    how = {"centered": False, "rounds": round_before_weight}
    forward(x, residual, weight, None, eps, weight_offset, y, summed, None, rstd, **how)


def rms_norm_backward(
    dy: torch.Tensor,
    dsummed: torch.Tensor | None,
    s: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    weight_offset: float,
    *,
    dx: torch.Tensor | None = None,
    dweight: torch.Tensor | None = None,
) -> None:
    backward(dy, dsummed, s, None, rstd, weight, weight_offset, dx, dweight, None)


KERNELS = {"rms_norm": rms_norm, "rms_norm_backward": rms_norm_backward}
