"""Projects are built here by the dozen: what all include is read once, and optimized no further than tests need."""

import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from opsmith.kernels import build, compiler, isa
from opsmith.profiler import recorder

# What generated sources include first, as a compiler takes one precompiled header: of the binding, and of the kernels.
HEADERS = {"project_binding.h": "binding.cpp", "formula.h": "gelu/gelu.cpp"}
# tests/examples and the processes that tests start build as users do.
USUAL = compiler.COMPILE_FLAGS
FLAGS = tuple("-O1" if flag == "-O3" else flag for flag in USUAL)


@pytest.fixture(scope="session")
def precompiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """A folder with those headers precompiled: g++ looks there first, and takes them where the flags agree."""
    found = compiler.find_compiler()
    if found is None or "clang" in found.version:  # which does it another way
        return None
    own = tmp_path_factory.getbasetemp()
    # A worker's lies in that of its session. Without workers, the folder above is that of all sessions there ever were.
    folder = (own.parent if hasattr(request.config, "workerinput") else own) / "headers"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            part = folder.with_suffix(".part")
            part.mkdir()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(compiler, "COMPILE_FLAGS", FLAGS)
                for header, like in HEADERS.items():
                    job = build._Job.of("x", [build.SOURCES / like], [build.SOURCES], (), isa.tier())
                    (unit,) = job.units
                    run = [*compiler._command(found, unit), "-w", "-x", "c++-header"]
                    run += [str(build.SOURCES / header), "-o", str(part / f"{header}.gch")]
                    subprocess.run(run, check=True)
            part.rename(folder)
    return folder


@pytest.fixture(scope="module", autouse=True)
def projects_build_faster(precompiled: Path | None) -> Iterator[None]:
    """The compiler by another name: it makes the same, and the cache knows that by the same keys."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "COMPILE_FLAGS", FLAGS)
        if precompiled and (found := compiler.find_compiler()):
            patch.setenv("CXX", shlex.join([*found.command, f"-I{precompiled}"]))
        yield


@pytest.fixture
def usual_recorder() -> None:
    """The profiler's recorder, which is no project, built with the usual flags, as for all other tests: once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "COMPILE_FLAGS", USUAL)
        recorder.library()
