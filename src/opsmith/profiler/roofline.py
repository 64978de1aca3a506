"""What this machine reaches at best, measured in the run it judges, and how far from that each row is.

Bandwidth is measured at three footprints, because an operator whose data the last one has left in the cache is not
bound by memory. A row is judged by the roof of the smallest footprint that holds its data.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from opsmith import measure
from opsmith.profiler.data import ATTENTION, FRAMEWORK, LOSS, MATMUL, Row

# Bytes a block: in a core's own cache, in the shared one, and beyond them all (None: as `measure` has it).
_FOOTPRINTS = {"near cache": 1 << 18, "far cache": 1 << 22, "memory": None}
_ROUNDS_S = 0.25
# A row is bound by what takes its least time; one that takes several times that, and is short, by its start.
_SHORT = 20e-6
_FAR = 3.0


class Roofs:
    """The roofs of one run: bytes per second by footprint, operations per second by dtype, seconds of a call."""

    def __init__(self, device: str = "cpu"):
        self.device = device
        self.rates: dict[str, float] = {}

    def measure(self, dtypes: Iterable[str]) -> None:
        """Measure once more, and keep the best: others may have been at work the last time."""
        for name, block in _FOOTPRINTS.items():
            found = _measured(self.device, ("read", "copy", "update"), _ROUNDS_S, block)
            self._keep(name, found.bandwidth("best", peak=True))
        wanted = [kind for d in dtypes if (kind := f"matmul {d}") in measure.KINDS]
        if wanted:
            for kind, roof in _measured(self.device, wanted, 2 * _ROUNDS_S).by_kind.items():
                self._keep(kind, roof.peak)
        self._keep("calls", 1 / _call_seconds(self.device))

    def _keep(self, name: str, rate: float) -> None:
        self.rates[name] = max(self.rates.get(name, 0.0), rate)

    def bandwidth(self, size: float) -> float | None:
        """Bytes per second for an operator that moves so many; None where unknown.

        What fits into a near cache fits into a far one: the probes of small blocks spend most of their time on calls.
        """
        rates = [
            self.rates[name]
            for name, block in _FOOTPRINTS.items()
            if name in self.rates and (block is None or size <= block)
        ]
        return max(rates, default=None)

    def compute(self, dtype: str) -> float | None:
        """Operations per second of a matmul in this dtype; None where no library here was measured for it."""
        return self.rates.get(f"matmul {dtype}")

    @property
    def call(self) -> float:
        """Seconds that PyTorch takes for an operator on one element."""
        return 1 / self.rates["calls"] if self.rates.get("calls") else 0.0


def _measured(device: str, kinds: Sequence[str], seconds: float, block: int | None = None) -> measure.Roofs:
    probes = measure.RoofProbes(kinds, block_bytes=block, device=device)
    limits: dict[str, Any] = {"rounds": 8, "min_rounds": 2, "warmup": 1, "budget_s": seconds}
    found = measure.compare({}, roofs=probes, device=device, **limits).roofs
    assert found is not None
    return found


def _call_seconds(device: str) -> float:
    x = torch.zeros(1, device=device)
    result = measure.compare({"one element": x.neg}, rounds=8, min_rounds=3, budget_s=0.05, device=device)
    return max(result.median("one element"), 1e-9)


def judge(rows: Iterable[Row], roofs: Roofs) -> None:
    """Give every row the least time that the roofs allow, and what bounds it."""
    for row in rows:
        if row.kind == FRAMEWORK:
            row.bound = "overhead"
            continue
        if not row.known or not row.calls:
            row.bound = "unknown"
            continue
        band = roofs.bandwidth(row.bytes / row.calls)
        by_bytes = row.bytes / band if band else 0.0
        by_flops = _by_products(row, roofs) if row.kind in (MATMUL, ATTENTION, LOSS) else 0.0
        if band is None or (row.kind == MATMUL and by_flops == 0 and by_bytes == 0):
            row.bound = "unknown"
            continue
        row.least = max(by_bytes, by_flops)
        each, least = row.seconds / row.calls, row.least / row.calls
        if each < _SHORT and each > _FAR * least:
            row.bound = "overhead" if least < roofs.call else "latency"
        else:
            row.bound = "compute" if by_flops > by_bytes else "memory"


def _by_products(row: Row, roofs: Roofs) -> float:
    """The least seconds that products take, those of int8 at their own rate; no seconds where none was measured."""
    parts = ((row.flops - row.int8_ops, roofs.compute(row.dtype)), (row.int8_ops, roofs.compute("int8")))
    return sum(ops / rate for ops, rate in parts if rate)
