"""Imports only go down, and kernel files know no torch header: the architecture, checked from the sources."""

import ast
import re
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest
import torch

import opsmith.ops  # noqa: F401  the cards register themselves
from opsmith.operator import Kind, registry

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "opsmith"
# Packages that build on the core, and the page that lists what these may import.
BACKENDS = [file.parent for file in sorted((ROOT / "packages").glob("*/src/*/__init__.py"))]
INTERFACE = ROOT / "docs" / "authoring" / "backends.md"
# Devices of theirs, and who makes these. What an operator follows is named in its docstring, as a source.
DEVICES = re.compile(r"ascend(?!ing)|\bnpu\b|_npu|npu_|\bcann\b", re.IGNORECASE)
SOURCES = re.compile(r"^ *Source: .*", re.MULTILINE)

# What each part of the package may import from the others. `__init__` is the public face, on top of them all.
MAY_IMPORT: dict[str, set[str]] = {
    "version": set(),
    "installed": set(),
    "files": set(),
    "implementation": set(),
    "backends": {"installed", "implementation"},
    "operator": {"implementation", "backends"},
    "measure": set(),
    "kernels": {"files"},
    "call": {"operator", "measure", "kernels"},
    "ops": {"operator", "measure", "kernels", "call"},
    "decoding": {"call", "ops"},
    "proof": {"operator", "measure", "kernels", "call", "ops"},
    "compiler": {"version", "files", "operator", "measure", "kernels", "call", "ops", "decoding", "proof"},
    "evaluation": {"compiler"},
    "checkpoints": {"ops", "compiler"},
    "profiler": {"version", "files", "operator", "measure", "kernels", "call", "ops", "proof", "compiler"},
    "authoring": {"version", "operator", "measure", "kernels", "call", "ops", "proof", "compiler"},
    "integrations": {
        "operator",
        "measure",
        "kernels",
        "call",
        "ops",
        "proof",
        "compiler",
        "profiler",
        "authoring",
    },
}
# What packages bring is asked for from above: by whom an entry point is loaded.
for upper in ("ops", "proof", "compiler", "profiler", "authoring", "integrations"):
    MAY_IMPORT[upper] |= {"installed", "implementation", "backends"}
MAY_IMPORT["__init__"] = set(MAY_IMPORT)
MAY_IMPORT["cli"] = set(MAY_IMPORT)
MAY_IMPORT["__main__"] = {"cli"}

# The compiler is one street: each part may import those before it.
STAGES = (
    *("config", "plan", "kept", "reasons", "progress", "meanwhile"),
    *("algebra", "capture", "find", "steps", "choose", "prove", "program", "modules"),
    *("report", "code", "bypass", "session", "frozen", "entry", "copying", "warmup", "api", "__init__"),
)

# What may see torch, by how its name begins: it registers the kernels with PyTorch's stable ABI.
BINDING = "binding"
TORCH_HEADER = re.compile(r'^\s*#\s*include\s*[<"](torch|ATen|c10)/', re.MULTILINE)


