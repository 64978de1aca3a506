"""What `opsmith new` writes: complete, formatted, quick, and right on every back end without an edit."""

import copy
import functools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from opsmith.authoring import project
from opsmith.authoring.new import create
from opsmith.backends import OWN, installed
from opsmith.call.fast import direct
from opsmith.cli import main
from opsmith.kernels import libraries, nvcc, triton
from opsmith.kernels.compiler import find_compiler
from opsmith.operator import Make, Operator
from opsmith.proof.verify import verify
from tests.authoring.prototypes import PROTOTYPES, prototype, text

BACKENDS = (*OWN, *installed())

# One of each structure: rows or not, one pass or more, pairs of both kinds, matmul, masks, row vectors, two outputs.
TRIED = (
    "RopeCustom",
    "RopeHalves",
    "LayerNormCustom",
    "AddRmsNorm",
    "SoftmaxCustom",
    "SiluMulCustom",
    "MatmulBiasGelu",
    "LogSumExp",
    "MaskedFill",
    "AdaModulate",
    "SoftCap",
)

here = "triton" if triton.INTERPRETED else "cpu"
runs = pytest.mark.skipif(not triton.INTERPRETED and not find_compiler(), reason="there is no C++ compiler")


def write(folder: Path, name: str, backends: tuple[str, ...]) -> Path:
    file = folder / f"{name}.json"
    file.write_text(text(name))
    return create(file, folder / name.lower(), backends=backends)[0]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Operator]:
    """The card of a generated project: one of a name in a process, which PyTorch's dispatcher keeps."""

    @functools.cache
    def loaded(name: str) -> Operator:
        card: Operator = project.load(write(tmp_path_factory.mktemp(name), name, (here,))).CARD
        return card

    return loaded


@pytest.mark.parametrize("name", PROTOTYPES)
def test_a_project_is_complete(name: str, tmp_path: Path) -> None:
    folder = write(tmp_path, name, BACKENDS)
    stem = re.sub(r"(?<=[a-z0-9])([A-Z])", r"_\1", name).lower()
    files = {str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()}
    assert files == {
        "__init__.py",
        "operator.py",
        "bench.py",
        "README.md",
        f"tests/test_{stem}.py",
        f"kernels/cpu/{stem}.cpp",
        f"kernels/triton/{stem}.py",
        *(f"kernels/cuda/{stem}.{end}" for end in ("cu", "h", "cpp")),
        # Those of back ends in packages of their own are tested there.
        *(f for f in files if f.startswith(tuple(f"kernels/{name}/" for name in installed()))),
    }
    for file in files:
        content = (folder / file).read_text()
        assert not re.search(r"TODO|FIXME|\{%|None None", content), file
        assert content.endswith("\n"), file
        if file.endswith(".py"):
            compile(content, file, "exec")


