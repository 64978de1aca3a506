"""The tables of the site come from the cards: each operator is there, with numbers where there are any."""

import inspect
import json
import re
import subprocess
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import opsmith.ops
from opsmith.authoring.project import imported
from opsmith.operator import registry

CARDS = Path(__file__).parents[1] / "docs" / "cards.py"


@pytest.fixture(scope="module")
def cards() -> ModuleType:
    return imported(CARDS, "cards")


def test_the_overview_names_every_operator(cards: ModuleType) -> None:
    text = cards.on_page_markdown("before\n\n<!-- operators -->\n\nafter", page_at("operators/index.md"))
    for name in registry().keys() & set(opsmith.ops.__all__):
        assert f"`{name}(" in text
    page = (CARDS.parent / "operators/index.md").read_text()
    assert "\n\n<!-- operators -->\n\n" in page  # lines of a table right behind it would be rows of it
    assert text.startswith("before\n\n| operator | call |")
    assert text.endswith("|\n\nafter")


@pytest.mark.parametrize("name", [name for name, card in registry().items() if card.schemas])
def test_a_page_ends_with_its_cards(cards: ModuleType, name: str) -> None:
    card = registry()[name]
    text = cards.on_page_markdown("# Title\n", page_at(f"operators/{cards.page_of(card)}.md"))
    assert f"## The card of `{name}`" in text
    assert f"`opsmith::{card.schemas[0]}`" in text
    assert "plus 1 unit in the last place" in text or card.tolerance.ulps != 1
    if card.workloads is not None:
        assert "MB read and written" in text


@pytest.mark.parametrize("name", ["mla_attention", "mla_preprocess", "reshape_and_cache"])
def test_a_call_is_that_of_the_public_function(cards: ModuleType, name: str) -> None:
    """The card's own form takes a cache as tensors, or makes one."""
    called = list(inspect.signature(getattr(opsmith.ops, name)).parameters)
    text = cards.on_page_markdown("<!-- operators -->", page_at("operators/index.md"))
    (call,) = re.findall(rf"`{name}\((.*?)\)`", text)
    assert [part.partition("=")[0] for part in call.replace("*, ", "").split(", ")] == called
    assert "partial(" not in cards.sentence(registry()["mla_preprocess_int8"])


def test_a_result_says_how_often_its_operator_has_changed(cards: ModuleType, tmp_path: Path) -> None:
    git = ("git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run([*git, "init", "-q"], check=True)
    for place in ("gelu", "gelu", "softmax", "gelu"):
        file = tmp_path / place / "kernel.cpp"
        file.parent.mkdir(exist_ok=True)
        file.write_text(file.read_text() + "1" if file.exists() else "1")
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "-qm", place], check=True)
    assert cards.since("HEAD", tmp_path / "gelu") == ""
    assert cards.since("HEAD~1", tmp_path / "gelu") == ", since which its folder has changed 1 time"
    assert cards.since("HEAD~3", tmp_path / "gelu") == ", since which its folder has changed 2 times"
    assert cards.since("HEAD~3", tmp_path / "softmax") == ", since which its folder has changed 1 time"
    assert cards.since("0123456789ab", tmp_path / "gelu") == ""


def test_the_cards_stand_where_a_page_wants_them(cards: ModuleType) -> None:
    text = cards.on_page_markdown("# A\n\n<!-- cards -->\n\n## B\n", page_at("operators/softmax.md"))
    assert text.index("## The card of `softmax`") < text.index("## B")
    assert cards.on_page_markdown("# A", page_at("guide/softmax.md")) == "# A"


def page_at(path: str) -> SimpleNamespace:
    return SimpleNamespace(file=SimpleNamespace(src_uri=path))


