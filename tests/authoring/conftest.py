"""Projects are built here by the dozen: what all include is read once, and optimized no further than tests need."""

import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from opsmith.authoring import project
from opsmith.authoring.project import checks
from opsmith.kernels import compiler, isa, libraries
from opsmith.profiler import recorder
from tests.precompiled import like, precompile, through

# What generated sources include first, as a compiler takes one precompiled header: of the binding, and of the kernels.
HEADERS = {
    "binding/project_binding.h": libraries.SHARED / "binding/binding.cpp",
    "formula.h": libraries.SOURCES / "gelu/cpu/gelu.cpp",
}
# tests/examples and the processes that tests start build as users do.
USUAL = compiler.COMPILE_FLAGS
FLAGS = tuple("-O1" if flag == "-O3" else flag for flag in USUAL)


@pytest.fixture(scope="session")
def precompiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """A folder with those headers precompiled."""
    folder, tier = libraries.SHARED, isa.tier()
    folders = [*libraries.HEADERS, libraries.SOURCES]
    headers = {folder / header: like(source, folders, tier) for header, source in HEADERS.items()}
    return precompile(request, tmp_path_factory, "headers", headers, FLAGS)


@pytest.fixture(scope="module", autouse=True)
def projects_build_faster(precompiled: Path | None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "COMPILE_FLAGS", FLAGS)
        patch.setattr(checks, "answer_of", in_a_process_that_builds_faster)
        through(patch, precompiled)
        yield


def in_a_process_that_builds_faster(module: str, *words: str, **how: Any) -> tuple[Any, str]:
    """What `answer_of` gives, of a process that finds what has been built here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
        return project.answer_of(__name__, module, *words, **how)


@pytest.fixture
def usual_recorder() -> None:
    """The profiler's recorder, which is no project, built with the usual flags, as for all other tests: once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "COMPILE_FLAGS", USUAL)
        recorder.library()


if __name__ == "__main__":
    compiler.COMPILE_FLAGS = FLAGS
    runpy.run_module(sys.argv.pop(1), run_name="__main__")
