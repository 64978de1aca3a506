"""The benchmark beside other engines: processes that answer, who is refused, and what page and picture say of it."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import docs_numbers, peers

from opsmith.cli import CommandError
from opsmith.cli.common import Output


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    bench = peers.Bench(
        Output("-"), "tiny", "float32", ["eager", "opsmith"], tmp_path_factory.mktemp("peers")
    )
    (found,) = bench.run([(1, 8)], rounds=3, budget=1.0)
    return json.loads(json.dumps(found))


def test_each_is_held_to_float64_and_timed_in_turns(cell: dict[str, Any]) -> None:
    assert set(cell["errors"]) == {"eager", "opsmith"}
    assert all(error <= cell["allowed"] < 1e-5 for error in cell["errors"].values())
    timed = cell["comparison"]["contestants"]
    assert all(len(one["samples"]) == 3 and 0 < one["median"] < 1 for one in timed.values())
    assert [sorted(order) for order in cell["comparison"]["orders"]] == [["eager", "opsmith"]] * 3
    assert cell["ratios"]["eager"]["b"] == "eager"
    assert cell["left_out"] == {}


def test_what_is_wrong_or_endless_or_ends_has_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, Any]] = []

    class Stranger:
        def __init__(self, name: str, *_: Any) -> None:
            if name == "absent":
                raise CommandError("absent: it is not installed")
            self.name, self.hello = name, {"prepare_seconds": 0.0}

        def ask(self, shape: tuple[int, int], calls: int, result: str = "") -> dict[str, float]:
            if not result:
                raise CommandError(f"{self.name} ended with status 1")
            asked.append((self.name, shape))
            right = bench.exact(**peers.batches_of(bench.exact, *shape)[0]).last_hidden_state
            peers.np.save(result, right.detach().numpy() * (1.5 if self.name == "wrong" else 1.0))
            return {"seconds": 60.0 if self.name == "endless" else 1e-3}

        def close(self) -> None:
            pass

    monkeypatch.setattr(peers, "Contestant", Stranger)
    bench = peers.Bench(Output("-"), "tiny", "float32", ["absent", "wrong", "endless", "dies"], tmp_path)
    small, large = bench.run([(1, 8), (1, 4)], rounds=3, budget=1.0)
    assert (small["shape"], large["shape"]) == ([1, 4], [1, 8])
    assert "comparison" not in small
    assert small["left_out"]["absent"] == "it is not installed"
    assert small["left_out"]["wrong"].startswith("wrong: relative error 5.0e-01, allowed")
    assert small["left_out"]["endless"] == "not timed: a call takes 60 s at 1×4"
    assert small["left_out"]["dies"] == "not timed at 1×4: dies ended with status 1"
    # What was endless is not tried again.
    assert [name for name, shape in asked if shape == (1, 8)] == ["wrong", "dies"]


def test_a_clock_adds_what_others_counted() -> None:
    class Counts:
        def ask(self, **request: Any) -> dict[str, float]:
            return {"seconds": 0.25 * request["calls"]}

    clock = peers._Clock()
    contestants = {name: clock.timed(Counts(), (1, 1), calls) for name, calls in {"a": 1, "b": 4}.items()}  # type: ignore[arg-type]
    found = peers.measure.compare(contestants, rounds=3, min_time=0.0, warmup=0, clock=clock)
    assert (found.samples["a"], found.samples["b"]) == ([0.25] * 3, [0.25] * 3)


def test_page_and_picture_say_first_where_another_is_faster(
    cell: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    lost = copy.deepcopy(cell)
    lost["left_out"] = {"absent": "it is not installed"}
    lost["ratios"]["eager"] |= {"verdict": "slower", "median": 2.0, "lo": 1.6, "hi": 2.5, "spread": 0.1}
    for one in lost["comparison"]["contestants"].values():
        one["spread"] = 0.1
    machine = peers.measure.describe().to_json()
    data = {"taken": "2026-01-02", "machine": machine, "versions": {"torch": "2"}, "cells": [lost]}
    (tmp_path / "peers-2026-01-02-here.json").write_text(json.dumps(data))
    monkeypatch.setattr(docs_numbers, "RESULTS", tmp_path)
    docs_numbers.read.cache_clear()
    text = docs_numbers._MADE["peers"]()
    docs_numbers.read.cache_clear()
    assert text.startswith("Faster than opsmith is:\n\n- eager, tiny, float32: 1×8\n")
    assert "| 0.50× [0.40, 0.62] | " in text
    assert text.endswith("Without a time:\n\n- absent, float32: it is not installed")
    peers.draw(data, tmp_path / "bars.svg")
    drawn = (tmp_path / "bars.svg").read_text()
    assert all(f">{word}</text>" in drawn for word in ("batch × length", "tiny, float32", "eager"))


def test_all_processes_make_the_same_model_and_tokens() -> None:
    torch.manual_seed(7)
    one, other = peers.load("tiny"), peers.load("tiny")
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    first, again = (peers.batches_of(model, 2, 3) for model in (one, other))
    assert [b["input_ids"].tolist() for b in first] == [b["input_ids"].tolist() for b in again]
