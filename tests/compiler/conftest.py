"""What every test of the compiler relies on: no graph of the test before it."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def forget_graphs() -> Iterator[None]:
    """Dynamo keeps what it has compiled for as long as the process lives."""
    yield
    torch._dynamo.reset()
