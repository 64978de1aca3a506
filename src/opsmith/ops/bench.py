"""Times an operator on its workloads: verified first, against eager and torch.compile, beside the roofs."""

from __future__ import annotations

import heapq
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from opsmith import measure
from opsmith.measure.pool import tensors_of
from opsmith.operator import Implementation, Kind, Make, Operator, Sample
from opsmith.ops.common import short
from opsmith.ops.verify import verify

__all__ = ["Benchmark", "bench", "workloads"]

EAGER, COMPILED = "eager", "torch.compile"
_LARGEST = 2  # samples that stand in for workloads where a card names none
# Smaller inputs would have to be too many for their rotation to leave the caches: those are flushed instead.
_LEAST_SHARE_OF_POOL = 1 / 256
_SECONDS = 3.0


@dataclass(frozen=True)
class Benchmark:
    """One workload in one dtype: the cold and the warm comparison, and each contestant's part of the roof."""

    operator: str
    workload: str
    dtype: str
    cold: measure.Comparison
    warm: measure.Comparison
    roof: Mapping[str, float | None]  # cold; None where the roofs of this dtype are not known
    notes: tuple[str, ...]
    faults: tuple[str, ...]  # times that the roofs do not allow: no records, but errors of formula or timer

    def to_json(self) -> dict[str, Any]:
        """Everything, samples included, as plain values."""
        ratios = {
            column: {
                f"{name} / {base}": taken.ratio(name, base).to_json()
                for base in (EAGER, COMPILED)
                if base in taken.names
                for name in taken.names
                if name != base
            }
            for column, taken in (("cold", self.cold), ("warm", self.warm))
        }
        return {
            "operator": self.operator,
            "workload": self.workload,
            "dtype": self.dtype,
            "roof_fraction": dict(self.roof),
            "ratios": ratios,
            "notes": list(self.notes),
            "faults": list(self.faults),
            "cold": self.cold.to_json(),
            "warm": self.warm.to_json(),
        }


def workloads(card: Operator, make: Make) -> list[Sample]:
    """What a benchmark runs: the card's workloads, or its largest samples where it names none."""
    if card.workloads is not None:
        return list(card.workloads(make))
    samples = card.samples(make)
    return heapq.nlargest(_LARGEST, samples, key=lambda s: card.cost(*s.args, **s.kwargs).min_bytes)


def bench(
    card: Operator, dtype: torch.dtype, *, compiled: bool = True, seconds: float = _SECONDS
) -> Iterator[Benchmark]:
    """Verify an operator in one dtype, then time its workloads; a wrong result prints no time.

    Args:
        card: the operator.
        dtype: of the inputs.
        compiled: let `torch.compile` of eager take part (it compiles for some seconds a workload).
        seconds: for each comparison, warm-up aside.

    Raises:
        WrongResult: a check of the card failed; nothing was timed.
    """
    red = min((f for f in verify(card, [dtype]) if not f.ok), key=lambda f: f.elements, default=None)
    if red is not None:
        what = f"{red.check} of sample {red.sample!r}, {red.dtype}"
        raise measure.WrongResult(f"{card.name} {red.implementation}", what, red.why, red.error, red.bound)
    for sample in workloads(card, Make(dtype)):
        with torch.no_grad():
            yield _bench(card, sample, dtype, compiled, seconds)


