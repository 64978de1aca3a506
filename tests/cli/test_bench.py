"""`opsmith bench`: the table, the JSON and the refusal."""

import dataclasses
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from opsmith import measure
from opsmith.cli import main
from opsmith.operator import Cost, Implementation, Kind, Make, Operator, Sample


def samples(make: Make) -> Iterator[Sample]:
    yield Sample("64x64", (make(64, 64),))


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Operator:
    """A card in a registry of its own, on a machine with small caches."""
    card = Operator(
        name="negate",
        kind=Kind.ACTIVATION,
        function=torch.neg,
        reference=torch.neg,
        cost=lambda x: Cost(x.numel(), 2 * x.nbytes),
        samples=samples,
        implementations=[Implementation("mine", torch.neg)],
        dtypes=(torch.float32, torch.bfloat16),
    )
    import opsmith.ops  # noqa: F401  (registers its cards before the registry is replaced)

    monkeypatch.setattr(sys.modules["opsmith.operator"], "_REGISTRY", {"negate": card})
    for module in ("pool", "roofs"):
        monkeypatch.setattr(f"opsmith.measure.{module}.cold_bytes", lambda device="cpu": 1 << 16)
    monkeypatch.setattr(measure, "cold_bytes", lambda device="cpu": 1 << 16)
    return card


QUICK = ("--against", "eager", "--no-backward", "--seconds", "0.01")


def test_a_table_for_each_dtype(card: Operator, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "negate", *QUICK]) == 0
    out = capsys.readouterr().out
    assert "negate 64x64, float32, forward, 2 threads" in out
    assert "negate 64x64, bfloat16, forward, 2 threads" in out
    assert "mine" in out
    assert "eager" in out


