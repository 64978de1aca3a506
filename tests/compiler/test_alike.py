"""Layers that are alike are proved once, each is checked, and one that differs in its numbers is still noticed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import opsmith
from opsmith.compiler.program import study
from opsmith.operator import Implementation, Tolerance, registry
from tests.compiler.models import UNTIMED, Encoder, Truth, numbers, seeded

LAYERS, WIDTH = 5, 24


class Stack(nn.Module):
    """Norms and linear layers, all of them alike."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(LAYERS)])
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = layer(norm(x))
        return x


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators of the sites that are computed in float64."""
    names: list[str] = []
    original = study.run_wide

    def counted(site: Any, *rest: Any) -> Any:
        names.append(site.card.name)
        return original(site, *rest)

    monkeypatch.setattr(study, "run_wide", counted)
    return names


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts what changes the results of a layer norm with this weight first on its card."""

    def put(weight: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        card = registry()["layer_norm"]
        right = card.implementation("eager").fn

        def planted(x: torch.Tensor, weight_: Any = None, *args: Any, **options: Any) -> Any:
            given = options.get("weight", weight_)
            options = {**options, "weight": given} if "weight" in options or weight_ is not None else options
            result = right(x, *args, **options)
            return change(result) if torch.equal(given, weight) else result

        monkeypatch.setattr(
            card, "implementations", [Implementation("planted", planted), *card.implementations]
        )

    return put


def _choices(model: Any, operator: str) -> list[str]:
    (shape,) = model.opsmith.plan.shapes
    return [s.implementation for s in shape.steps if s.operator == operator]


def test_alike_layers_are_computed_in_float64_once(exact: list[str]) -> None:
    model, x = seeded(Stack), numbers(3, 7, WIDTH)
    truth = Truth(model)
    opsmith.optimize(model, x, config=UNTIMED)
    sites = model.opsmith.report.sites
    for operator in ("layer_norm", "linear"):
        likes = [s.like for s in sites if s.operator == operator]
        # Each is proved itself, or like the first; some by chance have an error of eager's that is small.
        assert exact.count(operator) == likes.count("") < LAYERS
        assert set(likes) == {"", f"{operator}_0"}
    assert all(s.error <= s.bound for s in sites)
    with torch.no_grad():
        truth.check(model(x), x)


def test_blocks_of_a_model_are_alike(exact: list[str]) -> None:
    model: Any = opsmith.optimize(seeded(Encoder), torch.randint(0, 61, (2, 9)), config=UNTIMED)
    assert len(exact) < len(model.opsmith.report.sites)


@pytest.mark.parametrize(
    "change",
    [
        lambda y: y * (1 + 1e-4),
        lambda y: y + 1e-4,
        lambda y: y.index_fill(1, torch.tensor([2]), float("nan")),
        lambda y: y.index_fill(1, torch.tensor([2]), float("inf")),
        lambda y: torch.zeros_like(y),
        lambda y: y[:1],
        lambda y: y.flip(-1),
    ],
    ids=["scale", "shift", "nan", "inf", "zeros", "shape", "order"],
)
@pytest.mark.parametrize("layer", [0, 3, LAYERS - 1])
def test_one_wrong_layer_of_many_is_noticed(
    layer: int, change: Callable[[torch.Tensor], torch.Tensor], plant: Callable[..., None]
) -> None:
    model, x = seeded(Stack), numbers(3, 7, WIDTH)
    with torch.no_grad():
        model.norms[layer].weight.mul_(1.25)
    truth = Truth(model)
    plant(model.norms[layer].weight.detach().clone(), change)
    opsmith.optimize(model, x, config=UNTIMED)
    (line,) = model.opsmith.report.overruled
    assert line.startswith(f"layer_norm_{layer} ")
    assert [c == "planted" for c in _choices(model, "layer_norm")] == [i != layer for i in range(LAYERS)]
    with torch.no_grad():
        truth.check(model(x), x)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 30.0, 1e-42, 0.0])
def test_weights_unlike_the_others_have_a_proof_of_their_own(value: float, exact: list[str]) -> None:
    model, x = seeded(Stack), numbers(3, 7, WIDTH)
    with torch.no_grad():
        model.layers[2].weight[0] = value
        expected = model(x)
    opsmith.optimize(model, x, config=UNTIMED)
    assert len(model.opsmith.report.sites) == 2 * LAYERS
    assert not model.opsmith.report.rolled_back
    if not torch.isfinite(torch.tensor(value)):
        assert exact.count("linear") > 1  # that layer, and what its results reach
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected, equal_nan=True, atol=1e-4, rtol=1e-4)


def test_other_arithmetic_is_another_class(exact: list[str]) -> None:
    model, x = seeded(Stack), numbers(3, 7, WIDTH)
    model.norms[1].eps = 1e-3
    model.norms[2] = nn.LayerNorm(WIDTH, bias=False)
    model.norms[3] = nn.LayerNorm(WIDTH, elementwise_affine=False)
    opsmith.optimize(model, x, config=UNTIMED)
    likes = [s.like for s in model.opsmith.report.sites if s.operator == "layer_norm"]
    assert likes[:4] == [""] * 4
    assert exact.count("layer_norm") == likes.count("")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_near_is_within_the_tolerance(dtype: torch.dtype) -> None:
    """Wherever eager's error is at least what it is taken for, nothing passes that the policy refuses."""
    tolerance, passed = Tolerance(), 0
    for scale in (1e-4, 1.0, 300.0):
        exact = numbers(40, 50).double() * scale
        unit = torch.finfo(dtype).eps * scale
        for noise in (0.0, 0.3, 1.0, 3.0):
            eager = (exact + noise * unit * numbers(40, 50, seed=1).double()).to(dtype)
            policy = tolerance.check(eager, eager, exact)
            for off in (0.0, 0.5, 1.0, 2.0, 4.0, 8.0):
                got = (exact + off * unit * numbers(40, 50, seed=2).double()).to(dtype)
                if tolerance.near(got, eager, policy.eager).ok:
                    passed += 1
                    assert tolerance.check(got, eager, exact).ok
    assert passed > 20


def test_nothing_is_near_an_unknown_error() -> None:
    x = torch.ones(3)
    assert not Tolerance().near(x, x, float("nan")).ok
    assert not Tolerance().near(x * torch.inf, x * torch.inf, 0.1).ok
    assert Tolerance().near(x, x, 0.0).ok


def test_integers_are_the_same_or_have_a_proof_of_their_own() -> None:
    x = torch.arange(4)
    assert Tolerance().near(x, x.clone(), 0.0).ok
    assert not Tolerance().near(x + 1, x, 0.0).ok
    assert not Tolerance().near(x.int(), x, 0.0).ok


def test_a_tolerance_of_ones_own_stays_what_it_is() -> None:
    """One that allows more eager errors allows them here too."""
    exact = torch.ones(4, dtype=torch.float64)
    eager, got = torch.full((4,), 1.001), torch.full((4,), 0.998)
    errors = [replace(Tolerance(), factor=f).near(got, eager, 1e-3).ok for f in (2.0, 5.0)]
    assert errors == [False, True]
    assert Tolerance(5.0).check(got, eager, exact).ok
