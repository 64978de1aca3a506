"""What is particular to RMSNorm to int8: rows that are not finite, and integers to the last tie."""

from __future__ import annotations

import math

import pytest
import torch

from opsmith.call.dispatch import always_native
from opsmith.ops import rms_norm_quant
from opsmith.ops.rms_norm.quant import CARD


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 2, 39])
@pytest.mark.parametrize("weight", [None, torch.ones(40)], ids=["normalized already", "weight"])
def test_a_row_that_is_not_finite_says_so_by_its_scale(weight, at: int, odd: float) -> None:
    x = torch.randn(3, 40)
    x[1, at] = odd
    with always_native():
        q, s = rms_norm_quant(x, weight)
    assert s.isfinite().tolist() == [True, False, True]
    assert not q[1].any()
    expected, scales = CARD.reference(x, weight)
    torch.testing.assert_close(s, scales, equal_nan=True)
    assert (q - expected).abs().max() <= 1


@pytest.mark.parametrize("scale", [0.021, -3.7, 2.0**-7, 1e-29, 1e-38, 1e35])
@pytest.mark.parametrize("offset", [None, 3.0, -1e6])
def test_integers_are_those_of_a_division(scale: float, offset: float | None) -> None:
    # Halves between integers, their neighbors in float32, what is clamped, and what overflows.
    halves = (torch.arange(-300, 300) + 0.5) * scale
    up, down = (torch.nextafter(halves, torch.tensor(way)) for way in (math.inf, -math.inf))
    far = torch.tensor([0.0, -0.0, 3e38, -3e38, 1e-45, math.inf, -math.inf])
    x = torch.cat([halves, up, down, torch.randn(4096) * 100 * scale, far])[None]
    with always_native():
        q = rms_norm_quant(x, scale=scale, offset=offset)
    expected = x / torch.tensor(scale) + (offset or 0.0)
    assert torch.equal(q, expected.clamp(-128, 127).round().to(torch.int8))
