"""Every operator on inputs that nobody chose: the samples of its card with other sizes, layouts and values.

A card in the registry is driven by existing. What a call must satisfy is the card's own word: the reference in float64,
held to its tolerance. A named refusal is an answer too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings, strategies as st

import opsmith.ops  # noqa: F401  registers the cards
from opsmith.call.arguments import short
from opsmith.call.dispatch import always_native
from opsmith.measure.pool import tensors_of
from opsmith.operator import Make, Operator, Sample, registry
from opsmith.proof.verify import with_leaves

CARDS = list(registry().values())
SIZES = (0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 65)
EXTREMES = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-30, -1e-6, 1e4, -3e4, 6e4)
MOST_ELEMENTS = 6000  # of a sample that is varied

by_card = pytest.mark.parametrize("card", CARDS, ids=[card.name for card in CARDS])
property_of_cards = settings(
    max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)


@functools.cache
def samples(name: str, dtype: torch.dtype) -> list[Sample]:
    """Those small enough to be tried many times."""
    card = registry()[name]
    found = [s for s in card.samples(Make(dtype)) if not any(t.numel() > MOST_ELEMENTS for t in tensors(s))]
    assert found, f"{name} has no sample below {MOST_ELEMENTS} elements"
    return found


def tensors(sample: Sample) -> list[torch.Tensor]:
    return list(tensors_of((sample.args, dict(sample.kwargs))))


def mapped(sample: Sample, change: Callable[[Any], Any]) -> Sample:
    """The sample with every argument changed."""
    return Call(
        sample.name, tuple(map(change, sample.args)), {k: change(v) for k, v in sample.kwargs.items()}
    )


def resize(sample: Sample, sizes: dict[int, int]) -> Sample:
    """Dimensions of one size are taken for one dimension: all of them get the new size, by cutting or repeating."""

    def change(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            asks = value.requires_grad
            value = value.detach()
            for dim, size in enumerate(value.shape):
                if size in sizes:
                    value = value.index_select(dim, torch.arange(sizes[size]) % size)
            return value.requires_grad_(asks)
        return sizes.get(value, value) if type(value) is int else value

    return mapped(sample, change)


def lay_out(value: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values elsewhere in memory: at another offset, with gaps, with the dimensions in another order."""
    asks, value = value.requires_grad, value.detach()
    if layout == "offset":
        memory = value.new_empty(value.numel() + 1)
        laid = memory[1:].view(value.shape)
    elif layout == "gaps" and value.dim():
        laid = value.new_empty((*value.shape[:-1], value.shape[-1] + 3))[..., 1 : value.shape[-1] + 1]
    elif layout == "every other" and value.dim():
        laid = value.new_empty((*value.shape, 2))[..., 0]
    elif layout == "turned" and value.dim() > 1:
        laid = value.new_empty(value.shape[::-1]).permute(*range(value.dim() - 1, -1, -1))
    else:
        laid = torch.empty_like(value, memory_format=torch.contiguous_format)
    return laid.copy_(value).requires_grad_(asks)


LAYOUTS = ("contiguous", "offset", "gaps", "every other", "turned")


@st.composite
def calls(draw: st.DrawFn, card: Operator, extremes: bool) -> Sample:
    """A sample of the card with some sizes, all layouts and some values changed."""
    dtype = draw(st.sampled_from(card.dtypes))
    sample = draw(st.sampled_from(samples(card.name, dtype)))
    sizes = sorted({size for t in tensors(sample) for size in t.shape if size > 1})
    if sizes and draw(st.booleans()):
        changed = draw(st.dictionaries(st.sampled_from(sizes), st.sampled_from(SIZES), max_size=2))
        sample = resize(sample, changed)
    floating = [i for i, t in enumerate(tensors(sample)) if t.is_floating_point() and t.numel()]
    values: dict[int, list[tuple[int, float]]] = {}
    if extremes and floating:
        for _ in range(draw(st.integers(0, 3))):
            where = (draw(st.sampled_from(floating)), draw(st.integers(0, MOST_ELEMENTS)))
            values.setdefault(where[0], []).append((where[1], draw(st.sampled_from(EXTREMES))))
    scale = 2.0 ** draw(st.integers(-4, 3)) if draw(st.booleans()) else 1.0
    count = -1

    def change(value: Any) -> Any:
        nonlocal count
        if not isinstance(value, torch.Tensor):
            return value
        count += 1
        if value.is_floating_point() and value.numel():
            asks = value.requires_grad
            value = value.detach() * (scale if count == 0 else 1.0)
            flat = value.contiguous().view(-1)
            for at, extreme in values.get(count, ()):
                flat[at % flat.numel()] = extreme
            value = flat.view(value.shape).requires_grad_(asks)
        return lay_out(value, draw(st.sampled_from(LAYOUTS)))

    return mapped(sample, change)


