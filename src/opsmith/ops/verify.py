"""Holds an operator to its card: `opsmith verify`, and the check that comes before every benchmark.

Every implementation runs on every sample of the card, in every dtype, into memory that was filled with NaN;
then again on other values in the same memory, so that an answer remembered from before is found out.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from textwrap import shorten
from typing import Any

import torch

from opsmith.operator import Implementation, Make, Operator, Sample
from opsmith.ops.common import short

__all__ = ["Finding", "poisoned", "verify"]

Outcome = tuple[bool, float, float, str]  # passed, error, bound, why not
FUNCTION = "autograd"  # the name under which the public function's gradients are reported


@dataclass(frozen=True)
class Finding:
    """One check of one implementation on one sample: passed or not, and its error against the bound."""

    operator: str
    implementation: str
    dtype: str
    sample: str
    elements: int  # in the sample's inputs
    check: str  # values | new values | inputs | out= | gradients
    ok: bool
    error: float = 0.0
    bound: float = 0.0
    why: str = ""


def verify(
    card: Operator, dtypes: Sequence[torch.dtype] | None = None, device: str = "cpu"
) -> Iterator[Finding]:
    """Yield a finding for every check of an operator on this machine.

    >>> from opsmith.operator import registry
    >>> all(finding.ok for finding in verify(registry()["layer_norm"]))
    True

    Args:
        card: the operator.
        dtypes: of the inputs; by default all that the card names.
        device: where the samples live.
    """
    for dtype in dtypes or card.dtypes:
        first, other = (list(card.samples(Make(dtype, device, seed))) for seed in (0, 1))
        for sample, fresh in zip(first, other, strict=True):
            if card.differentiable:
                yield _finding(card, FUNCTION, dtype, sample, "gradients", partial(_gradients, card, sample))
            # The values change in place below, so this comes after everything that needs the first ones.
            yield from _forward(card, dtype, sample, fresh)


def _forward(card: Operator, dtype: torch.dtype, sample: Sample, fresh: Sample) -> Iterator[Finding]:
    accepted, _ = card.candidates(*sample.args, **sample.kwargs)
    for check in ("values", "new values"):
        if check == "new values" and not _refill(sample, fresh):
            return
        for implementation in accepted:
            report = partial(_finding, card, implementation.name, dtype, sample)
            before = [t.clone() for t in _tensors(sample)]
            yield report(check, partial(_fresh, card, implementation, sample))
            if implementation.takes_out and check == "values":
                yield report("out=", partial(_into, card, implementation, sample))
            yield report("inputs", partial(_unchanged, sample, before))


def _finding(
    card: Operator, name: str, dtype: torch.dtype, sample: Sample, check: str, run: Callable[[], Outcome]
) -> Finding:
    """The finding of one check; what it raises is a finding too."""
    try:
        ok, error, bound, why = run()
    except Exception as raised:
        ok, error, bound = False, math.inf, 0.0
        why = shorten(f"raised {type(raised).__name__}: {raised}", 200)
    elements = sum(t.numel() for t in _tensors(sample))
    return Finding(card.name, name, short(dtype), sample.name, elements, check, ok, error, bound, why)


def _fresh(card: Operator, implementation: Implementation, sample: Sample) -> Outcome:
    """Run into memory of the implementation's own, which held NaN."""
    eager, exact = _truth(card, sample)  # first, in case inputs are changed
    with torch.no_grad(), poisoned():
        return _judge(card, _flat(implementation.fn(*sample.args, **sample.kwargs)), eager, exact)


def _into(card: Operator, implementation: Implementation, sample: Sample) -> Outcome:
    """Run into outputs that are there already, filled with NaN."""
    eager, exact = _truth(card, sample)
    outs = [torch.full(t.shape, math.nan, dtype=t.dtype, device=t.device) for t in eager]
    with torch.no_grad():
        implementation.fn(*sample.args, **sample.kwargs, out=tuple(outs) if len(outs) > 1 else outs[0])
    return _judge(card, outs, eager, exact)


