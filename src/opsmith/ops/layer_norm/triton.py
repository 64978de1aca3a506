"""LayerNorm in Triton: both norms' kernels, with means."""

from __future__ import annotations

import torch

from opsmith.kernels.triton.norm import backward, forward


def layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    *,
    y: torch.Tensor,
    summed: torch.Tensor | None = None,
    mean: torch.Tensor | None = None,
    rstd: torch.Tensor | None = None,
) -> None:
    forward(x, residual, weight, bias, eps, 0.0, y, summed, mean, rstd, centered=True)


def layer_norm_backward(
    dy: torch.Tensor,
    dsummed: torch.Tensor | None,
    s: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    dx: torch.Tensor | None = None,
    dweight: torch.Tensor | None = None,
    dbias: torch.Tensor | None = None,
) -> None:
    backward(dy, dsummed, s, mean, rstd, weight, 0.0, dx, dweight, dbias)


KERNELS = {"layer_norm": layer_norm, "layer_norm_backward": layer_norm_backward}
