"""Gated activations: y = f(gate) * up, and both gradients, in one pass each."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from opsmith.kernels.triton.common import as_rows, launch, steps
from opsmith.ops.gelu.triton import BLOCK, curve, curve_and_slope, place, programs, spread_out


@triton.jit
def _forward(gate, up, y, n, gs, us, ys, CURVE: tl.constexpr, BLOCK: tl.constexpr):
    row, at, mask = place(n, BLOCK)
    g = tl.load(gate + row * gs + at, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + row * us + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + row * ys + at, (curve(g, y, CURVE) * u).to(y.dtype.element_ty), mask=mask)


@triton.jit
def _backward(dy, gate, up, dgate, dup, n, ds, gs, us, dgs, dus, CURVE: tl.constexpr, BLOCK: tl.constexpr):
    row, at, mask = place(n, BLOCK)
    d = tl.load(dy + row * ds + at, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(gate + row * gs + at, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + row * us + at, mask=mask, other=0.0).to(tl.float32)
    value, slope = curve_and_slope(g, dgate, CURVE)
    tl.store(dgate + row * dgs + at, (d * u * slope).to(dgate.dtype.element_ty), mask=mask)
    tl.store(dup + row * dus + at, (d * value).to(dup.dtype.element_ty), mask=mask)


def _pair(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """Both tensors; of a packed one, the halves of its rows."""
    if up is not None:
        return gate, up
    first, second = as_rows(gate).chunk(2, -1)
    return first, second


def gated(gate: Tensor, up: Tensor | None, activation: int, *, y: Tensor) -> None:
    g, u, out = spread_out(*_pair(gate, up), y)
    given = (g, u, out, out.shape[1], *steps(g, u, out))
    launch(_forward, programs(out), *given, CURVE=activation, BLOCK=BLOCK)


def gated_backward(
    dy: Tensor, gate: Tensor, up: Tensor | None, activation: int, *, dgate: Tensor, dup: Tensor | None = None
) -> None:
    d, g, u, dg, du = spread_out(dy, *_pair(gate, up), *_pair(dgate, dup))
    given = (d, g, u, dg, du, d.shape[1], *steps(d, g, u, dg, du))
    launch(_backward, programs(d), *given, CURVE=activation, BLOCK=BLOCK)


KERNELS = {"gated": gated, "gated_backward": gated_backward}
