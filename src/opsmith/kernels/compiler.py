"""The C++ compiler and ninja: find them, hash what they would compile, run them, read their errors."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen
from typing import Any

_BASE_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-fdiagnostics-color=never", "-pipe")
# No kernel reads errno or floating-point exceptions, and without these loops that could set them stay scalar.
_MATH_FLAGS = ("-fno-math-errno", "-fno-trapping-math")
COMPILE_FLAGS = (*_BASE_FLAGS, *_MATH_FLAGS)
# A symbol that nobody defines should fail here, by name, and not when the library is loaded.
LINK_FLAGS = ("-shared", "-Wl,--no-undefined", "-Wl,--as-needed")

# What bindings include of torch takes a third of their compile time, and what kernels include of the compiler's own
# half a second, so several of them share it precompiled.
_TORCH = "".join(f"#include <torch/csrc/stable/{name}.h>\n" for name in ("library", "ops", "tensor"))
_STANDARD = "".join(f"#include <{name}>\n" for name in ("algorithm", "cmath", "memory", "string", "vector"))
_VECTORS = "#if defined(__x86_64__)\n#include <immintrin.h>\n#endif\n"
_WORTH_SHARING = 6  # units: precompiling takes as long as that saves with three

_SANITIZERS = ("address", "undefined", "thread")

_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"\n]+)[>"]', re.MULTILINE)
_ERROR = re.compile(  # as g++ writes it, and as nvcc does
    r"^(?P<file>[^\s:(][^:(\n]*)(?::(?P<line>\d+):(?:\d+:)?|\((?P<nvcc_line>\d+)\):) (?:fatal )?error:? (?P<text>.*)$",
    re.MULTILINE,
)
_LINK_ERROR = re.compile(r"^.*(?:undefined reference|multiple definition|undefined symbol).*$", re.MULTILINE)
_ANY_ERROR = re.compile(r"^.*error: .*$", re.MULTILINE)
_STEP = re.compile(r"^\[(\d+)/(\d+)\] (.*)")

_generated: dict[Path, bytes] = {}  # C++ that is in no file, by the path that it goes by

Watch = Callable[[int, int, str], None]  # steps done, steps in all, and the file of the last one


class BuildError(RuntimeError):
    """Kernels could not be built; ``output`` is all that the compiler said."""

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: the command that runs it, and the version it answers with."""

    command: tuple[str, ...]
    version: str

    @property
    def identity(self) -> str:
        """What is part of the key of everything that it builds."""
        return f"{self.version} {sys.platform} {platform.machine()}"


@dataclass(frozen=True)
class Unit:
    """One source file with all its flags."""

    source: Path
    include_dirs: tuple[Path, ...]  # searched for headers that count: editing one recompiles the unit
    flags: tuple[str, ...]  # part of the key
    system_dirs: tuple[Path, ...] = ()  # headers of others, known by their version and not by their content
    binds: bool = False  # to torch, whose headers it sees
    # Another one than compiles the rest: nvcc; `flags` are then all there are.
    compiler: Compiler | None = None

    def key(self) -> str:
        """Digest of the source, of the headers it includes, directly or not, of the flags and a compiler of its own."""
        own = (self.compiler.identity,) if self.compiler else ()
        digest = hashlib.sha256(repr((self.source.name, self.flags, *own)).encode())
        for path in [self.source, *sorted(headers(self.source, self.include_dirs))]:
            digest.update(path.name.encode() + b"\0" + _text(path) + b"\0")
        return digest.hexdigest()


def find_compiler() -> Compiler | None:
    """``$CXX`` if it is set, else the first of g++, c++ and clang++ on PATH; None if there is none."""
    chosen = os.environ.get("CXX", "").strip()
    return first_that_runs((chosen,) if chosen else ("g++", "c++", "clang++"), os.environ.get("PATH", ""))


@functools.lru_cache(maxsize=8)
def first_that_runs(candidates: tuple[str, ...], path: str, line: int = 0) -> Compiler | None:
    """The first of these commands that says its version, on this line of its answer; None if none does."""
    for candidate in candidates:
        name, *words = shlex.split(candidate)
        program = shutil.which(name, path=path)
        if program is None:
            continue
        command = (program, *words)
        try:
            said = subprocess.check_output(
                [*command, "--version"], stderr=subprocess.DEVNULL, text=True, errors="replace", timeout=60
            )
        except (OSError, subprocess.SubprocessError):
            continue
        return Compiler(command, said.strip().split("\n")[line].strip())
    return None


