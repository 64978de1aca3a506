"""Formulas with choices, conditions, sums and casts are found in models that write them out, and nothing else is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import opsmith.operator as cards
from opsmith.authoring import load, new
from tests.authoring.prototypes import ROWS, prototype
from tests.compiler.graphs import found_in

Spelling = Callable[[torch.Tensor], torch.Tensor]
W = torch.linspace(-1, 1, 64)


def even(x: torch.Tensor) -> torch.Tensor:
    return x.int() % 2 == 0


# A prototype, ways in which models write it, and what comes close and is something else.
CASES: dict[str, tuple[dict[str, object], list[Spelling], list[Spelling]]] = {
    "abs": (
        prototype("AbsFound", {"x": ROWS, "w": "N"}, "abs(x) * w"),
        [lambda x: x.abs() * W, lambda x: torch.maximum(-x, x) * W],
        [lambda x: x.abs() * x * W],
    ),
    "clamp": (
        prototype("ClampFound", {"x": ROWS}, "clamp(x, 0, 6)"),
        [
            lambda x: F.relu6(x) * 2,
            lambda x: torch.clamp(x, 0, 6) + 1,
            lambda x: x.relu().clamp_max(6) + 1,
            lambda x: torch.minimum(torch.tensor(6.0), torch.maximum(x, torch.tensor(0.0))) * 2,
        ],
        [lambda x: torch.clamp(x, 0, 5) + 1, lambda x: x.relu() + 1],
    ),
    "hard swish": (
        prototype("HardFound", {"x": ROWS}, "x * clamp(x + 3, 0, 6) / 6"),
        [lambda x: F.hardswish(x) * 2, lambda x: x * F.relu6(x + 3) / 6 + 1, lambda x: F.hardsigmoid(x) * x],
        [lambda x: x * F.relu6(x + 2) / 6 + 1],
    ),
    "squared relu": (
        prototype("SquareFound", {"x": ROWS}, "relu(x) ** 2"),
        [lambda x: F.relu(x).square() * 2, lambda x: F.relu(x) ** 2 + 1],
        [lambda x: F.relu(x) ** 3 + 1],
    ),
    "sum": (
        prototype("SumFound", {"x": ROWS}, "x * rsqrt(sum(x * x) + eps)", eps=1e-6),
        [
            lambda x: x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6) + 1,
            lambda x: x * torch.rsqrt(x.pow(2).sum(-1, True) + 1e-5) + 1,
        ],
        [
            lambda x: x * torch.rsqrt(x.pow(2).sum(-2, True) + 1e-5) + 1,
            lambda x: x * torch.rsqrt(x.pow(2).mean(-1, True) + 1e-5) + 1,
        ],
    ),
    "normalize": (
        prototype("NormalizeFound", {"x": ROWS}, "x / max(sqrt(sum(x * x)), eps)", eps=1e-6),
        [lambda x: F.normalize(x, dim=-1) + 1],
        [lambda x: F.normalize(x, dim=-2) + 1, lambda x: F.normalize(x, p=1, dim=-1) + 1],
    ),
    "elu": (
        prototype("EluFound", {"x": ROWS}, "where(x > 0, x, exp(min(x, 0)) - 1)"),
        [
            lambda x: F.elu(x) * 2,
            lambda x: torch.where(x > 0, x, torch.exp(torch.clamp(x, max=0)) - 1) + 1,
            lambda x: torch.where(torch.lt(torch.zeros_like(x), x), x, torch.expm1(x.clamp_max(0))) + 1,
        ],
        [
            lambda x: torch.where(x >= 0, x, torch.exp(torch.clamp(x, max=0)) - 1) + 1,
            lambda x: torch.where(x < 0, x, torch.exp(torch.clamp(x, max=0)) - 1) + 1,
            lambda x: F.elu(x, 2.0) * 2,
        ],
    ),
    "an attribute in a condition": (
        prototype("LimitFound", {"x": ROWS}, "where(x > limit, x, 0)", limit=0.5),
        [lambda x: torch.where(x > 0.75, x, 0.0) * 2, lambda x: x.masked_fill(~(x > 0.75), 0.0) + 1],
        [lambda x: torch.where(x >= 0.75, x, 0.0) * 2],
    ),
    "an attribute in a branch": (
        prototype("LeakFound", {"x": ROWS}, "where(x > 0, x, slope * x)", slope=0.01),
        [lambda x: F.leaky_relu(x, 0.2) * 2, lambda x: torch.where(x > 0, x, x * 0.1) + 1],
        [lambda x: torch.where(x > 0, x, x * x) + 1],
    ),
    "two attributes": (
        prototype(
            "GateFound", {"x": ROWS, "up": ROWS}, "x * sigmoid(beta * x) * (up + shift)", beta=1.5, shift=0.5
        ),
        [lambda x: x * torch.sigmoid(2 * x) * (x.cos() + 0.25)],
        [lambda x: x * torch.sigmoid(2 * x.sin()) * (x.cos() + 0.25)],
    ),
    "equality": (
        prototype("EqualFound", {"x": ROWS, "other": ROWS}, "where(x != other, x, 0)"),
        [lambda x: torch.where(x.cos() == x, 0.0, x) + 1],
        [lambda x: torch.where(x == x.cos(), x, 0.0) + 1],
    ),
    "a mask": (
        prototype("MaskFound", {"x": ROWS, "keep": ROWS}, "where(keep, x, fill)", "keep", fill=-100.0),
        [lambda x: torch.where(even(x), x, -7.0) * 2, lambda x: x.masked_fill(even(x), -3.0)],
        [],
    ),
    "cast": (
        prototype("CastFound", {"x": ROWS, "w": "N"}, "cast(x * w, float16) + 1"),
        [lambda x: (x * W).half().float() + 1],
        [lambda x: x * W + 1, lambda x: (x * W).bfloat16().float() + 1],
    ),
    "a maximum of each row": (
        prototype("RowMaxFound", {"x": ROWS}, "x / max(max(abs(x)), eps)", eps=1e-6),
        [
            lambda x: x / x.abs().amax(-1, keepdim=True).clamp_min(1e-5),
            lambda x: x / x.abs().max(-1, keepdim=True).values.clamp(min=1e-5),
        ],
        [lambda x: x / x.amax(-1, keepdim=True).clamp_min(1e-5)],
    ),
    "both ends of each row": (
        prototype("RowMinFound", {"x": ROWS}, "(x - min(x)) / (max(x) - min(x) + 1)"),
        [lambda x: (x - x.amin(-1, True)) / (x.amax(-1, True) - x.min(-1, True).values + 1)],
        [lambda x: (x - x.amin(-1, True)) / (x.amax(-1, True) - x.amin(-2, True) + 1)],
    ),
    "the smaller of two expressions": (
        prototype("MinFound", {"x": ROWS, "other": ROWS}, "min(x, other)"),
        [lambda x: torch.minimum(x + 1, x.sin() - 2) * 2],
        [lambda x: torch.maximum(x + 1, x.sin() - 2) * 2],
    ),
    "one number for each row": (
        prototype("RowsFound", {"x": ROWS}, "log(sum(exp(x - max(x)))) + max(x)"),
        [lambda x: torch.logsumexp(x, -1, keepdim=True) * 2],
        [lambda x: torch.logsumexp(x, -2, keepdim=True) * 2],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_formula_is_found_as_models_write_it(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cards, "_REGISTRY", dict(cards._REGISTRY))
    described, same, other = CASES[case]
    file = tmp_path / "p.json"
    file.write_text(json.dumps(described))
    # Recognition needs no kernel: with none for the CPU the reference runs here.
    folder = new.create(file, tmp_path / "project", backends=["triton"])[0]
    name = load(folder).CARD.name
    torch.manual_seed(0)
    for fn, wanted in [(fn, True) for fn in same] + [(fn, False) for fn in other]:
        found, got, want = found_in(fn, [torch.randn(4, 64) * 3], False)
        assert (name in {site.card.name for site in found.sites}) is wanted, (fn, found.misses)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_an_operator_with_several_results_costs_the_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "_REGISTRY", dict(cards._REGISTRY))

    def samples(make: cards.Make) -> Iterator[cards.Sample]:
        yield cards.Sample("3x64", (make(3, 64),))

    @cards.operator(kind="norm", cost=lambda x: cards.Cost(3 * x.numel(), 2 * x.nbytes), samples=samples)
    def leveled(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        largest = x.abs().amax(-1, keepdim=True)
        return x / largest, largest

    def model(x: torch.Tensor) -> torch.Tensor:
        x = F.silu(x) * x.cos()
        return x / x.abs().amax(-1, keepdim=True)

    found, got, want = found_in(model, [torch.randn(4, 64)], False)
    assert [site.card.name for site in found.sites] == ["silu_mul"]
    assert [miss.expected for miss in found.misses] == ["an operator with one result"]
    torch.testing.assert_close(got, want)
