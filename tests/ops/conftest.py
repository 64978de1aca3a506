"""The tests of operators are about our kernels, for calls of any size."""

from collections.abc import Iterator

import pytest

from opsmith.call.dispatch import always_native


@pytest.fixture(autouse=True)
def kernels_for_small_calls() -> Iterator[None]:
    """Without this, calls of a few elements would be PyTorch's."""
    with always_native():
        yield
