"""Projects are built here by the dozen: the headers of torch that each one's binding includes are read once."""

import dataclasses
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from opsmith.kernels import build, compiler, isa

HEADER = (
    "project_binding.h"  # what a generated binding includes first: a compiler takes one precompiled header
)


@pytest.fixture(scope="session")
def precompiled(tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """A folder with that header precompiled: g++ looks there first, and takes it where the flags agree."""
    found = compiler.find_compiler()
    if found is None or "clang" in found.version:  # which does it another way
        return None
    folder = tmp_path_factory.getbasetemp().parent / "headers"
    made = folder / f"{HEADER}.gch"
    with FileLock(f"{folder}.lock"):
        if not made.exists():
            folder.mkdir(exist_ok=True)
            (unit,) = build._Job.of(
                "x", [build.SOURCES / "binding.cpp"], [build.SOURCES], (), isa.tier()
            ).units
            unit = dataclasses.replace(unit, source=build.SOURCES / HEADER)
            part = made.with_suffix(".part")
            run = [
                *compiler._command(found, unit),
                "-w",
                "-x",
                "c++-header",
                str(unit.source),
                "-o",
                str(part),
            ]
            subprocess.run(run, check=True)
            part.replace(made)
    return folder


@pytest.fixture(scope="module", autouse=True)
def bindings_build_faster(precompiled: Path | None) -> Iterator[None]:
    """The compiler by another name: what it makes is the same, and so are the keys that the cache knows it by."""
    with pytest.MonkeyPatch.context() as patch:
        if precompiled and (found := compiler.find_compiler()):
            patch.setenv("CXX", shlex.join([*found.command, f"-I{precompiled}"]))
        yield
