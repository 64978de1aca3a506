"""Ascend NPUs for opsmith: kernels in Ascend C, and an emulation that runs the very same files on a CPU.

opsmith asks `backend.BACKEND`, which loads the rest, and PyTorch, when it is needed.
"""

import functools
import importlib.util
from pathlib import Path

__all__ = ["SHARED", "SOURCES", "torch_npu"]

SOURCES = Path(__file__).parent / "kernels"
SHARED = SOURCES / "shared"  # headers


@functools.cache
def torch_npu() -> bool:
    """Whether the package is installed through which PyTorch reaches an NPU."""
    return importlib.util.find_spec("torch_npu") is not None