@functools.lru_cache(maxsize=16)
def accepts(compiler: Compiler, flags: tuple[str, ...], instruction: str) -> bool:
    """Whether a compiler knows these flags, and its assembler this instruction."""
    if not flags:
        return True
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "tier.cpp")
        source.write_text(f'void tier() {{ __asm__ volatile("{instruction}"); }}\n')
        command = [*compiler.command, *flags, "-c", str(source), "-o", str(source.with_suffix(".o"))]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


def sanitizer_flags() -> tuple[str, ...]:
    """What builds kernels that watch themselves, where ``OPSMITH_SANITIZE`` asks for it: see ``make sanitize``.

    Raises:
        ValueError: ``OPSMITH_SANITIZE`` names a sanitizer that does not exist.
    """
    chosen = os.environ.get("OPSMITH_SANITIZE", "")
    if not chosen:
        return ()
    if unknown := sorted(set(chosen.split(",")) - set(_SANITIZERS)):
        raise ValueError(
            f"OPSMITH_SANITIZE={chosen!r}: {', '.join(unknown)} is no sanitizer: expected some of "
            f"{', '.join(_SANITIZERS)}, separated by commas, or unset it"
        )
    # Without optimization a vector kernel takes minutes; the first level keeps what a sanitizer looks at.
    return (f"-fsanitize={chosen}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g1", "-O1")


