"""The kernels on ARM, as QEMU plays it: each on the smaller samples of its card; and what the machine must notice."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.arm import __main__ as arm
from tests.arm.machine import Machine, missing

from opsmith.operator import registry

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


def test_every_kernel_on_the_smaller_samples() -> None:
    """In a process that loads no kernels for this processor."""
    command = [sys.executable, "-m", "tests.arm", "--tier", "dotprod", "--calls", "1", "--most", "3000"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert f"{len(registry()) + 1}" == f"{done.stdout.count(' checks ')}"


@pytest.fixture(scope="module")
def faulty() -> Iterator[Machine]:
    """The lesser machine, with kernels that do what none may and no others."""
    with Machine("portable", names=()) as machine:
        machine.add(machine.compile(Path(__file__).with_name("faulty.cpp"), "faulty.so", "-shared"))
        yield machine


def call(machine: Machine, kernel: str) -> torch.Tensor:
    x, y = torch.arange(5.0), torch.zeros(5)
    machine.call(kernel, [x, y], [False, True], ["Tensor", "Tensor"])
    assert torch.equal(x, torch.arange(5.0))
    return y


@pytest.mark.parametrize(
    ("kernel", "error"),
    [
        ("behind", "wrote outside storage 1"),
        ("before", "wrote outside storage 1"),
        ("input", "wrote into storage 0, which is only read"),
        ("far_behind", "ended the ARM machine: exit status -11"),
        ("refused", "there are not 7 dimensions"),
        ("dot_products", "ended the ARM machine: exit status -4"),
        ("bfloat16_products", "ended the ARM machine: exit status -4"),
        ("nowhere", "no library has the kernel nowhere"),
    ],
)
def test_a_planted_fault_is_noticed_and_the_next_call_is_not_touched(
    faulty: Machine, kernel: str, error: str
) -> None:
    with pytest.raises(RuntimeError, match=error):
        call(faulty, kernel)
    assert torch.equal(call(faulty, "good"), torch.arange(5.0))


def test_what_is_wrong_is_found() -> None:
    right, off = torch.ones(8), torch.ones(8)
    off[7] = 1.001
    exact = right.double()
    assert arm.judged(("k", [right], [right], [exact]), torch.float32).ok
    assert not arm.judged(("k", [off], [right], [exact]), torch.float32).ok
