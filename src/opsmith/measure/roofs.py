"""What this machine reaches at best, measured with its own libraries: memory bandwidth and matmul rates.

A roof is never typed in. The ways of reaching it are contestants like any other, so that they run interleaved
with what they judge: on shared machines bandwidth drifts by a factor of two within minutes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from .machine import describe
from .pool import cold_bytes
from .products import lacks_unit

# read: bytes read. copy: bytes read plus written, into a reused output. update: the same, in place, which
# spares the fetch of the lines written. matmul: operations, two per multiply-add.
KINDS = ("read", "copy", "update", "matmul float32", "matmul bfloat16", "matmul int8")

Memory = Literal["best", "read", "copy", "update"]
# Blocks never take more than this part of the memory.
_MEMORY_SHARE = 16


class ImpossibleTime(ValueError):
    """A time shorter than the measured roofs allow: the cost formula or the timer is wrong."""


# A product may be so much faster than the libraries', by which its rate was measured; memory has no such room.
_BETTER = 1.1


@dataclass(frozen=True)
class Probe:
    """One way of reaching a roof, `work` bytes or operations per call; ignores its neighbors' inputs.

    `after` follows each sample, off the clock: lines that a probe left changed would go back to memory while the
    next contestant is timed.
    """

    name: str
    kind: str
    work: float
    call: Callable[[], object]
    after: Callable[[], object] | None = None

    def __call__(self, *_: object) -> object:
        return self.call()


@dataclass(frozen=True)
class Roof:
    """The best way found: `rate` per second by its median time, `peak` the fastest sample of all ways."""

    kind: str
    rate: float
    peak: float
    way: str
    others: Mapping[str, float]

    def __str__(self) -> str:
        unit = "Gop/s" if self.kind.startswith("matmul") else "GB/s"
        return f"{self.kind}: {self.rate / 1e9:.1f} {unit} ({self.way})"


@dataclass(frozen=True)
class Roofs:
    """The roofs of one run, by kind."""

    by_kind: Mapping[str, Roof]

    def bandwidth(self, kind: Memory = "best", *, peak: bool = False) -> float:
        """Bytes per second; "best" is the highest of those measured.

        Raises:
            ValueError: when that roof was not measured in this run.
        """
        kinds = ("read", "copy", "update") if kind == "best" else (kind,)
        found = [self.by_kind[name] for name in kinds if name in self.by_kind]
        if not found:
            raise ValueError(
                f"Roofs.bandwidth: {kind!r} was not measured in this run; add its probes: {KINDS}"
            )
        return max(roof.peak if peak else roof.rate for roof in found)

    def matmul(self, dtype: torch.dtype, *, peak: bool = False) -> float:
        """Operations per second for a dtype.

        Raises:
            ValueError: when that roof was not measured in this run.
        """
        roof = self.by_kind.get(f"matmul {str(dtype).removeprefix('torch.')}")
        if roof is None:
            raise ValueError(
                f"Roofs.matmul: {dtype} was not measured in this run; add its probe, one of {KINDS}"
            )
        return roof.peak if peak else roof.rate

    def fraction(
        self,
        seconds: float,
        *,
        flops: float,
        bytes: float,
        dtype: torch.dtype | None = None,
        int8_ops: float = 0.0,
        memory: Memory = "best",
        cold: bool = True,
    ) -> float:
        """The part of the roofline that was reached: the least time the roofs allow over the time taken.

            max(bytes / bandwidth, flops / matmul rate) / seconds

        >>> roofs = Roofs({"read": Roof("read", 1e9, 1e9, "sum", {})})
        >>> roofs.fraction(1.0, flops=0, bytes=5e8)
        0.5

        Args:
            seconds: time of one call.
            flops: operations, two per multiply-add; they count when `dtype` is given.
            bytes: bytes read plus written, each once.
            dtype: whose matmul rate bounds the operations; None for work that is no matmul.
            int8_ops: of the operations, those that the matmul rate of int8 bounds instead.
            memory: which bandwidth judges; "copy" for operators that write as much as they read.
            cold: whether the data came from memory; warm data may pass the bandwidth roof.

        Raises:
            ImpossibleTime: cold and faster than the fastest sample of any way to the roofs.
            ValueError: when a roof that is needed was not measured.
        """
        if not (seconds > 0 and math.isfinite(seconds)):
            raise ValueError(f"Roofs.fraction: expected seconds above zero, got {seconds}; measure again")
        products = ((flops - int8_ops, dtype), (int8_ops, torch.int8)) if dtype is not None else ()

        def least(memory: Memory, peak: bool, better: float) -> float:
            by_flops = sum(n / (self.matmul(of, peak=peak) * better) for n, of in products if n)
            return max(bytes / self.bandwidth(memory, peak=peak) if bytes else 0.0, by_flops)

        # Judged by the fastest sample, not the median: a record within the noise of the roof is no impossibility.
        floor = least("best", True, _BETTER)
        if cold and seconds < floor:
            raise ImpossibleTime(
                f"Roofs.fraction: {seconds:.3g} s is {floor / seconds:.0%} of what the roofs of this run allow; "
                "check the cost formula (bytes and operations), that the inputs were cold, and the timer"
            )
        return least(memory, False, 1.0) / seconds

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain values."""
        return {kind: asdict(roof) for kind, roof in self.by_kind.items()}