def answer(card: Operator, run: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor] | None:
    """What the operator returns, or None if it refuses the call by name."""
    try:
        return run()
    except (ValueError, TypeError, RuntimeError, IndexError) as refusal:
        names = card.name, card.name.removesuffix("_int8")  # a card may be of some calls of a function
        if any(f"{name}:" in str(refusal) for name in names):
            event("refused")
            return None
        raise


def hold(card: Operator, got: list[Any], eager: list[list[Any]], exact: list[Any], what: str) -> None:
    """To the card's tolerance, wherever one of eager's spellings is itself of the reference's kind: finite, inf or NaN.

    Where eager overflows on the way, say, and the reference does not, nothing is asked.
    """
    for out, right, *theirs in zip(got, exact, *eager, strict=True):
        assert all(out.dtype == one.dtype for one in theirs), f"{what}: {short(out.dtype)}"
        verdicts = []
        for one in theirs:
            if not out.dtype.is_floating_point or out.shape != right.shape:
                verdicts.append(card.tolerance.check(out, one, right))
                continue
            limit = torch.finfo(out.dtype).max
            seen = torch.where(right.abs() > limit, right * math.inf, right)
            fair = (
                ((one == seen) & seen.isinf())
                | (one.isnan() & seen.isnan())
                | (one.isfinite() & seen.isfinite())
            )
            out, one, seen = (torch.where(fair, t, torch.zeros_like(t)) for t in (out, one, seen))
            verdicts.append(card.tolerance.check(out, one, seen))
        assert any(verdict.ok for verdict in verdicts), f"{what}: {'; '.join(v.why for v in verdicts)}"


class Call(Sample):
    """A sample that shows itself in a line."""

    def __repr__(self) -> str:
        return describe(self)


def describe(sample: Sample) -> str:
    shapes = [f"{short(t.dtype)}{tuple(t.shape)}/{t.stride()}" for t in tensors(sample)]
    options = {k: v for k, v in sample.kwargs.items() if not isinstance(v, torch.Tensor)}
    return f"{sample.name}: {', '.join(shapes)}, {options}"


def spellings(card: Operator) -> list[Callable[..., Any]]:
    return list(dict.fromkeys((card.eager, card.reference)))


def values_of(fn: Callable[..., Any], sample: Sample) -> list[torch.Tensor]:
    with torch.no_grad():
        return list(tensors_of(fn(*sample.args, **sample.kwargs)))


def gradients_of(fn: Callable[..., Any], sample: Sample) -> list[torch.Tensor]:
    args, kwargs, leaves = with_leaves(sample.args, dict(sample.kwargs))
    outputs = [t for t in tensors_of(fn(*args, **kwargs)) if t.requires_grad]
    if not outputs or not leaves:
        return []
    seeds = [(torch.arange(t.numel()) % 17 - 8).view(t.shape).to(t.dtype) / 8 for t in outputs]
    return list(tensors_of(torch.autograd.grad(outputs, leaves, seeds, materialize_grads=True)))


Run = Callable[[Callable[..., Any], Sample], list[torch.Tensor]]


def jitter(value: Any, generator: torch.Generator) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    factor = 1 + (torch.rand(value.shape, generator=generator) - 0.5) / 50
    return (value.detach() * factor.to(value.dtype)).requires_grad_(value.requires_grad)


