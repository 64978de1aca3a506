"""Roofs take seconds to measure: tests that are not about them are judged by the same ones every time."""

from collections.abc import Iterator

import pytest
import torch

from opsmith.profiler.roofline import Roofs

RATES = {
    "near cache": 1e11,
    "far cache": 1e11,
    "memory": 5e10,
    "matmul float32": 2e11,
    "matmul bfloat16": 2e11,
    "calls": 5e5,
}


@pytest.fixture(scope="module", autouse=True)  # of modules elsewhere too, that import it
def fixed_roofs() -> Iterator[None]:
    """`Roofs.measure` answers at once; `measured_for_tests` is the real one."""

    def measure(self: Roofs, dtypes: object) -> None:
        self.rates = dict(RATES)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Roofs, "measured_for_tests", Roofs.measure, raising=False)
        patch.setattr(Roofs, "measure", measure)
        yield


@pytest.fixture(autouse=True)
def forget_graphs() -> Iterator[None]:
    """Dynamo keeps what it has compiled for as long as the process lives."""
    yield
    torch._dynamo.reset()
