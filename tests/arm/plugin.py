"""Any tests on ARM: `OPSMITH_ARM=dotprod python -m pytest -p tests.arm.plugin -n 0 tests/ops/softmax`."""

import os
from contextlib import ExitStack

from tests.arm.machine import Machine

_until_the_end = ExitStack()
# Before anything loads kernels for this processor.
_until_the_end.enter_context(_until_the_end.enter_context(Machine(os.environ["OPSMITH_ARM"])).in_place())


def pytest_unconfigure() -> None:
    """Ends the machine."""
    _until_the_end.close()