def _bench(card: Operator, sample: Sample, dtype: torch.dtype, compiled: bool, seconds: float) -> Benchmark:
    notes: list[str] = []
    contestants = _contestants(card, sample)
    if compiled:
        _add_compiled(card, sample, contestants, notes)
    for name, call in contestants.items():
        _check(card, sample, name, call)
    inputs = partial(_copy, (sample.args, dict(sample.kwargs), _outs(card, sample)))
    size = sum(t.nbytes for t in tensors_of(inputs()))
    small = size < _LEAST_SHARE_OF_POOL * measure.cold_bytes()
    # Two sets and a flush, or as many sets as leave the caches.
    pool = measure.Pool(lambda i: inputs(), total_bytes=size if small else None)
    matmul = card.kind in (Kind.MATMUL, Kind.ATTENTION) and f"matmul {short(dtype)}" in measure.KINDS
    kinds = ("read", "copy", "update", *((f"matmul {short(dtype)}",) if matmul else ()))
    options: dict[str, Any] = {
        "budget_s": seconds,
        "notes": {"outputs": "freshly allocated, unless the name says out="},
    }
    cold = measure.compare(
        contestants,
        pool=pool,
        flush=measure.CacheFlush() if small else None,
        roofs=measure.RoofProbes(kinds),
        **options,
    )
    warm = measure.compare(contestants, pool=pool, warm=True, **options)
    roof: dict[str, float | None] = dict.fromkeys(contestants)
    faults = []
    if matmul or card.kind not in (Kind.MATMUL, Kind.ATTENTION):
        cost = card.cost(*sample.args, **sample.kwargs)
        for name in contestants:
            try:
                roof[name] = cold.fraction(
                    name,
                    flops=cost.flops,
                    bytes=cost.min_bytes,
                    dtype=dtype if matmul else None,
                    memory="copy",
                )
            except measure.ImpossibleTime as error:
                faults.append(f"{card.name} {sample.name}, {name}: {error}")
    return Benchmark(
        card.name, sample.name, short(dtype), cold, warm, roof, (*notes, *cold.messages), tuple(faults)
    )


def _contestants(card: Operator, sample: Sample) -> dict[str, Callable[..., Any]]:
    """Every implementation that takes the sample, with a fresh output and, where it can, a reused one."""
    found: dict[str, Callable[..., Any]] = {}
    for implementation in card.candidates(*sample.args, **sample.kwargs)[0]:
        found[implementation.name] = partial(_call, implementation.fn)
        if implementation.takes_out:
            found[f"{implementation.name}, out="] = partial(_call_into, implementation)
    found.setdefault(EAGER, partial(_call, card.eager))
    return found


def _call(fn: Callable[..., Any], args: Any, kwargs: Any, outs: Any) -> Any:
    return fn(*args, **kwargs)


def _call_into(implementation: Implementation, args: Any, kwargs: Any, outs: Any) -> Any:
    return implementation.fn(*args, **kwargs, out=outs)


def _add_compiled(
    card: Operator, sample: Sample, contestants: dict[str, Callable[..., Any]], notes: list[str]
) -> None:
    """torch.compile of eager as a contestant; where it cannot compile, a note says why."""
    torch._dynamo.reset()
    call = partial(_call, torch.compile(card.eager, dynamic=False))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call(sample.args, sample.kwargs, None)
            _check(card, sample, COMPILED, call)
    except Exception as error:
        notes.append(f"{COMPILED} takes no part: {type(error).__name__}: {str(error).splitlines()[0]}")
        return
    contestants[COMPILED] = call


def _check(card: Operator, sample: Sample, name: str, call: Callable[..., Any]) -> None:
    """Hold a contestant to the card's tolerance on the very workload that is timed."""
    outs = _outs(card, sample)
    for out in tensors_of(outs):
        measure.poison(out)
    got = list(tensors_of(call(sample.args, sample.kwargs, outs)))
    eager = list(tensors_of(card.eager(*sample.args, **sample.kwargs)))
    for mine, theirs, exact in zip(got, eager, tensors_of(card.exact(sample)), strict=True):
        verdict = card.tolerance.check(mine, theirs, exact)
        if not verdict.ok:
            where = f"wrong value in workload {sample.name!r}"
            raise measure.WrongResult(f"{card.name} {name}", where, verdict.why, verdict.error, verdict.bound)


def _outs(card: Operator, sample: Sample) -> Any:
    """Outputs to be written into, one or a tuple, as the reference returns them."""
    like = card.reference(*sample.args, **sample.kwargs)
    outs = tuple(torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in tensors_of(like))
    return outs if isinstance(like, tuple) else outs[0]


def _copy(value: Any) -> Any:
    """Nested values with tensors of their own, in the same strides."""
    if isinstance(value, torch.Tensor):
        if 0 in value.stride():  # expanded: nothing but the few elements behind it takes memory
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(
            value
        )
    if isinstance(value, tuple | list):
        return type(value)(_copy(v) for v in value)
    if isinstance(value, dict):
        return {key: _copy(v) for key, v in value.items()}
    return value
