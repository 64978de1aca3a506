"""What is particular to silu_mul and gelu_mul: the packed form, working in place, one rounding, their errors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from opsmith.ops import gelu_mul, silu_mul


def test_packed_is_the_two_halves() -> None:
    x = torch.randn(3, 5, 66)
    gate, up = x.chunk(2, -1)
    assert torch.equal(silu_mul(x), silu_mul(gate, up))
    assert torch.equal(gelu_mul(x, tanh=True), gelu_mul(gate.contiguous(), up.contiguous(), tanh=True))


def test_the_gradient_of_a_packed_tensor_is_packed() -> None:
    x = torch.randn(2, 7, 34, requires_grad=True)
    dy = torch.randn(2, 7, 17)
    silu_mul(x).backward(dy)
    gate, up = (t.detach().requires_grad_() for t in x.chunk(2, -1))
    (F.silu(gate) * up).backward(dy)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.cat([gate.grad, up.grad], -1))


def test_the_product_is_rounded_once() -> None:
    gate, up = torch.randn(64, 64).bfloat16(), torch.randn(64, 64).bfloat16()
    once = (F.silu(gate.double()) * up.double()).bfloat16()
    assert (silu_mul(gate, up) != once).float().mean() < 0.02
    assert (F.silu(gate) * up != once).float().mean() > 0.1


def test_in_place_over_either_input() -> None:
    for tanh in (False, True):
        gate, up = torch.randn(5, 33), torch.randn(5, 33)
        expected = gelu_mul(gate, up, tanh=tanh)
        assert torch.equal(gelu_mul(gate.clone(), up, tanh=tanh, out=up.clone()), expected)
        assert gelu_mul(gate, up, tanh=tanh, out=gate) is gate
        assert torch.equal(gate, expected)


def test_the_ends_of_the_curve() -> None:
    gate = torch.tensor([0.0, -0.0, 60.0, -60.0, -1000.0, torch.inf, -torch.inf, torch.nan, 3e38, -3e38] * 4)
    up = torch.ones_like(gate)
    for dtype in (torch.float32, torch.bfloat16):
        x = gate.to(dtype)
        expected = F.silu(x.double()).to(dtype)
        torch.testing.assert_close(silu_mul(x, up.to(dtype)), expected, equal_nan=True, rtol=1e-6, atol=0)


def test_gradients_only_where_they_are_asked_for() -> None:
    gate, up = torch.randn(4, 9), torch.randn(4, 9, requires_grad=True)
    silu_mul(gate, up).sum().backward()
    assert gate.grad is None
    assert up.grad is not None
    torch.testing.assert_close(up.grad, F.silu(gate))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: silu_mul(2.0, x), TypeError, "silu_mul: gate must be a tensor, got float"),
        (lambda x: silu_mul(x.long(), x), TypeError, "silu_mul: gate must be a floating-point tensor"),
        (lambda x: silu_mul(x, x[:1]), ValueError, r"silu_mul: up must have shape \(2, 9\).*got \(1, 9\)"),
        (lambda x: silu_mul(x, 1.0), TypeError, "silu_mul: up must be a tensor, got float"),
        (lambda x: gelu_mul(x, x.half()), TypeError, "gelu_mul: up must be float32 like gate, got float16"),
        (lambda x: gelu_mul(x, x.to("meta")), ValueError, "gelu_mul: up is on meta, gate on cpu"),
        (
            lambda x: silu_mul(x),
            ValueError,
            r"silu_mul: without up, gate must hold both .*got shape \(2, 9\)",
        ),
        (lambda x: silu_mul(x[:, :8], out=x), ValueError, r"silu_mul: out must be float32 \(2, 4\)"),
    ],
)
def test_errors_name_what_was_expected_and_what_came(call, error, message) -> None:
    with pytest.raises(error, match=message):
        call(torch.randn(2, 9))


@pytest.mark.parametrize("fn", [silu_mul, gelu_mul])
def test_empty_rows_may_lie_anywhere(fn) -> None:
    gate, up = torch.randn(2, 0, requires_grad=True), torch.randn(2, 0, 2)[..., 0].requires_grad_()
    assert up.stride() == (2, 2)
    assert [g.shape for g in torch.autograd.grad(fn(gate, up).sum(), [gate, up])] == [(2, 0), (2, 0)]
