"""`opsmith profile`: scripts that end well, exit, raise or are interrupted, and what is left of them."""

import json
from pathlib import Path

import pytest
from tests.compiler.models import llama, seeded
from tests.profiler.conftest import fixed_roofs  # noqa: F401  the roofs take seconds to measure

from opsmith.cli import main
from opsmith.profiler import Profile

pytestmark = pytest.mark.usefixtures("fixed_roofs")

WORK = "import torch\nx = torch.ones(64, 64)\nfor _ in range(3): x = torch.softmax(x @ x, -1)\n"


def script(folder: Path, ending: str) -> Path:
    file = folder / "work.py"
    file.write_text(WORK + ending + "\n")
    return file


def test_a_script_is_profiled_and_every_view_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    html, trace, out = (tmp_path / name for name in ("p.html", "t.json", "p.json"))
    options = ["--html", str(html), "--trace", str(trace), "--json", str(out)]
    assert main(["profile", str(script(tmp_path, "")), *options]) == 0
    said = capsys.readouterr().out
    assert "work.py" in said
    assert "MatMul" in said
    profile = Profile.load(out)
    assert sum(r.calls for r in profile.phases[0].rows if r.kind == "MatMul") == 3
    assert not profile.partial
    assert "Softmax" in html.read_text()
    assert json.loads(trace.read_text())["traceEvents"]
    assert main(["profile", str(script(tmp_path, "")), "--against", str(out)]) == 0
    assert "before ms" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("ending", "why"),
    [
        ("raise SystemExit(3)", "the program exited"),
        ("raise RuntimeError('no luck')", "no luck"),
        ("raise KeyboardInterrupt", "interrupted"),
    ],
)
def test_what_was_gathered_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ending: str, why: str
) -> None:
    out = tmp_path / "p.json"
    assert main(["profile", str(script(tmp_path, ending)), "--json", str(out)]) == 1
    said = capsys.readouterr()
    assert "PARTIAL" in said.out
    assert why in said.err
    profile = Profile.load(out)
    assert why in profile.partial
    assert sum(r.calls for r in profile.phases[0].rows if r.kind == "MatMul") == 3


def test_a_script_that_exits_with_success_is_whole(tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    assert main(["profile", str(script(tmp_path, "raise SystemExit")), "--json", str(out)]) == 0
    assert not Profile.load(out).partial


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", str(tmp_path / "absent.py")]) == 1
    assert "there is no script" in capsys.readouterr().err
    assert main(["profile", str(script(tmp_path, "")), "--phase", "decode"]) == 1
    assert "a script is profiled as it is" in capsys.readouterr().err
    (tmp_path / "x.json").write_text("{}")
    assert main(["profile", str(script(tmp_path, "")), "--against", str(tmp_path / "x.json")]) == 1
    assert "is no profile" in capsys.readouterr().err
    assert main(["profile", str(tmp_path / "no-folder")]) == 1
    assert "profile: there is no folder" in capsys.readouterr().err


def test_a_decoders_prompt_and_token_are_profiled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seeded(llama).save_pretrained(tmp_path / "model")
    out = tmp_path / "profile.json"
    assert main(["profile", str(tmp_path / "model"), "--length", "8", "--json", str(out)]) == 0
    assert [phase["name"] for phase in json.loads(out.read_text())["phases"]] == ["prefill", "decode"]
    assert main(["profile", str(tmp_path / "model"), "--length", "8", "--dtype", "int8"]) == 1
    assert "--dtype: PyTorch has no dtype 'int8' of floats" in capsys.readouterr().err
