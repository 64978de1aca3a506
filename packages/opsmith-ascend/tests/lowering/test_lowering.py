"""`opsmith build --backend ascend-triton`: which Triton kernels triton-ascend lowers; nothing runs on an NPU."""

import json
import stat
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.authoring import normed_turn

from opsmith.cli import main
from opsmith.kernels.compiler import BuildError
from opsmith_ascend import lowering

try:
    lowering.environment()
    MISSING = ""
except BuildError as error:
    MISSING = str(error)
lowers = pytest.mark.skipif(bool(MISSING), reason=MISSING)

NAMED = ["rope._rotate", "norm._forward", "softmax._forward", "gated._forward"]


@lowers
def test_the_librarys_vector_kernels_lower() -> None:
    results = {one.kernel: one for one in lowering.lower()}
    good = {name for name, one in results.items() if one.lowers}
    assert len(good) >= 12
    assert good >= set(NAMED)
    for one in results.values():
        assert one.lowers == (one.reached["linalg"] == one.variants), one
        if not one.lowers:
            assert one.reason
            assert one.where
            assert Path(one.where.rpartition(":")[0]).is_file(), one


@lowers
def test_a_project_lowers_and_a_refusal_names_the_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = normed_turn.write(tmp_path, "turn_lowered", backends=("triton",))
    assert main(["build", str(folder), "--backend", "ascend-triton", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["evidence"] == "lowering"
    assert "nothing ran on an NPU" in report["note"]
    assert [one["lowers"] for one in report["kernels"]] == [True] * len(report["kernels"])
    assert report["kernels"]

    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef kernel(x, N: tl.constexpr):\n"
        "    at = x + tl.arange(0, N)\n    tl.store(at, tl.log(tl.load(at)))\n"
    )
    ask = {"module": "wrong", "kernel": "kernel", "file": str(wrong), "constants": {"N": 16}}
    asked = [{**ask, "signature": {"x": pointer}} for pointer in ("*fp64", "*fp32")]
    refused, taken = lowering._answers(lowering.environment(), asked)
    assert refused["stage"] == "triton"
    assert "fp64" in refused["reason"]
    assert refused["where"] == f"{wrong}:8"
    assert taken["stage"] is None


def python_that(says: str, folder: Path) -> Path:
    """A program in the place of the other environment's Python."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{says}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_a_compiler_that_dies_takes_only_one_variant_along(tmp_path: Path) -> None:
    dies = python_that(
        """echo '{"triton": "3.2.0"}'
while read line; do
  case "$line" in *deadly*) echo "an assertion" >&2; exit 134;; esac
  echo '{"stage": null, "operations": 1}'
done""",
        tmp_path,
    )
    asked = [{"kernel": name, "file": "here.py"} for name in ("mild", "deadly", "mild", "deadly")]
    answers = lowering._answers(dies, asked)
    assert [a["stage"] for a in answers] == [None, "triton", None, "triton"]
    assert answers[1]["reason"] == "the compiler died with status 134: an assertion"


def test_an_environment_that_cannot_lower_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = python_that("echo 'No module named triton' >&2; exit 1", tmp_path)
    with pytest.raises(BuildError, match="could not lower anything:\nNo module named triton"):
        lowering._answers(broken, [{"kernel": "any", "file": "here.py"}])
    monkeypatch.setenv(lowering.VARIABLE, str(tmp_path / "nothing"))
    assert main(["build", "--backend", "ascend-triton"]) == 1
    error = capsys.readouterr().err
    assert "which is no file" in error
    assert "make ascend-lower" in error


def test_a_table_tells_the_stage_and_never_a_result_from_hardware() -> None:
    passed = {"triton": 2, "ttir": 2, "linalg": 2}
    results = [
        lowering.Lowered("a.good", 2, passed, None, None, None),
        lowering.Lowered("b.bad", 2, {**passed, "linalg": 1}, "linalg", "x | y", "/somewhere/b.py:7"),
    ]
    table = lowering.table(results)
    assert "| `a.good` | yes | yes | yes |  |" in table
    assert r"| `b.bad` | yes | yes | 1 of 2 | x \| y (b.py:7) |" in table
    assert "1 of 2 kernels lower to Linalg" in table
    assert "nothing ran on an NPU" in table


def test_build_without_a_folder_is_for_lowering_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build"]) == 1
    assert "name the folder of a project" in capsys.readouterr().err
    assert main(["build", "--backend", "ascend-triton", "--backend", "cpu"]) == 1
    assert "goes alone" in capsys.readouterr().err