# What the function returns, what eager's spellings do, and the reference.
Results = tuple[list[torch.Tensor], list[list[torch.Tensor]], list[torch.Tensor]]


def results(card: Operator, sample: Sample, run: Run) -> Results | None:
    """All that a call is judged by, or None if the function refuses it."""
    with always_native():
        got = answer(card, lambda: run(card.function, sample))
    if got is None:
        return None
    eager = [run(fn, sample) for fn in spellings(card)]
    return got, eager, run(card.reference, sample.cast(torch.float64))


def together(calls: list[Results]) -> Results:
    """Several calls as one, whose outputs are theirs side by side."""

    def join(outputs: Any) -> list[torch.Tensor]:
        return [torch.stack(parts) for parts in zip(*outputs, strict=True)]

    got, eager, exact = zip(*calls, strict=True)
    return join(got), [join(spelling) for spelling in zip(*eager, strict=True)], join(exact)


def check(card: Operator, sample: Sample, run: Run) -> None:
    """Hold the public function to the card on this call, and the call's inputs to what they were.

    The policy compares two largest errors. Over thousands of numbers each is what it always is; over a handful
    eager's may be zero by luck, and twice nothing is no bound. So a call that misses is repeated with more that differ
    from it by a percent, eight and then, where it is small, sixty-four, and all are judged as one call of so many times
    the size: both sides get the same draws, and the same largest magnitude counts, so what is less accurate than the
    policy allows gains nothing.
    """
    before = [t.detach().clone() for t in tensors(sample)]
    found = results(card, sample, run)
    if found is None or (card.domain is not None and not card.domain(*sample.args, **sample.kwargs)):
        return
    for old, new in zip(before, tensors(sample), strict=True):
        torch.testing.assert_close(
            new.detach(), old, rtol=0, atol=0, equal_nan=True, msg="an input has changed"
        )
    generator = torch.Generator().manual_seed(0)
    judged, what = [found], describe(sample)
    for neighbors in (8, 64 * (sum(t.numel() for t in found[0]) < 1 << 14), 0):
        try:
            return hold(card, *together(judged), what)
        except AssertionError:
            if not neighbors:
                raise
        near = [mapped(sample, functools.partial(jitter, generator=generator)) for _ in range(neighbors)]
        judged += [r for r in (results(card, call, run) for call in near) if r is not None]
        what = f"{describe(sample)}, with {len(judged) - 1} neighbors"


@by_card
def test_values_of_any_call(card: Operator) -> None:
    @property_of_cards
    @given(calls(card, extremes=True))
    def holds(sample: Sample) -> None:
        check(card, sample, values_of)

    holds()


@pytest.mark.parametrize("card", [c for c in CARDS if c.differentiable], ids=lambda card: card.name)
def test_gradients_of_any_call(card: Operator) -> None:
    @property_of_cards
    @given(calls(card, extremes=False))
    def holds(sample: Sample) -> None:
        check(card, sample, gradients_of)

    holds()


def broken(card: Operator, fault: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Operator:
    return replace(card, function=fault(card.eager))


def forgets_strides(fn: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        memory = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())[x.storage_offset() :]
        return fn(memory[: x.numel()].view(x.shape), *args, **kwargs)

    return wrong


def forgets_nan(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, *args, **kwargs: fn(x.nan_to_num(nan=0.0), *args, **kwargs)


def forgets_the_last(fn: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(*args: Any, **kwargs: Any) -> Any:
        y = fn(*args, **kwargs).clone()
        if y.numel() and y.shape[-1] % 16 == 1:
            y[..., -1] = 0
        return y

    return wrong


@pytest.mark.parametrize("fault", [forgets_strides, forgets_nan, forgets_the_last])
def test_a_planted_fault_is_found(fault: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    card = broken(registry()["gelu"], fault)

    @property_of_cards
    @given(calls(card, extremes=True))
    def holds(sample: Sample) -> None:
        check(card, sample, values_of)

    with pytest.raises(AssertionError):
        holds()
