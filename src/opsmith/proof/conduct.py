"""How an operator behaves, its values aside: run twice, on one thread and on all, given an `out=`, under autograd,
dispatcher and compiler.

`opsmith.proof.verify` holds results to the definition. These checks are about what a kernel can do wrong although every
single result of a small call is right, and about what PyTorch expects of anything that it dispatches to.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, takewhile
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from opsmith.call.arguments import short
from opsmith.kernels import triton
from opsmith.measure.pool import tensors_of
from opsmith.operator import Implementation, Make, Operator, Sample
from opsmith.proof.outs import outs
from opsmith.proof.verify import (
    FUNCTION,
    Finding,
    backward,
    elements_of,
    examine,
    finding_of,
    forward,
    outside,
    with_leaves,
)

_LARGE = 1 << 21  # elements, at most, of the call that all threads share
_SMALL = 1 << 11  # elements, at most, of one that is differentiated by finite differences
_RUNS, _SECONDS = 6, 0.3  # on all threads, at least: a race may be won many times


def conduct(card: Operator, dtype: torch.dtype, device: str = "cpu") -> Iterator[Finding]:
    """Yield a finding for every such check of an operator on this machine, in one dtype.

    >>> from opsmith.operator import registry
    >>> all(finding.ok for finding in conduct(registry()["gelu"], torch.float32))
    True
    """
    samples = list(card.samples(Make(dtype, device)))
    for sample in (*samples, _largest(card, samples, dtype, device)):
        if strays := outside(card, dtype, sample):
            yield from strays
            return
    yield from runs(card, dtype, device)
    yield from outs(card, dtype, device)
    check = partial(examine, card, short(dtype))
    usual = next((s for s in samples if elements_of(s)), samples[0])
    yield from _in_the_dispatcher(card, usual, dtype)
    torch.compiler.reset()
    compiled = torch.compile(card.function, fullgraph=True, backend="aot_eager", dynamic=False)
    yield check(usual, "compiled", "torch.compile", partial(forward, compiled))
    if card.differentiable:
        slopes = partial(backward, compiled)
        yield check(usual, "compiled", "torch.compile, gradients", slopes, differentiated=True)
        yield from _gradcheck(card, device)


def runs(card: Operator, dtype: torch.dtype, device: str = "cpu") -> Iterator[Finding]:
    """The checks of `conduct` that run kernels again: twice, and on one thread or all, or program against program."""
    samples = list(card.samples(Make(dtype, device)))
    large, most = _largest(card, samples, dtype, device), max(samples, key=elements_of)
    for implementation in card.candidates(*large.args, **large.kwargs)[0]:
        if implementation.fn is card.eager:
            continue
        for what, sample, wrong in (("two runs", large, _twice), ("NaN", most, _loses_nan)):
            said = partial(wrong, card, implementation, sample)
            yield finding_of(card, implementation.name, short(dtype), sample, what, said)
        if implementation.name == "triton" and triton.INTERPRETED:
            yield from _races(card, implementation, samples, dtype)
        elif device == "cpu":
            on_threads = partial(_on_threads, implementation.fn)
            yield examine(card, short(dtype), large, implementation.name, "threads", on_threads)


def _largest(card: Operator, samples: list[Sample], dtype: torch.dtype, device: str) -> Sample:
    """The largest call that is quickly checked: only a large one is split over threads."""
    workloads: list[Sample] = []
    if card.workloads is not None and not triton.INTERPRETED:  # where a large call takes minutes
        workloads = list(card.workloads(Make(dtype, device)))
    quick = (s for s in (*samples, *workloads) if elements_of(s) <= _LARGE)
    return max(quick, key=elements_of, default=samples[0])


def _twice(card: Operator, implementation: Implementation, sample: Sample) -> str:
    """Two runs give the same bits, or the card says that they may not."""
    one, other = (forward(implementation.fn, sample.args, sample.kwargs) for _ in range(2))
    if all(torch.equal(a, b) for a, b in zip(one, other, strict=True)) or not implementation.repeatable:
        return ""
    return "two runs on the same inputs differ; if they may, say Implementation(..., repeatable=False)"


def _loses_nan(card: Operator, implementation: Implementation, sample: Sample) -> str:
    """Which tensor's NaN, as its first and last element, makes other results NaN than it makes those of eager."""
    inputs = (sample.args, dict(sample.kwargs))
    for at, t in enumerate(tensors_of(inputs)):
        planted = t.detach().clone(memory_format=torch.contiguous_format)
        if t.is_floating_point():
            planted.view(-1)[:: max(t.numel() - 1, 1)] = math.nan
        args, kwargs = tree_map(lambda v, t=t, planted=planted: planted if v is t else v, inputs)
        if card.domain is None or card.domain(*args, **kwargs):
            got, expected = (forward(fn, args, kwargs) for fn in (implementation.fn, card.eager))
            if not all(torch.equal(a.isnan(), b.isnan()) for a, b in zip(got, expected, strict=True)):
                return f"a NaN in tensor {at} of the call makes other results NaN than the reference's"
    return ""