def imported_names(file: Path, package: Path) -> Iterator[tuple[int, list[str]]]:
    """Yields (line, path of a name within opsmith) for every import in a file, those inside functions included."""
    here = ["opsmith", *file.relative_to(package).with_suffix("").parts]
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = here[: -node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            root, *rest = name.split(".")
            if root == "opsmith":
                yield node.lineno, rest


def imported_parts(file: Path, package: Path) -> Iterator[tuple[int, str]]:
    """Yields (line, part of opsmith) for every import in a file."""
    for line, rest in imported_names(file, package):
        # `from opsmith import Config` takes a name from the public face, not a part of its own.
        yield line, rest[0] if rest and exists(package, rest[0]) else "__init__"


def exists(package: Path, part: str) -> bool:
    return (package / part).is_dir() or (package / f"{part}.py").is_file()


def violations(package: Path) -> list[str]:
    """Every import that does not go down, one line each."""
    found = []
    for file in sorted(package.rglob("*.py")):
        path = file.relative_to(package)
        part = path.parts[0].removesuffix(".py")
        if part not in MAY_IMPORT:
            found.append(f"{path}:1: '{part}' has no layer; give it one in MAY_IMPORT")
            continue
        for line, other in imported_parts(file, package):
            if other != part and other not in MAY_IMPORT[part]:
                found.append(f"{path}:{line}: {part} must not import {other}")
    return found


def steps_back(package: Path) -> list[str]:
    """Every import of the compiler from one of its later stages, one line each."""
    compiler, found = package / "compiler", []
    for file in sorted(compiler.rglob("*.py")):
        path = file.relative_to(compiler)
        stage = path.parts[0].removesuffix(".py")
        if stage not in STAGES:
            found.append(f"{path}:1: '{stage}' has no place; give it one in STAGES")
            continue
        for line, rest in imported_names(file, package):
            own = rest[:1] == ["compiler"] and bool(rest[1:]) and exists(compiler, rest[1])
            if own and STAGES.index(rest[1]) > STAGES.index(stage):
                found.append(f"{path}:{line}: {stage} must not import {rest[1]}")
    return found


def torch_includes(package: Path) -> list[str]:
    """Every kernel source, the binding aside, that includes a torch header."""
    folders = ("kernels/cpu", "ops")
    sources = [
        f for top in folders for end in ("h", "cpp") for f in sorted(package.glob(f"{top}/**/*.{end}"))
    ]
    return [
        file.name
        for file in sources
        if not file.stem.startswith(BINDING) and TORCH_HEADER.search(file.read_text())
    ]


# What knows operators by their cards, and the files in it whose words are PyTorch's, a formula's or a kind's, some of
# which are operators' names too.
KNOW_CARDS = ("compiler", "profiler", "cli", "measure", "authoring")
SPEAK_PYTORCH = {"algebra", "costs", "advise"}
SPEAK_FORMULAS = {"formula", "lower", "generate"}
SPEAK_KINDS = {"generate", "spellings"}


def named_operators(package: Path, operators: Collection[str]) -> list[str]:
    """Every operator that is named outside of its own folder, where its card should be asked."""
    found = []
    for file in (f for part in KNOW_CARDS for f in sorted((package / part).rglob("*.py"))):
        words = {file.stem, file.parent.name}
        theirs = set(vars(torch.nn.functional)) if words & (SPEAK_PYTORCH | SPEAK_FORMULAS) else set()
        theirs |= {kind.value for kind in Kind} if words & SPEAK_KINDS else set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and node.value in operators and node.value not in theirs:
                found.append(f"{file.relative_to(package)}:{node.lineno}: names {node.value}; ask its card")
    return found


def test_no_part_keeps_a_list_of_operators() -> None:
    assert named_operators(PACKAGE, registry()) == []


def other_devices(package: Path) -> list[str]:
    """Every line of a package that names a back end in a package of its own."""
    found = []
    for file in sorted(file for file in package.rglob("*.*") if file.suffix in (".py", ".h", ".cpp", ".j2")):
        for i, line in enumerate(SOURCES.sub("", file.read_text()).splitlines(), 1):
            found += [f"{file.relative_to(package)}:{i}: {line.strip()}"] if DEVICES.search(line) else []
    return found


def beyond_the_interface(package: Path, page: str) -> list[str]:
    """Every import of a back end's package that takes what the page does not list."""
    listed, found = set(re.findall(r"`(opsmith[.\w]*)`", page)), []
    for file in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "opsmith":
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                taken = [n if is_module(n) else str(node.module) for n in names]
            else:
                taken = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            wrong = [n for n in taken if n.startswith("opsmith.") and n not in listed]
            found += [f"{file.relative_to(package)}:{node.lineno}: {name}" for name in wrong]
    return found


def is_module(name: str) -> bool:
    path = PACKAGE.parent.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def test_the_core_names_no_other_back_end() -> None:
    assert other_devices(PACKAGE) == []


def test_a_back_end_imports_what_the_page_lists() -> None:
    assert [package.name for package in BACKENDS] == ["opsmith_ascend", "opsmith_vllm"]
    for package in BACKENDS:
        assert beyond_the_interface(package, INTERFACE.read_text()) == []


def test_what_a_back_end_must_not_do_is_named(tmp_path: Path) -> None:
    (tmp_path / "deep.py").write_text("from opsmith.compiler import api\nfrom opsmith.authoring import new\n")
    assert beyond_the_interface(tmp_path, "`opsmith.authoring.new`") == ["deep.py:1: opsmith.compiler.api"]
    (tmp_path / "deep.py").write_text('x = 1  # rises, ascending\nif device == "npu":\n    pass\n')
    assert other_devices(tmp_path) == ['deep.py:2: if device == "npu":']


def test_imports_go_down() -> None:
    assert PACKAGE.is_dir()
    assert violations(PACKAGE) == []


def test_the_compiler_is_one_street() -> None:
    assert steps_back(PACKAGE) == []


def test_kernels_include_no_torch_header() -> None:
    assert torch_includes(PACKAGE) == []


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small package in good order, into which a test plants one fault."""
    for path, text in {
        "__init__.py": "from .ops import gelu\n",
        "operator.py": "import dataclasses\n",
        "measure/timing.py": "import torch\n",
        "ops/gelu/cpu/gelu.cpp": '#include "simd.h"\n',
        "kernels/cpu/binding/binding.cpp": "#include <torch/csrc/stable/library.h>\n",
        "ops/__init__.py": "from opsmith.operator import Operator\n",
        "ops/gelu/__init__.py": "from ...kernels import build\nfrom .common import rows\nfrom opsmith import measure\n",
        "compiler/plan.py": "import opsmith.ops.gelu\nfrom opsmith.compiler import Config\n",
        "compiler/find/match.py": "from ..algebra import terms\nfrom opsmith.compiler.plan import Plan\n",
        "compiler/algebra/terms.py": "import math\n",
        "cli/ops.py": "from opsmith import Config\n",
    }.items():
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


def test_a_tree_in_good_order_passes(tree: Path) -> None:
    assert violations(tree) == []
    assert steps_back(tree) == []
    assert torch_includes(tree) == []


@pytest.mark.parametrize(
    ("path", "text", "line", "complaint"),
    [
        ("ops/softmax.py", "import opsmith.compiler.plan\n", 1, "ops must not import compiler"),
        ("kernels/isa.py", "from opsmith.measure import timing\n", 1, "kernels must not import measure"),
        ("operator.py", "import math\n\nfrom . import ops\n", 3, "operator must not import ops"),
        ("measure/sub/roof.py", "from ...ops import gelu\n", 1, "measure must not import ops"),
        ("compiler/run.py", "def f():\n    from opsmith import cli\n", 2, "compiler must not import cli"),
        ("ops/mask.py", "from opsmith import Config\n", 1, "ops must not import __init__"),
        ("helpers.py", "import opsmith.ops\n", 1, "'helpers' has no layer; give it one in MAY_IMPORT"),
    ],
)
def test_an_import_that_goes_up_is_named(tree: Path, path: str, text: str, line: int, complaint: str) -> None:
    file = tree / path
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    assert violations(tree) == [f"{path}:{line}: {complaint}"]


@pytest.mark.parametrize(
    ("path", "text", "complaints"),
    [
        (
            "compiler/pairs.py",
            "def f(card):\n    return card.name == 'rope'\n",
            ["compiler/pairs.py:2: names rope"],
        ),
        ("cli/demo.py", "KERNELS = ('gelu', 'linear_rows')\n", ["cli/demo.py:1: names gelu"]),
        (
            "profiler/costs.py",
            "FORMULAS = {'gelu': 1, 'bias_gelu': 2}\n",
            ["profiler/costs.py:1: names bias_gelu"],
        ),
        ("compiler/algebra/canon.py", "KNOWN = {'layer_norm', 'aten::gelu'}\n", []),
        ("ops/gelu.py", "NAME = 'gelu'\n", []),
    ],
)
def test_an_operator_that_is_named_is_found(tree: Path, path: str, text: str, complaints: list[str]) -> None:
    (tree / path).parent.mkdir(parents=True, exist_ok=True)
    (tree / path).write_text(text)
    assert named_operators(tree, registry()) == [f"{c}; ask its card" for c in complaints]


def test_a_torch_header_in_a_kernel_is_named(tree: Path) -> None:
    (tree / "ops/gelu/cpu/gelu.cpp").write_text("  #include <ATen/ATen.h>\n")
    assert torch_includes(tree) == ["gelu.cpp"]


@pytest.mark.parametrize(
    ("path", "text", "complaint"),
    [
        (
            "find/match.py",
            "import math\nfrom ..choose import select\n",
            "find/match.py:2: find must not import choose",
        ),
        (
            "plan.py",
            "def f():\n    import opsmith.compiler.find.match\n",
            "plan.py:2: plan must not import find",
        ),
        ("guess.py", "", "guess.py:1: 'guess' has no place; give it one in STAGES"),
    ],
)
def test_a_step_back_is_named(tree: Path, path: str, text: str, complaint: str) -> None:
    (tree / "compiler/choose").mkdir()
    (tree / "compiler" / path).write_text(text)
    assert steps_back(tree) == [complaint]
