"""The command line as a whole: help, errors, and `--json`, which every verb shares."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from opsmith.cli import VERBS, CommandError, main
from opsmith.cli.common import Output

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command line in this process and gives back (exit status, stdout, stderr)."""

    def call(*args: str) -> tuple[int, str, str]:
        status = main(args)
        out, err = capsys.readouterr()
        return status, out, err

    return call


def in_a_new_process(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=600
    ).stdout


def test_help_imports_neither_torch_nor_any_verb() -> None:
    code = (
        "import sys; from opsmith.cli import main; main(['--help']);"
        "print([m for m in sys.modules if m in ('torch', 'numpy') or m.startswith('opsmith.cli.')])"
    )
    out = in_a_new_process(code)
    assert out.endswith("[]\n")
    assert all(verb in out for verb in VERBS)


END = "what the next verb says\n"


@pytest.fixture(scope="module")
def helps() -> dict[str, str]:
    """What each verb says to `-h`, and whether torch is imported by then: of one process that is asked for all."""
    code = (
        "import sys; from opsmith.cli import VERBS, main\n"
        f"for verb in VERBS: print(main([verb, '-h']), 'torch' in sys.modules, end={chr(10) + END!r})"
    )
    return dict(zip(VERBS, in_a_new_process(code).split(END), strict=False))


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_a_verb_shows_an_example_and_imports_no_torch(verb: str, helps: dict[str, str]) -> None:
    out = helps[verb]
    assert f"Example: opsmith {verb}" in out
    assert "--json" in out
    assert out.endswith("0 False\n")


@pytest.mark.parametrize("args", [(), ("--help",), ("-h",)])
def test_help_is_what_no_arguments_give(run: Run, args: tuple[str, ...]) -> None:
    status, out, _ = run(*args)
    assert status == 0
    assert "doctor" in out


def test_version(run: Run) -> None:
    import opsmith

    assert run("--version")[:2] == (0, f"opsmith {opsmith.__version__}\n")


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["veriffy"], "No such command 'veriffy'"),
        (["ops", "--zonk"], "see `opsmith ops --help`"),
        (["verify"], "name an operator, or say --all; there are: "),
        (["verify", "layer_nrm"], "did you mean layer_norm?"),
        (["verify", "zzz"], "no operator, and no folder with an operator.py, is called 'zzz'; there are: "),
        (
            ["verify", "./no-such-project"],
            "no-such-project is no project: it is missing; `opsmith new` writes one",
        ),
        (["build", "no-such-project"], "no-such-project is no project: it is missing"),
        (["verify", "layer_norm", "--all"], "give names or --all, not both"),
        (["verify", "layer_norm", "--dtype", "int8"], "layer_norm takes no 'int8'; it takes float32"),
        (["ops", "--json=/no/such/folder/x.json"], "cannot write /no/such/folder/x.json"),
        (["ops", "--json", "/"], "--json: / is a folder"),
    ],
)
def test_an_error_is_one_line_and_status_1(run: Run, args: list[str], expected: str) -> None:
    status, _, err = run(*args)
    assert status == 1
    assert expected in err
    assert err.startswith("opsmith: ")
    assert err.count("\n") == 1


def test_a_project_that_is_missing_is_said_with_those_beside_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rope_op").mkdir()
    (tmp_path / "rope_op" / "operator.py").touch()
    monkeypatch.chdir(tmp_path)
    assert (
        "no folder with an operator.py, is called 'rope_up'; did you mean rope_op?"
        in run("verify", "rope_up")[2]
    )
    assert (
        "nothing is no project: it is missing; projects beside it: rope_op;" in run("verify", "./nothing")[2]
    )
    assert "operator.py is no project: name its folder;" in run("verify", "rope_op/operator.py")[2]


def test_a_folder_that_cannot_be_written_is_said_before_the_work(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    status, out, err = run("ops", f"--json={tmp_path / 'x.json'}")
    assert (status, out) == (1, "")
    assert "x.json (permission denied); name another file" in err


def test_an_unexpected_error_shows_its_traceback_on_demand_only(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("first line\nsecond line " + "x" * 1000)

    monkeypatch.setattr("opsmith.cli.ops.choose", broken)
    status, _, err = run("ops")
    assert status == 1
    assert err.startswith("opsmith: first line second line")
    assert err.endswith("(--debug shows the traceback)\n")
    assert err.count("\n") == 1
    assert len(err) < 500
    with pytest.raises(RuntimeError, match="first line"):
        run("ops", "--debug")


def test_interrupted(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("opsmith.cli.ops.choose", interrupted)
    status, _, err = run("ops")
    assert status == 130
    assert "Traceback" not in err


def test_json_on_stdout_stands_alone(run: Run) -> None:
    status, out, _ = run("ops", "--json", "layer_norm")
    assert status == 0
    assert {row["operator"] for row in json.loads(out)["operators"]} == {"layer_norm"}


@pytest.mark.parametrize("form", ["--json {}", "--json={}"])
def test_json_in_a_file_leaves_the_table(run: Run, tmp_path: Path, form: str) -> None:
    file = tmp_path / "ops.json"
    status, out, _ = run("ops", "layer_norm", *form.format(file).split())
    assert status == 0
    assert "layer_norm" in out
    assert json.loads(file.read_text())["operators"]


def test_json_has_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    Output("-").finish({"a": (float("nan"), float("inf"), 1.5), Path("b"): Path("c")})
    assert json.loads(capsys.readouterr().out) == {"a": [None, None, 1.5], "b": "c"}


def test_a_command_error_is_not_wrapped(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*args: object, **kwargs: object) -> None:
        raise CommandError("no such thing; do another")

    monkeypatch.setattr("opsmith.cli.ops.choose", refuses)
    assert run("ops")[2] == "opsmith: no such thing; do another\n"
