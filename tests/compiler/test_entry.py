"""How calls reach graphs: what one model captures is no other's, and it may capture as often as it changes."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

import opsmith

UNTIMED = opsmith.Config(tune=False, inductor=False)


class Changing(nn.Module):
    """Whose arithmetic is another one for each number of repetitions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.repetitions = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.repetitions):
            x = self.norm(x) + 1
        return x


def optimized() -> Any:
    return opsmith.optimize(Changing().eval(), torch.randn(2, 8), config=UNTIMED)


@torch.no_grad()
def graphs_after(model: Any, changes: int) -> int:
    x = torch.randn(2, 8)
    for repetitions in range(1, 1 + changes):
        model.repetitions = repetitions
        for _ in range(2):  # sizes seen before
            torch.testing.assert_close(model(x), model._call_impl(x))
    return len(model.opsmith.graphs)


@torch._dynamo.config.patch(recompile_limit=3)
def test_no_model_uses_up_what_another_may_capture() -> None:
    """Dynamo keeps graphs by code, and after so many of them captures none any more."""
    others = [optimized() for _ in range(4)]
    for model in (*others, optimized()):
        assert graphs_after(model, 2) == 2


@pytest.mark.skipif(
    "recompile_limit" not in inspect.signature(torch.compile).parameters,
    reason="this PyTorch has one limit for all functions",
)
def test_a_model_that_changes_often_is_captured_as_often() -> None:
    model = optimized()
    assert graphs_after(model, 12) == 12
