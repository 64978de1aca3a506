"""How the project is laid out: no circles among files, operators found by their names, no crowded folder, a budget."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "opsmith"

MOST_SOURCES = 25  # in one folder: what a person takes in at a look
# Lines of Python and C++ of the core, and of everything, with what decoders, processors without AVX-512, ranks and
# vLLM add, files of few bits and experts, calls on GPUs as one launch, and latent attention on packed projections
# (docs/decisions/042, 043, 046 and 047).
CORE, WHOLE = 65_250, 72_725
NO_KERNEL = {"rope_table"}  # a table, made once by PyTorch's own arithmetic


def modules(package: Path) -> dict[str, Path]:
    found = {}
    for file in package.rglob("*.py"):
        parts = file.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = file
    return found


def imported(module: str, file: Path, known: dict[str, Path]) -> Iterator[str]:
    """The modules of ours that a file imports, inside functions and for types too."""
    here = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            whole = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{whole}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            while name and name not in known:
                name = name.rpartition(".")[0]
            if name and name != module:
                yield name


def circles(package: Path) -> list[list[str]]:
    """Groups of files that import each other, directly or not: those that reach each other (Tarjan)."""
    known = modules(package)
    graph = {module: sorted(set(imported(module, file, known))) for module, file in known.items()}
    low: dict[str, int] = {}
    stack: list[str] = []
    done: set[str] = set()
    groups = []

    def visit(module: str) -> int:
        low[module] = first = len(low)
        stack.append(module)
        for other in graph[module]:
            if other not in low:
                low[module] = min(low[module], visit(other))
            elif other not in done:
                low[module] = min(low[module], low[other])
        if low[module] == first:
            group = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            done.update(group)
            groups.append(sorted(group))
        return low[module]

    for module in graph:
        if module not in low:
            visit(module)
    return sorted(group for group in groups if len(group) > 1)


def crowded(package: Path) -> list[str]:
    folders = [package, *(folder for folder in package.rglob("*") if folder.is_dir())]
    count = {
        folder: sum(f.suffix in (".py", ".cpp", ".h", ".cu") for f in folder.iterdir()) for folder in folders
    }
    return sorted(str(folder.relative_to(package.parent)) for folder, n in count.items() if n > MOST_SOURCES)


def lacking(root: Path) -> list[str]:
    """What of each public operator does not lie where its name, or its folder's, says."""
    ops = root / "src/opsmith/ops"
    public = next(
        ast.literal_eval(node.value)
        for node in ast.parse((ops / "__init__.py").read_text()).body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
    )
    families = {}
    for file in sorted(ops.glob("*/*.py")):
        if not file.stem.startswith("triton"):  # whose launches have the operators' names too
            names = [n.name for n in ast.parse(file.read_text()).body if isinstance(n, ast.FunctionDef)]
            families.update({name: file.parent for name in names if name in public})
    found = []
    for name in public:
        if name != name.lower():  # a class
            continue
        if name not in families:
            found.append(f"{name}: no folder of ops/ defines it")
            continue
        family = families[name]
        stems = {name, family.name}
        wanted = {
            "page": any((root / "docs/operators" / f"{stem}.md").exists() for stem in stems),
            "CPU kernel": name in NO_KERNEL or any(family.glob("cpu*/*.cpp")),
            "Triton kernel": name in NO_KERNEL or any(family.glob("triton*")),
        }
        wanted["test"] = any(list((root / "tests/ops").rglob(f"test_{stem}.py")) for stem in stems)
        found += [f"{name}: no {what}" for what, there in wanted.items() if not there]
    return found


def lines(*folders: Path) -> int:
    files = (
        f for folder in folders for f in folder.rglob("*") if f.suffix in (".py", ".cpp", ".h", ".cu", ".cuh")
    )
    return sum(len(f.read_text().splitlines()) for f in files)


def test_the_house_does_not_grow() -> None:
    assert lines(PACKAGE) <= CORE
    assert lines(PACKAGE, *ROOT.glob("packages/*/src")) <= WHOLE


