"""The kernels in Ascend C as implementations: for NPUs, through torch_npu. Emulated in tests, never run here."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from opsmith.operator import Implementation, Supports

__all__ = ["on_npu"]

NAMESPACE = "opsmith_npu"


def on_npu(
    stem: str,
    prepare: Callable[..., Any] | None = None,
    supports: Callable[..., Supports] = lambda *args, **kwargs: True,
) -> Implementation:
    """The kernel `kernels/ascend/STEM.cpp` as an implementation, on tensors of torch_npu.

    A library that was built where CANN is, and loaded (`torch.ops.load_library`), gives it to the dispatcher as
    `opsmith_npu::STEM(Tensor?[] inputs, Tensor(a!)[] outputs, float[] sizes) -> ()`: a launch of the kernel with what
    its tiling function makes of the sizes.

    >>> on_npu("silu_mul").accepts(torch.randn(2, 8))
    'ascend needs torch_npu, which is not installed; here its kernel only runs emulated, in tests (docs/ascend.md)'

    Args:
        stem: of the kernel.
        prepare: called with the kernel's `launch` and the operator's arguments, where they need preparing.
        supports: True, or the reason why the kernel does not take a call.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        launch = importlib.import_module(f"opsmith.kernels.ascend.{stem}").launch
        call = launch(*args, **kwargs) if prepare is None else prepare(launch, *args, **kwargs)
        if not call.empty:
            kernel = getattr(getattr(torch.ops, NAMESPACE), stem).default
            outputs = [
                t for t in call.outputs.values() if t is not None
            ]  # one not wanted is the last, and left out
            kernel(list(call.inputs.values()), outputs, [float(n) for n in call.sizes])
        return call.result

    return Implementation("ascend", run, "npu", supports, lambda: _available(stem))


def _available(stem: str) -> Supports:
    if not _torch_npu():
        return (
            "ascend needs torch_npu, which is not installed; here its kernel only runs emulated, in tests "
            "(docs/ascend.md)"
        )
    if not hasattr(getattr(torch.ops, NAMESPACE), stem):
        return f"no library that was loaded has {NAMESPACE}::{stem}: docs/ascend.md says how one is built with CANN"
    return True


@functools.cache
def _torch_npu() -> bool:
    return importlib.util.find_spec("torch_npu") is not None
