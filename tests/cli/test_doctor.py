"""`opsmith doctor`: what it says, and what it advises where something is amiss."""

import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from opsmith.cli import main
from opsmith.kernels import libraries


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> libraries.Status:
    """A machine whose kernels are well, whatever the one that runs the tests is like."""
    from opsmith.kernels import isa

    state = libraries.Status(
        tier=isa.supported()[-1],
        forced=False,
        compiler="/usr/bin/c++ (a compiler)",
        cache=Path("/cache/kernels"),
        libraries={name: Path(f"/cache/kernels/libraries/{name}.so") for name in ("gelu", "rope")},
        loaded=("gelu", "rope"),
        bytes=3 << 20,
        reason=None,
    )
    monkeypatch.setattr(libraries, "load", lambda: True)
    monkeypatch.setattr(libraries, "status", lambda: state)
    return state


def doctor(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, dict[str, Any]], str]:
    """Exit status, lines by topic, and stderr of `opsmith doctor --no-roofs`."""
    status = main(["doctor", "--no-roofs", "--json"])
    out, err = capsys.readouterr()
    return status, {line["topic"]: line for line in json.loads(out)["lines"]}, err


def test_a_healthy_machine(state: libraries.Status, capsys: pytest.CaptureFixture[str]) -> None:
    status, lines, err = doctor(capsys)
    assert (status, err) == (0, "")
    assert lines["kernel tier"]["finding"] == state.tier
    assert lines["kernel cache"]["finding"] == "/cache/kernels, 3 MiB"
    assert torch.__version__ in lines["torch"]["finding"]
    assert [topic for topic, line in lines.items() if line["grave"]] == []


def test_people_get_a_table(state: libraries.Status, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--no-roofs"]) == 0
    out = capsys.readouterr().out
    assert "2 of 2 libraries loaded" in out
    assert "a compiler" in out


def test_roofs_are_measured_on_demand(
    state: libraries.Status, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from opsmith import measure

    roof = measure.Roof("copy", 40e9, 42e9, "copy_", {"copy_": 40e9})
    monkeypatch.setattr(measure, "measure_roofs", lambda quick: measure.Roofs({"copy": roof}))
    assert main(["doctor", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["roofs"]["copy"]["rate"] == 40e9
    assert result["lines"][-1]["finding"] == "40 GB/s, measured now"


def test_fewer_threads_than_processors(
    state: libraries.Status, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from opsmith import measure

    here = dataclasses.replace(measure.describe(), cores=8, threads=2)
    monkeypatch.setattr(measure, "describe", lambda: here)
    status, lines, _ = doctor(capsys)
    assert status == 0
    assert "torch.set_num_threads(8)" in lines["threads"]["advice"]


def test_an_old_torch_is_grave(
    state: libraries.Status, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from opsmith import measure

    here = dataclasses.replace(measure.describe(), torch="2.9.1+cpu")
    monkeypatch.setattr(measure, "describe", lambda: here)
    status, lines, err = doctor(capsys)
    assert status == 1
    assert lines["torch"]["grave"]
    assert "opsmith needs torch 2.10 or newer" in err


def test_a_lower_tier_than_possible(
    state: libraries.Status, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from opsmith.kernels import isa

    monkeypatch.setattr(isa, "supported", lambda: ("portable", "better"))
    monkeypatch.setattr(libraries, "status", lambda: dataclasses.replace(state, tier="portable", forced=True))
    status, lines, _ = doctor(capsys)
    assert status == 0
    assert "(better); unset it for full speed" in lines["kernel tier"]["advice"]


def test_no_compiler_and_no_kernels(
    state: libraries.Status, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lacking = dataclasses.replace(
        state,
        compiler=None,
        libraries={"gelu": None},
        loaded=(),
        reason="no compiler is on PATH.\nInstall g++",
    )
    monkeypatch.setattr(libraries, "load", lambda: False)
    monkeypatch.setattr(libraries, "status", lambda: lacking)
    status, lines, err = doctor(capsys)
    assert status == 1
    assert lines["kernels"]["advice"] == "no compiler is on PATH. Install g++"
    assert lines["compiler"]["advice"]
    assert err.startswith("opsmith: doctor: kernels: not loaded")
    assert err.count("\n") == 1


@pytest.mark.parametrize("there", [True, False])
def test_what_records_gradients(
    there: bool, state: libraries.Status, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from opsmith.call.fast import direct, nodes

    monkeypatch.setattr(direct, "library", lambda: object())
    monkeypatch.setattr(nodes, "library", lambda: object() if there else None)
    status, lines, _ = doctor(capsys)
    assert status == 0
    assert ("C++" in lines["gradients"]["finding"]) == there
    assert ("python3-dev" in lines["gradients"]["advice"]) != there


def test_a_tier_that_does_not_exist(
    state: libraries.Status, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuses() -> bool:
        raise ValueError("OPSMITH_ISA='zzz' is no tier: expected one of portable")

    monkeypatch.setattr(libraries, "load", refuses)
    status, lines, _ = doctor(capsys)
    assert status == 1
    assert lines["kernels"]["advice"].startswith("OPSMITH_ISA='zzz' is no tier")


def test_a_cache_that_cannot_be_written(
    state: libraries.Status, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def complains() -> bool:
        warnings.warn(
            "cannot keep kernels in the cache folder; set OPSMITH_CACHE", RuntimeWarning, stacklevel=2
        )
        return True

    monkeypatch.setattr(libraries, "load", complains)
    status, lines, _ = doctor(capsys)
    assert status == 0
    assert lines["kernel cache"]["advice"] == "cannot keep kernels in the cache folder; set OPSMITH_CACHE"


def test_a_dtype_without_a_unit_is_not_called_ok(
    state: libraries.Status, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from opsmith import measure

    rates = {"matmul float32": 34e9, "matmul bfloat16": 34e9, "matmul int8": 2e9}
    roofs = {kind: measure.Roof(kind, rate, rate, "mm", {}) for kind, rate in rates.items()}
    monkeypatch.setattr(measure, "measure_roofs", lambda quick: measure.Roofs(roofs))
    monkeypatch.setattr(measure.products, "slowness", lambda dtype: 34.0)
    assert main(["doctor", "--json"]) == 0
    lines = {line["topic"]: line for line in json.loads(capsys.readouterr().out)["lines"]}
    assert "34 times as long" in lines["matmul bfloat16"]["advice"]
    assert not lines["matmul float32"]["advice"]
    assert not lines["matmul int8"]["advice"]
