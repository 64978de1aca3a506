"""The activations on shapes, strides and values that nobody chose, infinities and NaN among them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from tests.ops.test_properties import Call, check, gradients_of, lay_out, values_of

from opsmith.operator import registry

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ("contiguous", "gaps", "every other", "turned")
FINITE = st.floats(-20, 20, width=32) | st.sampled_from([0.0, -0.0, 1e-30, -1e-4, 300.0, -300.0])
ANY = FINITE | st.sampled_from([math.inf, -math.inf, math.nan])
NAMES = ("gelu", "bias_gelu", "silu_mul", "gelu_mul")


@st.composite
def tensors(
    draw: st.DrawFn, shape: tuple[int, ...], dtype: torch.dtype, values: Any, anchored: bool
) -> torch.Tensor:
    """A few chosen values repeated over a tensor in some layout; an anchored one begins with a 1."""
    few = torch.tensor(draw(st.lists(values, min_size=1, max_size=40)), dtype=torch.float64).to(dtype)
    count = math.prod(shape)
    x = few.repeat(count // len(few) + 1)[:count].view(shape)
    if anchored and count:
        x[..., 0] = 1.0
        x[..., shape[-1] // 2] = 1.0  # where a packed tensor's second half begins
    return lay_out(x, draw(st.sampled_from(LAYOUTS)))


@st.composite
def calls(draw: st.DrawFn, name: str, values: Any) -> Call:
    """A call of one of the activations.

    GELU's definitions, in both forms, add 1 to what is nearly -1: below -5 or so float64 does not know the result to
    float32's precision any more, and below -9 calls it 0. Values are above that, or beside an ordinary element, 1,
    against whose size the error is measured.
    """
    shape = (*draw(st.lists(st.integers(0, 5), max_size=2)), draw(st.integers(0, 70)))
    dtype = draw(st.sampled_from(DTYPES))
    kwargs = {} if name == "silu_mul" else {"tanh": draw(st.booleans())}
    if name == "bias_gelu":
        shapes = [shape, shape[-1:]]
    elif name == "gelu":
        shapes = [shape]
    else:
        shapes = [(*shape[:-1], 2 * shape[-1])] if draw(st.booleans()) else [shape, shape]
    anchored = name != "silu_mul" and draw(st.booleans())
    if name != "silu_mul" and not anchored:
        values = values.filter(lambda value: not value < -2.0)
    return Call(name, tuple(draw(tensors(s, dtype, values, anchored)) for s in shapes), kwargs)


@pytest.mark.parametrize("name", NAMES)
def test_values_keep_the_tolerance(name: str) -> None:
    @settings(max_examples=100)
    @given(calls(name, ANY))
    def holds(call: Call) -> None:
        check(registry()[name], call, values_of)

    holds()


@pytest.mark.parametrize("name", NAMES)
def test_gradients_keep_the_tolerance(name: str) -> None:
    @settings(max_examples=60)
    @given(calls(name, FINITE))  # at infinity, a slope is what one calls it
    def holds(call: Call) -> None:
        check(registry()[name], call, gradients_of)

    holds()
