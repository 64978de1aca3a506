"""Back ends beyond the core's own: the page's example as it stands, and what is said of one that is not here."""

import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from opsmith import backends
from opsmith.authoring.new import create
from opsmith.authoring.project import load
from opsmith.authoring.project.checks import emulated
from opsmith.cli import main
from opsmith.implementation import Implementation
from opsmith.operator import registry
from tests.authoring.prototypes import text

PAGE = Path(__file__).parents[1] / "docs" / "authoring" / "backends.md"


def test_the_example_of_the_page_works(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    before = list(registry()["gelu"].implementations)
    exec(compile(code, str(PAGE), "exec"), {"__name__": "page"})
    assert re.search(r"\d\d checks of toy, all passed: True", capsys.readouterr().out)
    assert registry()["gelu"].implementations == before


def test_the_page_has_every_member() -> None:
    rows = re.findall(r"^\| `(\w+)", PAGE.read_text(), re.MULTILINE)
    members = {*backends.Backend.__annotations__, *vars(backends.Backend)} - {"__annotations__"}
    assert {m for m in members if not m.startswith("__")} <= set(rows)


class Doubles(backends.Backend):
    """A device that is not here, whose kernels are files with a factor."""

    name = "doubles"
    device = "xpu"
    kernels = "*.txt"
    targets = ("doubled",)
    factor = 2.0

    def implementations(self, operator: str) -> Sequence[Implementation]:
        return [Implementation("doubles", torch.softmax, self.device)] if operator == "softmax" else []

    def write(self, project: Any) -> Mapping[str, str]:
        return {f"{project.name}.txt": f"{self.factor}\n"}

    def compile(self, kernels: Any, dtypes: Sequence[torch.dtype] = ()) -> str:
        return f"a factor of {float(kernels.source(self.name).read_text())}"

    def emulations(self, kernels: Any) -> Mapping[str, Any]:
        factor = float(kernels.source(self.name).read_text())

        def run(x: torch.Tensor, other: torch.Tensor, *, y: torch.Tensor) -> None:
            torch.add(x, other, out=y).mul_(factor / 2)

        return {"one": run, "other": run}

    def make(self, target: str, folder: Path | None) -> tuple[str, dict[str, Any]]:
        return f"{target} for {folder}", {"target": target}


@pytest.fixture
def doubles() -> Iterator[Doubles]:
    backend = Doubles()
    backends.add(backend)
    yield backend
    backends.remove("doubles")


def test_it_takes_part_until_it_is_removed(doubles: Doubles, capsys: pytest.CaptureFixture[str]) -> None:
    names = [i.name for i in registry()["softmax"].implementations]
    assert names.index("doubles") < names.index("eager")
    assert main(["ops", "softmax"]) == 0
    assert re.search(r"doubles +xpu +no: no xpu device that this PyTorch can use", capsys.readouterr().out)
    with pytest.raises(ValueError, match="a back end named 'doubles' is there already"):
        backends.add(Doubles())
    backends.remove("doubles")
    assert "doubles" not in [i.name for i in registry()["softmax"].implementations]
    backends.add(doubles)
    assert [i.name for i in registry()["softmax"].implementations] == names


@pytest.mark.parametrize("factor", [2.0, 3.0])
def test_a_project_is_written_built_and_verified(doubles: Doubles, factor: float, tmp_path: Path) -> None:
    doubles.factor = factor
    op = f"Added{factor:.0f}"
    file = tmp_path / "add.json"
    file.write_text(text("AddCustom").replace("AddCustom", op))
    folder, files, _ = create(file, tmp_path / "made", backends=("doubles",))
    assert any(path.parts[-2] == "doubles" for path in files)
    assert main(["build", str(folder)]) == 0
    card = load(folder).CARD
    assert [(i.name, i.device) for i in card.implementations[:-1]] == [("doubles", "xpu")]
    found = list(emulated(folder))
    assert {f.implementation for f in found} == {"doubles, emulated"}
    assert all(f.ok for f in found) == (factor == 2.0)


def test_a_target_is_made_with_or_without_a_project(
    doubles: Doubles, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["build", "--backend", "doubled"]) == 0
    assert "doubled for None" in capsys.readouterr().out
    assert main(["build", "--backend", "doubled", "--backend", "cpu"]) == 1
    assert "doubled goes alone" in capsys.readouterr().err


def test_one_that_is_not_installed_is_named_with_the_way_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    required = ["torch>=2.10", 'opsmith-faraway>=1; extra == "faraway"']
    monkeypatch.setattr(metadata, "requires", lambda name: required)
    file = tmp_path / "add.json"
    file.write_text(text("AddCustom"))
    said = r"no back end 'faraway'; there are: cpu, triton, cuda.*pip install opsmith-faraway"
    for command in (
        ["new", str(file), "--backends", "faraway"],
        ["build", str(tmp_path), "--backend", "faraway"],
    ):
        assert main(command) == 1
        assert re.search(said, capsys.readouterr().err)
