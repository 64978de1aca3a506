"""RMSNorm in Triton: both norms' kernels, without means."""

from __future__ import annotations

from opsmith.kernels.triton.norm import backward, forward


def rms_norm(x, residual, weight, eps, offset, rounds, *, y, summed=None, rstd=None):
    forward(x, residual, weight, None, eps, offset, y, summed, None, rstd, centered=False, rounds=rounds)


def rms_norm_backward(dy, dsummed, s, rstd, weight, offset, *, dx=None, dweight=None):
    backward(dy, dsummed, s, None, rstd, weight, offset, dx, dweight, None)


KERNELS = {"rms_norm": rms_norm, "rms_norm_backward": rms_norm_backward}