def test_the_newest_results_of_a_machine_are_shown(
    cards: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cards, "RESULTS", tmp_path)
    kept = {
        "b-first": ("2026-01-01", "float32", 9e-3),
        "a-second": ("2026-02-02", "float32", 2e-3),
        "c-half": ("2026-01-03", "bfloat16", 4e-3),
    }
    for stem, (day, dtype, seconds) in kept.items():
        cold = {"mine": seconds, "eager": 8e-3, "roof: copy": 1e-3}
        result = {
            "taken": f"{day}T00:00:00",
            "commit": "abc",
            "versions": {"torch": "2.13"},
            "machine": {"gpu": None, "cpu": "A processor", "threads": 2},
            "benchmarks": [
                {
                    "operator": "softmax",
                    "workload": "4096x4096",
                    "dtype": dtype,
                    "direction": "forward",
                    "roof_fraction": {"cold": {"mine": 0.3}, "reused": {"mine": 0.9, "mine, out=": 0.95}},
                    "ratios": {"cold": {"mine / eager": {"median": seconds / 8e-3}}, "reused": {}},
                    "columns": {
                        "cold": {"contestants": {name: {"median": s} for name, s in cold.items()}},
                        "reused": {
                            "contestants": {"mine": {"median": 1.5e-3}, "mine, out=": {"median": 1e-3}}
                        },
                    },
                }
            ],
        }
        (tmp_path / f"{stem}.json").write_text(json.dumps(result))
    text = cards.described(registry()["softmax"])
    assert (
        "Measured on A processor, 2 threads (2026-01-03, torch 2.13, commit abc, c-half.json; 2026-02-02,"
        in text
    )
    assert "b-first" not in text
    assert "| 4096x4096 | float32 | forward | 1 ms | 95% | 4.00 |" in text
    assert "| 4096x4096 | bfloat16 | forward | 1 ms | 95% | 2.00 |" in text
    assert "](measured/softmax.svg)" in text
    assert "4096x4096, bfloat16, forward" in cards.drawn(registry()["softmax"]).decode()
    assert "measured/" not in cards.described(registry()["gelu"])


def test_what_concludes_nothing_is_no_number(cards: ModuleType) -> None:
    contestants = {"mine": {"median": 1e-3, "spread": 0.1}, "eager": {"median": 5e-3, "spread": 0.1}}
    benchmark = {
        "operator": "softmax",
        "workload": "4096x4096",
        "dtype": "float32",
        "direction": "forward",
        "roof_fraction": {"cold": {"mine": 1.17}},
        "ratios": {"cold": {"mine / eager": {"median": 0.2, "verdict": "inconclusive"}}},
        "columns": {"cold": {"contestants": contestants}},
    }
    assert cards.row(benchmark)[3:] == ("1 ms", None, {"eager": "no conclusion"})
    contestants["mine"]["spread"] = 0.3
    benchmark["roof_fraction"]["cold"]["mine"] = 0.9
    benchmark["ratios"]["cold"]["mine / eager"]["verdict"] = "faster"
    assert cards.row(benchmark)[3:] == ("no conclusion", None, {"eager": "5.00"})
    benchmark["ratios"]["cold"]["mine / eager"]["verdict"] = "no difference"
    assert cards.row(benchmark)[5] == {"eager": "no difference"}


def test_what_a_newcomer_reads_comes_first(cards: ModuleType) -> None:
    def section(title: str, *pages: str) -> SimpleNamespace:
        children = [SimpleNamespace(file=SimpleNamespace(name=page)) for page in pages]
        return SimpleNamespace(is_section=True, title=title, children=children)

    home = SimpleNamespace(is_section=False, title=None)
    nav = SimpleNamespace(
        items=[home, section("Course"), section("Decisions"), section("Guide", "faq", "getting-started")]
    )
    cards.on_nav(nav)
    assert [item.title for item in nav.items] == [None, "Guide", "Course", "Decisions"]
    assert [page.file.name for page in nav.items[1].children] == ["getting-started", "faq"]


def test_the_first_page_leads_to_every_page_of_the_guide(cards: ModuleType) -> None:
    named = cards.GUIDE.findall((CARDS.parent / "index.md").read_text())
    assert sorted(named) == sorted(page.stem for page in (CARDS.parent / "guide").glob("*.md"))


def test_a_number_in_a_cell_does_not_break(cards: ModuleType) -> None:
    page = "<td>1.6e-02</td><td>a 1e-2 b</td><p>1.6e-02</p>"
    assert cards.on_page_content(page) == page.replace("1.6e-02</td>", "1.6e\u201102</td>")
