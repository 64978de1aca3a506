"""`--backends ascendc`: complete operator packages, whose kernels are right when they run emulated."""

import functools
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.authoring.prototypes import PROTOTYPES, prototype, text

from opsmith.authoring import project
from opsmith.authoring.new import create
from opsmith.authoring.project import Kernels
from opsmith.authoring.project.checks import findings, standing_in
from opsmith.authoring.project.compile import projects_kernels
from opsmith.cli import main
from opsmith.kernels import triton
from opsmith.kernels.compiler import find_compiler
from opsmith.operator import Make, Operator, Sample
from opsmith.proof.verify import Finding, examine, forward
from opsmith_ascend.backend import BACKEND
from opsmith_ascend.emulation import EmulationError
from opsmith_ascend.project import run

EVERY = (torch.float32, torch.bfloat16, torch.float16)
# One of each structure, in types by turns: a kernel takes two seconds of a compiler for each.
TRIED = {
    "LayerNormCustom": EVERY,
    "SiluMulCustom": EVERY[:1],
    "RopeCustom": EVERY[2:],
    "RopeHalves": EVERY[1:2],
    "SoftmaxCustom": EVERY[2:],
    "AddRmsNorm": EVERY[1:2],
    "LogSumExp": EVERY[:1],
    "MaskedFill": EVERY[2:],
    "AdaModulate": EVERY[1:2],
    "MatmulBiasGelu": EVERY[2:],
    "SoftCap": EVERY[:1],
}


def emulated(test: Callable[..., None]) -> Callable[..., None]:
    """Needs a C++ compiler, and the CPU."""
    test = pytest.mark.skipif(not find_compiler(), reason="there is no C++ compiler")(test)
    return pytest.mark.skipif(triton.INTERPRETED, reason="the interpreter has the CPU")(test)


def write(folder: Path, op: dict[str, object] | str, backends: tuple[str, ...] = ("ascendc",)) -> Path:
    source = text(op) if isinstance(op, str) else json.dumps(op)
    file = folder / "prototype.json"
    file.write_text(source)
    return create(file, folder / "made", backends=backends)[0]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Kernels, Operator]]:
    """A generated project: one of a name in a process, which PyTorch's dispatcher keeps."""

    @functools.cache
    def loaded(name: str) -> tuple[Kernels, Operator]:
        folder = write(tmp_path_factory.mktemp(name), {**PROTOTYPES[name], "op": f"Ascend{name}"})
        (kernels,) = projects_kernels(folder)
        return kernels, project.load(folder).CARD

    return loaded


def held(kernels: Kernels, card: Operator, sample: Sample, dtype: str = "float32") -> Finding:
    """What a sample says of the emulated kernel."""
    (implementation,) = (i for i in card.implementations if i.name == "ascendc")
    with standing_in(kernels, "ascendc", run.call(kernels)):
        return examine(card, dtype, sample, "emulated", "values", partial(forward, implementation.fn))


