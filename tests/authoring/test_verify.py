"""Every fault that `opsmith verify` claims to catch, planted in a kernel for a CPU and in one of Triton's."""

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from opsmith.authoring import new, project
from opsmith.authoring.project import checks
from opsmith.cli import main
from opsmith.kernels import nvcc, triton as kernels
from opsmith.kernels.compiler import find_compiler

from . import faults, normed_turn
from .prototypes import prototype

Found = list[tuple[bool, str, int, str]]


def hold(fault: str, found: Found) -> None:
    """All is well without a fault; with one, the smallest failure says which."""
    assert found
    red = sorted((one for one in found if not one[0]), key=lambda one: one[2])
    if not fault:
        assert red == []
        return
    assert red, f"{fault} was not caught"
    assert re.search(faults.SAID[fault], red[0][3]), red[0]
    checks = {check for ok, check, _, _ in found if not ok}
    if fault == "race":  # nothing else shows it
        assert checks <= {"threads", "two runs", "races"}
    else:
        assert "values" in checks


@pytest.fixture(scope="module")
def turned(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The project of a fault for the CPU, or that of none, whose kernels are built once."""

    @functools.cache
    def written(fault: str) -> Path:
        folder = tmp_path_factory.mktemp("turned")
        return normed_turn.write(folder, f"turn_cpu_{fault}", cpu=faults.CPU.get(fault), backends=("cpu",))

    return written


@pytest.mark.skipif(not find_compiler(), reason="there is no C++ compiler")
@pytest.mark.skipif(kernels.INTERPRETED, reason="the interpreter has the CPU")
@pytest.mark.parametrize("fault", faults.SAID)
def test_a_fault_planted_in_a_cpu_kernel(fault: str, turned: Callable[[str], Path]) -> None:
    hold(fault, list(faults.findings(turned(fault), "native")))


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    """What Triton's interpreter finds, in one process for all projects."""
    pytest.importorskip("triton")
    folder = tmp_path_factory.mktemp("projects")
    for fault in faults.SAID:
        normed_turn.write(
            folder, f"turn_triton_{fault}", triton=faults.TRITON.get(fault), backends=("triton",)
        )
    command = [sys.executable, faults.__file__, str(folder)]
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Found] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


@pytest.mark.parametrize("fault", faults.SAID)
def test_a_fault_planted_in_a_triton_kernel(fault: str, interpreted: dict[str, Any]) -> None:
    hold(fault, interpreted[f"turn_triton_{fault}"])


