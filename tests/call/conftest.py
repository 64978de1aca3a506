"""These tests are about our kernels, for calls of any size, as those of the operators are."""

from tests.ops.conftest import kernels_for_small_calls  # noqa: F401
