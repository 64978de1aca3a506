"""The guide's answers hold: its programs run, its commands are there, and no variable is left out."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import opsmith
from opsmith.cli import VERBS, _load

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs/guide").glob("*.md")),
]


def commands(text: str) -> list[list[str]]:
    """The words of each `opsmith ...` in backticks and of each line of code, with comments cut off."""
    code = re.findall(r"^ *```.*?^ *```", text, re.DOTALL | re.MULTILINE)
    lines = re.findall(r"(?<!`)`(opsmith [a-z][^`]*)`(?!`)", text) + re.findall(
        r"^    +(opsmith [a-z].*)$", text, re.MULTILINE
    )
    lines += [
        line for block in code for line in re.findall(r"^ *(?:\$ )?(opsmith [a-z].*)$", block, re.MULTILINE)
    ]
    return [shlex.split(line.split(" #")[0]) for line in lines]


def wrong(words: list[str]) -> list[str]:
    """What of a command opsmith has not: the verb, or an option of it."""
    _, verb, *rest = words
    if verb not in VERBS:
        return [verb]
    known = {option for one in _load(verb).params for option in (*one.opts, *one.secondary_opts)}
    known |= {"--help", "-h", "--debug"}
    return [word for word in rest if word.startswith("-") and word.partition("=")[0] not in known]


def dead(page: Path, text: str) -> list[str]:
    """Links to files that are not there, from a page that the site's strict build does not see."""
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", text)
    return [link for link in links if "://" not in link and not (page.parent / link).exists()]


@pytest.mark.parametrize(
    "name", ["README.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/results/README.md"]
)
def test_links_lead_to_files(name: str) -> None:
    page = ROOT / name
    assert dead(page, page.read_text()) == []
    assert dead(page, "[a](nowhere.md), [b](README.md#c)") == ["nowhere.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_on_a_page_are_there(page: Path) -> None:
    assert [
        (" ".join(words), missing) for words in commands(page.read_text()) if (missing := wrong(words))
    ] == []


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("run `opsmith bench softmax --fastest`", ["--fastest"]),
        ("```\nopsmith benchmark softmax\n```", ["benchmark"]),
        ("run `opsmith bench softmax --dtype bfloat16 --json=FILE`", []),
    ],
)
def test_a_command_that_is_not_there_is_found(text: str, missing: list[str]) -> None:
    assert [word for words in commands(text) for word in wrong(words)] == missing


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_is_on_the_page_of_commands(verb: str) -> None:
    said = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", (ROOT / "docs/guide/cli.md").read_text()))
    options = [{*one.opts, *one.secondary_opts} for one in _load(verb).params]
    assert [sorted(names) for names in options if "-" in {n[0] for n in names} and not names & said] == []


@pytest.mark.parametrize("name", opsmith.__all__)
def test_every_public_name_is_on_a_page(name: str) -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs").glob("[!d]*/*.md")]
    assert any(
        re.search(rf"\bopsmith\.{name}\b|from opsmith import .*\b{name}\b", p.read_text()) for p in pages
    )


def test_a_public_name_needs_no_import_of_its_own() -> None:
    """As pages write it: `opsmith.authoring.load(...)` in a process that has imported opsmith and no more."""
    told = subprocess.run(
        [sys.executable, "-c", "import opsmith; print(opsmith.authoring.load.__module__)"],
        capture_output=True,
        text=True,
    )
    assert told.stdout.strip().startswith("opsmith.authoring"), told.stderr


def test_every_variable_has_its_answer() -> None:
    """Those that our Python reads from the environment stand in the table of the FAQ, and no others."""
    read = re.compile(
        r"environ(?:\.get\(|\[)\s*\"(OPSMITH_\w+)\"|^(?:VARIABLE|LLAMACPP) = \"(OPSMITH_\w+)\"", re.MULTILINE
    )
    files = [file for folder in (ROOT / "src", *ROOT.glob("packages/*/src")) for file in folder.rglob("*.py")]
    asked = {a or b for file in files for a, b in read.findall(file.read_text())}
    told = set(re.findall(r"^\| `(OPSMITH_\w+)` \|", (ROOT / "docs/guide/faq.md").read_text(), re.MULTILINE))
    assert asked == told


def test_the_configuration_on_its_page_is_one_and_has_every_field(tmp_path: Path) -> None:
    page = (ROOT / "docs/guide/optimize.md").read_text()
    (tmp_path / "opsmith.toml").write_text(page.partition("```toml\n")[2].partition("```")[0])
    assert (
        opsmith.Config.load(tmp_path / "opsmith.toml").model_fields_set == opsmith.Config.model_fields.keys()
    )


def test_operators_on_the_page_for_migrants_are_there() -> None:
    import opsmith.ops

    named = set(re.findall(r"`ops\.(\w+)", (ROOT / "docs/guide/migrating.md").read_text()))
    assert len(named) > 10
    assert named <= set(opsmith.ops.__all__)