class RoofProbes:
    """The contestants that find the roofs, to be passed to `compare(..., roofs=...)`.

    >>> probes = RoofProbes(("copy",), block_bytes=1 << 16)
    >>> sorted({probe.kind for probe in probes.contestants().values()})
    ['copy']

    Args:
        kinds: which roofs, of `KINDS`.
        block_bytes: size of the block read or copied; five times the last-level cache by default, capped at a
            sixteenth of the memory.
        sizes: edges n of the square matmuls tried.
        device: "cpu" or "cuda".

    Raises:
        ValueError: for a kind that does not exist.
    """

    def __init__(
        self,
        kinds: Sequence[str] = ("read", "copy", "update"),
        *,
        block_bytes: int | None = None,
        sizes: Sequence[int] | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        unknown = set(kinds) - set(KINDS)
        if unknown:
            raise ValueError(f"RoofProbes: expected kinds of {KINDS}, got {sorted(unknown)}")
        device = torch.device(device)
        if block_bytes is None:
            block_bytes = min(cold_bytes(device), (describe().memory_bytes or 1 << 40) // _MEMORY_SHARE)
        if sizes is None:
            sizes = (8192,) if device.type == "cuda" else (512, 1024)
        self._probes: list[Probe] = []
        if set(kinds) & {"read", "copy", "update"}:
            self._probes += [p for p in _memory_probes(block_bytes, device) if p.kind in kinds]
        for kind in kinds:
            if kind.startswith("matmul"):
                for size in sizes:
                    self._probes += _matmul_probes(kind, size, device)

    def contestants(self) -> dict[str, Probe]:
        """The probes by name; names start with "roof: "."""
        return {probe.name: probe for probe in self._probes}

    def roofs(self, samples: Mapping[str, Sequence[float]]) -> Roofs:
        """From the probes' seconds per call to the roofs: of each kind, the way with the best median."""
        by_kind: dict[str, Roof] = {}
        for kind in dict.fromkeys(probe.kind for probe in self._probes):
            probes = [p for p in self._probes if p.kind == kind and samples.get(p.name)]
            if not probes:
                continue
            rates = {
                p.name.removeprefix("roof: "): p.work / float(np.median(samples[p.name])) for p in probes
            }
            peak = max(p.work / min(samples[p.name]) for p in probes)
            way = max(rates, key=rates.__getitem__)
            by_kind[kind] = Roof(kind, rates[way], peak, way, rates)
        return Roofs(by_kind)


def _memory_probes(block_bytes: int, device: torch.device) -> list[Probe]:
    n = max(block_bytes // 4 // 4096, 1) * 4096
    source = torch.ones(n, device=device)
    target = torch.zeros(n, device=device)
    rows = source.view(-1, 4096)
    total = float(n * 4)
    after = source.sum if device.type == "cpu" else None
    return [
        Probe("roof: read, sum", "read", total, lambda: source.sum()),
        Probe("roof: read, sum of rows", "read", total, lambda: rows.sum(1)),
        Probe("roof: read, dot", "read", 2 * total, lambda: torch.dot(source, target)),
        Probe("roof: copy, copy_", "copy", 2 * total, lambda: target.copy_(source), after),
        Probe("roof: copy, neg", "copy", 2 * total, lambda: torch.neg(source, out=target), after),
        # Times one, so that it can be repeated for ever without overflow or denormals.
        Probe("roof: update, mul_", "update", 2 * total, lambda: source.mul_(1.0), after),
    ]


def _matmul_probes(kind: str, n: int, device: torch.device) -> list[Probe]:
    dtype: torch.dtype = getattr(torch, kind.removeprefix("matmul "))
    generator = torch.Generator().manual_seed(n)
    if dtype == torch.int8:
        a, b = (
            torch.randint(-127, 128, (n, n), generator=generator, dtype=dtype).to(device) for _ in range(2)
        )
        ways: dict[str, Callable[[], object]] = {
            "_int_mm": lambda: torch._int_mm(a, b),
            "_int_mm, transposed": lambda: torch._int_mm(a, b.t()),
        }
    else:
        if device.type == "cpu" and lacks_unit(dtype):
            dtype = torch.float32  # numbers are widened sooner than they are multiplied as they are
        a, b = (torch.randn(n, n, generator=generator).to(device, dtype) for _ in range(2))
        out = torch.empty(n, n, dtype=dtype, device=device)
        ways = {"mm": lambda: torch.mm(a, b, out=out)}
        if device.type == "cpu":
            ways.update(_prepacked(a, b))
    work = 2.0 * n**3
    probes = []
    for way, call in ways.items():
        # A library without this matmul is no contestant; what remains is still the best that exists here.
        with contextlib.suppress(RuntimeError, NotImplementedError, AttributeError):
            call()
            probes.append(Probe(f"roof: {kind}, {way}, n={n}", kind, work, call))
    return probes


def _prepacked(a: Tensor, b: Tensor) -> dict[str, Callable[[], object]]:
    """The matmuls of the libraries behind torch, with the weight packed once, as a compiled model has it."""
    ways: dict[str, Callable[[], object]] = {}
    n = a.shape[0]
    weight = b.t().contiguous()  # linear layers hold [out, in]
    with contextlib.suppress(RuntimeError, NotImplementedError, AttributeError):
        onednn = torch.ops.mkldnn._linear_pointwise
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, n)
        ways["oneDNN"] = lambda: onednn(a, packed, None, "none", [], "")
    if a.dtype == torch.float32:
        with contextlib.suppress(RuntimeError, NotImplementedError, AttributeError):
            mkl = torch.ops.mkl._mkl_linear
            mkl_packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, n)
            ways["MKL"] = lambda: mkl(a, mkl_packed, weight, None, n)
    return ways
