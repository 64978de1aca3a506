"""What a prototype, a model or a file says is data: in generated code, in pages and pictures, and on the terminal."""

from __future__ import annotations

import ast
import copy
import dataclasses
import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from opsmith.authoring.new import create
from opsmith.authoring.prototype import PrototypeError
from opsmith.backends import installed
from opsmith.cli import main, pictures
from opsmith.cli.common import Output
from opsmith.kernels import build
from opsmith.profiler.data import Findings
from opsmith.profiler.report.html import page
from opsmith.profiler.report.text import text
from tests.profiler.test_html import sample

# Prototypes: refused, or the code is as if the text were not there.

HOSTILE = [
    '"; system("touch ran"); //',
    "'; import os; os.system('touch ran') #",
    '"""\nimport os\n"""',
    "*/ int x = system(0); /*",
    "x\n#include </etc/passwd>\n",
    "x\r\nint y;",
    "??/\nsystem(0);",  # a trigraph: a backslash, which joins lines
    "\\",
    "\\\n",
    "{{ 7 * 7 }}{% include '/etc/passwd' %}",
    "${HOME}$(touch ran)`touch ran`",
    "../../../tmp/ran",
    "/etc/passwd",
    "nul\0",
    "\x1b]0;title\x07",
    "x‮y",  # reads backwards
    "аlpha",  # a Cyrillic letter
    "ｘ",  # x, once Python has normalized it
    "__import__('os')",
    " # */ system(0); /*",
    ' # """',
    " # \\",
    ")",
    "%s%n{0}",
    "<script>alert(1)</script>",
    "x" * 5000,
    "",
]

WHOLE: dict[str, Any] = {
    "op": "ScaledCustom",
    "language": "cpp",
    "input_desc": [
        {"name": "x", "param_type": "required", "format": ["ND"], "type": ["float"], "shape": ["...", "N"]},
        {"name": "w", "param_type": "required", "format": ["ND"], "type": ["float"], "shape": ["N"]},
    ],
    "output_desc": [{"name": "y", "param_type": "required", "format": ["ND"], "type": ["float"]}],
    "attr": [
        {"name": "alpha", "param_type": "optional", "type": "float", "default_value": 2.0},
        {"name": "mode", "param_type": "optional", "type": "string", "default_value": "plain"},
    ],
    "formula": {"y": "x * w + alpha"},
    "kind": "activation",
    "tolerance": {"factor": 2.0, "ulps": 1.0},
}
Place = tuple[str | int, ...]


def places(value: Any, at: Place = ()) -> Iterator[Place]:
    """Where a prototype has a value that is no list or dictionary; and its formula's keys, as (..., "key")."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*at, key))
            if at == ("formula",):
                yield (*at, key, "key")
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from places(inner, (*at, i))
    else:
        yield at


def changed(place: Place, said: str) -> dict[str, Any]:
    """The prototype with other text at a place."""
    found = copy.deepcopy(WHOLE)
    inner: Any = found
    *above, last = place[:-1] if place[-1] == "key" else place
    for key in above:
        inner = inner[key]
    if place[-1] == "key":
        inner[said] = inner.pop(last)
    else:
        inner[last] = said
    return found


BACKENDS = ("cpu", "triton", "cuda", *(one.name for one in installed().values() if one.kernels))


def written(prototype: dict[str, Any], folder: Path) -> dict[str, str]:
    """The files of a project; what is left in the folder above is what there was."""
    folder.mkdir()
    file = folder / "prototype.json"
    file.write_text(json.dumps(prototype))
    try:
        made, _, _ = create(file, folder / "made", backends=BACKENDS)
        return {str(p.relative_to(made)): p.read_text() for p in made.rglob("*") if p.is_file()}
    finally:
        assert {p.name for p in folder.iterdir()} <= {"prototype.json", "made"}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return written(WHOLE, tmp_path_factory.mktemp("plain") / "project")


# What a person may say in any words, and where it says nothing to the generated code.
FREE = {("language",), ("attr", 1, "default_value")}


@pytest.mark.parametrize("place", list(places(WHOLE)), ids=lambda place: ".".join(map(str, place)))
def test_no_text_in_a_prototype_becomes_code(place: Place, plain: dict[str, str], tmp_path: Path) -> None:
    """By itself, and behind what is allowed at that place."""
    problems: list[str] = []
    before = {("op",): WHOLE["op"], ("formula", "y"): WHOLE["formula"]["y"]}.get(place, "x")
    behind = [f"{before}{one}" for one in HOSTILE if one]
    # What may be anything is written as a whole, in a tenth of a second.
    for i, said in enumerate([" ".join(HOSTILE)] if place in FREE else [*HOSTILE, *behind]):
        try:
            found = written(changed(place, said), tmp_path / str(i))
        except ValueError as error:  # of which prototypes' and formulas' errors are
            assert place not in FREE
            problems.append(str(error))
        else:
            assert found == plain, f"{place} = {said!r} changed {[k for k in plain if found[k] != plain[k]]}"
    assert not [p for p in problems if re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", p)]


def test_what_is_generated_is_whole_and_of_one_language(plain: dict[str, str]) -> None:
    """The counterpart of the test above: what is compared is code."""
    assert {"operator.py", "kernels/cpu/scaled_custom.cpp", "kernels/cuda/scaled_custom.cu"} <= plain.keys()
    for name, source in plain.items():
        if name.endswith(".py"):
            ast.parse(source)
        assert "{%" not in source


def test_a_template_is_not_rendered_twice(tmp_path: Path) -> None:
    """A folder's name is in the README, as it is."""
    (tmp_path / "x").mkdir()
    file = tmp_path / "p.json"
    file.write_text(json.dumps(WHOLE))
    made, _, _ = create(file, tmp_path / "x" / "{{ 7 * 7 }}")
    assert "{{ 7 * 7 }}" in (made / "README.md").read_text()


