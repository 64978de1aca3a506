"""Layers that are alike are searched once, and what differs in one of them is read as what it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import linear

from opsmith.compiler.find import recognize
from opsmith.compiler.find.recognize import Recognized, _Finder
from opsmith.compiler.find.window import Window, Windows
from opsmith.operator import registry
from tests.compiler.graphs import found_in
from tests.compiler.models import numbers

LAYERS, FEW, WIDTH = 20, 3, 16


def _norm(x: torch.Tensor, of: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * (x * torch.rsqrt(of.pow(2).mean(-1, keepdim=True) + eps))


def _layers(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """A decoder's feed-forward layers, written out."""
    for i in range(len(weights) // 4):
        weight, gate, up, down = weights[4 * i : 4 * i + 4]
        eps = 1e-6 if i != 2 else 1e-5
        weight = weight if i != 3 else weights[0]  # shared with the first layer
        h = _norm(x, x if i != 4 else x + 1.0, weight, eps)  # of another value: no norm
        g, u = linear(h, gate), linear(h, up if i != 5 else weights[2])
        y = torch.sigmoid(g) * g * (u if i != 6 else g)  # a square
        x = x + linear(y, down)
    return x


@pytest.fixture(autouse=True)
def nothing_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this test alone in which forms are kept."""
    monkeypatch.setenv("OPSMITH_TUNING", str(tmp_path / "tuning"))
    return tmp_path / "tuning"


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The roots that all templates were tried at."""
    names: list[str] = []
    search = _Finder._search

    def counted(self: _Finder, root: Any, window: Window) -> Any:
        names.append(root.name)
        return search(self, root, window)

    monkeypatch.setattr(_Finder, "_search", counted)
    return names


@pytest.fixture
def forms(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any], Any]], None]:
    """Gives windows the form that a function makes of their root."""
    of = Windows.of

    def put(form: Callable[[Any], Any]) -> None:
        def formed(self: Windows, root: Any, explained: Any) -> Window:
            return replace(of(self, root, explained), form=form(root))

        monkeypatch.setattr(Windows, "of", formed)

    return put


def _found(layers: int = LAYERS) -> tuple[Recognized, torch.Tensor, torch.Tensor]:
    shapes = [(WIDTH,), (2 * WIDTH, WIDTH), (2 * WIDTH, WIDTH), (WIDTH, 2 * WIDTH)] * layers
    return found_in(_layers, [numbers(*s, seed=i) for i, s in enumerate([(3, 5, WIDTH), *shapes])], True)


def _sites(found: Recognized) -> list[str]:
    every = (*found.apart, *found.sites)
    return [f"{s.card.name} {s.pattern} {s.arguments} {s.outputs} {sorted(s.region)}" for s in every]


def test_what_differs_in_a_layer_is_read_as_what_it_is(
    searched: list[str], forms: Callable[[Callable[[Any], Any]], None]
) -> None:
    first, got, want = _found()
    assert float((got - want).abs().max()) < 1e-5 * float(want.abs().max())
    names = [s.card.name for s in first.sites]
    assert names.count("rms_norm") == LAYERS - 1
    assert names.count("silu_mul") == LAYERS - 1
    eps = {f"{s.arguments['eps']:.0e}" for s in first.sites if s.card.name == "rms_norm"}
    assert eps == {"1e-06", "1e-05"}
    few = len(searched)
    again, _, _ = _found()
    assert len(searched) == few, "another graph with the same layers is searched nowhere"
    searched.clear()
    forms(lambda root: None)  # so that nothing is known
    alone, _, _ = _found()
    assert _sites(first) == _sites(again) == _sites(alone)
    assert [*map(str, first.misses)] == [*map(str, again.misses)] == [*map(str, alone.misses)]
    assert few < 0.6 * len(searched)


def test_no_site_rests_on_what_is_known(forms: Callable[[Callable[[Any], Any]], None]) -> None:
    """Were all that one operator computes taken to be alike, sites would be missed, and none would be wrong."""
    right = set(_sites(_found()[0]))
    forms(lambda root: str(root.target))
    found, got, want = _found()
    assert float((got - want).abs().max()) < 1e-5 * float(want.abs().max())
    assert found.sites
    assert set(_sites(found)) <= right


def _next_process() -> None:
    recognize._known.cache_clear()


def test_the_next_process_searches_nothing(searched: list[str]) -> None:
    first, _, _ = _found(7)
    assert searched
    searched.clear()
    _next_process()
    again, _, _ = _found(7)
    assert searched == []
    assert _sites(first) == _sites(again)
    assert [*map(str, first.misses)] == [*map(str, again.misses)] != []


@pytest.mark.parametrize(
    "damaged", [[None, 0, [999]], [None, 999, []], [[1, 2], 0, []], "no outcome"], ids=str
)
def test_a_damaged_file_costs_a_search(damaged: Any, searched: list[str], nothing_known: Path) -> None:
    first, _, _ = _found(FEW)
    few = len(searched)
    [file] = nothing_known.glob("forms-*.json")
    data = json.loads(file.read_text())
    file.write_text(json.dumps({**data, "entries": dict.fromkeys(data["entries"], damaged)}))
    _next_process()
    again, _, _ = _found(FEW)
    assert len(searched) >= 2 * few
    assert _sites(first) == _sites(again)


@pytest.mark.parametrize("what", ["code", "reference"])
def test_other_code_is_searched_again(
    what: str, searched: list[str], nothing_known: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What we found by other rules, and what anyone else's operator looks like, may not be so."""
    if what == "code":
        _found(FEW)
        monkeypatch.setattr(recognize, "code", lambda *folders: "edited")
    else:
        monkeypatch.setattr(registry()["softmax"], "reference", torch.softmax)
        _found(FEW)
        assert not nothing_known.exists()
    few = len(searched)
    _next_process()
    _found(FEW)
    assert len(searched) == 2 * few > 0