def fingerprint(parts: Iterable[str]) -> str:
    """One digest for several strings."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def generated(name: str, text: str) -> Path:
    """The path that generated C++ goes by as a source; it is a file only in the folder of a build, while that runs."""
    path = Path("/generated", fingerprint([text])[:20], name)
    _generated[path] = text.encode()
    return path


def _text(source: Path) -> bytes:
    return _generated[source] if source in _generated else source.read_bytes()


def headers(source: Path, include_dirs: Sequence[Path]) -> set[Path]:
    """The headers in these folders that a source includes, directly or not."""
    found: set[Path] = set()
    waiting = [source]
    while waiting:
        path = waiting.pop()
        for quote, name in _INCLUDE.findall(_text(path)):
            places = [path.parent, *include_dirs] if quote == b'"' else include_dirs
            header = next((p for p in (place / os.fsdecode(name) for place in places) if p.is_file()), None)
            # No link is followed: who looks for what stands beside a header knows the folders by these names.
            if header is not None and (header := Path(os.path.normpath(header))) not in found:
                found.add(header)
                waiting.append(header)
    return found


def compile_and_link(
    compiler: Compiler,
    folder: Path,
    units: dict[str, Unit],
    links: dict[str, tuple[list[str], list[str]]],
    watch: Watch,
) -> None:
    """Compile ``units`` (object name to unit) inside ``folder``, and link libraries of objects by name, with flags.

    Raises:
        BuildError: with the first error, its file and its line.
    """
    lines = ["rule compile", " command = $run", " description = $in"]
    lines += ["rule link", " command = $run", " description = $out"]
    shared: dict[Unit, str] = {}  # a unit's precompiled header
    for header, text, sharing in _sharing(compiler, units.values()):
        (folder / header).write_text(text)
        run = [*_command(compiler, sharing[0]), "-x", "c++-header", header, "-o", f"{header}.gch"]
        lines += [f"build {header}.gch: compile {header}", _ninja_run(run)]
        shared |= dict.fromkeys(sharing, header)
    # The longest first, so that no core is left with one at the end: a binding is quick, a large kernel is not.
    for name, unit in sorted(units.items(), key=lambda u: (u[1].binds, -len(_text(u[1].source)))):
        ready = shared.get(unit)
        include, needs = (["-include", ready], f" | {ready}.gch") if ready else ([], "")
        source = unit.source
        if source in _generated:
            source = folder / source.name
            source.write_bytes(_text(unit.source))
        run = [*_command(compiler, unit), *include, "-c", str(source), "-o", name]
        lines += [f"build {_ninja_path(name)}: compile {_ninja_path(source)}{needs}", _ninja_run(run)]
    for library, (objects, flags) in links.items():
        run = [*compiler.command, *objects, *LINK_FLAGS, *flags, "-o", library]
        inputs = " ".join(map(_ninja_path, objects))
        lines += [f"build {_ninja_path(library)}: link {inputs}", _ninja_run(run)]
    (folder / "build.ninja").write_bytes(os.fsencode("\n".join([*lines, ""])))
    code, output = _run_ninja(folder, watch)
    if code != 0:
        raise _explain(output)


def _command(compiler: Compiler, unit: Unit) -> list[str]:
    includes = [f"-I{d}" for d in unit.include_dirs] + [f"-isystem{d}" for d in unit.system_dirs]
    chosen, base = (unit.compiler, ()) if unit.compiler else (compiler, COMPILE_FLAGS)
    return [*chosen.command, *base, *unit.flags, *includes]


def _sharing(compiler: Compiler, units: Iterable[Unit]) -> list[tuple[str, str, list[Unit]]]:
    """Headers to precompile, each with its text and the units that share it. Clang does it another way."""
    if "clang" in compiler.version:
        return []
    alike: dict[tuple[Any, ...], list[Unit]] = {}
    for unit in units:
        if unit.compiler is None:
            alike.setdefault((unit.binds, unit.flags, unit.system_dirs), []).append(unit)
    enough = [sharing for sharing in alike.values() if len(sharing) >= _WORTH_SHARING]
    enough.sort(key=lambda sharing: not sharing[0].binds)  # the longer ones first
    return [
        (f"{'torch' if sharing[0].binds else 'standard'}_headers_{i}.h", text, sharing)
        for i, sharing in enumerate(enough)
        for text in [_TORCH if sharing[0].binds else _STANDARD + _VECTORS]
    ]


def finished(folder: Path) -> set[str]:
    """Names of the files in ``folder`` that ninja completed, also when the build failed later."""
    try:
        log = os.fsdecode((folder / ".ninja_log").read_bytes())
    except OSError:
        return set()
    return {fields[3] for fields in (line.split("\t") for line in log.splitlines()[1:]) if len(fields) == 5}


def _run_ninja(folder: Path, watch: Watch) -> tuple[int, str]:
    # English messages, because errors are searched for; temporary files where they are cleaned up.
    environment = {**os.environ, "NINJA_STATUS": "[%f/%t] ", "LC_ALL": "C", "TMPDIR": str(folder)}
    most = os.environ.get("MAX_JOBS", "")
    jobs = int(most) if most.isdigit() and int(most) > 0 else len(os.sched_getaffinity(0))
    command = [_ninja(), "-C", str(folder), "-j", str(jobs)]
    output: list[str] = []
    with Popen(command, env=environment, stdout=PIPE, stderr=STDOUT, text=True, errors="replace") as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                output.append(line)
                if step := _STEP.match(line):
                    watch(int(step[1]), int(step[2]), step[3])
        except BaseException:
            process.terminate()  # ninja stops its compilers in turn
            raise
    return process.returncode, "".join(output)


def _ninja() -> str:
    try:
        import ninja

        program = Path(ninja.BIN_DIR) / "ninja"
        if program.is_file():
            return str(program)
    except ImportError:
        pass
    found = shutil.which("ninja")
    if found is None:
        raise BuildError(
            "opsmith: ninja is missing, and it runs the compiler; install it with: pip install ninja"
        )
    return found


def _explain(output: str) -> BuildError:
    if "No space left on device" in output or "Disk quota exceeded" in output:
        return disk_full(output)
    if error := _ERROR.search(output):
        # What follows the error up to the next one: the source line, a caret, notes.
        context = re.split(
            r"^\S.*(?:error|warning): ", output[error.end() :], maxsplit=1, flags=re.MULTILINE
        )[0]
        shown = "".join(
            f"\n{line}" for line in context.strip("\n").splitlines()[:6] if not line.startswith("ninja:")
        )
        message = f"{error['file']}:{error['line'] or error['nvcc_line']}: {error['text']}{shown}"
    elif error := _LINK_ERROR.search(output):
        message = f"linking failed: {error[0].strip()}"
    elif error := _ANY_ERROR.search(output):
        message = error[0]
    else:
        message = "the compiler failed:\n" + "\n".join(output.strip().splitlines()[-10:])
    return BuildError(f"opsmith: kernels do not compile: {message}", output)


def disk_full(output: str = "") -> BuildError:
    """The error for a disk without room for the build."""
    return BuildError(
        "opsmith: the disk is full, so kernels could not be built. Free some space, or set"
        " OPSMITH_CACHE to a folder on another disk",
        output,
    )


def _ninja_path(path: Path | str) -> str:
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def _ninja_run(words: Iterable[str]) -> str:
    words = list(words)
    if wrong := [word for word in words if "\n" in word]:  # which would begin a line of ninja's own
        raise BuildError(
            f"opsmith: {wrong[0]!r} has a line break, which ninja has no way to write; rename it"
        )
    return " run = " + " ".join(map(shlex.quote, words)).replace("$", "$$")
