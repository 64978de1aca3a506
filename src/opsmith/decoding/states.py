"""What a cache in blocks gives back for keys and values: tensors that are read together when somebody looks at them.

opsmith's attention reads the blocks where they lie. Whoever else computes with what `update` returned, PyTorch's
attention or a model's own code, gets the keys and values of all columns in one tensor, as from any other cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

# What is known without the numbers.
_PROPERTIES = ("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "layout")
_METHODS = ("size", "dim", "numel", "is_floating_point", "__len__")
_KNOWN = {getattr(Tensor, name).__get__ for name in _PROPERTIES}
_KNOWN |= {getattr(Tensor, name) for name in _METHODS}


class PagedStates(Tensor):
    """Keys or values of a layer, `[batch, heads, columns, width]`, which lie in blocks."""

    together: Callable[[], Tensor]
    source: Any

    @classmethod
    def of(cls, new: Tensor, columns: int, together: Callable[[], Tensor], source: Any) -> PagedStates:
        """For so many columns, the last of them `new`.

        Args:
            together: gives all of them in one tensor.
            source: for whoever reads the blocks.
        """
        # One number that is none stands for all of them: what got past `__torch_function__` would not go unnoticed.
        one = torch.full((), math.nan, dtype=new.dtype, device=new.device)
        states = one.expand(*new.shape[:2], columns, new.shape[-1]).as_subclass(cls)
        states.together, states.source = together, source
        return states

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _KNOWN:
            return super().__torch_function__(func, types, args, kwargs)
        args, kwargs = tree_map_only(PagedStates, lambda states: states.together(), (args, kwargs or {}))
        return func(*args, **kwargs)