@pytest.mark.skipif(shutil.which("ruff") is None, reason="ruff is not installed")
def test_what_is_written_is_formatted_and_written_in_a_second(tmp_path: Path) -> None:
    took = []
    for name in PROTOTYPES:
        began = time.process_time()
        write(tmp_path, name, BACKENDS)
        took.append(time.process_time() - began)
    assert (
        statistics.median(took) < 1.0
    )  # about a tenth: whatever else a machine does, half of them are not slowed
    for command in (["format", "--check"], ["check"]):
        done = subprocess.run(
            ["ruff", *command, "--isolated", "--line-length", "110", str(tmp_path)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout


@runs
@pytest.mark.parametrize("name", TRIED)
def test_kernels_and_gradients_are_right_without_an_edit(name: str, load: Callable[[str], Operator]) -> None:
    card = load(name)
    dtypes = [torch.float32, torch.bfloat16] if here == "cpu" else [torch.float32]
    findings = list(verify(card, dtypes))
    wanted = {"triton" if here == "triton" else "native", "eager", "autograd"}
    assert {f.implementation for f in findings} == wanted
    assert [str(f) for f in findings if not f.ok] == []


@runs
def test_the_function_refuses_what_does_not_fit(load: Callable[[str], Operator]) -> None:
    rope = load("RopeCustom").function
    x, cos = torch.randn(2, 3, 5, 8), torch.randn(5, 8)
    with pytest.raises(ValueError, match=r"cos must have shape \[L, D\] with L = 5, D = 8, got \(4, 8\)"):
        rope(x, cos[:4], cos)
    with pytest.raises(ValueError, match=r"D must be even, as its elements are pairs; got 7"):
        rope(x[..., :7], cos[:, :7], cos[:, :7])
    with pytest.raises(TypeError, match=r"rope_custom\(\) missing 1 required positional argument: 'sin'"):
        rope(x, cos)
    with pytest.raises(TypeError, match=r"rope_custom\(\) got an unexpected keyword argument 'eps'"):
        rope(x, cos, sin=cos, eps=1)
    with pytest.raises(TypeError, match=r"got float32, float16, float32; cast them first"):
        rope(x, cos.half(), cos)
    with pytest.raises(ValueError, match=r"out must be float32 \(2, 3, 5, 8\)"):
        rope(x, cos, cos, out=torch.empty(2, 3, 5, 7))
    memory = torch.zeros(2 * 2 * 3 * 5 * 8)
    left, right = memory[:240].view_as(x), memory[120:360].view_as(x)
    for out in (left, right):
        with pytest.raises(ValueError, match=r"out \(2, 3, 5, 8\) shares memory with x"):
            rope(left, cos, cos, out=out)
    assert not memory.any()
    # One row of the table for one new token: no other code for streaming decode.
    whole = rope(x, cos, cos)
    assert torch.allclose(rope(x[:, :, -1:], cos[-1:], cos[-1:]), whole[:, :, -1:])


@runs
def test_a_number_that_is_none_is_named(load: Callable[[str], Operator]) -> None:
    x = torch.randn(3, 8)
    with pytest.raises(TypeError, match=r"^layer_norm_custom: eps must be a number, got 'a' \(str\)$"):
        load("LayerNormCustom").function(x, x[0], x[0], eps="a")


@runs
def test_leading_sizes_must_agree_and_not_their_product_alone(load: Callable[[str], Operator]) -> None:
    silu_mul = load("SiluMulCustom").function
    silu_mul(torch.ones(2, 3, 4), torch.ones(2, 3, 4))
    with pytest.raises(ValueError, match=r"must have shape \[\.\.\., N\] with \.\.\. = \(2, 3\), N = 4"):
        silu_mul(torch.ones(2, 3, 4), torch.ones(3, 2, 4))
    for rows in (1, 5):
        with pytest.raises(ValueError, match=r"must have shape"):
            silu_mul(torch.ones(4), torch.ones(rows, 4))


@runs
def test_a_call_looks_at_no_file(load: Callable[[str], Operator], monkeypatch: pytest.MonkeyPatch) -> None:
    card = load("SiluMulCustom")
    gate, up = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8)
    card.function(gate, up)
    seen: list[str] = []
    for name in ("stat", "lstat", "scandir", "listdir"):
        usual = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda path, *a, f=usual, **k: seen.append(str(path)) or f(path, *a, **k)
        )
    for one in (gate, gate.detach(), gate.detach().t(), gate.detach().double()):
        card.function(one, up.to(one.dtype))
    assert seen == []


@pytest.mark.skipif(direct.library() is None or triton.INTERPRETED, reason="kernels are not called directly")
@pytest.mark.parametrize("name", ["SiluMulCustom", "LayerNormCustom", "RopeCustom", "MatmulBiasGelu"])
def test_a_call_goes_to_the_kernel_at_once(
    name: str, load: Callable[[str], Operator], monkeypatch: pytest.MonkeyPatch
) -> None:
    card = load(name)
    sample = next(card.samples(Make(torch.float32)))
    right = card.function(*sample.args)
    monkeypatch.setattr(project.Kernels, "backend", lambda *given: pytest.fail("the general way"))
    assert torch.equal(card.function(*sample.args), right)
    out = torch.empty_like(right)
    assert card.function(*sample.args, out=out) is out
    assert torch.equal(out, right)


