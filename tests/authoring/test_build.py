"""`opsmith build`: one cached JIT for a project's kernels, errors at the author's line, wheels without compilers."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from opsmith.authoring import project
from opsmith.authoring.project import compile, function
from opsmith.call import binding
from opsmith.call.signature import Signature
from opsmith.cli import main
from opsmith.kernels import isa, nvcc
from opsmith.kernels.compiler import find_compiler
from opsmith.operator import Cost, registry

from . import normed_turn

SRC = Path(__file__).parents[2] / "src"

compiler = pytest.mark.skipif(not find_compiler(), reason="there is no C++ compiler")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Projects are built into a cache of the test's own."""
    monkeypatch.setenv("OPSMITH_CACHE", str(tmp_path / "cache"))


def line_of(file: Path, text: str) -> int:
    return next(i for i, line in enumerate(file.read_text().splitlines(), 1) if text in line)


@compiler
def test_builds_with_steps_once_and_computes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = normed_turn.write(tmp_path, "turn_built", backends=("cpu",))
    assert main(["build", str(folder)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"\[\d/3\] turn_built.cpp", out)
    assert re.search(r"turn_built, cpu: .*turn_built-.*\.so \(\d+\.\d s\)", out)
    assert main(["build", str(folder), "--backend", "cpu"]) == 0
    assert "[1/" not in capsys.readouterr().out  # from the cache
    card = project.load(folder).CARD
    x, cos, sin = torch.randn(3, 4, 34), torch.randn(34), torch.randn(34)
    torch.testing.assert_close(card.function(x, cos, sin), card.reference(x, cos, sin))
    assert project.load(str(folder) + "/") is project.load(folder)
    kernels = project.load(folder).KERNELS
    y = torch.empty_like(x)
    for wrong, why in (
        ((x, cos[:32], sin), "cos has 32 where N is 34"),
        ((x, cos, sin.half()), "no combination"),
        ((x.transpose(0, 1), cos, sin), "x must be contiguous"),
        ((x, cos[None], sin), r"cos must have 1 dimension\(s\), got 2"),
    ):
        with pytest.raises(RuntimeError, match=why):
            kernels.op("cpu")(*wrong, 1e-5, y=y)
    with pytest.raises(RuntimeError, match=r"y has 3 where \.\.\. is 12"):
        kernels.op("cpu")(x, cos, sin, 1e-5, y=y[0, :3])


@compiler
@pytest.mark.parametrize(
    ("right", "wrong", "says"),
    [
        ("double sum = 0;", "double sum = ;", "expected primary-expression"),
        ("from_float<T>(b", "from_float<int*>(b", "no match for 'operator='"),
    ],
)
def test_an_error_is_shown_at_the_authors_line(
    right: str, wrong: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "turn_wrong_" + str(len(wrong))
    folder = normed_turn.write(tmp_path, name, cpu={right: wrong}, backends=("cpu",))
    assert main(["build", str(folder)]) == 1
    file = folder / "kernels" / "cpu" / f"{name}.cpp"
    out, err = capsys.readouterr()
    assert f"{file}:{line_of(file, wrong)}: " in err
    assert says in err
    assert "^" in out  # the line itself, with the place
    assert "Traceback" not in err


@compiler
def test_cpp_without_a_declared_attribute_is_shown_the_expected_signature(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = normed_turn.write(tmp_path, "turn_unlinked", backends=("cpu",))
    card = folder / "operator.py"
    card.write_text(
        card.read_text().replace('attributes={"eps": 1e-5}', 'attributes={"eps": 1e-5, "gain": 2.0}')
    )
    assert main(["build", str(folder), "--backend", "cpu"]) == 1
    views = "opsmith::View x, opsmith::View cos, opsmith::View sin"
    expected = f"namespace turn_unlinked: void forward({views}, double eps, double gain, opsmith::View y)"
    assert expected in capsys.readouterr().err


@compiler
def test_an_error_in_our_header_names_the_line_that_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asks = "for_lanes(n, [&](int64_t i) { sum += to_float(in[i]); });"
    folder = normed_turn.write(
        tmp_path, "turn_asks", cpu={"double sum = 0;": f"double sum = 0; {asks}"}, backends=("cpu",)
    )
    assert main(["build", str(folder)]) == 1
    file = folder / "kernels" / "cpu" / "turn_asks.cpp"
    out, err = capsys.readouterr()
    assert "simd.h:" in err
    assert f"asked for by {file}:{line_of(file, asks)}" in out


@pytest.mark.skipif(nvcc.find() is None, reason="there is no nvcc")
def test_cuda_compiles_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "scaled"
    (folder / "kernels" / "cuda").mkdir(parents=True)
    (folder / "operator.py").write_text(
        "from opsmith.authoring import project\n"
        'KERNELS = project.kernels(__file__, "scaled", inputs={"x": "... N"}, outputs={"y": "... N"})\n'
    )
    kernel = folder / "kernels" / "cuda" / "scaled.cu"
    text = """#include "types.h"
__global__ void twice(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = 2 * x[i];
}
void forward(opsmith::View x, opsmith::View y) { twice<<<1, 32>>>(x.as<float>(), y.as<float>(), 32); }
"""
    kernel.write_text(text)
    assert main(["build", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "sm_80, sm_90a and newer" in out
    assert project.load(folder).KERNELS.backends() == ("cuda",)
    assert [project.load(folder).KERNELS.op("cuda")._schema.name] == ["scaled::forward_cuda"]
    kernel.write_text(text.replace("2 * x[i]", "2 * z[i]"))
    assert main(["build", str(folder)]) == 1
    assert f'{kernel}:4: identifier "z" is undefined' in capsys.readouterr().err


def test_a_project_without_any_kernel_is_not_built(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = normed_turn.write(tmp_path, "turn_of_nothing", backends=())
    assert main(["build", str(folder)]) == 1
    error = capsys.readouterr().err
    assert "turn_of_nothing has no kernels for 'cpu'; it has kernels for: none; looked in" in error


def test_without_nvcc_the_next_step_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NVCC", "/no/nvcc")
    folder = normed_turn.write(tmp_path, "turn_no_nvcc", backends=())
    (folder / "kernels" / "cuda").mkdir(parents=True)
    (folder / "kernels" / "cuda" / "turn_no_nvcc.cu").write_text("")
    assert main(["build", str(folder), "--backend", "cuda"]) == 1
    assert "NVCC=/no/nvcc does not run. Install NVIDIA's CUDA toolkit" in capsys.readouterr().err
    assert main(["build", str(folder)]) == 0  # nobody asked for CUDA
    assert "turn_no_nvcc, cuda, is left out: CUDA kernels cannot be built: NVCC" in capsys.readouterr().out
    assert main(["build", str(folder), "--backend", "cpu"]) == 1
    assert "has no kernels for 'cpu'; it has kernels for: cuda" in capsys.readouterr().err


def test_without_triton_the_others_are_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compile, "find_spec", lambda name: None)
    folder = normed_turn.write(tmp_path, "turn_no_triton", backends=("cpu", "triton"))
    assert main(["build", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "turn_no_triton, cpu: " in out
    assert (
        "turn_no_triton, triton, is left out: Triton kernels cannot be compiled: triton is not installed"
        in out
    )
    assert main(["build", str(folder), "--backend", "triton"]) == 1
    assert 'pip install "opsmith[gpu]"' in capsys.readouterr().err


def test_triton_kernels_compile_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    folder = normed_turn.write(tmp_path, "turn_ahead", backends=("triton",))
    assert main(["build", str(folder)]) == 0
    assert re.search(r"\d variants of 1 kernels compile for sm_80, sm_90", capsys.readouterr().out)
    file = folder / "kernels" / "triton" / "turn_ahead.py"
    file.write_text(file.read_text().replace("HALF=block_of(n) // 2", "HALF=3"))
    assert main(["build", str(folder)]) == 1
    out, err = capsys.readouterr()
    assert f"{file}:{line_of(file, 'i = 2 * tl.arange')}: " in err
    assert "arange's range must be a power of 2" in out


@compiler
def test_a_wheel_runs_where_there_is_no_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Installed into a folder of its own: `opsmith ops` lists it, `optimize` finds it, and its kernels are there."""
    # One that runs everywhere, and this machine's.
    monkeypatch.setattr(isa, "TIERS", tuple(dict.fromkeys((isa.TIERS[0], isa.tier()))))
    folder = normed_turn.write(tmp_path, "turn_packed", backends=("cpu",))
    assert main(["build", str(folder), "--aot", str(tmp_path / "dist")]) == 0
    wheel = next((tmp_path / "dist").glob("turn_packed-0.1.0-py3-none-*.whl"))
    assert str(wheel) in capsys.readouterr().out
    site = tmp_path / "site"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(site),
    ]
    subprocess.run([*pip, str(wheel)], check=True)
    script = """
import torch, turn_packed.operator as there
x, c, s = torch.randn(40, 512), torch.randn(512), torch.randn(512)
assert there.KERNELS.ready(x.device) is True, there.KERNELS.ready(x.device)
torch.testing.assert_close(there.NAME(x, c, s), there.reference(x, c, s))
from opsmith.cli import main
raise SystemExit(main(["ops", "turn_packed"]))
""".replace("NAME", "turn_packed")
    environment = {
        **{k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
        "PYTHONPATH": f"{site}:{SRC}",
        "CXX": "/no/compiler",
        "OPSMITH_CACHE": str(tmp_path / "empty"),
    }
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(r"turn_packed +rope +native +cpu +float32, bfloat16, float16", done.stdout)
    # The one line of output besides: a kernel of ours that cannot be built there is no reason to hide.
    assert "Traceback" not in done.stderr


def test_names_that_are_taken_or_none(tmp_path: Path) -> None:
    for name, why in (
        ("aten", "has operators of that name"),
        ("std", "choose another"),
        ("a-b", "is no name for C"),
    ):
        with pytest.raises(ValueError, match=why):
            project.kernels(__file__, name, inputs={"x": "N"}, outputs={"y": "N"})
    with pytest.raises(ValueError, match="'float8' is no dtype: expected one of float64"):
        Signature.of("f", {"x": "N"}, {"y": "N"}, {}, ["float8"], [])
    with pytest.raises(
        ValueError, match=r"names 1 dtype or 2 \(every tensor's\), got 'float32 float32 bool'"
    ):
        Signature.of("f", {"x": "N"}, {"y": "N"}, {}, ["float32 float32 bool"], [])
    with pytest.raises(ValueError, match="'N\\+1' is no size"):
        Signature.of("f", {"x": "N+1"}, {"y": "N"}, {}, ["float32"], [])
    with pytest.raises(ValueError, match=r"y: no input has size 'M': expected a number or \.\.\., N"):
        Signature.of("f", {"x": "... N", "w": "N 4"}, {"y": "... M"}, {}, ["float32"], [])
    with pytest.raises(ValueError, match="gradients names 'z', which is no input: x"):
        Signature.of("f", {"x": "N"}, {"y": "N"}, {}, ["float32"], ["z"])
    with pytest.raises(ValueError, match="f: mode must be a float, int, bool or None, got 'tanh'"):
        Signature.of("f", {"x": "N"}, {"y": "N"}, {"mode": "tanh"}, ["float32"], [])  # type: ignore[dict-item]
    with pytest.raises(ValueError, match=r"has no operator.py; `opsmith new` writes one"):
        project.load(tmp_path)


@pytest.mark.parametrize(
    ("declared", "why"),
    [({"by": 2.0}, "says by: 2.0, the reference has 3.0"), ({"to": 3.0}, "has no such parameter")],
)
def test_a_card_refuses_attributes_that_the_reference_contradicts(
    declared: dict[str, float], why: str
) -> None:
    def reference(x: torch.Tensor, by: float = 3.0) -> torch.Tensor:
        return x * by

    name = f"refused_{next(iter(declared))}"
    kernels = project.kernels(__file__, name, inputs={"x": "N"}, outputs={"y": "N"}, attributes=declared)
    given = {"kind": "activation", "samples": lambda make: iter(())}
    with pytest.raises(ValueError, match=why):
        function.card(kernels, reference, cost=lambda x, by=3.0: Cost(1.0, 1.0), **given)
    with pytest.raises(TypeError, match=r"card\(\) missing .* 'cost'"):
        function.card(kernels, reference, **given)
    assert name not in registry()


def test_a_signature_says_everything_once() -> None:
    signature = Signature.of(
        "f",
        {"x": "... N", "w": "N 4"},
        {"y": "... N"},
        {"eps": 1e-5, "k": 2, "on": True, "must": None},
        ["bfloat16 float32 bfloat16", "float32", "float64"],
        ["x"],
    )
    scalars = "float eps, int k, bool on, float must"
    assert signature.schemas() == (
        f"forward(Tensor x, Tensor w, {scalars}, *, Tensor(a!) y) -> ()",
        f"backward(Tensor dy, Tensor x, Tensor w, {scalars}, *, Tensor(a!)? dx=None) -> ()",
    )
    text = binding.project(signature)
    assert 'call.tensor("w", w, {"N", "4"});' in text
    backward = text.partition("void backward_op")[2]
    first, second = "bf16, bf16, f32, bf16", "f32, f32, f32, f32"  # dy, x, w, dx; float64 is the reference's
    for column in (first, second):
        assert "{" + ", ".join(f"opsmith::DType::{name}" for name in column.split(", ")) + "}" in backward
    assert "f64" not in text
