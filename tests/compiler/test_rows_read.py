"""Of a product only the rows that are read: the logits of the last position, where nobody asks for others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import opsmith

QUIET = opsmith.Config(tune=False, inductor=False)


class Head(nn.Module):
    def __init__(self, read: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(24)
        self.head = nn.Linear(24, 90)
        self.read = read

    def forward(self, x: torch.Tensor) -> Any:
        return self.read(self.head(self.norm(x)))


def made(read: Callable[[torch.Tensor], Any]) -> Any:
    torch.manual_seed(0)
    return Head(read).eval()


def rows(model: Any) -> list[str]:
    """What each product is called with."""
    steps = [s for shape in model.opsmith.plan.shapes for s in shape.steps if s.operator == "linear"]
    return [s.signature.partition(" x=")[2] for s in steps]


@pytest.mark.parametrize(
    ("read", "x"),
    [
        (lambda y: y[:, -1], "cpu:float32[2,24]@120,1"),
        (lambda y: y[:, -1:], "cpu:float32[2,1,24]@120,24,1"),
        (lambda y: y[:, -1:, :].softmax(-1), "cpu:float32[2,1,24]@120,24,1"),
        (lambda y: y[1, ::2], "cpu:float32[3,24]@48,1"),
        (lambda y: y[:, :3], "cpu:float32[2,3,24]@120,24,1"),
    ],
)
def test_only_these_rows_are_multiplied(read: Callable[[torch.Tensor], Any], x: str) -> None:
    model, given = made(read), torch.randn(2, 5, 24)
    with torch.no_grad():
        before = model(given)
        opsmith.optimize(model, given, config=QUIET)
        assert rows(model) == [x]
        assert torch.allclose(model(given), before, rtol=1e-5, atol=1e-5)
        other = torch.randn(3, 9, 24)
        assert torch.allclose(model(other), model.forward(other), rtol=1e-5, atol=1e-5)
    mine = torch.autograd.grad(model(given).square().sum(), model.head.weight)[0]
    assert torch.allclose(
        mine, torch.autograd.grad(model.forward(given).square().sum(), model.head.weight)[0], atol=1e-4
    )


@pytest.mark.parametrize(
    "read",
    [
        lambda y: (y[:, -1], y),  # all are returned
        lambda y: y[:, -1] + y[:, 0],  # two rows are read
        lambda y: y[..., :7],  # columns
        lambda y: y[..., 3],
    ],
)
def test_where_more_is_read_all_rows_are_multiplied(read: Callable[[torch.Tensor], Any]) -> None:
    model, given = made(read), torch.randn(2, 5, 24)
    opsmith.optimize(model, given, config=QUIET)
    assert rows(model) == ["cpu:float32[2,5,24]"]
    with torch.no_grad():
        mine, other = model(given), model.forward(given)
    torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