@pytest.mark.parametrize("name", PROTOTYPES)
def test_a_tree_is_complete(name: str, tmp_path: Path) -> None:
    folder = write(tmp_path, name) / "kernels" / "ascendc"
    stem = re.sub(r"(?<=[a-z0-9])([A-Z])", r"_\1", name).lower()
    files = {str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()}
    assert files == {
        *("README.md", "CMakeLists.txt", "CMakePresets.json", "build.sh", "launch.py", "test_on_board.py"),
        *("op_host/CMakeLists.txt", f"op_host/{stem}.cpp"),
        *("op_kernel/CMakeLists.txt", f"op_kernel/{stem}.cpp", f"op_kernel/{stem}_tiling.h"),
        *(f"op_kernel/{h}.h" for h in ("tiling", "formula", "formula_functions", "formula_statistics")),
        *("framework/pytorch/binding.cpp", "framework/pytorch/build.py"),
    }
    for file in files:
        content = (folder / file).read_text()
        assert not re.search(r"TODO|FIXME|\{%|\{\{ |None", content.replace("-> None", "")), file
        assert content.endswith("\n"), file
        if file.endswith(".py"):
            compile(content, file, "exec")
    assert json.loads((folder / "CMakePresets.json").read_text())["configurePresets"]
    subprocess.run(["bash", "-n", str(folder / "build.sh")], check=True)
    tiling = (folder / f"op_kernel/{stem}_tiling.h").read_text()
    assert re.search(r"float16.*: .*\d\)? / \(?\d+", tiling)  # the sum, with its numbers


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
def test_the_hosts_side_is_cpp(tmp_path: Path) -> None:
    names = ("SiluMulCustom", "LayerNormCustom", "LogSumExp", "AdaModulate", "MaskedFill")
    sources = []
    for name in names:
        (tmp_path / name).mkdir()
        sources += (write(tmp_path / name, name) / "kernels" / "ascendc" / "op_host").glob("*.cpp")
    assert len(sources) == len(names)
    command = [
        "g++",
        "-std=c++17",
        "-Wall",
        "-Werror",
        "-fsyntax-only",
        f"-I{Path(__file__).parent / 'cann'}",
    ]
    for source in sources:
        done = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[:2000]


@emulated
@pytest.mark.parametrize("name", TRIED)
def test_kernels_are_right_emulated(name: str, load: Callable[[str], tuple[Kernels, Operator]]) -> None:
    kernels, card = load(name)
    found = list(findings(BACKEND, kernels, card, TRIED[name]))
    assert {f.check for f in found} == {"values", "cores"}
    assert {f.implementation for f in found} == {"ascendc, emulated"}
    assert len(found) == 7 * len(TRIED[name]) + 1
    assert [str(f) for f in found if not f.ok] == []


@emulated
@pytest.mark.parametrize("name", ["LayerNormCustom", "SoftmaxCustom", "LogSumExp"])
def test_rows_longer_than_local_memory_come_in_tiles(
    name: str, load: Callable[[str], tuple[Kernels, Operator]]
) -> None:
    kernels, card = load(name)
    dtype = TRIED[name][-1]
    make = Make(dtype)
    size = 20011
    more = (make(size), make(size)) if name == "LayerNormCustom" else ()
    found = held(kernels, card, Sample("long", (make(3, size, shift=2.0), *more)), str(dtype)[6:])
    assert found.ok, found.why


@emulated
def test_tiles_have_many_rows_with_gaps_between(load: Callable[[str], tuple[Kernels, Operator]]) -> None:
    kernels, card = load("LayerNormCustom")
    for dtype in (torch.bfloat16, torch.float32):
        make = Make(dtype)
        for rows, size in ((700, 40), (300, 129), (90, 1001)):
            args = (make(rows, size), make(size), make(size))
            y = torch.empty_like(args[0])
            done = run.call(kernels, 1)(*args, 1e-5, y=y)
            assert done is not None
            assert done.local_peak > 150 * 1024  # a tile as large as there is room
            exact = card.reference(*(t.double() for t in args))
            assert card.tolerance.check(y, card.eager(*args), exact).ok


@emulated
def test_a_rotated_row_must_fit_in_local_memory(load: Callable[[str], tuple[Kernels, Operator]]) -> None:
    kernels, card = load("RopeHalves")
    make = Make(torch.bfloat16)
    row = make(1, 1, 1, 40000)
    found = held(kernels, card, Sample("long", (row, row[0, 0], row[0, 0])), "bfloat16")
    assert not found.ok
    assert "expected 1 to 48 blocks, got 0" in found.why


