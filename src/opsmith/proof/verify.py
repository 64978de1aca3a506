"""Holds an operator to its card: `opsmith verify`, and the check that comes before every benchmark.

Every implementation runs on every sample of the card, in every dtype, and so does the public function's
backward. How a call is tried, so that what only looks right is found out: `opsmith.measure.checks`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from opsmith.call.arguments import short
from opsmith.call.dispatch import always_native
from opsmith.measure.checks import WrongResult, check_call, exact_turns
from opsmith.measure.pool import tensors_of
from opsmith.measure.products import Widened
from opsmith.operator import Implementation, Make, Operator, Sample

# Of one call: its tensors, what each eager spelling made of them, what the reference did, and the bounds that follow.
Known = tuple[list[Tensor], list[tuple[Tensor, ...]], list[Tensor], list[float]]

_DRAWS = 12  # orders of the values from which eager's largest error is taken where the first few leave doubt
FUNCTION = "autograd"  # the name under which the public function's gradients are reported


@dataclass(frozen=True)
class Finding:
    """One check of one implementation on one sample: passed or not, and its error against the bound."""

    operator: str
    implementation: str
    dtype: str
    sample: str
    elements: int  # in the sample's inputs
    check: str  # values | out= | gradients, and those of `opsmith.proof.conduct`
    ok: bool
    error: float = 0.0
    bound: float = 0.0
    why: str = ""

    @property
    def place(self) -> str:
        """What was checked: on a sample in a dtype, or of all calls."""
        return f"{self.check} of sample {self.sample!r}, {self.dtype}" if self.sample else self.check


def verify(
    card: Operator,
    dtypes: Sequence[torch.dtype] | None = None,
    device: str = "cpu",
    *,
    allocating: bool = True,
    calls: int = 3,
) -> Iterator[Finding]:
    """Yield a finding for every check of an operator on this machine.

    >>> from opsmith.operator import registry
    >>> all(finding.ok for finding in verify(registry()["layer_norm"]))
    True

    Args:
        card: the operator.
        dtypes: of the inputs; by default all that the card names.
        device: where the samples live.
        allocating: call implementations that write into `out=` without it too.
        calls: of each implementation with each sample, as `check_call` makes them.
    """
    for dtype in dtypes or card.dtypes:
        for sample in card.samples(Make(dtype, device)):
            check = partial(examine, card, short(dtype), sample, calls=calls)
            if strays := outside(card, dtype, sample):
                yield from strays
                return
            known: list[Known] = []  # every implementation is held to the same numbers
            try:
                card.cost_of(sample)
            except ValueError as wrong:
                where = (card.name, "card", short(dtype), sample.name, elements_of(sample), "cost")
                yield Finding(*where, False, math.inf, why=str(wrong))
            if card.differentiable:
                yield check(FUNCTION, "gradients", partial(backward, card.function), differentiated=True)
            for one in card.candidates(*sample.args, **sample.kwargs)[0]:
                held = partial(check, one.name, known=known)
                if allocating or not one.takes_out:
                    yield held("values", partial(forward, one.fn))
                if one.takes_out:
                    yield held("out=", partial(_into, one), into=True)


def examine(
    card: Operator,
    dtype: str,
    sample: Sample,
    name: str,
    check: str,
    fn: Callable[..., Any],
    *,
    differentiated: bool = False,
    into: bool = False,
    known: list[Known] | None = None,
    calls: int = 3,
) -> Finding:
    """The finding of one check; what it raises is a finding too.

    `fn(args, kwargs, *outs)` gives the tensors to hold against the reference: results, gradients where they are
    `differentiated`, or what it writes `into` outs. `known` is what the reference gave in other checks of this sample
    and of the same kind, and will have given in this. `calls` are made of it as `check_call` makes them.
    """
    inputs = (sample.args, dict(sample.kwargs))
    report = partial(Finding, card.name, name, dtype, sample.name, elements_of(sample), check)
    truth = _Truth(card, inputs, backward if differentiated else forward, [] if known is None else known)
    try:
        like = forward(card.eager, *inputs) if into else []
        outs = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in like]
        called = _gradients_of(card, *inputs) if differentiated else ()
        how: Any = {"outs": outs, "calls": calls, "name": f"{card.name} {name}", "called": called}
        with always_native():
            for draws in (calls, _DRAWS):
                for given in exact_turns(inputs, draws):
                    truth(*given)
                try:
                    seen = check_call(fn, inputs, truth, truth.tolerance, **how)
                    break
                except WrongResult as wrong:
                    if wrong.fault != "low precision" or draws == _DRAWS:
                        raise
    except WrongResult as wrong:
        return report(False, wrong.error, wrong.allowed, wrong.why)
    except Exception as raised:
        return report(False, math.inf, 0.0, shorten(f"raised {type(raised).__name__}: {raised}", 200))
    return report(True, seen.error, seen.allowed)


def finding_of(
    card: Operator, name: str, dtype: str, sample: Sample, check: str, wrong: Callable[[], object]
) -> Finding:
    """The finding of a check that gives what is wrong as a text, if anything; what it raises is wrong too."""
    try:
        with always_native():
            why = said if isinstance(said := wrong(), str) else ""
    except Exception as raised:
        why = shorten(f"raised {type(raised).__name__}: {raised}", 300)
    error = math.inf if why else 0.0
    return Finding(card.name, name, dtype, sample.name, elements_of(sample), check, not why, error, 0.0, why)


def outside(card: Operator, dtype: torch.dtype, sample: Sample) -> list[Finding]:
    """The kernels of a project that write outside their results: no check can run them, on memory that they spoil."""
    if not hasattr(getattr(torch.ops, card.name), "forward"):
        return []
    calls = [partial(forward, one.fn) for one in card.candidates(*sample.args, **sample.kwargs)[0]]
    calls += [partial(backward, card.function)] * card.differentiable
    with _Guarded(card.name) as guarded, always_native():
        for call in calls:
            with suppress(Exception):  # which is for other checks to tell
                call(sample.args, dict(sample.kwargs))
    where = (short(dtype), sample.name, elements_of(sample), "bounds", False, math.inf)
    return [Finding(card.name, kernel, *where, why=why) for kernel, why in guarded.found.items()]


class _Guarded(TorchDispatchMode):
    """Gives the kernels of a project results that lie in memory as large as all tensors of the call, on both sides."""

    def __init__(self, namespace: str) -> None:
        super().__init__()
        self._namespace, self.found = namespace, dict[str, str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != self._namespace:
            return func(*args, **kwargs or {})
        # Results are as far apart as they are aligned elsewhere: by 64 bytes.
        around = sum(4096 + -(-t.nbytes // 64) * 64 for t in tensors_of((args, kwargs)))
        inside, beside = dict(kwargs), dict[str, list[Tensor]]()
        for name, t in kwargs.items():
            if t is not None and t.is_contiguous():  # else the binding refuses it
                memory = t.new_full((2 * around + t.nbytes,), 165, dtype=torch.uint8)
                before, own, after = memory.split([around, t.nbytes, around])
                inside[name], beside[name] = own.view(t.dtype).view(t.shape).copy_(t), [before, after]
        func(*args, **inside)
        for name, sides in beside.items():
            t = kwargs[name].copy_(inside[name])
            if count := sum(int((side != 165).sum()) for side in sides):
                self.found[func._schema.name.rpartition("::")[2]] = (
                    f"the kernel writes {count} bytes outside {name}, which is {short(t.dtype)} {tuple(t.shape)}; "
                    "correct its loops, or the sizes and gradients that operator.py declares"
                )


def elements_of(sample: Sample) -> int:
    """The elements in the inputs of a call."""
    return sum(t.numel() for t in tensors_of((sample.args, dict(sample.kwargs))))


class _Truth:
    """The reference in float64, and eager PyTorch in the sample's dtypes: the bound depends on both.

    Gradients have two eager spellings, autograd through the reference and through PyTorch's fused operator. Their
    largest errors differ by chance, so the larger one is the yardstick. So do those of the calls of a sample, whose
    values are the same in another order and which are all asked for first: held to the bound of one other call, eager
    itself would fail once in 3000. What fails is held to the bound of more of them.
    """

    def __init__(
        self, card: Operator, inputs: tuple[Any, Any], run: Callable[..., list[Tensor]], known: list[Known]
    ):
        self._card = card
        self._known = known
        self._run = run
        self._inputs = inputs
        fused_only = run is forward or card.eager is card.reference
        self._spellings = [card.eager] if fused_only else [card.eager, card.reference]
        self._left: list[tuple[Tensor, ...]] = []

    def __call__(self, args: Any, kwargs: Any) -> list[Tensor]:
        given = [t.detach().clone() for t in tensors_of((args, kwargs))]
        for then, left, exact, _ in self._known:
            if all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(then, given, strict=True)):
                self._left = list(left)
                return exact
        with Widened():
            eager = [self._run(fn, *_in_dtypes_of((args, kwargs), self._inputs)) for fn in self._spellings]
        self._left = list(zip(*eager, strict=True))
        left, exact = list(self._left), self._run(self._card.reference, args, kwargs)
        check = self._card.tolerance.check
        bounds = [
            max(check(one, one, right).bound for one in spellings)
            for spellings, right in zip(left, exact, strict=False)
        ]
        self._known.append((given, left, exact, bounds))
        return exact

    def tolerance(self, got: Tensor, exact: Tensor) -> float:
        """What an output may be off by; asked once for each output, in order."""
        spellings = self._left.pop(0)
        if got.dtype != spellings[0].dtype:
            detail = f"an output is {short(got.dtype)}, expected {short(spellings[0].dtype)}"
            raise WrongResult(self._card.name, "wrong dtype", detail, math.inf, 0.0)
        place = -1 - len(self._left)
        own = [self._card.tolerance.check(got, eager, exact).bound for eager in spellings]
        return max(*own, *(bounds[place] for *_, bounds in self._known))


def forward(fn: Callable[..., Any], args: Any, kwargs: Any) -> list[Tensor]:
    """The results of a call that nobody differentiates."""
    with torch.no_grad():
        return list(tensors_of(fn(*args, **kwargs)))


def _into(implementation: Implementation, args: Any, kwargs: Any, *outs: Tensor) -> None:
    with torch.no_grad():
        implementation.fn(*args, **kwargs, out=outs if len(outs) > 1 else outs[0])


def backward(fn: Callable[..., Any], args: Any, kwargs: Any) -> list[Tensor]:
    """Gradients of the floating-point inputs (of those that ask for one, where any does).

    The gradients of the outputs depend on the outputs' shapes alone, and are numbers that every dtype has.
    """
    args, kwargs, leaves = with_leaves(args, kwargs)
    outputs = [t for t in tensors_of(fn(*args, **kwargs)) if t.requires_grad]
    generator = torch.Generator().manual_seed(0)
    seeds = [(torch.randint(-8, 9, t.shape, generator=generator) / 8).to(t) for t in outputs]
    gradients = torch.autograd.grad(outputs, leaves, seeds, allow_unused=True) if leaves and outputs else ()
    return list(tensors_of(gradients))


def _gradients_of(card: Operator, args: Any, kwargs: Any) -> list[str]:
    """What `backward` gives of a call, in words."""
    args, kwargs, leaves = with_leaves(args, kwargs)
    with suppress(ValueError):  # a builtin function has no signature
        named = zip(inspect.signature(card.function).parameters, args, strict=False)
        return [f"the gradient of {n}" for n, v in (*named, *kwargs.items()) if any(v is t for t in leaves)]
    return []


def with_leaves(args: Any, kwargs: Any) -> tuple[Any, Any, list[Tensor]]:
    """The call with its floating-point tensors (those that ask for gradients, where any does) as leaves, and these."""
    any_asks = any(t.requires_grad for t in tensors_of((args, kwargs)))
    seen: dict[int, Tensor] = {}  # a tensor that is two of the arguments is so in the copy

    def leaf(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        if id(value) not in seen:
            seen[id(value)] = value.detach().requires_grad_(value.requires_grad or not any_asks)
        return seen[id(value)]

    copy = tuple(map(leaf, args)), {name: leaf(value) for name, value in kwargs.items()}
    return *copy, [t for t in seen.values() if t.requires_grad]


def _in_dtypes_of(value: Any, like: Any) -> Any:
    """Nested values with each tensor in the dtype of the one at the same place in `like`."""
    return tree_map(lambda v, w: v.to(w.dtype) if isinstance(v, Tensor) else v, value, like)
