"""Calls that nodes in C++ record."""

import pytest

from opsmith.call import dispatch
from opsmith.call.fast import direct, nodes


@pytest.fixture
def recorded_in_cpp() -> None:
    """Calls that record gradients are recorded by nodes in C++."""
    if not dispatch.native_library() or direct.library() is None or nodes.library() is None:
        pytest.skip("calls are not recorded in C++ here")
    nodes.begin()


@pytest.fixture(autouse=True)
def kernels_for_small_calls() -> None:
    """Here small calls go where they go for everybody."""
