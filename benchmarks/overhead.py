"""What a small call costs: every operator on one row, its public function against eager PyTorch, in microseconds.

    python benchmarks/overhead.py [--only silu_mul,gelu] [--dtype bfloat16] [--seconds 0.5]

"kernel" is the time of the dispatcher calls that the public function makes, made alone with the same arguments;
"above" is what the public function costs beyond that: checks, views, the memory for the result.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import opsmith.ops  # noqa: F401  registers the cards
from opsmith import measure
from opsmith.measure.pool import tensors_of
from opsmith.operator import Make, Operator, Sample, registry
from opsmith.ops.common import short

MOST = 200_000  # elements of the largest input: beyond this the kernel's own time hides the rest


class Recorder(TorchDispatchMode):
    """Keeps the calls that compute something: no views, no allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not func.is_view and "empty" not in str(func) and "detach" not in str(func):
            self.calls.append(partial(func, *args, **kwargs))
        return result


def one_row(card: Operator, dtype: torch.dtype) -> Iterator[Sample]:
    """The card's samples and workloads that are one row or one token, smallest first."""
    found = {}
    for sample in (*card.samples(Make(dtype)), *(card.workloads(Make(dtype)) if card.workloads else ())):
        first = next(iter(tensors_of(sample.args)))
        rows = first.numel() // first.shape[-1] if first.dim() and first.shape[-1] else 0
        if rows == 1 and first.is_contiguous():
            found[tuple(first.shape), str(sample.kwargs)] = sample
    largest = partial(max, default=0)
    sizes = {key: largest(t.numel() for t in tensors_of(s.args)) for key, s in found.items()}
    yield from (found[key] for key in sorted(found, key=sizes.__getitem__) if sizes[key] <= MOST)


def times(card: Operator, sample: Sample, seconds: float) -> dict[str, float]:
    """Microseconds of a call: ours, eager's, and that of the kernels alone."""
    args, kwargs = sample.args, dict(sample.kwargs)
    with Recorder() as seen:
        card.function(*args, **kwargs)

    def kernels() -> None:
        for call in seen.calls:
            call()

    contestants = {
        "ours": partial(card.function, *args, **kwargs),
        "eager": partial(card.eager, *args, **kwargs),
        "kernel": kernels,
    }
    taken = measure.compare(contestants, budget_s=seconds, rounds=60, warmup=50)
    return {name: taken.median(name) * 1e6 for name in contestants}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="names of operators, separated by commas")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each row")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    only = set(options.only.split(",")) - {""}
    print(
        f"{'':32}{'ours':>8}{'eager':>8}{'ratio':>8}{'kernel':>8}{'above':>8}   {short(dtype)}, microseconds"
    )
    with torch.no_grad():
        for card in registry().values():
            if only and card.name not in only:
                continue
            for sample in one_row(card, dtype):
                t = times(card, sample, options.seconds)
                name = f"{card.name} {sample.name}"
                print(
                    f"{name:32}{t['ours']:8.2f}{t['eager']:8.2f}{t['eager'] / t['ours']:8.2f}"
                    f"{t['kernel']:8.2f}{t['ours'] - t['kernel']:8.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
