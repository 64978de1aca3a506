"""How time and memory grow: points that are right, lines beside them, and what page and picture say."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import docs_numbers, growth

from opsmith import measure
from opsmith.cli.common import Output
from opsmith.operator import Cost


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    found = {"taken": "2026-01-02", "machine": measure.describe().to_json()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(growth, "CURVES", [c for c in growth.CURVES if c.name.startswith("paged_attention of")])
        curves = list(growth.run(["context"], True, 0.1, Output("-")))
    return json.loads(json.dumps(found | {"curves": curves}))


def test_a_point_has_times_memory_and_the_least(data: dict[str, Any]) -> None:
    small, large = data["curves"][0]["points"]
    assert (small["size"], large["size"]) == (128, 256)
    assert small["peak_bytes"]["opsmith"] == large["peak_bytes"]["opsmith"] == 32 * 128 * 4
    assert small["peak_bytes"]["eager"] < large["peak_bytes"]["eager"]
    assert large["min_bytes"] > 1.9 * small["min_bytes"] > 1.9 * 2 * 128 * 8 * 128 * 4
    for point in (small, large):
        assert all(len(samples) == 3 for samples in point["samples"].values())
        assert 0 < point["least_seconds"] < 1
        assert point["least_seconds"] * point["roofs"]["read"]["peak"] >= point["min_bytes"]
        assert point["ratio"]["b"] == "eager"


def test_what_is_wrong_has_no_point() -> None:
    right = growth.lookup(100)
    ways = {**right.ways, "opsmith": lambda: right.ways["opsmith"]() + 1}
    with pytest.raises(measure.WrongResult, match="opsmith: wrong value"):
        growth.measured(growth.Point(ways, right.check, Cost(0, 1)), rounds=1, seconds=0.1)


def test_a_prompt_is_held_to_float64_at_both_ends() -> None:
    point = growth.prompt(1, 256)
    got = point.ways["eager"]()
    assert point.check(got) is None
    for row in (0, -1):
        spoiled = got.clone()
        spoiled[:, :, row] += 0.1
        assert "error" in str(point.check(spoiled))


def test_a_whole_model_is_held_to_float64() -> None:
    pytest.importorskip("transformers")
    with torch.no_grad():
        point = growth.llama(1, 64)
        got = point.ways["opsmith"]()
        assert point.check(got) is None
        assert str(point.check(got + 0.1)).startswith("relative error")
    assert point.cost.flops > 2 * growth.TOKENS * (
        point.cost.min_bytes / 4 - 200
    )  # each weight but the norms'


def test_every_axis_has_more_than_one_size() -> None:
    assert growth.AXES == ["context", "batch", "vocabulary", "model"]
    assert growth.CONTEXT == [128, 256, 512, 1024, 2048, 4096, 8192, 16384]
    assert growth.VOCABULARY == [32_000, 64_000, 128_000, 256_000, 512_000, 1_000_000]
    assert all(list(c.sizes) == sorted(set(c.sizes)) and len(c.sizes) > 2 for c in growth.CURVES)
    assert [growth.short(size) for size in (64, 2048, 128_000, 1_000_000)] == ["64", "2Ki", "128k", "1M"]


def test_page_and_picture(data: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    steady = copy.deepcopy(data)
    for curve in steady["curves"]:
        for point in curve["points"]:
            point |= {"spread": {"eager": 0.1, "opsmith": 0.1}, "seconds": {"eager": 0.002, "opsmith": 0.001}}
            point["least_seconds"] = 0.0005
    (tmp_path / "growth-2026-01-02-here.json").write_text(json.dumps(steady))
    monkeypatch.setattr(docs_numbers, "RESULTS", tmp_path)
    docs_numbers.read.cache_clear()
    text = docs_numbers._MADE["growth-context"]()
    docs_numbers.read.cache_clear()
    assert "\n\n**paged_attention of one token**\n\n| keys | eager | opsmith | " in text
    assert "| 128 | 2.00 ms | 1.00 ms | " in text
    assert "| 50% | 1.5 MiB | 16 KiB |" in text
    growth.draw(steady, "context", tmp_path / "growth.svg")
    drawn = (tmp_path / "growth.svg").read_text()
    assert all(f">{word}</text>" in drawn for word in ("keys", "ms a call", "MiB beyond inputs", "opsmith"))
