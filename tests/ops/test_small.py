"""Calls of a few elements are PyTorch's: its kernel is done before a call of ours has begun."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import opsmith
from opsmith.ops.common import SMALL, _small


class Recorded(TorchDispatchMode):
    """The names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


CALLS = {
    "layer_norm": lambda rows: opsmith.ops.layer_norm(torch.randn(rows, 64)),
    "softmax": lambda rows: opsmith.ops.softmax(torch.randn(rows, 64)),
    "gelu": lambda rows: opsmith.ops.gelu(torch.randn(rows, 64)),
    # Without a gradient, PyTorch's gather has nothing to gain until results leave the cache.
    "embedding": lambda rows: opsmith.ops.embedding(
        torch.arange(rows) % 8, torch.randn(8, 64, requires_grad=True)
    ),
    "attention": lambda rows: opsmith.ops.attention(*torch.randn(3, 1, 1, rows, 64)),
}


@pytest.mark.parametrize("name", list(CALLS))
def test_only_small_calls_go_to_pytorch(name: str) -> None:
    token = _small.set(SMALL)
    try:
        for rows, ours in ((2, False), (SMALL // 64 + 1, True)):
            with Recorded() as seen:
                CALLS[name](rows)
            assert any(n.startswith("opsmith.") for n in seen.names) is ours
    finally:
        _small.reset(token)
