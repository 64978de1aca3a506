"""Products in a dtype that the processor has no unit for: how much longer PyTorch takes, and how it need not."""

from __future__ import annotations

import functools
import timeit
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

_SIZE = 256
_SLOW = 3.0  # times as long as in float32: no unit is that slow
_NAMES = ("addmm", "baddbmm", "bmm", "mm", "_scaled_dot_product_flash_attention_for_cpu")
_PRODUCTS = frozenset(getattr(torch.ops.aten, name).default for name in _NAMES)


@functools.cache
def slowness(dtype: torch.dtype) -> float:
    """How many times as long as in float32 a linear layer's product takes PyTorch in `dtype` here, measured once.

    >>> slowness(torch.float32)
    1.0
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return 1.0
    one, threads = torch.ones(_SIZE, _SIZE), torch.get_num_threads()
    torch.set_num_threads(1)  # two that wait for each other beside other work say nothing about products
    try:
        return _seconds(one.to(dtype)) / _seconds(one)
    finally:
        torch.set_num_threads(threads)


def _seconds(x: Tensor) -> float:
    return min(timeit.repeat(lambda: torch.mm(x, x.t()), number=1, repeat=4))


def lacks_unit(dtype: torch.dtype) -> bool:
    """Whether PyTorch's products in `dtype` are slower here than such products in float32 by far."""
    return slowness(dtype) > _SLOW


def without_unit(dtype: torch.dtype) -> str:
    """A sentence that says so of a dtype, or nothing."""
    if not lacks_unit(dtype):
        return ""
    name, times = str(dtype).removeprefix("torch."), f"{slowness(dtype):.0f} times as long as in float32"
    return f"this processor has no unit for products in {name}: PyTorch takes {times}"


class Widened(TorchDispatchMode):
    """Computes PyTorch's products of 16-bit numbers on the CPU in float32 where no unit multiplies such numbers.

    Their sums are float32 in either case, so that results are the same but for their order; not for what is timed.

    >>> with Widened():
    ...     (torch.eye(2, dtype=torch.bfloat16) @ torch.ones(2, 2, dtype=torch.bfloat16)).dtype
    torch.bfloat16
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _PRODUCTS or args[0].device.type != "cpu" or not lacks_unit(dtype := args[0].dtype):
            return func(*args, **kwargs)
        widen = functools.partial(tree_map_only, Tensor, lambda t: t.float() if t.dtype == dtype else t)
        result = func(*widen(args), **widen(kwargs))
        return (result[0].to(dtype), *result[1:]) if isinstance(result, tuple) else result.to(dtype)
