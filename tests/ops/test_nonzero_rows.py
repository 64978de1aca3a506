"""Gradients with rows of zeros, which backward passes leave out: which rows they are, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from opsmith.measure import ulp
from opsmith.ops import attention, linear
from opsmith.ops.linear import ACTIVATIONS
from opsmith.ops.nonzero_rows import nonzero_rows


def _some(rows: int, n: int, keep: float = 0.15) -> torch.Tensor:
    return torch.randn(rows, n) * (torch.rand(rows, 1) < keep)


def _found(x: torch.Tensor) -> list[int] | None:
    rows = nonzero_rows(x)
    return None if rows is None else rows.tolist()


@pytest.mark.parametrize("n", [1, 15, 16, 17, 80, 81, 300])
def test_a_row_counts_if_one_number_of_it_does(n: int) -> None:
    for at in {0, n // 2, n - 1}:
        x = torch.zeros(50, n)
        x[7, at], x[9, at], x[49, at] = 1e-45, float("nan"), -float("inf")
        x[11, at] = -0.0
        assert _found(x) == [7, 9, 49]
        assert _found(torch.cat((x, x), 1)[:, :n]) == [7, 9, 49]  # rows with gaps between them


def test_most_rows_are_not_chosen_from() -> None:
    x = torch.ones(40, 8)
    assert _found(x) is None
    x[:5] = 0
    assert _found(x) is None
    x[:20] = 0
    assert _found(x) == list(range(20, 40))
    assert _found(torch.zeros(40, 8)) == [0]
    assert _found(torch.zeros(1, 8)) is None
    assert _found(torch.zeros(40, 8, dtype=torch.float64)) is None


def _check(
    mine: Callable[..., torch.Tensor], theirs: Callable[..., torch.Tensor], dy: torch.Tensor, *inputs: Any
) -> None:
    """The gradients' errors are within twice PyTorch's plus one unit in the last place."""

    def gradients(fn: Callable[..., torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in inputs]
        return torch.autograd.grad(fn(*leaves), leaves, dy.to(dtype))

    exact = gradients(theirs, torch.float64)
    pairs = zip(exact, gradients(theirs, torch.float32), gradients(mine, torch.float32), strict=True)
    for right, them, me in pairs:
        allowed = 2 * (them.double() - right).abs().max() + ulp(torch.float32, float(right.abs().max()))
        assert (me.double() - right).abs().max() <= allowed


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("keep", [0.0, 0.02, 0.15, 0.6])
def test_a_linear_layers_gradients(keep: float, activation: str | None) -> None:
    x, w, b = torch.randn(1000, 65), torch.randn(90, 65) * 0.1, torch.randn(90)
    residual = torch.randn(1000, 90)

    def eager(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, w, b)
        return (y if activation is None else ACTIVATIONS[activation](y)) + residual

    def mine(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return linear(x, w, b, activation=activation, residual=residual)

    _check(mine, eager, _some(1000, 90, keep), x, w, b, residual)


def test_gradients_of_a_transposed_weight() -> None:
    x, w, b = torch.randn(1600, 64), torch.randn(64, 70) * 0.1, torch.randn(70)
    _check(
        lambda x, w, b: linear(x, w.t(), b), lambda x, w, b: F.linear(x, w.t(), b), _some(1600, 70), x, w, b
    )


@pytest.mark.parametrize("activation", [None, "gelu"])
def test_a_second_backward_finds_what_the_first_one_did(activation: str | None) -> None:
    x, w = torch.randn(1600, 64, requires_grad=True), torch.randn(48, 64, requires_grad=True)
    y, dy = linear(x, w, activation=activation), _some(1600, 48)
    first = torch.autograd.grad(y, (x, w), dy, retain_graph=True)
    second = torch.autograd.grad(y, (x, w), dy)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(first[0].ne(0).any(1), dy.ne(0).any(1))  # what is zero stays zero


@pytest.mark.parametrize("heads", [(3, 3), (4, 2)])
@pytest.mark.parametrize("layout", ["heads inside", "heads outside", "one tensor"])
@pytest.mark.parametrize("keep", [0.0, 0.15])
def test_attentions_gradients(heads: tuple[int, int], layout: str, keep: float) -> None:
    (h, hkv), batch, length, keys, d = heads, 3, 70, 90, 32
    if layout == "one tensor":
        keys, hkv = length, h
        q, k, v = torch.randn(batch, length, 3, h, d).transpose(1, 3).unbind(2)
    else:
        q, k, v = torch.randn(batch, length, h, d), *torch.randn(2, batch, keys, hkv, d)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if layout == "heads outside":
            q, k, v = (t.contiguous() for t in (q, k, v))
    dy = _some(batch * length, h * d, keep).view(batch, length, h, d).transpose(1, 2)

    def eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    _check(attention, eager, dy, q, k, v)


def test_what_is_zero_stays_zero_before_attention() -> None:
    q, k, v = (t.transpose(1, 2).requires_grad_() for t in torch.randn(3, 2, 64, 3, 32))
    dy = _some(128, 96).view(2, 64, 3, 32).transpose(1, 2)
    (dq,) = torch.autograd.grad(attention(q, k, v), (q,), dy)
    assert torch.equal(dq.transpose(1, 2).ne(0).any(-1), dy.transpose(1, 2).ne(0).any(-1))
