"""What is particular to gelu and bias_gelu: the ends of the curve, working in place, their errors."""

from __future__ import annotations

import math

import pytest
import torch

from opsmith.call import dispatch
from opsmith.kernels import isa, triton
from opsmith.ops import bias_gelu, gelu
from opsmith.ops.gelu import CARD


@pytest.mark.parametrize("tanh", [False, True])
def test_the_ends_of_the_curve(tanh: bool) -> None:
    x = torch.tensor([0.0, -0.0, 60.0, -60.0, torch.inf, torch.nan, 3e38, -3e38] * 5)
    y = gelu(x, tanh=tanh)
    expected = CARD.reference(
        x.double(), tanh=tanh
    ).float()  # eager float32 gives NaN at infinity and inf at 3e38
    torch.testing.assert_close(y, expected, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("tanh", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_nan_stays_one_whatever_its_sign(dtype: torch.dtype, tanh: bool) -> None:
    nan = torch.tensor([torch.nan, 1.0]).to(dtype)
    x = torch.cat([nan, nan.copysign(-torch.ones_like(nan))]).repeat(20).requires_grad_()
    y = gelu(x, tanh=tanh)
    y.sum().backward()
    assert torch.equal(y.isnan(), x.isnan())
    assert torch.equal(x.grad.isnan(), x.isnan())


@pytest.mark.parametrize("tanh", [False, True])
def test_the_slope_vanishes_with_the_tail(tanh: bool) -> None:
    """Far below zero, where PyTorch's own float64 adds 1 to what is nearly -1 and knows nothing any more."""
    x = torch.linspace(-30, -1, 5000).requires_grad_()
    gelu(x, tanh=tanh).sum().backward()
    z = x.detach().double()
    if tanh:
        k = 2 * math.sqrt(2 / math.pi)
        odds = torch.sigmoid(k * (z + 0.044715 * z**3))
        exact = odds * (1 + z * (1 - odds) * k * (1 + 3 * 0.044715 * z**2))
    else:
        density = torch.exp(-z * z / 2) / math.sqrt(2 * math.pi)
        exact = torch.special.erfc(-z * math.sqrt(0.5)) / 2 + z * density
    # The exponent, up to 88, is a product rounded to float32 a few times. Where the sigmoid is less than any normal
    # float, the slope, up to 300 times as much, is lost.
    error, bound = (x.grad.double() - exact).abs(), 3 * 88 * 2**-23 * exact.abs() + 300 * 2.0**-126
    assert (error <= bound).all()


def test_the_two_forms_differ_where_they_should() -> None:
    x = torch.tensor([1.0, 2.0])
    torch.testing.assert_close(gelu(x), torch.tensor([0.8413447, 1.9544997]))
    torch.testing.assert_close(gelu(x, tanh=True), torch.tensor([0.8411920, 1.9545977]))


def test_in_place() -> None:
    x = torch.randn(5, 33)
    expected = gelu(x)
    assert gelu(x, out=x) is x
    assert torch.equal(x, expected)


def test_bias_is_added_before() -> None:
    x, bias = torch.randn(2, 3, 33), torch.randn(33)
    torch.testing.assert_close(bias_gelu(x, bias), gelu(x + bias), rtol=1e-6, atol=1e-6)


def test_the_bias_alone_may_learn() -> None:
    x, bias = torch.randn(6, 5), torch.randn(5, requires_grad=True)
    bias_gelu(x, bias).sum().backward()
    wanted = bias.detach().clone().requires_grad_()
    torch.nn.functional.gelu(x + wanted).sum().backward()
    torch.testing.assert_close(bias.grad, wanted.grad)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: gelu(2.0), TypeError, "gelu: x must be a tensor, got float"),
        (lambda x: gelu(x.long()), TypeError, "gelu: x must be a floating-point tensor, got int64"),
        (lambda x: bias_gelu(x, x[0, :3]), ValueError, r"bias_gelu: bias must have shape \(8,\).*got \(3,\)"),
        (
            lambda x: bias_gelu(x, x[0].half()),
            TypeError,
            "bias_gelu: bias must be float32 like x, got float16",
        ),
        (
            lambda x: bias_gelu(x, x[0].to("meta")),
            ValueError,
            "bias_gelu: bias is on meta, x on cpu; move one",
        ),
    ],
)
def test_errors_name_what_was_expected_and_what_came(call, error, message) -> None:
    with pytest.raises(error, match=message):
        call(torch.randn(2, 8))


@pytest.mark.skipif(triton.INTERPRETED, reason="Triton's interpreter cuts bfloat16 off")
@pytest.mark.parametrize("tanh", [False, True])
def test_every_bfloat16_has_its_value_and_its_slope(tanh: bool) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    # Above, float64's own x^3 overflows in the slope of tanh's form.
    x = every[every.isfinite() & (every.abs() < 1e9)].requires_grad_()
    with dispatch.always_native():
        y = gelu(x, tanh=tanh)
        (slope,) = torch.autograd.grad(y, x, torch.ones_like(y))
    wide = x.detach().double().requires_grad_()
    exact = torch.nn.functional.gelu(wide, approximate="tanh" if tanh else "none")
    (exact_slope,) = torch.autograd.grad(exact, wide, torch.ones_like(exact))
    tables = isa.tier().startswith("avx512")
    fit = 0.0 if tables else 9e-4  # of Phi and its slope, of themselves
    for got, right in ((y.detach(), exact.detach()), (slope, exact_slope)):
        unit = 2.0 ** (torch.floor(torch.log2(right.abs().clamp_min(1e-30))) - 7)
        beside_rounding = (got.double() - right).abs() - 0.5 * unit - fit * right.abs()
        # What phi_table.h says; without tables, what cancels where the slope crosses zero.
        assert float(beside_rounding.max()) <= (6e-6 if tables else 2e-5)