@runs
def test_transforms_take_the_definition(load: Callable[[str], Operator]) -> None:
    card = load("SiluMulCustom")
    gate, up = torch.randn(3, 4, 8), torch.randn(3, 4, 8)

    def total(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = card.function(gate, up)
        return y.square().sum()

    right = card.reference(gate, up)
    torch.testing.assert_close(torch.func.vmap(card.function)(gate, up), right)
    _, tangent = torch.func.jvp(card.function, (gate, up), (gate, up))
    torch.testing.assert_close(tangent, torch.func.jvp(card.reference, (gate, up), (gate, up))[1])
    slopes = torch.func.vmap(torch.func.grad(total))(gate, up)
    leaf = gate.clone().requires_grad_()
    torch.testing.assert_close(slopes, torch.autograd.grad(total(leaf, up), leaf)[0])


@runs
def test_each_operator_is_compiled_for_itself(load: Callable[[str], Operator]) -> None:
    x = torch.randn(3, 8)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=1):
        for name, args in (
            ("SiluMulCustom", (x, x)),
            ("LayerNormCustom", (x, x[0], x[0])),
            ("LogSumExp", (x,)),
        ):
            card = load(name)
            y = torch.compile(card.function, backend="eager", fullgraph=True)(*args)
            torch.testing.assert_close(y, card.reference(*args))


@runs
def test_dtypes_may_be_mixed(tmp_path: Path) -> None:
    p = prototype(
        "MixedNorm", {"x": "... N", "weight": "N"}, "x * rsqrt(mean(x * x) + eps) * weight", eps=1e-6
    )
    for tensor in (p["input_desc"][0], p["output_desc"][0]):
        tensor["type"] = ["bf16", "float"]
    p["input_desc"][1]["type"] = "float"
    file = tmp_path / "p.json"
    file.write_text(json.dumps(p))
    folder, _, _ = create(file, tmp_path / "mixed", backends=(here,))
    card: Operator = project.load(folder).CARD
    y = card.function(torch.ones(2, 8, dtype=torch.bfloat16), torch.full((8,), 3.0))
    assert y.dtype == torch.bfloat16
    findings = list(verify(card, [torch.bfloat16]))
    assert [str(f) for f in findings if not f.ok] == []


@runs
def test_a_gradient_may_have_a_dtype_of_its_own(tmp_path: Path) -> None:
    """That of an input which the backward does not read, while all that it reads has another."""
    p = copy.deepcopy(next(p for p in PROTOTYPES.values() if p["op"] == "RopeCustom"))
    p["op"] = "MixedTurn"
    p["input_desc"][0]["type"] = "float"  # x's, and so of its gradient; cosines, sines and y may be bfloat16
    file = tmp_path / "p.json"
    file.write_text(json.dumps(p))
    folder, _, _ = create(file, tmp_path / "mixed", backends=(here,))
    card: Operator = project.load(folder).CARD
    x, angles = torch.randn(1, 2, 3, 8, requires_grad=True), torch.randn(3, 8)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    results = []
    for function in (card.function, card.reference):
        y = function(x, cos, sin)
        results.append((y, *torch.autograd.grad(y, x, torch.ones_like(y))))
    assert [t.dtype for t in results[0]] == [torch.bfloat16, torch.float32]
    for got, right in zip(*results, strict=True):
        torch.testing.assert_close(got, right)