def _unchanged(sample: Sample, before: list[torch.Tensor]) -> Outcome:
    """Inputs are as they were; if not, they are mended for the checks to come."""
    changed = [(t, b) for t, b in zip(_tensors(sample), before, strict=True) if not _same(t, b)]
    for tensor, value in changed:
        tensor.copy_(value)
    return not changed, 0.0, 0.0, "an input was changed" if changed else ""


def _truth(card: Operator, sample: Sample) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    with torch.no_grad():
        return _flat(card.reference(*sample.args, **sample.kwargs)), _flat(card.exact(sample))


def _judge(card: Operator, got: list[Any], eager: list[torch.Tensor], exact: list[torch.Tensor]) -> Outcome:
    """The worst verdict over all outputs."""
    if len(got) != len(exact):
        return False, math.inf, 0.0, f"{len(got)} outputs, expected {len(exact)}"
    worst = (True, 0.0, 0.0, "")
    for mine, theirs, truth in zip(got, eager, exact, strict=True):
        if not isinstance(mine, torch.Tensor) or mine.dtype != theirs.dtype:
            what = short(mine.dtype) if isinstance(mine, torch.Tensor) else type(mine).__name__
            return False, math.inf, 0.0, f"an output is {what}, expected {short(theirs.dtype)}"
        verdict = card.tolerance.check(mine, theirs, truth)
        found = (verdict.ok, verdict.error, verdict.bound, verdict.why)
        if not verdict.ok:
            return found
        worst = max(worst, found, key=lambda f: f[1] / f[2] if f[2] else 0.0)
    return worst


def _gradients(card: Operator, sample: Sample) -> Outcome:
    """The public function's gradients against the reference's, in float64 and in the same dtype."""
    with poisoned():
        got = _backward(card.function, sample)
    eager = _backward(card.reference, sample)
    exact = _backward(card.reference, sample.cast(torch.float64))
    for a, b in zip(got, exact, strict=True):
        if (a is None) != (b is None):
            return False, math.inf, 0.0, f"an input has {'no' if a is None else 'an unexpected'} gradient"
    mine, theirs, truth = ([g for g in grads if g is not None] for grads in (got, eager, exact))
    return _judge(card, mine, theirs, truth)


def _backward(fn: Callable[..., Any], sample: Sample) -> list[torch.Tensor | None]:
    """Gradients of every floating-point input; the outputs' own depend only on their shapes."""
    chosen = [t.requires_grad for t in _tensors(sample)]
    leaves: list[torch.Tensor] = []

    def leaf(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            value, wanted = value.detach(), value.requires_grad or not any(chosen)
            leaves.extend([value.requires_grad_()] if wanted else [])
        return value

    args = [leaf(a) for a in sample.args]
    kwargs = {k: leaf(v) for k, v in sample.kwargs.items()}
    outputs = [t for t in _flat(fn(*args, **kwargs)) if t.requires_grad]
    generator = torch.Generator().manual_seed(0)
    # Rounded to bfloat16, so that every dtype sees exactly the same output gradients.
    seeds = [
        torch.randn(t.shape, generator=generator, dtype=torch.float64).bfloat16().to(t.device, t.dtype)
        for t in outputs
    ]
    return list(torch.autograd.grad(outputs, leaves, seeds, allow_unused=True)) if leaves else []


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """While this lasts, `torch.empty` and its like are filled with NaN, so that what nobody wrote shows."""
    mode = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode[0], warn_only=mode[1])


def _flat(result: Any) -> list[torch.Tensor]:
    return list(result) if isinstance(result, tuple | list) else [result]


def _tensors(sample: Sample) -> list[torch.Tensor]:
    return [v for v in (*sample.args, *sample.kwargs.values()) if isinstance(v, torch.Tensor)]


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def _writable(tensor: torch.Tensor) -> bool:
    return all(step or size <= 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def _refill(sample: Sample, fresh: Sample) -> bool:
    """Put other values into a sample's own memory; False where an expanded tensor does not allow it."""
    pairs = list(zip(_tensors(sample), _tensors(fresh), strict=True))
    if not all(_writable(tensor) for tensor, _ in pairs):
        return False
    with torch.no_grad():
        for tensor, values in pairs:
            tensor.copy_(values)
    return True
