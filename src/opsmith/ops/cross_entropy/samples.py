"""The work of a cross-entropy, the inputs worth trying, and the sizes that models use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from opsmith.operator import Cost, Make, Sample


def cost(logits: Tensor, target: Tensor, *, reduction: str = "mean", **options: Any) -> Cost:
    dtype = options.get("dtype") or logits.dtype
    results = (target.numel() if reduction == "none" else 1) * (torch.finfo(dtype).bits // 8)
    # Ignored rows need not be read, but how many there are is not known here: they are counted.
    return Cost(9.0 * logits.numel(), logits.numel() * logits.element_size() + target.nbytes + results)


def _targets(make: Make, *shape: int, high: int, ignored: float = 0.0, ignore_index: int = -100) -> Tensor:
    target = make.ids(*shape, high=high)
    return target.masked_fill(make.mask(*shape, keep=ignored), ignore_index)


def samples(make: Make) -> Iterator[Sample]:
    for rows, n in ((1, 1), (3, 7), (17, 33), (64, 512), (5, 4097), (2, 32003)):
        yield Sample(f"{rows}x{n}", (make(rows, n, scale=2.0), make.ids(rows, high=n)))
    x, target = make(2, 9, 130, scale=3.0), _targets(make, 2, 9, high=130, ignored=0.4)
    yield Sample("ignored", (x, target))
    yield Sample("sum", (x, target), {"reduction": "sum"})
    yield Sample("none", (x, target), {"reduction": "none"})
    yield Sample("label smoothing", (x, target), {"label_smoothing": 0.1})
    others = _targets(make, 2, 9, high=130, ignored=0.4, ignore_index=7)
    yield Sample("all options", (x, others), {"label_smoothing": 0.2, "z_loss": 1e-3, "ignore_index": 7})
    yield Sample("z-loss", (make(6, 200), make.ids(6, high=200)), {"z_loss": 1e-4, "reduction": "none"})
    yield Sample("logits near 1e4", (make(4, 300, shift=1e4), make.ids(4, high=300)), {"reduction": "none"})
    yield Sample(
        "logits up to 1e4", (make(4, 3000, scale=3e3), make.ids(4, high=3000)), {"reduction": "none"}
    )
    rising = make(3, 5000) + torch.linspace(-40, 400, 5000, dtype=torch.float64).to(make(1)).expand(3, 5000)
    yield Sample("logits that rise", (rising, make.ids(3, high=5000)), {"reduction": "none"})
    # Rows whose target stands far above the rest: a loss near zero.
    level, chosen = make(5, 90), make.ids(5, high=90)
    peaked = level.scatter_add(1, chosen[:, None], torch.full((5, 1), 12.0).to(level))
    yield Sample("confident", (peaked, chosen), {"reduction": "none"})
    yield Sample("float32 loss", (x, target), {"dtype": torch.float32})
    yield Sample("int32 targets", (make(8, 65), make.ids(8, high=65).int()))
    yield Sample("vector", (make(19), make.ids(high=19)))
    yield Sample("strided", (make(60, 12).t(), make.ids(12, high=60)))
    yield Sample("sliced rows, strided targets", (make(8, 200)[:, 20:84], make.ids(8, 3, high=64)[:, 1]))
    yield Sample("empty", (make(0, 16), make.ids(0, high=16)), {"reduction": "sum"})


def workloads(make: Make) -> Iterator[Sample]:
    yield Sample("4096x32000", (make(4096, 32000), _targets(make, 4096, high=32000, ignored=0.05)))
    yield Sample("512x128256", (make(512, 128256), make.ids(512, high=128256)))
    yield Sample("1x32000", (make(1, 32000), make.ids(1, high=32000)))