def _on_threads(fn: Callable[..., Any], args: Any, kwargs: Any) -> list[Tensor]:
    """The results on all threads, of several runs those that are farthest from what one thread computes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alone = forward(fn, args, kwargs)
    finally:
        torch.set_num_threads(threads)
    end = time.monotonic() + _SECONDS
    runs = takewhile(lambda done: done < _RUNS or time.monotonic() < end, count())
    return max((forward(fn, args, kwargs) for _ in runs), key=lambda run: max(map(_distance, run, alone)))


def _distance(a: Tensor, b: Tensor) -> float:
    if torch.equal(a, b):
        return 0.0
    return float((a.double() - b.double()).abs().nan_to_num(math.inf).max())


def _races(
    card: Operator, implementation: Implementation, samples: list[Sample], dtype: torch.dtype
) -> Iterator[Finding]:
    """The interpreter runs programs one by one, so that races do no harm there: what they touch is compared instead."""
    from opsmith.kernels.triton.races import watched

    for sample in samples:
        if implementation.accepts(*sample.args, **sample.kwargs) is not True:
            continue

        def races(sample: Sample = sample) -> str:
            with watched() as found:
                forward(implementation.fn, sample.args, sample.kwargs)
            return "; ".join(found[:2])

        yield finding_of(card, implementation.name, short(dtype), sample, "races", races)


class Recorder(TorchDispatchMode):
    """Keeps the calls of native operators, one for each operator, dtype and set of present arguments."""

    def __init__(self, *namespaces: str) -> None:
        super().__init__()
        self.namespaces = namespaces
        self.calls: dict[Any, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in self.namespaces:
            kinds = [v.dtype if isinstance(v, Tensor) else v is None for v in tree_leaves((args, kwargs))]
            copies = tree_map_only(Tensor, torch.clone, (args, kwargs))
            self.calls.setdefault((func, *kwargs, *kinds), (func, *copies))
        return func(*args, **kwargs)


def _in_the_dispatcher(card: Operator, sample: Sample, dtype: torch.dtype) -> Iterator[Finding]:
    """The dispatcher's entries that a call uses, as `torch.library.opcheck` sees them."""
    with Recorder("opsmith", card.name) as recorder:
        calls = finding_of(card, FUNCTION, short(dtype), sample, "opcheck", lambda: _both_ways(card, sample))
    if not calls.ok:
        yield calls
        return
    for func, args, kwargs in recorder.calls.values():
        name = func._schema.name.rpartition("::")[2]
        checked = partial(torch.library.opcheck, func, args, kwargs)
        yield finding_of(card, name, short(dtype), sample, "opcheck", checked)


def _both_ways(card: Operator, sample: Sample) -> None:
    forward(card.function, sample.args, sample.kwargs)
    if card.differentiable:
        backward(card.function, sample.args, sample.kwargs)


def _gradcheck(card: Operator, device: str) -> Iterator[Finding]:
    """Analytic against numerical gradients in float64, on the first samples that are small enough."""
    fitting = [s for s in card.samples(Make(torch.float64, device)) if 0 < elements_of(s) <= _SMALL]
    for sample in fitting[:2]:
        args, kwargs, leaves = with_leaves(sample.args, dict(sample.kwargs))
        if not leaves:
            continue
        names = list(kwargs)

        def call(*values: Any, names: list[str] = names, n: int = len(args)) -> Any:
            return card.function(*values[:n], **dict(zip(names, values[n:], strict=True)))

        checked = partial(torch.autograd.gradcheck, call, (*args, *kwargs.values()), fast_mode=True)
        yield finding_of(card, FUNCTION, "float64", sample, "gradcheck", checked)
