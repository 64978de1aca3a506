"""What an entry of the dispatcher costs when it is called by itself, where the card's own cost does not say.

The profiler sees such a call as shapes without values, under the names of the entry's schema; a card's `entries` names
the formula. Tensors are on the meta device, and None where a call left them out.
"""

from __future__ import annotations

from typing import Any

import torch

from opsmith.call.layouts import nbytes
from opsmith.operator import Cost


def _logits(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> float:
    return 2.0 * target.numel() * weight.shape[0] * weight.shape[1] + 9.0 * target.numel() * weight.shape[0]


def linear_cross_entropy_and_gradients(
    hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, **rest: Any
) -> Cost:
    """Logits once, and a product of their size for each gradient that is asked for."""
    return _with_gradients(hidden, weight, target, rest)


def linear_cross_entropy_backward(
    hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, **rest: Any
) -> Cost:
    """The same: the logits are computed again."""
    return _with_gradients(hidden, weight, target, rest)


def _with_gradients(
    hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, rest: dict[str, Any]
) -> Cost:
    wanted = sum(rest.get(name) is not None for name in ("dhidden", "dweight"))
    tensors = [t for t in rest.values() if isinstance(t, torch.Tensor)]
    products = 2.0 * target.numel() * weight.shape[0] * weight.shape[1] * wanted
    return Cost(_logits(hidden, weight, target) + products, nbytes(hidden, weight, target, *tensors))