def test_json(card: Operator, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--all", "--dtype", "bfloat16", "--json", *QUICK]) == 0
    found = json.loads(capsys.readouterr().out)
    (result,) = found["benchmarks"]
    assert found["machine"]["threads"] == 2
    assert found["versions"]["torch"]
    assert found["commit"] == found["machine"]["commit"]
    assert result["operator"] == "negate"
    assert result["dtype"] == "bfloat16"
    assert result["columns"]["cold"]["contestants"]["mine"]["samples"]
    assert result["peak_bytes"] == dict.fromkeys(("opsmith", "mine", "eager"), 64 * 64 * 2)


def test_a_wrong_result_prints_no_time(card: Operator, capsys: pytest.CaptureFixture[str]) -> None:
    card.implementations.append(Implementation("wrong", lambda x: -x + 1))
    assert main(["bench", "negate", *QUICK]) == 1
    out, err = capsys.readouterr()
    assert "negate 64x64" not in out
    assert "bench: 2 faults, the first: negate wrong: values of sample '64x64', float32" in err
    assert err.count("\n") == 1


def test_what_behaves_wrong_is_not_timed_either(card: Operator, capsys: pytest.CaptureFixture[str]) -> None:
    """Every value is within the tolerance, and no two runs agree: only the checks of behavior see it."""
    turns = itertools.count()

    def unsteady(x: torch.Tensor) -> torch.Tensor:
        y = -x
        return y if next(turns) % 2 else torch.nextafter(y, torch.zeros_like(y))

    card.implementations.append(Implementation("unsteady", unsteady))
    only = ("--dtype", "float32", *QUICK)
    assert main(["bench", "negate", *only]) == 1
    out, err = capsys.readouterr()
    assert "negate 64x64" not in out
    assert "negate unsteady: two runs of sample '64x64', float32" in err
    assert main(["bench", "negate", *only, "--quick"]) == 0


def test_a_call_of_ones_own_is_timed(card: Operator, capsys: pytest.CaptureFixture[str]) -> None:
    def negate(x: torch.Tensor) -> torch.Tensor:
        return -x

    card.function = negate
    assert main(["bench", "negate", *QUICK, "--quick", "--shape", "x=bfloat16[8,32]@1,8"]) == 0
    out = capsys.readouterr().out
    assert "negate x 8x32, bfloat16, forward" in out
    assert "float32" not in out
    assert main(["bench", "negate", *QUICK, "--shape", "y=float32[2]"]) == 1
    assert "--shape: negate takes x: " in capsys.readouterr().err


def test_an_operator_of_other_dtypes_is_timed_in_these(
    card: Operator, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(card, "dtypes", (torch.float16,))
    options = ("--no-backward", "--seconds", "0.01", "--against", "eager", "--quick", "--json")
    assert main(["bench", "negate", *options]) == 0
    assert {b["dtype"] for b in json.loads(capsys.readouterr().out)["benchmarks"]} == {"float16"}


def test_the_definition_is_a_column_where_eager_is_another(
    card: Operator, capsys: pytest.CaptureFixture[str]
) -> None:
    options = (
        "--no-backward",
        "--seconds",
        "0.01",
        "--dtype",
        "float32",
        "--against",
        "reference,eager",
        "--json",
    )
    assert main(["bench", "negate", *options]) == 0
    (result,) = json.loads(capsys.readouterr().out)["benchmarks"]
    assert "reference takes no part: eager runs the definition itself" in result["notes"]
    card.implementations.append(Implementation("eager", torch.negative))
    assert main(["bench", "negate", *options]) == 0
    (result,) = json.loads(capsys.readouterr().out)["benchmarks"]
    assert {"mine / reference", "mine / eager", "eager / reference"} <= set(result["ratios"]["cold"])


def test_one_fault_does_not_keep_others_from_being_timed(
    card: Operator, capsys: pytest.CaptureFixture[str]
) -> None:
    def supports(x: torch.Tensor) -> bool | str:
        return x.dtype == torch.float32 or "float32 only"

    card.implementations.append(Implementation("wrong", lambda x: -x + 1, supports=supports))
    assert main(["bench", "--all", "--json", *QUICK]) == 1
    result = json.loads(capsys.readouterr().out)
    assert not result["ok"]
    assert [b["dtype"] for b in result["benchmarks"]] == ["bfloat16"]
    assert len(result["faults"]) == 1


def test_an_impossible_time_is_a_fault(card: Operator, capsys: pytest.CaptureFixture[str]) -> None:
    card.cost = lambda x: Cost(0, 1e15)
    assert main(["bench", "--all", "--dtype", "float32", "--json", *QUICK]) == 1
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert result["benchmarks"][0]["roof_fraction"] == {"cold": {}}
    assert "of what the roofs of this run allow" in result["faults"][0]
    assert "bench: 3 faults" in err  # of the public function, its implementation and eager


def test_both_directions_and_a_summary(card: Operator, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "negate", "--against", "eager", "--seconds", "0.01", "--dtype", "float32"]) == 0
    out = capsys.readouterr().out
    assert "negate 64x64, float32, backward, 2 threads" in out
    assert "Summary" in out
    assert "× eager, float32, backward: geometric mean" in out


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (
            ["--against", "eagre"],
            "--against: no baseline is called 'eagre'; there are: reference, eager, compile, liger",
        ),
        (
            ["--against", "liger"],
            "--against: cannot compare against liger: Liger-Kernel is written in Triton",
        ),
        (["--device", "tpu"], "--device: no device is called 'tpu'; there are: cpu, cuda"),
        (["--device", "cuda"], "--device: this PyTorch finds no GPU; leave --device out"),
        (["--roofline", "roofs.pdf"], "--roofline: roofs.pdf is no .svg or .png file; name one"),
        (["--roofline", "no/folder/roofs.svg"], "--roofline: cannot write no/folder/roofs.svg"),
    ],
)
def test_a_wrong_option_is_one_line_before_anything_is_timed(
    options: list[str],
    complaint: str,
    card: Operator,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "negate", *options]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert complaint in err
    assert err.count("\n") == 1


def test_the_roofline_shows_every_operator_under_the_roofs(
    card: Operator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "roofs.svg"
    assert main(["bench", "negate", *QUICK, "--roofline", str(picture)]) == 0
    text = picture.read_text()
    assert text.lstrip().startswith("<?xml")
    assert ">negate</text>" in text
    assert "copy: " in text
    assert "operations per byte" in text


def test_who_stops_it_keeps_what_was_timed(
    card: Operator, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(make: Make) -> Iterator[Sample]:
        raise KeyboardInterrupt

    later = dataclasses.replace(card, name="later", samples=stopped)
    monkeypatch.setattr(sys.modules["opsmith.operator"], "_REGISTRY", {"negate": card, "later": later})
    file = tmp_path / "bench.json"
    assert main(["bench", "--all", "--dtype", "float32", "--json", str(file), *QUICK]) != 0
    found = json.loads(file.read_text())
    assert [b["operator"] for b in found["benchmarks"]] == ["negate"]
    assert found["left"] == ["later"]
    assert not found["ok"]