@runs
def test_a_result_may_have_no_part_of_what_autograd_differentiates(tmp_path: Path) -> None:
    """The gradient of cosines, broadcast in the middle, is that of the reference, whose `z` has no cosine in it."""
    p = copy.deepcopy(next(p for p in PROTOTYPES.values() if p["op"] == "RopeCustom"))
    p |= {"op": "TurnAndDouble", "formula": {"y": "x * cos + rotate_half(x) * sin", "z": "x * 2"}}
    p["output_desc"].append({**p["output_desc"][0], "name": "z"})
    file = tmp_path / "p.json"
    file.write_text(json.dumps(p))
    folder, _, _ = create(file, tmp_path / "double", backends=(here,))
    card: Operator = project.load(folder).CARD
    inputs = [torch.randn(*size).requires_grad_() for size in ((1, 2, 3, 8), (3, 8), (3, 8))]
    results = [
        torch.autograd.grad([t.square().sum() for t in function(*inputs)], inputs)
        for function in (card.function, card.reference)
    ]
    for got, right in zip(*results, strict=True):
        torch.testing.assert_close(got, right)


@pytest.mark.parametrize(("op", "name"), [("SineOfBoth", "sine_of_both"), ("SineOfTwo", "cost")])
def test_a_definition_may_have_any_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, op: str, name: str
) -> None:
    """The operator's own most of all."""
    (tmp_path / f"has_{name}.py").write_text(f"def {name}(x, bias):\n    return (x + bias).sin()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    p = prototype(op, {"x": "... N", "bias": "N"}, "x")
    del p["formula"]
    file = tmp_path / "p.json"
    file.write_text(json.dumps(p))
    folder, _, _ = create(file, tmp_path / f"made_{name}", backends=("cpu",), reference=f"has_{name}:{name}")
    card: Operator = project.load(folder).CARD
    x = torch.ones(2, 3)
    assert torch.equal(card.reference(x, x[0]), (x + x).sin())


@runs
def test_without_a_formula_the_kernels_are_the_authors_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_curves.py").write_text("def curve(x, bias):\n    return (x + bias).sin()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    p = prototype("SineOfSum", {"x": "... N", "bias": "N"}, "x")
    del p["formula"]
    file = tmp_path / "p.json"
    file.write_text(json.dumps(p))
    with pytest.raises(ValueError, match="no module:function"):
        create(file, tmp_path / "made", reference="my_curves.curve; import os")
    folder, _, notes = create(
        file, tmp_path / "made", backends=("cpu", "triton"), reference="my_curves:curve", by_hand=True
    )
    assert "my_curves" not in sys.modules
    assert notes == ["Yours to write, where the kernels say WRITE HERE: forward and backward."]
    source = folder / "kernels" / "cpu" / "sine_of_sum.cpp"
    kernel = folder / "kernels" / "triton" / "sine_of_sum.py"
    assert "WRITE HERE: forward and backward" in source.read_text()
    if here == "cpu":  # written: both functions of sin are the library's for lanes of float
        text = source.read_text().replace("v_x + v_bias, lanes", "sine(v_x + v_bias), lanes")
        text = text.replace("v_dy, lanes", "v_dy * cosine(v_x + v_bias), lanes")
        loads = "const auto v_dy = read(dy_row + at, lanes);"
        more = "const auto v_x = load(x_row + at, lanes), v_bias = load(bias.as<T>() + at, lanes);"
        text = text.replace(loads, f"{loads}\n{more}")
        text = text.replace(
            "const T* const dy_row", "const T* const x_row = x.as<T>() + row * size;\nconst T* const dy_row"
        )
        text = text.replace(
            "(const View& dy, const View& dx",
            "(const View& dy, const View& x, const View& bias, const View& dx",
        )
        text = text.replace("(dy, dx", "(dy, x, bias, dx")
        helpers = "".join(
            f"Vec {name}(Vec v) {{ for (int i = 0; i < W; ++i) v[i] = std::{f}(v[i]); return v; }}\n"
            f"Pair {name}(Pair v) {{ return {{{name}(v.a), {name}(v.b)}}; }}\n"
            for name, f in (("sine", "sin"), ("cosine", "cos"))
        )
        source.write_text(text.replace("using namespace opsmith;", f"using namespace opsmith;\n{helpers}"))
    else:
        text = kernel.read_text().replace("rounded(v_x + v_bias, y)", "rounded(tl.sin(v_x + v_bias), y)")
        kernel.write_text(text)
    card: Operator = project.load(folder).CARD
    findings = [f for f in verify(card, [torch.float32]) if here == "cpu" or f.implementation != "autograd"]
    assert {"cpu": "native", "triton": "triton"}[here] in {f.implementation for f in findings}
    assert [str(f) for f in findings if not f.ok] == []


@pytest.mark.skipif(nvcc.find() is None, reason="there is no nvcc")
def test_cuda_kernels_compile(tmp_path: Path) -> None:
    for name in ("LayerNormCustom", "RopeCustom"):
        folder = write(tmp_path, name, ("cuda",))
        (source,) = (folder / "kernels" / "cuda").glob("*.cu")
        command = ["nvcc", "-std=c++17", "-O0", "-arch=sm_80", "-c", str(source), "-o", os.devnull]
        command += [f"-I{folder}" for folder in (source.parent, *libraries.HEADERS)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[:2000]


def test_the_command_says_what_it_wrote_and_what_is_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rope.json"
    file.write_text(text("RopeCustom"))
    made = tmp_path / "rope_op"
    assert main(["new", str(file), "--backends", "cpu,triton,cuda", "-o", str(made)]) == 0
    out = capsys.readouterr().out
    assert f"{made}/kernels/cuda/rope_custom.cu" in out
    assert f"Next: opsmith build {made}; opsmith verify {made}; opsmith bench {made}" in out
    assert main(["new", str(file), "-o", str(made)]) == 1
    assert "overwrites nothing" in capsys.readouterr().err
    assert main(["new", str(file), "--backends", "cpu,tpu"]) == 1
    assert "no back end 'tpu'; there are: cpu, triton, cuda" in capsys.readouterr().err
    file.write_text(text("RopeCustom").replace("rotate_interleaved(x)", "rotate(x)"))
    assert main(["new", str(file), "-o", str(tmp_path / "other")]) == 1
    err = capsys.readouterr().err.splitlines()
    assert err[0] == "  y = x * cos + rotate(x) * sin"
    assert err[1].index("^") == err[0].index("rotate(")
    assert "rotate is no function here" in err[2]


def test_new_imports_no_pytorch(tmp_path: Path) -> None:
    file = tmp_path / "rope.json"
    file.write_text(text("RopeCustom"))
    code = (
        "import sys; from opsmith.cli import main; "
        f"print(main(['new', {str(file)!r}, '-o', {str(tmp_path / 'made')!r}]), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("0 False\n")


def documented() -> list[tuple[str, dict[str, str | None], str]]:
    """The operators of the table in the docs."""
    page = (Path(__file__).parents[2] / "docs" / "authoring" / "prototype.md").read_text()
    rows = page.partition("| operator | inputs | formula | source |")[2].splitlines()
    found = []
    for row in (r for r in rows if r.startswith("| ") and "`" in r):
        name, inputs, formula = (cell.strip() for cell in row.split("|")[1:4])
        shapes = {
            n.strip(): s.strip()
            for part in inputs.split(";")
            for n in part.split(":")[0].split(",")
            for s in [part.split(":")[1]]
        }
        found.append((name, shapes, formula.strip("`")))
    return found


@pytest.mark.parametrize(
    ("name", "inputs", "formula"), documented(), ids=lambda v: v if isinstance(v, str) else ""
)
def test_the_operators_that_the_docs_list_can_be_written(
    name: str, inputs: dict[str, str | None], formula: str, tmp_path: Path
) -> None:
    file = tmp_path / "p.json"
    file.write_text(json.dumps(prototype("FromTheDocs", inputs, formula)))
    folder, _, notes = create(file, tmp_path / "made", backends=BACKENDS)
    assert notes == []
    lines = (folder / "operator.py").read_text()
    assert f"FromTheDocs: y = {formula}" in lines, name
    assert len(documented()) >= 15
