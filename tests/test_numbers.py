"""Measured numbers on the pages are those of the files in benchmarks/results, and none stands there by hand."""

import json
from pathlib import Path

import pytest
from benchmarks import docs_numbers


@pytest.mark.parametrize("page", docs_numbers.PAGES, ids=lambda page: page.name)
def test_a_page_says_what_its_files_say(page: Path) -> None:
    if page.name == "architectures.md":
        pytest.importorskip("transformers")
    assert docs_numbers.complaints(page, page.read_text()) == []


def test_every_region_is_on_a_page() -> None:
    text = "".join(page.read_text() for page in docs_numbers.PAGES)
    assert [name for name in docs_numbers._MADE if f"<!-- numbers: {name} -->" not in text] == []


def test_another_number_in_a_region_is_found() -> None:
    page = docs_numbers.HERE / "README.md"
    text = page.read_text()
    cell = docs_numbers._readme().splitlines()[4].split(" | ")[1]
    assert docs_numbers.complaints(page, text.replace(cell, "0.01 ms")) == [
        "README.md: `make docs-numbers` would change it"
    ]


SPEEDS = [
    "2.37×",
    "2.4 ×",
    "1.5x faster",
    "86 %",
    "86% of the roof",
    "25.1 tokens/s",
    "34 GB/s",
    "200 GFLOP/s",
]
TIMES = ["0.31 ms", "36 µs", "40 ns", "29 s"]


@pytest.mark.parametrize("said", [*SPEEDS, *TIMES])
def test_a_number_by_hand_is_found(said: str) -> None:
    for text in (f"It takes {said} now.", f"```\n{said}\n```\n", f"\n`{said}`\n"):
        assert docs_numbers.by_hand(text) != []
    assert docs_numbers.by_hand(f"It takes {said}.", code=False) != []
    assert docs_numbers.by_hand(f"It prints `{said}`, or\n\n```\n{said}\n```\n", code=False) == []


@pytest.mark.parametrize(
    "said", ["1×16 tokens", "rope, 32 heads × 128", "a 95 % interval", "version 2.13", "4096×4096, bfloat16"]
)
def test_a_size_is_no_measured_number(said: str) -> None:
    assert docs_numbers.by_hand(f"Of {said}.") == []


def test_a_table_of_times_by_hand_is_found() -> None:
    assert docs_numbers.by_hand("| | ours, µs | eager |\n|---|--:|--:|\n| softmax | 3 | 4 |\n") != []
    assert docs_numbers.by_hand("| words | what they mean |\n|---|---|\n| 3 | 4 |\n") == []


def test_what_concludes_nothing_says_so() -> None:
    ratio = {"median": 0.25, "lo": 0.2, "hi": 0.5, "verdict": "faster"}
    assert docs_numbers.times(ratio) == "4.00× [2.00, 5.00]"
    assert docs_numbers.times(ratio | {"verdict": "inconclusive"}) == "no conclusion"
    assert docs_numbers.part(0.86) == "86%"
    assert docs_numbers.part(1.17) == "no conclusion"
    assert docs_numbers.duration(1e-3, 0.3) == "no conclusion"


def test_what_a_file_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {"taken": "2026-01-01", "machine": {"cpu": "A", "threads": 2, "torch": "2", "commit": "abc"}}
    (tmp_path / "whole.json").write_text(json.dumps(whole))
    (tmp_path / "half-2026-01-02.json").write_text(json.dumps({"machine": "0f3a", "results": []}))
    (tmp_path / "changed.json").write_text(json.dumps(whole | {"commit": "abc-dirty"}))
    monkeypatch.setattr(docs_numbers, "RESULTS", tmp_path)
    docs_numbers.read.cache_clear()
    rows = docs_numbers._lacking().splitlines()[2:]
    docs_numbers.read.cache_clear()
    assert rows == [
        "| `changed` | its commit's tree was changed |",
        "| `half-2026-01-02` | no machine, no versions, no commit |",
    ]
