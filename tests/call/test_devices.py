"""On a GPU everything that an operator allocates, and hands to a kernel, is on that GPU.

No GPU is needed to see it: on the meta device, which is no CPU either, an operator takes the same way to its kernels,
gradients included, and there are no values to compute. (Fake tensors that claim to be on a GPU stop a PyTorch built
without CUDA at the first gradient, or the first copy.)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import opsmith.ops  # noqa: F401  registers the cards
from opsmith.kernels import triton
from opsmith.measure.pool import tensors_of
from opsmith.operator import Make, Operator, registry
from opsmith.proof.verify import with_leaves

pytest.importorskip("triton")

CARDS = [card for card in registry().values() if card.schemas]


class Calls(TorchDispatchMode):
    """Keeps the names of the native operators that are called, and what was handed to them from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.strays: list[str] = []

    def see(self, what: str, *values: Any) -> None:
        found = {t.device.type for t in tensors_of(values)} - {"meta"}
        if found:
            self.strays.append(f"{what}: {', '.join(found)}")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "opsmith":
            name = func._schema.name.removeprefix("opsmith::")
            self.names.add(name)
            for argument, value in (*zip(func._schema.arguments, args, strict=False), *kwargs.items()):
                self.see(f"{name}, {getattr(argument, 'name', argument)}", value)
        return func(*args, **kwargs)


@pytest.fixture(autouse=True)
def kernels_for_meta(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks whether there is a kernel is answered as for a GPU."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("opsmith.ops.", "opsmith.call.")) and hasattr(module, "native"):
            monkeypatch.setattr(module, "native", lambda x, op, *more: triton.offers(op))


def ways(card: Operator) -> Iterator[Callable[..., Any]]:
    """The public function, and the function behind the kernels where the public one prefers something else."""
    yield card.function
    yield from (i.fn for i in card.implementations if i.name == "triton")


def run(fn: Callable[..., Any], inputs: tuple[Any, Any], calls: Calls) -> None:
    args, kwargs = tree_map_only(torch.Tensor, to_meta, inputs)
    leaves = [t for t in tensors_of((args, kwargs)) if t.requires_grad]
    with calls:
        results = list(tensors_of(fn(*args, **kwargs)))
        calls.see("results", results)
        asked = [t for t in results if t.requires_grad]
        if asked:
            seeds = [torch.empty_like(t) for t in asked]
            calls.see("gradients", torch.autograd.grad(asked, leaves, seeds, allow_unused=True))


def to_meta(t: torch.Tensor) -> torch.Tensor:
    """The same layout, and whether a gradient is asked for."""
    there = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
    return there.requires_grad_(t.requires_grad)


@pytest.mark.parametrize("card", CARDS, ids=[card.name for card in CARDS])
def test_all_is_on_the_device_of_the_input(card: Operator) -> None:
    calls = Calls()
    for sample in card.samples(Make(torch.bfloat16)):
        plain = (sample.args, dict(sample.kwargs))
        for fn in ways(card):
            with torch.no_grad():
                run(fn, plain, calls)
        if card.differentiable:
            *leaves, _ = with_leaves(*plain)
            run(card.function, tuple(leaves), calls)
    assert calls.strays == []
    offered = {
        name for name in (schema.partition("(")[0] for schema in card.schemas) if triton.offers(name) is True
    }
    assert calls.names >= offered - {"linear_pack"}  # linear's, and on a GPU called for linear_rope alone


def test_a_tensor_from_elsewhere_is_found() -> None:
    def forgets_the_device(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty(x.shape)
        torch.ops.opsmith.gelu.default(x, None, False, y=y)
        return y

    calls = Calls()
    run(forgets_the_device, ((torch.ones(3, 4),), {}), calls)
    assert calls.strays == ["gelu, y: cpu", "results: cpu"]
