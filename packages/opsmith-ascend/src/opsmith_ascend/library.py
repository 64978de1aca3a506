"""The kernels in Ascend C as implementations of opsmith's cards: for NPUs, through torch_npu."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import opsmith_ascend
from opsmith.implementation import Implementation, Supports
from opsmith.ops import MLACache
from opsmith_ascend import launches
from opsmith_ascend.launches import Launch

NAMESPACE = "opsmith_npu"


def implementations(operator: str) -> Sequence[Implementation]:
    """The kernel `kernels/OPERATOR.cpp` as an implementation, on tensors of torch_npu.

    A library that was built where CANN is, and loaded (`torch.ops.load_library`), gives it to the dispatcher as
    `opsmith_npu::OPERATOR(Tensor?[] inputs, Tensor(a!)[] outputs, float[] sizes) -> ()`: a launch of the kernel with
    what its tiling function makes of the sizes.

    >>> implementations("silu_mul")[0].accepts(torch.randn(2, 8))
    'ascend needs torch_npu, which is not installed; here its kernel only runs emulated, in tests (docs/ascend.md)'
    """
    if operator not in launches.__all__:
        return ()
    launch: Callable[..., Launch] = _LAUNCHES.get(operator) or getattr(launches, operator)

    def run(*args: Any, **kwargs: Any) -> Any:
        call = launch(*args, **kwargs)
        if not call.empty:
            kernel = getattr(getattr(torch.ops, NAMESPACE), operator).default
            outputs = [
                t for t in call.outputs.values() if t is not None
            ]  # one not wanted is the last: left out
            kernel(list(call.inputs.values()), outputs, [float(n) for n in call.sizes])
        return call.result

    supports = _SUPPORTS.get(operator, lambda *args, **kwargs: True)
    return (Implementation("ascend", run, "npu", supports, lambda: _available(operator)),)


def _available(operator: str) -> Supports:
    if not opsmith_ascend.torch_npu():
        return (
            "ascend needs torch_npu, which is not installed; here its kernel only runs emulated, in tests "
            "(docs/ascend.md)"
        )
    if not hasattr(getattr(torch.ops, NAMESPACE), operator):
        return f"no library that was loaded has {NAMESPACE}::{operator}: docs/ascend.md says how one is built with CANN"
    return True


def _softmax(x: Tensor, dim: int = -1, *, mask: Any = None, **options: Any) -> Supports:
    if dim not in (-1, x.dim() - 1):
        return f"the kernel works on the last dimension, not on dim {dim}"
    return mask is None or mask.dtype in (torch.bool, x.dtype) or "the mask must be boolean or of x's type"


def kv_form(
    a: Tensor,
    gamma2: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    slot_mapping: Tensor,
    *,
    mode: str,
    blocks: int,
    block_size: int,
    rope: int,
    **options: Any,
) -> Launch:
    """The card's form of the call, whose result is a fresh cache."""
    cache = MLACache.allocate(
        mode, blocks, block_size, kv_lora=gamma2.shape[0], rope=rope, dtype=a.dtype, device=a.device
    )
    return launches.mla_kv_epilogue(a, gamma2, cos, sin, slot_mapping, cache, **options)


_LAUNCHES: dict[str, Callable[..., Launch]] = {"mla_kv_epilogue": kv_form}
_SUPPORTS: dict[str, Callable[..., Supports]] = {"softmax": _softmax}
