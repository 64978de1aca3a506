"""What is particular to layer_norm: its accuracy far from zero, the residual pair, its errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from opsmith.ops import layer_norm
from opsmith.ops.layer_norm import CARD


def test_the_residual_sum_is_rounded_once_and_returned() -> None:
    x, r = torch.randn(3, 40).bfloat16(), torch.randn(3, 40).bfloat16()
    y, s = layer_norm(x, residual=r)
    assert torch.equal(s, x + r)
    torch.testing.assert_close(y, CARD.reference(s), rtol=1e-2, atol=1e-2)


def test_a_constant_row_gives_the_bias() -> None:
    y = layer_norm(torch.full((2, 30), 7.0), torch.rand(30), torch.arange(30.0))
    assert torch.equal(y, torch.arange(30.0).expand(2, 30))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mean_whose_square_no_float_holds(dtype: torch.dtype) -> None:
    x = torch.full((2, 200), 3e19).to(dtype)
    x[:, 0] *= 1.0625
    torch.testing.assert_close(layer_norm(x), CARD.reference(x.double()).to(dtype), rtol=1e-2, atol=1e-2)


def test_variance_survives_a_large_mean() -> None:
    x = torch.randn(8, 1024, dtype=torch.float64) + 1e4
    error = (layer_norm(x.float()) - CARD.reference(x.float().double())).abs().max()
    assert error < 2e-3  # E[s^2] - E[s]^2 in float32 would be off by about 8


def test_float32_weights_serve_bfloat16() -> None:
    x, w, b = torch.randn(4, 50).bfloat16(), torch.randn(50), torch.randn(50)
    y = layer_norm(x, w, b)
    exact = CARD.reference(x.double(), w.double(), b.double())
    assert y.dtype == torch.bfloat16
    assert (y.double() - exact).abs().max() <= exact.abs().max() * 2**-8


def test_infinity_and_nan_spread_over_their_row_only() -> None:
    x = torch.randn(3, 20)
    x[1, 4] = torch.inf
    y = layer_norm(x)
    assert y[1].isnan().any()
    assert y[[0, 2]].isfinite().all()


def test_gradients_only_where_they_are_asked_for() -> None:
    x, w, b = torch.randn(4, 9), torch.ones(9, requires_grad=True), torch.zeros(9, requires_grad=True)
    layer_norm(x, w, b).sum().backward()
    assert x.grad is None
    assert torch.equal(b.grad, torch.full((9,), 4.0))
    assert w.grad is not None


def test_cost_counts_each_tensor_once() -> None:
    x, w = torch.empty(6, 8), torch.empty(8)
    assert CARD.cost(x, w, w).min_bytes == 2 * 6 * 8 * 4 + 2 * 8 * 4
    assert CARD.cost(x, residual=x).min_bytes == 4 * 6 * 8 * 4


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: layer_norm([1.0]), TypeError, "x must be a tensor, got list"),
        (
            lambda x: layer_norm(x.long()),
            TypeError,
            "x must be a floating-point tensor, got int64; cast it first",
        ),
        (lambda x: layer_norm(torch.tensor(1.0)), ValueError, r"at least 1 dimension\(s\), got shape \(\)"),
        (lambda x: layer_norm(x, torch.ones(7)), ValueError, r"weight must have shape \(8,\).*got \(7,\)"),
        (
            lambda x: layer_norm(x, bias=torch.ones(1, 8)),
            ValueError,
            r"bias must have shape \(8,\).*got \(1, 8\)",
        ),
        (lambda x: layer_norm(x, torch.ones(8).half()), TypeError, "weight must be float32, got float16"),
        (lambda x: layer_norm(x, residual=x[:1]), ValueError, r"residual must have shape \(2, 8\)"),
        (
            lambda x: layer_norm(x, residual=x.half()),
            TypeError,
            "residual must be float32 like x, got float16",
        ),
        (lambda x: layer_norm(x, residual=x, out=x), ValueError, "out must be one tensor, or a pair"),
    ],
)
def test_errors_name_what_was_expected_and_what_came(call, error, message) -> None:
    with pytest.raises(error, match=f"layer_norm: .*{message}"):
        call(torch.randn(2, 8))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"weight": torch.ones(5)}, "weight must be a contiguous vector of 8"),
        ({"weight": torch.ones(8, dtype=torch.float16)}, "weight must be float32 or in the input's dtype"),
        ({"bias": torch.ones(16)[::2]}, "bias must be a contiguous vector of 8"),
        (
            {"residual": torch.ones(4, 7), "summed": torch.ones(4, 8)},
            "residual must be rows like the input's",
        ),
        ({"residual": torch.ones(4, 8)}, "summed must be given too"),
        ({"summed": torch.ones(8, 4).t()}, "last dimension of summed must be contiguous"),
        ({"summed": torch.ones(2, 8)}, "summed must be rows like the input's"),
        ({"y": torch.zeros(3, 8)}, "y must be rows like the input's, in its dtype"),
        ({"y": torch.zeros(4, 8).half()}, "y must be rows like the input's, in its dtype"),
        ({"mean": torch.ones(3)}, "mean must be a contiguous vector of 4 float32"),
        ({"rstd": torch.ones(4, dtype=torch.bfloat16)}, "rstd must be a contiguous vector of 4 float32"),
        ({"x": torch.ones(2, 4, 8)[:, ::2].transpose(0, 1)}, "x must be viewable as rows"),
    ],
)
def test_the_kernel_refuses_what_it_would_read_beyond(wrong: dict[str, Any], message: str) -> None:
    none = dict.fromkeys(("residual", "weight", "bias", "summed", "mean", "rstd"))
    given = {"x": torch.ones(4, 8), "eps": 1e-5, "y": torch.zeros(4, 8), **none, **wrong}
    with pytest.raises(RuntimeError, match=message):
        torch.ops.opsmith.layer_norm(**given)
    assert not given["y"].any()


@pytest.mark.parametrize("name", ["dy", "dsummed", "mean", "rstd", "weight", "dx", "dweight", "dbias"])
def test_the_backward_kernel_refuses_what_it_would_read_beyond(name: str) -> None:
    rows = {k: torch.ones(4, 8) for k in ("dy", "dsummed", "s", "dx")}
    given = rows | {k: torch.ones(4) for k in ("mean", "rstd")}
    given |= {k: torch.ones(8) for k in ("weight", "dweight", "dbias")}
    given[name] = given[name][..., :-1]
    with pytest.raises(RuntimeError, match=f"layer_norm: {name} must be"):
        torch.ops.opsmith.layer_norm_backward(**given)
