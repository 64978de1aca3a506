"""Every operator on calls that nobody chose: values, shapes, strides, dtypes, `out=` of all kinds, gradients, threads.

Calls are those of `tests.ops.test_properties`, and so is what judges them: the card's reference in float64, held to its
tolerance wherever eager's own result is of the reference's kind. Here whole tensors are of an odd kind too.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from torch.utils._pytree import tree_map_only

import opsmith.ops  # noqa: F401  registers the cards
from opsmith.call.dispatch import always_native
from opsmith.operator import Kind, Operator, Sample, registry
from tests.fuzz.fuzzer import Fuzzer
from tests.ops.test_properties import (
    LAYOUTS,
    Run,
    calls,
    check,
    describe,
    gradients_of,
    lay_out,
    mapped,
    tensors,
    values_of,
)

THREADS = 3
GUARD = 77.0  # around an out=
LARGE = 1e9  # beyond, whether a sum of products overflows depends on its order


def _finfo(t: torch.Tensor) -> torch.finfo:
    return torch.finfo(t.dtype)


# Of whole tensors: what becomes of normal numbers.
FILLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal": lambda t: t,
    "large": lambda t: (t * 1e4).clamp(-(most := min(LARGE, _finfo(t).max)), most),
    "tiny": lambda t: t * _finfo(t).tiny,
    "denormal": lambda t: t * _finfo(t).tiny * 2.0**-4,
    "equal rows": lambda t: t[:1].expand_as(t) if t.dim() else t,
    "equal numbers": lambda t: t.flatten()[:1].view([1] * t.dim()).expand_as(t),
    "negative zeros": lambda t: torch.full_like(t, -0.0),
}
OUTS = ("fresh", *LAYOUTS[1:], "an input", "next to an input")


@dataclass(frozen=True)
class Case:
    """A call, what of it is looked at, and how its `out=` lies."""

    what: str
    sample: Sample
    out: str = ""
    shift: int = 0

    def __repr__(self) -> str:
        out = f", out {self.out} {self.shift}" if self.out else ""
        return f"{self.what} of {describe(self.sample)}{out}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """For Hypothesis, which would print every number."""
        printer.text(repr(self))


@st.composite
def cases(draw: st.DrawFn, card: Operator) -> Case:
    """A call of the operator, more often than not of odd numbers."""
    kinds = ["values", "threads"]
    kinds += ["gradients"] if card.differentiable else []
    kinds += ["out"] if any(i.takes_out for i in card.implementations) else []
    what = draw(st.sampled_from(kinds))
    sample = draw(calls(card, extremes=what != "gradients"))
    floating = [i for i, t in enumerate(tensors(sample)) if t.is_floating_point() and t.numel()]
    if floating and draw(st.booleans()):
        at, fill = (
            draw(st.sampled_from(floating)),
            draw(st.sampled_from([f for f in FILLS if f not in spared(card, sample)])),
        )
        sample = filled(sample, at, FILLS[fill], draw(st.booleans()))
    if what != "out":
        return Case(what, sample)
    return Case(what, sample, draw(st.sampled_from(OUTS)), draw(st.integers(0, 40)))


def spared(card: Operator, sample: Sample) -> tuple[str, ...]:
    """Rows that are rounded to int8 by their own largest number: where that is next to nothing, so is its inverse.

    And products of bfloat16: a unit for pairs of them takes what has no exponent of its own for zero, results too.
    """
    if any(word in card.name for word in ("int8", "quant", "cache")):
        return "tiny", "denormal", "negative zeros"
    products = card.kind is Kind.MATMUL or card.name == "mla_preprocess"
    pairs = products and any(t.dtype == torch.bfloat16 for t in tensors(sample))
    return ("tiny", "denormal") if pairs else ()


def filled(sample: Sample, at: int, fill: Callable[[torch.Tensor], torch.Tensor], stride0: bool) -> Sample:
    """The call with another tensor in one place: in the layout of the one that was there, or as the fill left it."""
    count = -1

    def change(value: Any) -> Any:
        nonlocal count
        count += isinstance(value, torch.Tensor)
        if count != at or not isinstance(value, torch.Tensor):
            return value
        new = fill(value.detach())
        if not stride0:
            new = torch.empty_like(value).copy_(new)
        return new.requires_grad_(value.requires_grad)

    return mapped(sample, change)


def into(card: Operator, how: str, shift: int) -> Run:
    """A way to run the function that gives it an `out=`; what it refuses it must not have touched."""

    def run(fn: Callable[..., Any], sample: Sample) -> list[torch.Tensor]:
        if fn is not card.function:
            return values_of(fn, sample)
        with torch.no_grad():
            like = fn(*sample.args, **sample.kwargs)  # where this is refused, nothing is asked of out
        memory: list[torch.Tensor] = []
        if how in ("an input", "next to an input"):
            sample, out = _overlapping(sample, like, 0 if how == "an input" else shift, memory)
        else:
            out = tree_map_only(torch.Tensor, lambda t: _guarded(t, how, memory), like)
        before = [t.clone() for t in (*memory, *tensors(sample))]
        try:
            with torch.no_grad():
                back = fn(*sample.args, **sample.kwargs, out=out)
        except Exception:
            now = (*memory, *tensors(sample))
            assert all(map(_same, before, now)), "written to before it was refused"
            assert how != "fresh", "refused a fresh out"
            raise
        given, returned = _leaves(out), _leaves(back)
        assert all(map(lambda a, b: a is b, given, returned)), "returned another tensor than out"
        results = [t.clone() for t in given]
        for t in given:  # what is left is what lies around them, and is to be as it was
            t.fill_(GUARD)
        for old, new in zip(before, memory, strict=False):
            covered = new == GUARD
            assert _same(old[~covered], new[~covered]), "written to beside out"
        return results

    return run


def _leaves(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else list(value)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(_bits(a), _bits(b))


def _bits(t: torch.Tensor) -> torch.Tensor:
    return t.detach().flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _guarded(like: torch.Tensor, how: str, memory: list[torch.Tensor]) -> torch.Tensor:
    """An out in that layout, in memory full of the guard."""
    laid = lay_out(like, how if how in LAYOUTS else "contiguous")
    size = laid.untyped_storage().nbytes() // laid.element_size()
    base = torch.full((size,), GUARD, dtype=like.dtype)
    memory.append(base)
    return base.as_strided(laid.shape, laid.stride(), laid.storage_offset())


def _overlapping(sample: Sample, like: Any, shift: int, memory: list[torch.Tensor]) -> tuple[Sample, Any]:
    """The call with the first input of the first result's dtype moved to where that result goes, or near it."""
    first, *rest = _leaves(like)
    base = moved = None

    def change(value: Any) -> Any:
        nonlocal base, moved
        if isinstance(value, torch.Tensor) and value.dtype == first.dtype and value.numel() and base is None:
            base = torch.full((value.numel() + first.numel() + shift,), GUARD, dtype=first.dtype)
            moved = base[: value.numel()].view(value.shape).copy_(value.detach())
            return moved
        return value

    sample = mapped(sample, change)
    if base is None:
        base = torch.full((first.numel() + shift,), GUARD, dtype=first.dtype)
    memory.append(base)
    out = base[shift : shift + first.numel()].view(first.shape)
    if isinstance(like, torch.Tensor):
        return sample, out
    return sample, (out, *(torch.empty_like(t) for t in rest))


