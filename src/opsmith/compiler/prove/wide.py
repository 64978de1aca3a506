"""Arithmetic in float64: arguments widened, and code that widens all it computes with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_WIDE = {
    torch.float32: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float16: torch.float64,
    torch.complex64: torch.complex128,
}


def widened(value: Any) -> Any:
    """Arguments with every dtype of fewer bits replaced by float64, or by that of complex numbers of such."""
    if isinstance(value, torch.dtype):
        return _WIDE.get(value, value)
    if isinstance(value, tuple | list):
        return type(value)(widened(v) for v in value)
    if isinstance(value, dict):
        return {k: widened(v) for k, v in value.items()}
    if isinstance(value, Tensor) and value.dtype in _WIDE:
        return value.to(_WIDE[value.dtype])
    return value


class Exact(TorchFunctionMode):
    """Every call is on numbers in float64, weights too; casts to less are casts to it, as methods or as dtypes."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.float, Tensor.half, Tensor.bfloat16):
            func = Tensor.double
        return func(*widened(args), **widened(kwargs or {}))
