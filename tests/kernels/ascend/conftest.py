"""Kernels are compiled here for each mix of dtypes: what all include is read once, and nothing is optimized."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.precompiled import EMULATED, emulation, precompile, through

from opsmith.kernels.ascend import harness


@pytest.fixture(scope="session")
def precompiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    return precompile(request, tmp_path_factory, "emulation", emulation())


@pytest.fixture(scope="module", autouse=True)
def kernels_compile_faster(precompiled: Path | None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "_FLAGS", EMULATED)
        through(patch, precompiled)
        yield