@emulated
def test_what_fits_is_read_once(load: Callable[[str], tuple[Kernels, Operator]]) -> None:
    kernels, card = load("LayerNormCustom")
    make = Make(torch.bfloat16)
    x, weight, bias = make(1536, 256), make(256), make(256)
    done = run.call(kernels)(x, weight, bias, 1e-5, y=torch.empty_like(x))
    assert done is not None
    assert done.blocks == 48
    least = card.cost(x, weight, bias).min_bytes
    assert least <= done.traffic <= 1.07 * least  # each core reads weight and bias
    alone = run.call(kernels, 1)(x, weight, bias, 1e-5, y=torch.empty_like(x))
    assert alone is not None
    assert alone.traffic == least


@emulated
def test_types_may_be_mixed_and_rows_odd(tmp_path: Path) -> None:
    p = prototype(
        "AscendMixed", {"x": "... N", "cos": "... N", "weight": "N"}, "x * weight * cos + rotate_half(x)"
    )
    for tensor in (p["input_desc"][0], p["output_desc"][0]):
        tensor["type"] = ["bf16", "fp16"]
    p["input_desc"][1]["type"] = p["input_desc"][2]["type"] = "float"
    folder = write(tmp_path, p)
    (kernels,) = projects_kernels(folder)
    found = list(findings(BACKEND, kernels, project.load(folder).CARD, [torch.bfloat16]))
    assert [str(f) for f in found if not f.ok] == []


FAULTS = {
    "address": (
        "Mul(v_1, x, cos, n);",
        "Mul(v_1[1], x, cos, n);",
        r"rope\w*\.cpp:\d+, Mul: .*multiple of 32",
    ),
    "outside": (
        "y_.Store(at, tile);",
        "y_.Store(at + 1, tile);",
        r"outside the tensor|of y were written by no",
    ),
    "tail": ("t_.size - column)", "t_.size - column - 1)", r"nobody has written all|of y were written by no"),
    "never freed": ("    sin_.Close();\n", "", r"buffers of VECIN \d are in use|never given back"),
    "never queued": ("    cos_.End();\n", "", r"DeQue: VECIN \d is empty"),
    "sign": ("Add(y, v_1, v_2, n);", "Sub(y, v_1, v_2, n);", "wrong value"),
}


def planted(tmp_path: Path, name: str, file: str, old: str, new: str) -> list[Finding]:
    """What verify says of RoPE with a fault in its kernel."""
    op = f"Rope{''.join(word.title() for word in name.split())}"
    folder = write(tmp_path, {**PROTOTYPES["RopeCustom"], "op": op})
    (source,) = (folder / "kernels" / "ascendc" / "op_kernel").glob(file)
    content = source.read_text()
    assert old in content
    source.write_text(content.replace(old, new))
    (kernels,) = projects_kernels(folder)
    found = findings(BACKEND, kernels, project.load(folder).CARD, [torch.float16], quick=True)
    return [f for f in found if not f.ok]


@emulated
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_planted_in_a_kernel(fault: str, tmp_path: Path) -> None:
    old, new, said = FAULTS[fault]
    red = planted(tmp_path, fault, "rope*[a-z].cpp", old, new)
    assert red
    assert any(re.search(said, f.why) for f in red), red[0].why


@emulated
def test_too_large_a_tile_is_named(tmp_path: Path) -> None:
    old = "const uint64_t room = platform.localBytes"
    folder = write(tmp_path, {**PROTOTYPES["RopeCustom"], "op": "RopeTooLarge"})
    (header,) = (folder / "kernels" / "ascendc" / "op_kernel").glob("*_tiling.h")
    content = header.read_text()
    assert old in content
    header.write_text(content.replace(old, f"{old} + 90000"))
    (kernels,) = projects_kernels(folder)
    x = torch.ones(4, 8, 512, 128, dtype=torch.float16)
    with pytest.raises(
        EmulationError, match=r"needs \d+ bytes of local memory behind \d+ .* there are 196608"
    ):
        run.call(kernels)(x, x[0, 0], x[0, 0], y=torch.empty_like(x))


