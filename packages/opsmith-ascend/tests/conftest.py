"""Kernels are compiled here for each mix of dtypes: what all include is read once, and nothing is optimized."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.precompiled import like, precompile, through

from opsmith_ascend import emulation

# Without optimization an emulated kernel computes the same, and most are run for less time than they are compiled for.
FLAGS = tuple("-O0" if flag == "-O1" else flag for flag in emulation._FLAGS)


@pytest.fixture(scope="session")
def precompiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """A folder with what every emulated kernel includes first."""
    folder = emulation.HEADERS
    headers = {folder / "standard.h": like(folder / "core.cpp", [folder], "portable", FLAGS)}
    return precompile(request, tmp_path_factory, "emulation", headers)


@pytest.fixture(scope="module", autouse=True)
def kernels_compile_faster(precompiled: Path | None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulation, "_FLAGS", FLAGS)
        through(patch, precompiled)
        yield
