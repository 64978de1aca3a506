"""What a public function does with its `out=`: fills and returns it, or refuses it before anything is written."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from opsmith.call.arguments import short
from opsmith.measure.checks import poison
from opsmith.measure.pool import tensors_of
from opsmith.operator import Make, Operator, Sample
from opsmith.proof.verify import FUNCTION, Finding, finding_of, forward


def outs(card: Operator, dtype: torch.dtype, device: str = "cpu") -> Iterator[Finding]:
    """Yield the findings of an operator's `out=`, of a library's and a project's alike; none where it takes none.

    >>> from opsmith.operator import registry
    >>> [finding.check for finding in outs(registry()["gelu"], torch.float32) if finding.ok][-2:]
    ['out=, returned', 'out=, refused']
    """
    if not any(implementation.takes_out for implementation in card.implementations):
        return
    for sample in card.samples(Make(dtype, device)):
        check = partial(finding_of, card, FUNCTION, short(dtype), sample)
        yield check("out=, returned", partial(_lost, card, sample))
        yield check("out=, refused", partial(_taken, card, sample))


def _call(card: Operator, sample: Sample, out: Any) -> list[Tensor]:
    return forward(card.function, sample.args, {**sample.kwargs, "out": out})


def _results(card: Operator, sample: Sample) -> Any:
    """A tensor, or a tuple of tensors, as `out=` expects them."""
    with torch.no_grad():
        return card.function(*sample.args, **sample.kwargs)


def _lost(card: Operator, sample: Sample) -> str:
    """Why what was given is not what came back, full of the results."""
    inputs = (sample.args, dict(sample.kwargs))
    before = [t.clone() for t in tensors_of(inputs)]
    expected = _results(card, sample)
    given = tree_map_only(Tensor, lambda t: poison(torch.empty_like(t)), expected)
    back = _call(card, sample, given)
    if any(a is not b for a, b in zip(back, tensors_of(given), strict=True)):
        return "what the call returns is not the tensor that out= gave it"
    for mine, value in zip(back, tensors_of(expected), strict=True):
        torch.testing.assert_close(mine, value, rtol=1e-5, atol=1e-6, equal_nan=True)
    if not all(map(_same, before, tensors_of(inputs))):
        return "an input is written to, although out= is a tensor of its own"
    return ""


def _taken(card: Operator, sample: Sample) -> str:
    """Which out= was taken that cannot hold the results, or written to before it was refused."""
    fitting = _results(card, sample)
    first = next(iter(tensors_of(fitting)))
    other = torch.float64 if first.dtype != torch.float64 else torch.float32
    wrong = {
        "another dtype": (sample, tree_map_only(Tensor, lambda t: t.to(other), fitting)),
        "another shape": (sample, tree_map_only(Tensor, lambda t: t.new_zeros((*t.shape, 2)), fitting)),
        "no tensor": (sample, [1.0]),
    }
    alike = (t for t in tensors_of((sample.args, dict(sample.kwargs))) if t.dtype == first.dtype)
    read = [t for t in alike if t.is_contiguous() and t.numel() > 1 and first.numel()]
    for at, t in enumerate(read):
        wrong[f"a part of input {at} of its dtype"] = _overlapping(sample, t, fitting)
    for what, (call, out) in wrong.items():
        seen = list(tensors_of((call.args, dict(call.kwargs), out)))
        before = [t.clone() for t in seen]
        try:
            _call(card, call, out)
        except (TypeError, ValueError):
            if not all(map(_same, before, seen)):
                return f"an out that is {what} is written to before it is refused"
            continue
        return f"an out that is {what} is taken; expected a TypeError or a ValueError"
    return ""


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(), b.nan_to_num()) if a.is_floating_point() else torch.equal(a, b)


def _overlapping(sample: Sample, t: Tensor, fitting: Any) -> tuple[Sample, Any]:
    """The call with one input in memory whose second element is where its first result goes."""
    first, *rest = tensors_of(fitting)
    memory = first.new_zeros(t.numel() + first.numel())
    moved = memory[: t.numel()].view(t.shape).copy_(t.detach())
    given = (sample.args, dict(sample.kwargs))
    args, kwargs = tree_map_only(Tensor, lambda one: moved if one is t else one, given)
    out = memory[1 : 1 + first.numel()].view(first.shape)
    return Sample(sample.name, args, kwargs), out if isinstance(fitting, Tensor) else (out, *rest)
