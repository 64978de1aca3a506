"""What packed layers take beside their owners' weights: timed at the rows of the examples, alike ones together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from opsmith import measure
from opsmith.compiler.choose.ranks import SharedTimes
from opsmith.compiler.kept import TuningCache
from opsmith.measure.pages import Read
from opsmith.ops.packed_linear.module import PackedLinear

_WORK = 4e9  # multiplications and additions of a round: less than a tenth of a second
_BUDGET = 0.1  # seconds for layers that are alike

Call = tuple[
    PackedLinear, Any, int, torch.dtype
]  # a packed layer, whose calls it takes over, an input's rows and dtype


@dataclass(frozen=True)
class Compared:
    """Seconds of all packed layers at some rows, each called by itself, and of the layers as they were."""

    rows: int
    layers: int
    packed: float
    own: float

    def __str__(self) -> str:
        return (
            f"{self.layers} packed layers on {self.rows} row{'s' * (self.rows > 1)}: {self.packed * 1e3:.3g} ms, with "
            f"their own weights {self.own * 1e3:.3g} ms: {self.own / self.packed:.2f}x"
            + (", slower than the model was" if self.packed > self.own else "")
        )


def compare(calls: Iterable[Call], cache: TuningCache | SharedTimes) -> list[Compared]:
    """The times, by rows; of many layers or rows that are alike, those of as many as are worth the time."""
    alike: dict[tuple[Any, ...], list[Call]] = {}
    for call in calls:
        packed, owner, rows, dtype = call
        weight = owner.weight
        kind = (rows, weight.shape, weight.dtype, dtype, packed.format, packed.group_size, type(owner))
        alike.setdefault(kind, []).append(call)
    found: dict[int, Compared] = {}
    read = Read()
    for kind, layers in alike.items():
        rows = kind[0]
        work = 2.0 * rows * layers[0][1].weight.numel()
        share = max(1.0, work / _WORK)  # of rows that are not multiplied
        some = layers[: max(1, int(_WORK / work))]
        fewer = max(1, int(rows / share))
        key = f"packed {kind[1:]} x {len(some)} at {fewer} rows"
        times = cache.get(key) or {}
        if times.keys() != {"packed", "own"}:
            times = cache.settled(key, *_measure(some, fewer))
            for call in some:
                read.add(call[1].weight)
        scale = share * len(layers) / len(some)
        before = found.get(rows, Compared(rows, 0, 0.0, 0.0))
        found[rows] = Compared(
            rows,
            before.layers + len(layers),
            before.packed + times["packed"] * scale,
            before.own + times["own"] * scale,
        )
    read.give_back()
    return list(found.values())


def _measure(layers: list[Call], rows: int) -> tuple[dict[str, float], bool]:
    """Seconds of one call of each layer, one behind the other: their weights come from memory as they do in a model."""

    def run(calls: Sequence[Callable[[], Any]]) -> None:
        for call in calls:
            call()

    with torch.no_grad():
        x = torch.randn(rows, layers[0][0].in_features).to(layers[0][1].weight.device, layers[0][3])
        packed = [partial(call[0].forward, x) for call in layers]
        own = [partial(type(call[1]).forward, call[1], x) for call in layers]
        result = measure.quick({"packed": partial(run, packed), "own": partial(run, own)}, budget_s=_BUDGET)
    steady = all(result.spread(name) <= measure.CONCLUDES_NOTHING for name in result.samples)
    return {name: min(times) for name, times in result.samples.items()}, steady
