"""Verification is only worth something if it finds faults: each of these was planted, and must be named."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from opsmith.operator import Cost, Implementation, Kind, Make, Operator, Sample
from opsmith.proof.verify import FUNCTION, Finding, verify


def double_plus_one(x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """The operator under test, y = 2 x + 1."""
    y = 2 * x + 1
    return y if out is None else out.copy_(y)


def samples(make: Make) -> Iterator[Sample]:
    yield Sample("vector", (make(17),))
    yield Sample("strided", (make(6, 10)[:, 2:7],))
    yield Sample("empty", (make(0, 4),))


def card(
    fn: Callable[..., Any], *, function: Callable[..., Any] = double_plus_one, out: bool = False
) -> Operator:
    return Operator(
        name="double_plus_one",
        kind=Kind.ACTIVATION,
        function=function,
        reference=lambda x: 2 * x + 1,
        cost=lambda x: Cost(2 * x.numel(), 2 * x.nbytes),
        samples=samples,
        implementations=[Implementation("mine", fn, takes_out=out)],
    )


def failures(operator: Operator) -> list[Finding]:
    return [finding for finding in verify(operator) if not finding.ok]


def test_a_right_operator_passes_every_check() -> None:
    findings = list(verify(card(double_plus_one, out=True)))
    assert [f for f in findings if not f.ok] == []
    assert {f.check for f in findings} == {"values", "out=", "gradients"}
    assert {f.dtype for f in findings} == {"float32", "bfloat16", "float16"}
    assert {f.sample for f in findings} == {"vector", "strided", "empty"}


def test_the_first_call_is_held_to_eagers_worst_of_all_calls_too() -> None:
    given = torch.arange(17.0)

    def eager(
        x: torch.Tensor,
    ) -> torch.Tensor:  # exact for the sample itself, off for its values in another order
        return 2 * x + 1 + (0.0 if torch.equal(x, given.to(x.dtype)) else 1e-3)

    def mine(by: float) -> Operator:
        operator = card(lambda x: 2 * x + 1 + by)
        implementations = [*operator.implementations, Implementation("eager", eager)]
        some = [Sample("counting", (given,))]
        return replace(
            operator, implementations=implementations, samples=lambda make: some, differentiable=False
        )

    assert [f for f in verify(mine(1.5e-3), [torch.float32]) if not f.ok] == []
    assert {f.implementation for f in verify(mine(3e-3), [torch.float32]) if not f.ok} == {"mine"}


def test_what_fails_is_held_to_eagers_worst_of_more_calls() -> None:
    """Off in one order of the values out of many, as a largest error is by luck: the first few draws do not see it."""
    seen: list[bytes] = []

    def eager(x: torch.Tensor) -> torch.Tensor:
        order = x.numpy().tobytes()
        seen.extend([] if order in seen else [order])
        return 2 * x + 1 + (1e-3 if seen.index(order) == 7 else 1e-6)

    def found(by: float) -> list[Finding]:
        seen.clear()
        operator = card(lambda x: 2 * x + 1 + by)
        some = [Sample("counting", (torch.arange(17.0),))]
        more = [*operator.implementations, Implementation("eager", eager)]
        operator = replace(operator, implementations=more, samples=lambda make: some, differentiable=False)
        return [f for f in verify(operator, [torch.float32]) if f.implementation == "mine"]

    assert [f.ok for f in found(1e-6)] == [True]
    assert len(seen) == 3
    assert [f.ok for f in found(1.5e-3)] == [True]
    assert len(seen) == 12
    assert [f.ok for f in found(3e-3)] == [False]


def test_checks_of_a_sample_share_the_references_results_and_no_others() -> None:
    """An implementation that changes nothing asks for nothing new: one that is wrong at other values is still found."""
    asked = []

    def reference(x: torch.Tensor) -> torch.Tensor:
        asked.append(x.dtype)
        return 2 * x + 1

    first: list[torch.Tensor] = []

    def right_at_first(x: torch.Tensor) -> torch.Tensor:
        first.append(x.clone())
        return 2 * first[0] + 1

    plain = replace(card(double_plus_one), reference=reference, differentiable=False)
    several = [Implementation("one", double_plus_one), Implementation("two", double_plus_one)]
    several += [Implementation("late", right_at_first)]
    held = replace(plain, implementations=several, samples=lambda make: [Sample("vector", (make(17),))])
    found = list(verify(held, [torch.float32]))
    assert [(f.implementation, f.ok) for f in found] == [("one", True), ("two", True), ("late", False)]
    assert asked.count(torch.float64) == 3  # the values of the sample, and two orders of them


def unwritten_tail(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=x.dtype)
    y[:-1] = 2 * x[:-1] + 1
    return y


def mutated_input(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(2).add_(1).clone()


def cached_answer() -> Callable[[torch.Tensor], torch.Tensor]:
    answers: dict[tuple[int, torch.Size], torch.Tensor] = {}

    def fn(x: torch.Tensor) -> torch.Tensor:
        return answers.setdefault((x.data_ptr(), x.shape), 2 * x + 1)

    return fn


def low_precision(x: torch.Tensor) -> torch.Tensor:
    return (2 * x.half() + 1).to(x.dtype)


def nan(x: torch.Tensor) -> torch.Tensor:
    return x * float("nan")


def other_dtype(x: torch.Tensor) -> torch.Tensor:
    return 2 * x.double() + 1


def transposed(x: torch.Tensor) -> torch.Tensor:
    return (2 * x + 1).t() if x.dim() == 2 else 2 * x + 1


def raises(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no such\nkernel")


@pytest.mark.parametrize(
    ("fn", "why"),
    [
        (unwritten_tail, "skipped tail"),
        (mutated_input, "mutated input"),
        (cached_answer(), "cached answer"),
        (low_precision, "low precision"),
        (nan, "unwritten output"),
        (other_dtype, "wrong dtype: an output is float64, expected"),
        (transposed, "(5, 6), expected (6, 5)"),
        (raises, "raised RuntimeError: no such kernel"),
        (lambda x: (x, x), "expected 1 tensors, got 2"),
    ],
)
def test_a_planted_fault_is_named(fn: Callable[..., Any], why: str) -> None:
    found = failures(card(fn))
    assert found
    assert {(f.implementation, f.check) for f in found} == {("mine", "values")}
    assert any(why in f.why for f in found), found


def test_an_unwritten_out_is_named() -> None:
    def forgets_out(x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        return 2 * x + 1

    found = failures(card(forgets_out, out=True))
    assert {f.check for f in found} == {"out="}
    assert {f.sample for f in found} == {"vector", "strided"}


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x + 1

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        return dy


def test_a_wrong_gradient_is_named() -> None:
    found = failures(card(double_plus_one, function=_WrongGradient.apply))
    assert {(f.implementation, f.check, f.sample) for f in found} == {
        (FUNCTION, "gradients", "vector"),
        (FUNCTION, "gradients", "strided"),
    }


def test_a_missing_gradient_is_named() -> None:
    found = failures(card(double_plus_one, function=lambda x: x.detach() * 2 + 1))
    assert {f.check for f in found} == {"gradients"}
    assert all("expected 1 tensors, got 0" in f.why for f in found)