def test_programs_may_share_what_they_read_and_add_atomically(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    script = """
import torch, triton, triton.language as tl
from opsmith.kernels.triton.common import launch
from opsmith.kernels.triton.races import watched

@triton.jit
def add(x, y, total, N: tl.constexpr, OWN: tl.constexpr):
    i = tl.arange(0, N)
    row = tl.program_id(0)
    v = tl.load(x + i)
    tl.store(y + (row * N if OWN else 0) + i, v + tl.load(y + row * N + i))
    tl.atomic_add(total, tl.sum(v))

x, y, total = torch.ones(8), torch.zeros(3, 8), torch.zeros(1)
with watched() as races:
    launch(add, (3,), x, y, total, N=8, OWN=True)
assert races == [], races
assert float(total) == 24, total
with watched() as races:
    launch(add, (3,), x, y, total, N=8, OWN=False)
assert races == ["add: 8 places are stored by several programs",
                 "add: 8 places are loaded by one program and stored by another"], races
"""
    (tmp_path / "shared.py").write_text(script)
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, str(tmp_path / "shared.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.skipif(not find_compiler(), reason="there is no C++ compiler")
@pytest.mark.skipif(kernels.INTERPRETED, reason="the interpreter has the CPU")
def test_the_command_prints_a_table_and_the_smallest_failing_case(
    turned: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = turned("tail")
    assert main(["verify", str(folder), "--dtype", "float32"]) == 1
    out, err = capsys.readouterr()
    heads = re.split(r"  +", out.splitlines()[0].strip())
    checks = [
        "gradients",
        "values",
        "two runs",
        "NaN",
        "threads",
        "opcheck",
        "torch.compile",
        "torch.compile, gradients",
        "gradcheck",
    ]
    assert heads == ["turn_cpu_tail", "dtype", *checks, "error / bound"]
    assert re.search(r"native +float32 +\d of 8 failed", out)
    assert re.search(r"start with the smallest: turn_cpu_tail native, values of sample '1x2', float32", err)
    assert main(["bench", str(folder), "--dtype", "float32"]) == 1  # a wrong result has no time
    assert "unwritten output" in capsys.readouterr().err


@pytest.mark.skipif(not find_compiler(), reason="there is no C++ compiler")
@pytest.mark.skipif(kernels.INTERPRETED, reason="the interpreter has the CPU")
def test_a_kernel_that_does_not_compile_is_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = normed_turn.write(
        tmp_path, "turn_uncompiled", cpu={"double sum = 0;": "double sum = nought;"}, backends=("cpu",)
    )
    with pytest.warns(
        RuntimeWarning, match="'nought' was not declared.*\nUntil then turn_uncompiled computes in"
    ):
        project.load(folder).CARD.function(torch.randn(3, 8), torch.randn(8), torch.randn(8))
    assert main(["verify", str(folder), "--dtype", "float32", "--quick"]) == 1
    assert re.search(
        "turn_uncompiled native, compiles: .*cpp:[0-9]+: 'nought' was not", capsys.readouterr().err
    )
    assert main(["ops", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "no: opsmith: kernels do" in out
    assert "= nought;" not in out  # the source is for `opsmith build` to show


@pytest.mark.parametrize("left", ["nothing", "a folder", "two files of other names"])
@pytest.mark.skipif(kernels.INTERPRETED, reason="the interpreter has the CPU")
def test_a_kernel_that_is_gone_is_a_failure(
    left: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backends = () if left == "nothing" else ("triton",)
    folder = normed_turn.write(tmp_path, f"turn_lost_{len(left)}", backends=backends)
    cpu = folder / "kernels" / "cpu"
    if backends:
        cpu.mkdir()
    for name in ("a.cpp", "b.cpp") if "files" in left else ():
        (cpu / name).touch()
    for verb in ("verify", "bench"):
        assert main([verb, str(folder), "--dtype", "float32", "--quick"]) == 1
        assert f"compiles: {cpu / folder.name}.cpp is missing: PyTorch" in capsys.readouterr().err
    assert main(["build", str(folder)]) == 1
    assert "has no kernels for 'cpu'" in capsys.readouterr().err


@pytest.mark.skipif(not find_compiler(), reason="there is no C++ compiler")
@pytest.mark.skipif(kernels.INTERPRETED, reason="the interpreter has the CPU")
@pytest.mark.parametrize("than", ["smaller", "larger"])
def test_declared_sizes_that_the_reference_contradicts_are_found_before_a_kernel_runs(
    than: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    described = prototype(f"SizesOf{than.title()}", {"x": "... N"}, "x + 1")
    (tmp_path / "p.json").write_text(json.dumps(described))
    folder, _, _ = new.create(tmp_path / "p.json", tmp_path / "made", backends=("cpu", "triton"))
    card = folder / "operator.py"
    text = card.read_text()
    if than == "smaller":
        card.write_text(text.replace('outputs={"y": "... N"}', 'outputs={"y": "..."}'))
    else:
        card.write_text(text.replace("return x + 1", "return (x + 1).sum(-1)"))
    assert card.read_text() != text
    module = project.load(folder)
    x = torch.randn(2, 3)
    with pytest.warns(RuntimeWarning, match="outputs= declares .* the reference returns .*\nUntil then"):
        torch.testing.assert_close(module.CARD.function(x), module.reference(x))
    assert module.KERNELS.offers("triton") is not True
    assert main(["verify", str(folder), "--dtype", "float32"]) == 1
    said = re.search(
        r"card, sizes: .*operator.py: outputs= declares (.*) for .*, the reference returns (.*);",
        capsys.readouterr().out,
    )
    assert said is not None
    assert said[1] != said[2]
    assert main(["build", str(folder)]) == 1
    assert "outputs= declares" in capsys.readouterr().err


@pytest.mark.skipif(not find_compiler(), reason="there is no C++ compiler")
@pytest.mark.skipif(kernels.INTERPRETED, reason="the interpreter has the CPU")
def test_a_kernel_that_writes_outside_its_result_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not run amid other memory, where the process would end: by no check, of verify or of bench."""
    past = {"double sum = 0;": "double sum = 0; y.as<T>()[rows * n + 1] = from_float<T>(1);"}
    folder = normed_turn.write(tmp_path, "turn_past", cpu=past, backends=("cpu",))
    said = "bounds of sample '1x2', float32: the kernel writes 4 bytes outside y, which is float32 (1, 2); "
    for verb in ("verify", "bench"):
        assert main([verb, str(folder), "--dtype", "float32"]) == 1
        assert said in capsys.readouterr().err
    from opsmith.proof.conduct import conduct

    assert {finding.check for finding in conduct(project.load(folder).CARD, torch.float32)} == {"bounds"}


@pytest.mark.skipif(not find_compiler(), reason="there is no C++ compiler")
@pytest.mark.skipif(kernels.INTERPRETED, reason="the interpreter has the CPU")
def test_a_kernel_that_loses_a_nan_of_its_input_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forgets = {
        "sum += to_float(in[i]) * to_float(in[i]);": "sum += std::fmax(to_float(in[i]) * to_float(in[i]), 0);"
    }
    folder = normed_turn.write(tmp_path, "turn_nan", cpu=forgets, backends=("cpu",))
    assert main(["verify", str(folder), "--dtype", "float32"]) == 1
    said = (
        "1 of [0-9]+ checks failed; .* turn_nan native, NaN of sample '64x256', float32: a NaN in tensor 0 of"
    )
    assert re.search(said, capsys.readouterr().err)


@pytest.mark.skipif(kernels.INTERPRETED, reason="the interpreter is asked for")
def test_the_extremes_of_rows_that_are_generated_for_triton_keep_nan(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    described = prototype("ExtremesOfRows", {"x": "... N"}, {"y": "x - max(x)", "z": "x - min(x)"})
    (tmp_path / "p.json").write_text(json.dumps(described))
    folder, _, _ = new.create(tmp_path / "p.json", tmp_path / "made", backends=("triton",))
    found = checks.interpreted(folder, [torch.float32])
    assert [finding.ok for finding in found if finding.check == "NaN"] == [True]
    assert [str(finding) for finding in found if not finding.ok] == []


@pytest.mark.skipif(not find_compiler(), reason="there is no C++ compiler")
@pytest.mark.skipif(kernels.INTERPRETED, reason="the interpreter has the CPU")
def test_gradients_in_another_order_than_the_kernel_writes_them_are_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.json").write_text(json.dumps(prototype("Crossed", {"x": "... N", "w": "N"}, "x * w")))
    folder, _, _ = new.create(tmp_path / "p.json", tmp_path / "made", backends=("cpu",))
    card = folder / "operator.py"
    text = card.read_text()
    card.write_text(text.replace('gradients=("x", "w")', 'gradients=("w", "x")'))
    assert card.read_text() != text
    assert main(["verify", str(folder), "--dtype", "float32"]) == 1
    out, err = capsys.readouterr()
    assert "checks failed" in err
    assert re.search("backward, bounds of sample .* writes [0-9]+ bytes outside dw, which is", out)


def with_another_kernel(tmp_path: Path, made: dict[str, object], old: str, changed: str) -> Path:
    """The project of a prototype, with something else in its kernel for the CPU."""
    (tmp_path / "p.json").write_text(json.dumps(made))
    folder, _, _ = new.create(tmp_path / "p.json", tmp_path / "made", backends=("cpu",))
    (kernel,) = (folder / "kernels" / "cpu").glob("*.cpp")
    text = kernel.read_text()
    kernel.write_text(text.replace(old, changed))
    assert kernel.read_text() != text
    return folder


@pytest.mark.skipif(not find_compiler(), reason="there is no C++ compiler")
@pytest.mark.skipif(kernels.INTERPRETED, reason="the interpreter has the CPU")
def test_a_wrong_gradient_is_called_by_the_name_of_its_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = prototype("Sloped", {"x": "... N", "other": "... N"}, "x * exp(other)")
    folder = with_another_kernel(tmp_path, made, "write(dother_row, at, ", "write(dother_row, at, 2.0f * ")
    assert main(["verify", str(folder), "--dtype", "float32", "--quick"]) == 1
    said = "gradients of sample '1x1', float32: wrong value: the gradient of other differs in 1 of 1 elements"
    assert said in capsys.readouterr().err


@pytest.mark.skipif(not find_compiler(), reason="there is no C++ compiler")
@pytest.mark.skipif(kernels.INTERPRETED, reason="the interpreter has the CPU")
def test_a_kernel_that_writes_a_gradient_that_nobody_asks_for_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where a model's other tensors are frozen it has no memory to write to, and the process ends."""
    made = prototype("Unasked", {"x": "... N", "other": "... N"}, "x * other")
    folder = with_another_kernel(tmp_path, made, "if (dx_row) ", "")
    assert main(["verify", str(folder), "--dtype", "float32"]) == 1
    assert "the process ended at the gradient of other, asked for alone" in capsys.readouterr().err


@pytest.mark.skipif(not find_compiler(), reason="there is no C++ compiler")
@pytest.mark.skipif(kernels.INTERPRETED, reason="the interpreter has the CPU")
def test_a_cost_that_raises_is_a_failure_of_the_card(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = normed_turn.write(tmp_path, "turn_costly", backends=("cpu",))
    card = folder / "operator.py"
    card.write_text(card.read_text().replace("Cost(8.0 * x.numel()", "Cost(8.0 * x.elements()"))
    for verb in ("verify", "bench"):
        assert main([verb, str(folder), "--dtype", "float32", "--quick"]) == 1
        said = "turn_costly: the cost of '1x2' raised AttributeError: .*'elements'; correct `cost`"
        assert re.search(said, capsys.readouterr().err)


@pytest.mark.skipif(not find_compiler() or nvcc.find() is None, reason="there is no C++ compiler, or no nvcc")
@pytest.mark.skipif(kernels.INTERPRETED, reason="the interpreter has the CPU")
def test_cuda_kernels_are_compiled_though_no_gpu_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "p.json").write_text(json.dumps(prototype("CompiledAway", {"x": "... N"}, "x + 1")))
    folder, _, _ = new.create(tmp_path / "p.json", tmp_path / "made", backends=("cpu", "cuda"))
    assert main(["verify", str(folder), "--dtype", "float32", "--quick"]) == 0
    assert re.search("cuda +1 ok", capsys.readouterr().out)
    kernel = folder / "kernels" / "cuda" / "compiled_away.cu"
    kernel.write_text(kernel.read_text() + "\nint last() { return nought; }\n")
    assert main(["verify", str(folder), "--dtype", "float32", "--quick"]) == 1
    assert re.search("compiled_away cuda, compiles: .*cu:[0-9]+: .*nought", capsys.readouterr().err)
    monkeypatch.setenv("NVCC", "/no/nvcc")
    assert main(["verify", str(folder), "--dtype", "float32", "--quick"]) == 0
    assert "compiled_away, cuda, is not checked: CUDA kernels cannot be built" in capsys.readouterr().out


def test_opcheck_and_gradcheck_look_at_the_projects_own_entries(turned: Callable[[str], Path]) -> None:
    card = project.load(turned("")).CARD
    from opsmith.proof.conduct import Recorder

    with Recorder(card.name) as recorder:
        card.function(torch.randn(3, 8), torch.randn(8), torch.randn(8))
    assert {call[0]._schema.name for call in recorder.calls.values()} == {"turn_cpu_::forward"}


IDS = """import torch
from opsmith.authoring import project
from opsmith.authoring.project import function
from opsmith.operator import Cost, Sample

KERNELS = project.kernels(
    __file__,
    "rows_by_ids",
    inputs={"table": "V N", "ids": "B"},
    outputs={"y": "B N"},
    dtypes=("float32 int64 float32",),
)


def reference(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return 2 * table[ids]


def samples(make):
    yield Sample("7x33", (make(7, 33), make.ids(5, high=7)))


CARD = function.card(
    KERNELS, reference, kind="embedding", cost=lambda table, ids: Cost(0.0, table.nbytes), samples=samples
)
"""
BY_IDS = """#include "formula.h"

namespace rows_by_ids {
using namespace opsmith;
void forward(View table, View ids, View y) {
  const int64_t n = table.sizes[1];
  for (int64_t i = 0; i < ids.sizes[0] * n; ++i) {
    y.as<float>()[i] = FACTOR * table.as<float>()[ids.as<int64_t>()[i / n] * n + i % n];
  }
}
}  // namespace rows_by_ids
"""


@pytest.mark.skipif(not find_compiler(), reason="there is no C++ compiler")
@pytest.mark.skipif(kernels.INTERPRETED, reason="the interpreter has the CPU")
def test_a_kernel_that_is_given_ids_is_run_and_held(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cpu = tmp_path / "kernels" / "cpu"
    cpu.mkdir(parents=True)
    (tmp_path / "operator.py").write_text(IDS)
    (cpu / "rows_by_ids.cpp").write_text(BY_IDS.replace("FACTOR", "3"))
    assert main(["verify", str(tmp_path), "--quick"]) == 1
    assert "rows_by_ids native, values of sample '7x33'" in capsys.readouterr().err


@pytest.mark.skipif(not find_compiler(), reason="there is no C++ compiler")
@pytest.mark.skipif(kernels.INTERPRETED, reason="the interpreter has the CPU")
def test_a_kernel_that_no_sample_reaches_is_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cpu = tmp_path / "kernels" / "cpu"
    cpu.mkdir(parents=True)
    (tmp_path / "operator.py").write_text(
        IDS.replace("rows_by_ids", "rows_by_other_ids").replace("high=7)", "high=7).int()")
    )
    (cpu / "rows.cpp").write_text(BY_IDS.replace("FACTOR", "2").replace("rows_by_ids", "rows_by_other_ids"))
    assert main(["verify", str(tmp_path), "--quick"]) == 1
    said = "native, values: no sample reaches the kernel (the kernels take no float32, int32)"
    assert said in capsys.readouterr().err
