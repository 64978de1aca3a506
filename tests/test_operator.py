"""The card, the registry, and the tolerance that everything is held to."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

import opsmith.operator as module
from opsmith.operator import (
    Cost,
    Implementation,
    Kind,
    Make,
    Operator,
    Sample,
    Tolerance,
    operator,
    register,
    registry,
)


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REGISTRY", dict(module._REGISTRY))


def samples(make: Make) -> Iterator[Sample]:
    yield Sample("vector", (make(5),))


def cost(x: torch.Tensor) -> Cost:
    return Cost(2.0 * x.numel(), 2.0 * x.nbytes)


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x).square()


def test_a_plain_function_becomes_a_card() -> None:
    card = operator(kind="activation", cost=cost, samples=samples)(squared_relu)
    assert isinstance(card, Operator)
    assert registry()["squared_relu"] is card
    assert card.kind is Kind.ACTIVATION
    assert [i.name for i in card.implementations] == ["eager"]
    x = torch.tensor([-1.0, 3.0])
    assert torch.equal(card.eager(x), torch.tensor([0.0, 9.0]))


def test_a_taken_name_is_refused() -> None:
    card = operator(kind="activation", cost=cost, samples=samples)(squared_relu)
    with pytest.raises(ValueError, match="'squared_relu' is registered already; choose another name"):
        register(card)


def test_an_unknown_kind_is_refused_with_those_there_are() -> None:
    with pytest.raises(
        ValueError, match="'activatoin' is no kind of operator; there are: matmul, attention, "
    ):
        operator(kind="activatoin", cost=cost, samples=samples)(squared_relu)


def test_the_registry_handed_out_is_a_copy() -> None:
    card = operator(kind="activation", cost=cost, samples=samples)(squared_relu)
    registry().clear()
    assert registry()["squared_relu"] is card


def test_implementations_are_found_by_name_and_refuse_with_reasons() -> None:
    picky = Implementation("picky", squared_relu, supports=lambda x: x.numel() > 9 or "ten elements at least")
    absent = Implementation("absent", squared_relu, available=lambda: "no such hardware")
    elsewhere = Implementation("elsewhere", squared_relu, device="cuda")
    card = operator(
        kind="activation", cost=cost, samples=samples, implementations=[picky, absent, elsewhere]
    )(squared_relu)
    accepted, refused = card.candidates(torch.ones(3))
    assert [i.name for i in accepted] == ["eager"]
    assert refused == {
        "picky": "ten elements at least",
        "absent": "no such hardware",
        "elsewhere": "elsewhere runs on cuda, the input is on cpu",
    }
    assert [i.name for i in card.candidates(torch.ones(10))[0]] == ["picky", "eager"]
    assert card.implementation("picky") is picky
    with pytest.raises(KeyError, match="no implementation 'fast'; it has: picky, absent, elsewhere, eager"):
        card.implementation("fast")


def test_cost_tells_the_operations_per_byte() -> None:
    assert Cost(8.0, 4.0).intensity == 2.0
    assert Cost(8.0, 0.0).intensity == math.inf


def test_cast_changes_floating_point_tensors_only() -> None:
    learned = torch.ones(2, requires_grad=True)
    sample = Sample("s", (learned, torch.arange(3), 0.5), {"mask": torch.tensor([True]), "scale": 2.0})
    wide = sample.cast(torch.float64)
    assert wide.args[0].dtype == torch.float64
    assert wide.args[0].requires_grad
    assert wide.args[0].is_leaf
    assert wide.args[1].dtype == torch.int64
    assert wide.kwargs["mask"].dtype == torch.bool
    assert (wide.args[2], wide.kwargs["scale"], wide.name) == (0.5, 2.0, "s")
    assert sample.args[0].dtype == torch.float32


def test_make_gives_the_same_numbers_for_the_same_seed_in_every_dtype() -> None:
    one, same, other = Make(torch.float32)(50), Make(torch.bfloat16)(50), Make(torch.float32, seed=1)(50)
    assert torch.equal(one.bfloat16(), same)
    assert not torch.equal(one, other)
    assert Make(torch.float32).ids(1000, high=3).unique().tolist() == [0, 1, 2]
    assert 0.6 < Make(torch.float32).mask(1000, keep=0.7).float().mean() < 0.8


EXACT = torch.tensor([1.0, -2.0, 0.25], dtype=torch.float64)
ULP = 2.0**-22  # of float32, between 2 and 4


@pytest.mark.parametrize(
    ("error", "eager_error", "ok"),
    [
        (0.0, 0.0, True),
        (ULP, 0.0, True),
        (2 * ULP, 0.0, False),
        (4 * ULP, 2 * ULP, True),
        (6 * ULP, 2 * ULP, False),
    ],
)
def test_tolerance_is_twice_eager_and_one_ulp(error: float, eager_error: float, ok: bool) -> None:
    def off_by(e: float) -> torch.Tensor:
        return (EXACT + torch.tensor([0.0, e, 0.0], dtype=torch.float64)).float()

    verdict = Tolerance().check(off_by(error), off_by(eager_error), EXACT)
    assert verdict.ok is ok
    assert verdict.error == error
    assert verdict.bound == 2 * eager_error + ULP
    assert ("above the bound" in verdict.why) is not ok


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_never_passes_for_a_number(bad: float) -> None:
    got = EXACT.float()
    got[1] = bad
    for eager in (EXACT.float(), got):  # even where eager errs alike
        assert not Tolerance(factor=1e9).check(got, eager, EXACT).ok


def test_a_number_never_passes_for_infinity_or_nan() -> None:
    exact = torch.tensor([1.0, math.inf, math.nan], dtype=torch.float64)
    right = exact.float()
    assert Tolerance().check(right, right, exact).ok
    for place, value in ((1, 3e38), (1, -math.inf), (2, 0.0), (2, math.inf)):
        got = right.clone()
        got[place] = value
        verdict = Tolerance().check(got, right, exact)
        assert not verdict.ok
        assert "infinities or NaN stand elsewhere" in verdict.why


def test_what_overflows_the_dtype_is_infinite_there() -> None:
    exact = torch.tensor([7e4, 1.0], dtype=torch.float64)
    assert Tolerance().check(exact.half(), exact.half(), exact).ok


def test_another_shape_fails_and_an_empty_tensor_passes() -> None:
    assert not Tolerance().check(EXACT.float()[:2], EXACT.float(), EXACT).ok
    nothing = torch.empty(0, 3)
    assert Tolerance().check(nothing, nothing, nothing.double()).ok


def test_integers_must_be_equal() -> None:
    exact = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert Tolerance().check(exact.long(), exact.long(), exact).ok
    assert not Tolerance().check(exact.long() + 1, exact.long(), exact).ok
