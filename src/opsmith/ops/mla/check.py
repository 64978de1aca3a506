"""What MLA's operators refuse of one argument, whatever it is of: a weight, a table, a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opsmith.call.arguments import check_device, one_of, short
from opsmith.call.dispatch import needs_grad


def check_tensor(
    op: str, name: str, t: Any, shape: Sequence[int], what: str, like: Tensor, of: str, *dtypes: torch.dtype
) -> None:
    """Refuse what is no tensor of this shape, on the device of `like` and in its dtype, or in one of those given."""
    if not isinstance(t, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor {tuple(shape)} ({what}), got {type(t).__name__}")
    if tuple(t.shape) != tuple(shape):
        raise ValueError(f"{op}: {name} must have shape {tuple(shape)} ({what}), got {tuple(t.shape)}")
    if t.dtype not in (dtypes or (like.dtype,)):
        known = one_of(*dtypes) if dtypes else f"{short(like.dtype)} like {of}"
        raise TypeError(f"{op}: {name} must be {known}, got {short(t.dtype)}; cast it first")
    check_device(op, t, like, name, of)


def check_inference(op: str, *tensors: Tensor | None) -> None:
    """Quantized forms have no gradient, and say so."""
    if needs_grad(*tensors):
        raise ValueError(
            f"{op}: the quantized form is inference only, and an argument requires gradients; call it under "
            "torch.no_grad(), or train the unquantized form"
        )