@pytest.mark.parametrize("said", ["os:system('x')", "a.b:c;d", "a:b\nimport os", "а:b", "../a:b", ":b", "a:"])
def test_a_reference_is_a_module_and_a_function(said: str, tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    file.write_text(json.dumps({k: v for k, v in WHOLE.items() if k != "formula"}))
    with pytest.raises(ValueError, match="is no module:function"):
        create(file, tmp_path / "made", reference=said)


def test_a_folder_cannot_write_lines_of_a_build(tmp_path: Path) -> None:
    """ninja runs what its file says, and its file has lines."""
    folder = tmp_path / "a\n command = touch ran\n"
    folder.mkdir()
    (folder / "one.cpp").write_text("int one() { return 1; }\n")
    with pytest.raises(
        build.BuildError, match="has a line break, which ninja has no way to write; rename it"
    ):
        build.build_libraries([build.Library("one", [folder / "one.cpp"], tier="portable")])


# Pages and pictures: what a model names is text.

SPOKEN = [
    "<script>alert(1)</script>",
    "\"><img src=x onerror='alert(1)'>",
    "' onmouseover='alert(1)",
    "</style></title></script><svg onload=alert(1)>",
    "</script x",
    "<!-- ",
    "]]>",
    "javascript:alert(1)",
    "{{ 7 * 7 }}{% raw %}",
    "[/red][link=http://x]y",
    "$\\frac{$",
    "\x1b[2J",
]


class Structure(HTMLParser):
    """The tags of a page, with the names of their attributes, and what a name may lead to."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, tuple[str, ...]]] = []
        self.links: set[str] = set()
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, tuple(name for name, _ in attrs)))
        self.links |= {str(value)[:1] for name, value in attrs if name in ("href", "src")}


def filled(value: Any, said: str) -> Any:
    """Findings with this text wherever they have text of their own: but for the classes, which are ours."""
    if isinstance(value, str):
        return said
    if isinstance(value, list):
        return [filled(one, said) for one in value]
    if isinstance(value, dict):
        return {k if k in ("memory", "torch", "opsmith") or "matmul" in k else said: filled(v, said)
                for k, v in value.items()}  # fmt: skip
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kept = {"kind", "by_kind", "overhead_from", "bound"}
        changes = {
            f.name: filled(getattr(value, f.name), said)
            for f in dataclasses.fields(value)
            if f.name not in kept
        }
        return dataclasses.replace(value, **changes)
    return value


@pytest.fixture(scope="module")
def profile() -> Findings:
    return sample(20)


@pytest.mark.parametrize("said", SPOKEN)
def test_a_page_has_the_same_tags_whatever_a_model_names(said: str, profile: Findings) -> None:
    plain, found = (Structure(page(filled(profile, one))) for one in ("name", said))
    assert found.tags == plain.tags
    assert found.links == {"#", "d"}  # into the page itself, and an empty picture
    assert len(plain.tags) > 100
    json.loads(filled(profile, said).to_chrome_trace())
    assert text(filled(profile, said), 150)


@pytest.mark.parametrize("said", SPOKEN[:-1])
def test_a_picture_shows_names_as_they_are(said: str, tmp_path: Path) -> None:
    """XML has no way to write control characters: the last of the names."""
    cell = {"batch": 1, "prompt": 1, "contestants": {said: {"tokens_per_second": 1.0, "first_seconds": 1.0}}}
    data = {"cells": [cell], "machine": {"cpu": said, "threads": 1}, "model": said, "dtype": "float32"}
    pictures.curves(data, tmp_path / "curves.svg")
    root = ET.parse(tmp_path / "curves.svg").getroot()
    assert not [e for e in root.iter() if e.tag.split("}")[-1] in ("script", "img", "foreignObject", "a")]
    assert not [name for e in root.iter() for name in e.attrib if name.startswith("on")]
    assert said.strip() in {(e.text or "").strip() for e in root.iter()}


# The terminal


@pytest.mark.parametrize("said", ["[/red]", "[link=http://x]y", "[bold]"])
def test_names_are_no_markup(said: str, capsys: pytest.CaptureFixture[str]) -> None:
    Output(None).console.print(said)
    assert capsys.readouterr().out == f"{said}\n"


def test_an_error_cannot_speak_to_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "p.json"
    file.write_text(json.dumps([{"op": "\x1b]0;owned\x07\x1b[2J"}, {"op": "‮"}]))
    assert main(["new", str(file)]) == 1
    said = capsys.readouterr().err
    assert said[:-1].isprintable()
    assert r"\x1b]0;owned" in said


def test_a_prototypes_error_is_one_of_ours() -> None:
    assert issubclass(PrototypeError, ValueError)
