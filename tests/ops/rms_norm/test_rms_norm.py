"""What is particular to rms_norm: the ways in which models round and shift, the residual pair, its errors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from opsmith.ops import rms_norm
from opsmith.ops.rms_norm import CARD


def _llama(x: torch.Tensor, w: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    h = x.float()
    return w * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def _gemma(x: torch.Tensor, w: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps) * (1.0 + w.float())).to(x.dtype)


def test_one_rounding_or_two_as_the_model_asks() -> None:
    x, w = torch.randn(64, 200).half(), (torch.rand(200) + 0.5).half()
    twice, once = rms_norm(x, w, round_before_weight=True), rms_norm(x, w)
    # The root may differ in its last bit, and so may what is rounded on a boundary: all but a few are equal.
    assert (twice == _llama(x, w)).double().mean() > 0.999
    assert (once == F.rms_norm(x, (200,), w, 1e-6)).double().mean() > 0.999
    assert (twice == once).double().mean() < 0.95


def test_gemmas_weights_are_shifted_in_float32() -> None:
    x, w = torch.randn(64, 200).half(), (torch.randn(200) * 1e-3).half()
    y = rms_norm(x, w, weight_offset=1.0)
    assert (y == _gemma(x, w)).double().mean() > 0.999
    rounded = rms_norm(x, (1 + w))  # in float16, most of these weights are lost beside the one
    assert (y == rounded).double().mean() < 0.95


def test_the_residual_sum_is_rounded_once_and_returned() -> None:
    x, r = torch.randn(3, 40).half(), torch.randn(3, 40).half()
    y, s = rms_norm(x, residual=r)
    assert torch.equal(s, x + r)
    torch.testing.assert_close(y, CARD.reference(s), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("n", [7, 130, 4096])
def test_the_sum_may_be_written_over_its_inputs(n: int) -> None:
    x, r = torch.randn(5, n), torch.randn(5, n)
    expected_y, expected_s = CARD.reference(x, torch.ones(n), residual=r)
    y, s = rms_norm(x, torch.ones(n), residual=r, out=(r, x))
    assert (y is r, s is x) == (True, True)
    torch.testing.assert_close(s, expected_s, rtol=0, atol=0)
    torch.testing.assert_close(y, expected_y)


def test_float32_weights_serve_bfloat16() -> None:
    x, w = torch.randn(4, 50).bfloat16(), torch.randn(50)
    y = rms_norm(x, w)
    exact = CARD.reference(x.double(), w.double())
    assert y.dtype == torch.bfloat16
    assert (y.double() - exact).abs().max() <= exact.abs().max() * 2**-8


def test_infinity_and_nan_stay_in_their_row() -> None:
    x = torch.randn(3, 20)
    x[1, 4] = torch.nan
    y = rms_norm(x)
    assert y[1].isnan().all()
    assert y[[0, 2]].isfinite().all()


def test_gradients_only_where_they_are_asked_for() -> None:
    x, w = torch.randn(4, 9), torch.ones(9, requires_grad=True)
    rms_norm(x, w).sum().backward()
    assert x.grad is None
    torch.testing.assert_close(w.grad, CARD.reference(x).sum(0))
    x.requires_grad_()
    w.requires_grad_(False)
    w.grad = None
    rms_norm(x, w).sum().backward()
    assert w.grad is None
    assert x.grad is not None


def test_the_weights_gradient_stays_exact_over_many_rows() -> None:
    x, dy, w = torch.randn(8192, 96), torch.randn(8192, 96), torch.ones(96, requires_grad=True)

    def gradient(fn: Callable[..., torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        weight = w.to(dtype)
        return torch.autograd.grad(fn(x.to(dtype), weight), w if dtype == w.dtype else weight, dy.to(dtype))[
            0
        ]

    exact = gradient(CARD.reference, torch.float64)
    eager, ours = (
        (gradient(fn, torch.float32) - exact).square().mean().sqrt() for fn in (CARD.reference, rms_norm)
    )
    assert ours <= 2 * eager


def test_cost_counts_each_tensor_once() -> None:
    x, w = torch.empty(6, 8), torch.empty(8)
    assert CARD.cost(x, w).min_bytes == 2 * 6 * 8 * 4 + 8 * 4
    assert CARD.cost(x, residual=x).min_bytes == 4 * 6 * 8 * 4


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: rms_norm([1.0]), TypeError, "x must be a tensor, got list"),
        (lambda x: rms_norm(x.long()), TypeError, "x must be a floating-point tensor, got int64; cast it"),
        (lambda x: rms_norm(torch.tensor(1.0)), ValueError, r"at least 1 dimension\(s\), got shape \(\)"),
        (lambda x: rms_norm(x, torch.ones(7)), ValueError, r"weight must have shape \(8,\).*got \(7,\)"),
        (lambda x: rms_norm(x, torch.ones(8).half()), TypeError, "weight must be float32, got float16"),
        (lambda x: rms_norm(x, residual=torch.ones(3, 8)), ValueError, r"residual must have shape \(2, 8\)"),
        (lambda x: rms_norm(x, residual=x.half()), TypeError, "residual must be float32 like x, got float16"),
        (lambda x: rms_norm(x, residual=x, out=x.clone()), ValueError, r"a pair \(y, sum\)"),
    ],
)
def test_errors_name_what_was_expected(call: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"rms_norm: .*{message}"):
        call(torch.ones(2, 8))  # type: ignore[operator]