@emulated
def test_a_line_that_does_not_compile_is_named(tmp_path: Path) -> None:
    (found,) = planted(tmp_path, "broken", "rope*[a-z].cpp", "Add(y, v_1, v_2, n);", "Add(y, v_1, v_9, n);")
    assert found.check == "compiles"
    assert re.search(r"op_kernel/rope_broken\.cpp:\d+: 'v_9' was not declared", found.why)


def test_formats_other_than_nd_are_for_this_back_end_alone(tmp_path: Path) -> None:
    p = prototype("NzGelu", {"x": "M N"}, "gelu(x)")
    for tensor in (p["input_desc"][0], p["output_desc"][0]):
        tensor["format"] = "FRACTAL_NZ"
    folder = write(tmp_path, p) / "kernels" / "ascendc"
    assert "ge::FORMAT_FRACTAL_NZ, ge::FORMAT_FRACTAL_NZ" in (folder / "op_host" / "nz_gelu.cpp").read_text()
    assert not (folder / "framework").exists()  # PyTorch hands over ND
    refusals = [
        (p, ("cpu", "ascendc"), r"x has format FRACTAL_NZ; cpu take ND.*--backends ascendc alone"),
        (
            {**p, "formula": "softmax(x)"},
            ("ascendc",),
            r"FRACTAL_NZ does not keep the elements of a row together",
        ),
    ]
    mixed = json.loads(json.dumps(p))
    mixed["output_desc"][0]["format"] = "ND"
    refusals.append((mixed, ("ascendc",), r"with all tensors in one format"))
    for i, (one, backends, said) in enumerate(refusals):
        (tmp_path / str(i)).mkdir()
        with pytest.raises(ValueError, match=said):
            write(tmp_path / str(i), one, backends)
        assert not (tmp_path / str(i) / "made").exists()


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("half", "b"), "'half' means something in an Ascend C kernel"),
        (("x_", "b"), "'x_' means something"),
        (("Muls", "b"), "'Muls' means something"),
        (("executor", "bytes_b"), "'executor' means something"),
        (("a", "bytes_a"), "'bytes_a' means something"),
        (("kLanes", "Times"), "'kLanes' means something"),
        (("x", "values"), "'values' means something"),
        (("x", "int64_t"), "'int64_t' means something"),
        (("gate", "Gate"), "differ in case alone"),
        (("x", "v_1"), "has a meaning in Python, C\\+\\+ or the generated code"),
        (("x", 'y"); system("id'), "allowed: a letter"),
        (("x", "s\u0441ale"), "allowed: a letter"),
    ],
)
def test_no_name_gets_into_the_code_that_means_something_there(
    names: tuple[str, str], said: str, tmp_path: Path
) -> None:
    p = prototype("Hostile", dict.fromkeys(names, "... N"), f"{names[0]} + {names[1]}")
    with pytest.raises(ValueError, match=said):
        write(tmp_path, p)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("inputs", "formula", "said"),
    [
        ({"x": "B L N", "s": "L 1"}, "x * s", "s has one number for several rows"),
        (
            dict.fromkeys("abcdefghi", "... N"),
            " + ".join("abcdefghi"),
            "9 inputs; a core has events for the queues of 8",
        ),
    ],
)
def test_what_is_not_computed_says_so(
    inputs: dict[str, str | None], formula: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=said):
        write(tmp_path, prototype("NotComputed", inputs, formula))


@emulated
def test_the_commands_say_emulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    p = prototype("CapShown", {"x": "... N"}, "cap * tanh(x / cap)", cap=30.0)
    for tensor in (p["input_desc"][0], p["output_desc"][0]):
        tensor["type"] = ["fp16"]
    folder = write(tmp_path, p)
    assert main(["build", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "cap_shown, ascendc: compiles for emulation, in 1 combination of types; CANN builds it" in out
    assert main(["verify", str(folder), "--quick", "--dtype", "float16"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"ascendc, emulated +float16 +7 ok", out)
    assert main(["ops", str(folder)]) == 0
    assert re.search(r"ascendc +npu +no: ", capsys.readouterr().out)