def at_once(card: Operator) -> Run:
    """A way to run the function on several threads at the same time, all on the same inputs."""

    def run(fn: Callable[..., Any], sample: Sample) -> list[torch.Tensor]:
        if fn is not card.function:
            return values_of(fn, sample)

        def one(_: int) -> list[torch.Tensor]:
            return values_of(fn, sample)

        with always_native(), ThreadPoolExecutor(THREADS) as pool:  # which is set for all threads
            first, *others = pool.map(one, range(THREADS))
        promised = card.domain is None or card.domain(*sample.args, **sample.kwargs)
        if promised and all(i.repeatable for i in card.implementations):
            for other in others:
                assert all(map(_same, first, other)), "threads differ"
        return first

    return run


def judge(card: Operator, case: Case) -> None:
    """Hold a case to the card."""
    run: Run = {
        "values": values_of,
        "gradients": gradients_of,
        "threads": at_once(card),
        "out": into(card, case.out, case.shift),
    }[case.what]
    x, dim = case.sample.args[0], case.sample.kwargs.get("dim", -1)
    if (
        card.name == "gelu_mul"
        and any(bool(t.isinf().any()) for t in tensors(case.sample))
        and bool((x < -5).any())
    ):
        return  # a gate of -9 is 0 in the reference, NaN times infinity, and next to 0 in ours
    if card.kind is Kind.SOFTMAX and case.what == "gradients" and x.shape[dim] == 1:
        return  # eager's is 0 to the last bit, which is no bound for ours: e / e is rounded twice in e * (1 / e)
    try:
        check(card, case.sample, run)
    except AssertionError:
        if case.what != "gradients" and card.kind is Kind.MATMUL and overflows(card, case.sample):
            return
        if card.kind not in (Kind.ACTIVATION, Kind.LOSS):
            raise
        check(card, case.sample, above_float64(run))


def overflows(card: Operator, sample: Sample) -> bool:
    """Whether the largest results, by which errors are judged, are no numbers of the dtype."""
    exact, limit = (
        values_of(card.reference, sample.cast(torch.float64)),
        torch.finfo(sample.args[0].dtype).max,
    )
    return any(bool((t.abs() > limit).any()) for t in exact)


def above_float64(run: Run) -> Run:
    """The run without what is so small that the definition, 1 + tanh(x) or p - 1, has rounded it in float64."""

    def seen(fn: Callable[..., Any], sample: Sample) -> list[torch.Tensor]:
        floating = [t.detach() for t in tensors(sample) if t.is_floating_point() and t.numel()]
        largest = max(float(t.abs().nan_to_num(0.0, 0.0).max()) for t in floating)
        return [torch.where(t.abs() < largest * 2.0**-48, 0.0, t) for t in run(fn, sample)]

    return seen


def fuzzers() -> list[Fuzzer]:
    """One for each operator."""
    return [Fuzzer(f"operators.{c.name}", cases(c), partial(judge, c)) for c in registry().values()]