def test_lines_are_counted(tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    (tmp_path / "room/a.py").write_text("x = 1\n\ny = 2\n")
    (tmp_path / "room/b.h").write_text("int b();\n")
    (tmp_path / "notes.md").write_text("not counted\n")
    assert lines(tmp_path) == 4


def test_prefetches_have_an_effect() -> None:
    """GCC drops calls of functions that only prefetch, where it has not inlined them: of ours 1,900 in one tier."""
    files = [f for end in ("cpp", "h") for f in PACKAGE.rglob(f"*.{end}")]
    asking = {f.name: f.read_text() for f in files if "__builtin_prefetch" in f.read_text()}
    assert list(asking) == ["simd.h"], "call a function of simd.h"
    assert re.findall(r"__builtin_prefetch.*\n(.*)", asking["simd.h"]) == ['  asm volatile("");']


def test_no_files_import_each_other() -> None:
    assert circles(PACKAGE) == []


def test_a_circle_is_found(tmp_path: Path) -> None:
    house = tmp_path / "house"
    (house / "attic").mkdir(parents=True)
    (house / "__init__.py").write_text("")
    (house / "door.py").write_text("from house.attic import stairs\n")
    (house / "attic/__init__.py").write_text("")
    (house / "attic/stairs.py").write_text("def f():\n    from ..hall import x\n")
    (house / "hall.py").write_text("x = 1\n")
    assert circles(house) == []
    (house / "hall.py").write_text("TYPE_CHECKING = False\nif TYPE_CHECKING:\n    from .door import y\n")
    assert circles(house) == [["house.attic.stairs", "house.door", "house.hall"]]


def test_no_folder_is_crowded() -> None:
    for package in (PACKAGE, *ROOT.glob("packages/*/src/*/")):
        assert crowded(package) == []


def test_a_crowded_folder_is_found(tmp_path: Path) -> None:
    (tmp_path / "house/room").mkdir(parents=True)
    for i in range(MOST_SOURCES + 1):
        assert crowded(tmp_path / "house") == []
        (tmp_path / f"house/room/thing_{i}.h").write_text("")
    assert crowded(tmp_path / "house") == ["house/room"]


def test_every_operator_is_found_by_its_name() -> None:
    assert lacking(ROOT) == []


@pytest.mark.parametrize(
    ("gone", "complaint"),
    [
        ("src/opsmith/ops/norm/cpu/norm.cpp", "norm: no CPU kernel"),
        ("src/opsmith/ops/norm/triton.py", "norm: no Triton kernel"),
        ("tests/ops/test_norm.py", "norm: no test"),
        ("docs/operators/norm.md", "norm: no page"),
        ("src/opsmith/ops/norm/__init__.py", "norm: no folder of ops/ defines it"),
    ],
)
def test_an_operator_that_lacks_something_is_found(tmp_path: Path, gone: str, complaint: str) -> None:
    for path, text in {
        "src/opsmith/ops/__init__.py": '__all__ = ["Norm", "norm"]\n',
        "src/opsmith/ops/norm/__init__.py": "def norm(): ...\n",
        "src/opsmith/ops/norm/cpu/norm.cpp": "",
        "src/opsmith/ops/norm/triton.py": "def norm(): ...\n",
        "tests/ops/test_norm.py": "",
        "docs/operators/norm.md": "",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert lacking(tmp_path) == []
    (tmp_path / gone).unlink()
    assert lacking(tmp_path) == [complaint]


def test_the_walks_lead_along_files_that_are_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    walks = re.findall(r"^\d\. .*$", text[text.index("From `opsmith") : text.index("| folder |")], re.M)
    named = [name for line in walks for name in re.findall(r"`([a-z_]+/[a-z_/]+\.(?:py|cpp))`", line)]
    assert len(named) > 15
    assert [name for name in named if not (PACKAGE / name).is_file()] == []
    assert len(set(named)) == len(named)
