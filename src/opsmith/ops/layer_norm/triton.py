"""LayerNorm in Triton: both norms' kernels, with means."""

from __future__ import annotations

from opsmith.kernels.triton.norm import backward, forward


def layer_norm(x, residual, weight, bias, eps, *, y, summed=None, mean=None, rstd=None):
    forward(x, residual, weight, bias, eps, 0.0, y, summed, mean, rstd, centered=True)


def layer_norm_backward(dy, dsummed, s, mean, rstd, weight, *, dx=None, dweight=None, dbias=None):
    backward(dy, dsummed, s, mean, rstd, weight, 0.0, dx, dweight, dbias)


KERNELS = {"layer_norm": layer_norm, "layer_norm_backward": layer_norm_backward}
