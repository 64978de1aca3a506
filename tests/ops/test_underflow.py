"""What a mask hides has a weight of 0 itself: a product that underflows takes tens of cycles on most processors."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from opsmith.kernels import isa, triton
from opsmith.ops import attention, softmax

ALL, UNDERFLOW = 0x3D, 0x10  # of x86's fenv.h

pytestmark = pytest.mark.skipif(
    isa.tier() not in ("avx2", "portable") or triton.INTERPRETED,
    reason="is about the tiers that put together the exponent of a power themselves, in x86's flags",
)


def underflows(call: Callable[[], object]) -> bool:
    """Whether a call that one thread does leaves the processor's flag for it."""
    libm = ctypes.CDLL("libm.so.6")
    call()
    libm.feclearexcept(ALL)
    call()
    return bool(libm.fetestexcept(ALL) & UNDERFLOW)


def masks(shown: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """A boolean mask, and the ways that models write it to be added."""
    scores = torch.zeros(shown.shape, dtype=dtype)
    return [shown, *(scores.masked_fill(~shown, low) for low in (-math.inf, torch.finfo(dtype).min))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("method", ["auto", "stable"])
def test_hidden_scores_of_softmax(method: str, dtype: torch.dtype) -> None:
    x = torch.randn(3, 61).to(dtype)
    for mask in masks(torch.arange(61) % 3 > 0, dtype):
        assert not underflows(lambda mask=mask: softmax(x, mask=mask, method=method))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_hidden_keys_of_attention(dtype: torch.dtype) -> None:
    q, k, v = torch.randn(3, 1, 1, 5, 16).to(dtype)
    for mask in masks(torch.arange(5) % 3 > 0, dtype):
        assert not underflows(lambda mask=mask: attention(q, k, v, mask=mask))
