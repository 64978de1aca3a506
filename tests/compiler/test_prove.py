"""A site is used only where its result is as accurate as the model's own arithmetic; everything else is undone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import opsmith
from opsmith.compiler import Config
from opsmith.compiler.program import study
from opsmith.operator import Implementation, registry
from tests.compiler.models import UNTIMED, WIDTH, Feed, Truth, numbers, seeded


@pytest.fixture(autouse=True)
def _forget_graphs() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def _slightly_wrong(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    """LayerNorm with an epsilon of its own: an error of a thousandth."""
    return registry()["layer_norm"].reference(x, *args, **{**options, "eps": 1e-2})  # type: ignore[no-any-return]


def _nan(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    y: torch.Tensor = registry()["layer_norm"].reference(x, *args, **options)
    y = y.clone()
    y.view(-1)[-1] = float("nan")
    return y


def _wrong_shape(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    return x[:1]


def _raises(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    raise ZeroDivisionError("one divided by zero\nand more lines")


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts an implementation first on the card of layer_norm, alone or before the others."""

    def put(fn: Callable[..., Any], *, alone: bool = False) -> None:
        card = registry()["layer_norm"]
        wrong = Implementation("planted", fn)
        others = [replace(i, fn=fn) for i in card.implementations] if alone else card.implementations
        monkeypatch.setattr(card, "implementations", [wrong, *others])

    return put


def _used(model: Any) -> set[str]:
    return {s.implementation for s in model.opsmith.plan.shapes[0].steps if s.operator == "layer_norm"}


@pytest.mark.parametrize("fn", [_slightly_wrong, _nan, _wrong_shape], ids=lambda f: f.__name__.strip("_"))
def test_a_wrong_implementation_gives_way_to_the_next(
    fn: Callable[..., Any], plant: Callable[..., None]
) -> None:
    plant(fn)
    model, x = seeded(Feed), numbers(3, 4, WIDTH)
    truth = Truth(model)
    opsmith.optimize(model, [x, numbers(2, 7, WIDTH)], config=UNTIMED)
    assert _used(model).isdisjoint({"planted"})
    report = model.opsmith.report
    assert report.rolled_back == []
    (line,) = report.overruled
    assert line.startswith("layer_norm_0 (models.py:")
    assert "planted: " in line
    assert ("bound" in line) == (fn is _slightly_wrong)
    assert line in str(report)
    with torch.no_grad():
        truth.check(model(x), x)
        # Nor is it taken up again where nothing is proven, at other sizes.
        truth.check(model(numbers(5, 6, WIDTH)), numbers(5, 6, WIDTH))
    assert "planted" in model.opsmith.plan.shapes[1].steps[-1].refused


def test_a_site_without_an_accurate_implementation_is_rolled_back(plant: Callable[..., None]) -> None:
    plant(_slightly_wrong, alone=True)
    model, x = seeded(Feed), numbers(3, 4, WIDTH)
    truth = Truth(model)
    opsmith.optimize(model, [x, numbers(5, 6, WIDTH)], config=UNTIMED)
    report = model.opsmith.report
    assert "layer_norm" not in report.found
    assert report.found["linear"] == 2
    (line,) = report.rolled_back
    assert line.startswith("layer_norm_0 (models.py:")
    assert "error" in line
    assert "above the bound" in line
    (site,) = [s for s in report.sites if s.operator == "layer_norm"]
    assert site.status == "rolled back"
    assert site.error > site.bound > 0
    assert report.to_dict()["rolled_back"] == [line]
    for size in ((3, 4, WIDTH), (5, 6, WIDTH), (2, 7, WIDTH)):
        with torch.no_grad():
            truth.check(model(numbers(*size)), numbers(*size))


def test_without_proof_the_wrong_implementation_stays(plant: Callable[..., None]) -> None:
    """So the proof, and nothing else, is what keeps it out."""
    plant(_slightly_wrong)
    model, x = seeded(Feed), numbers(3, 4, WIDTH)
    truth = Truth(model)
    opsmith.optimize(model, x, config=UNTIMED, verify=False)
    assert _used(model) == {"planted"}
    assert model.opsmith.report.overruled == []
    with torch.no_grad(), pytest.raises(AssertionError, match="above the bound"):
        truth.check(model(x), x)


@pytest.mark.parametrize("tune", [False, True], ids=["untimed", "timed"])
def test_an_implementation_that_raises_is_refused_with_its_reason(
    tune: bool, plant: Callable[..., None]
) -> None:
    plant(_raises)
    model, x = seeded(Feed), numbers(3, 4, WIDTH)
    truth = Truth(model)
    opsmith.optimize(model, x, config=Config(tune=tune))
    (step,) = [s for s in model.opsmith.plan.shapes[0].steps if s.operator == "layer_norm"]
    assert step.implementation != "planted"
    assert step.refused["planted"] == "raised ZeroDivisionError: one divided by zero"
    with torch.no_grad():
        truth.check(model(x), x)


def test_a_site_whose_proof_raises_is_left_and_the_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where float64 does not fit in memory; on ranks, which prove site by site, the others learn of it there."""

    def scarce(site: Any, *rest: Any) -> Any:
        if site.card.name == "layer_norm":
            raise RuntimeError("can't allocate memory: you tried to allocate 4 GB")
        return prove(site, *rest)

    prove = study.prove
    monkeypatch.setattr(study, "prove", scarce)
    model, x = seeded(Feed), numbers(3, 4, WIDTH)
    truth = Truth(model)
    opsmith.optimize(model, x, config=UNTIMED)
    report = model.opsmith.report
    assert report.found
    assert "layer_norm" not in report.found
    (site,) = [s for g in report.graphs for s in g.sites if s.name.startswith("layer_norm")]
    assert site.status == "rolled back"
    assert "can't allocate memory" in site.why
    with torch.no_grad():
        truth.check(model(x), x)


def test_an_unproven_implementation_that_raises_leaves_the_model_to_eager(plant: Callable[..., None]) -> None:
    plant(_raises)
    model, x = seeded(Feed), numbers(3, 4, WIDTH)
    truth = Truth(model)
    opsmith.optimize(model, x, config=UNTIMED, verify=False)
    (shape,) = model.opsmith.plan.shapes
    assert not shape.used
    assert "raised ZeroDivisionError" in shape.note
    with torch.no_grad():
        truth.check(model(x), x)


def test_the_models_own_errors_are_not_hidden() -> None:
    model = seeded(lambda: torch.nn.Embedding(5, 8))
    opsmith.optimize(model, torch.tensor([[1, 2, 3]]), config=UNTIMED)
    for size in (3, 4):
        with torch.no_grad(), pytest.raises((IndexError, RuntimeError), match=r"out of range|outside"):
            model(torch.full((2, size), 9))
    with torch.no_grad():
        assert torch.equal(model(torch.full((2, 3), 4)), model.weight[4].expand(2, 3, 8))


def test_a_row_that_is_masked_wholly_is_no_reason_to_roll_back() -> None:
    class Masked(torch.nn.Module):
        def forward(self, q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            scores = (q @ q.transpose(-1, -2) * 0.5).masked_fill(~mask, float("-inf"))
            return torch.softmax(scores, -1) @ q

    q, mask = numbers(2, 3, 6, 8), torch.ones(2, 1, 6, 6, dtype=torch.bool)
    mask[0, 0, 2] = False
    model: Any = opsmith.optimize(Masked(), (q, mask), config=UNTIMED)
    assert model.opsmith.report.found == {"attention": 1}
    with torch.no_grad():
        got = model(q, mask)
    assert torch.equal(got[0, :, 2], torch.zeros(3, 8))
