"""What is particular to RMSNorm to int8: rows that are not finite."""

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
