"""Projects are built here by the dozen: what all include is read once, and optimized no further than tests need."""

from collections.abc import Iterator
from pathlib import Path

import pytest

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
        through(patch, precompiled)
        yield


@pytest.fixture
def usual_recorder() -> None:
    """The profiler's recorder, which is no project, built with the usual flags, as for all other tests: once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "COMPILE_FLAGS", USUAL)
        recorder.library()
