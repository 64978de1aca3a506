"""Headers that many tests compile are read once a session: g++ looks for them here first, where the flags agree."""

import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from filelock import FileLock

from opsmith.kernels import compiler
from opsmith.kernels.build import Library, _Job

__all__ = ["like", "precompile", "through"]


def like(source: Path, folders: Sequence[Path], tier: str, flags: tuple[str, ...] = ()) -> compiler.Unit:
    """How a source is compiled that includes headers of these folders."""
    (unit,) = _Job.of(Library("x", [source], folders, flags, tier=tier)).units
    return unit


def precompile(
    request: pytest.FixtureRequest,
    factory: pytest.TempPathFactory,
    name: str,
    headers: Mapping[Path, compiler.Unit],
    base: tuple[str, ...] = compiler.COMPILE_FLAGS,
) -> Path | None:
    """A folder with headers precompiled as units, which workers share; None where that is done another way."""
    found = compiler.find_compiler()
    if found is None or "clang" in found.version:
        return None
    own = factory.getbasetemp()
    # A worker's lies in that of its session. Without workers, the folder above is that of all sessions there ever were.
    folder = (own.parent if hasattr(request.config, "workerinput") else own) / name
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            part = folder.with_suffix(".part")
            part.mkdir()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(compiler, "COMPILE_FLAGS", base)
                for header, unit in headers.items():
                    run = [*compiler._command(found, unit), "-w", "-x", "c++-header", str(header)]
                    subprocess.run([*run, "-o", str(part / f"{header.name}.gch")], check=True)
            part.rename(folder)
    return folder


def through(patch: pytest.MonkeyPatch, folder: Path | None) -> None:
    """The compiler by another name: it makes the same, and the cache knows that by the same keys."""
    if folder and (found := compiler.find_compiler()):
        patch.setenv("CXX", shlex.join([*found.command, f"-I{folder}"]))
