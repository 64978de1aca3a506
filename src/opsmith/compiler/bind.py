"""What a step comes to once its sizes and its memory are known: calls of kernels, without the Python before them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


class _Unbound(Exception):
    """The function computes something that is no kernel."""


class _Rehearsal(TorchDispatchMode):
    """Keeps the calls of kernels, which only write to what they are given, and makes none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "opsmith" and not func._schema.returns:
            self.calls.append((func, tuple(args), dict(kwargs or {})))
            return None
        if not func.is_view:
            raise _Unbound
        return func(*args, **(kwargs or {}))


def kernel_calls(
    fn: Callable[..., Any], arguments: Mapping[str, Any], known: Callable[[torch.Tensor], bool]
) -> list[Call] | None:
    """The kernels that a function calls for these arguments, or None where it does more than that.

    Views it makes on the way are arguments of the calls. All tensors must be `known` to be at the same place, with
    the same sizes and strides, at every call.
    """
    if not all(known(value) for value in arguments.values() if isinstance(value, torch.Tensor)):
        return None
    rehearsal = _Rehearsal()
    try:
        with rehearsal:
            fn(**arguments)
    except _Unbound:
        return None
    calls = rehearsal.calls
    tensors = [v for _, args, kwargs in calls for v in (*args, *kwargs.values()) if _holds_tensor(v)]
    return calls if all(isinstance(v, torch.Tensor) and known(v) for v in tensors) else None


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(_holds_tensor(v) for v in value)
    return isinstance(value, torch.Tensor)
