"""Kernels of lesser processors on this one: the smaller samples of each card, judged as `opsmith verify` judges them.

`make test-tiers` runs all samples, and the operators' own tests.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.arm import __main__ as arm
from torch.utils._python_dispatch import TorchDispatchMode

from opsmith.kernels import isa, libraries, triton
from opsmith.measure.pool import tensors_of
from opsmith.operator import registry

ROOT = Path(__file__).parents[2]
# Further ones have a few instructions more than these, and building one takes a minute.
LESSER = [tier for tier in isa.supported()[:2] if tier != isa.tier()]
MOST = 3000  # elements in a sample
ONE_TIER = any(os.environ.get(f"OPSMITH_{name}") for name in ("ISA", "NATIVE", "SANITIZE"))


class Noting(TorchDispatchMode):
    """Notes the kernels of ours that are called, with the dtypes of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.reached: dict[str, set[torch.dtype]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace != "opsmith":
            return func(*args, **kwargs)
        if func._opname not in libraries.kernels():  # it is Python's, and calls kernels
            with self:
                return func._op_dk(torch._C.DispatchKey.CPU, *args, **kwargs)
        dtypes = self.reached.setdefault(func._opname, set())
        dtypes.update(t.dtype for t in tensors_of((args, kwargs)))
        return func(*args, **kwargs)


def verified() -> list[str]:
    """What is wrong with the kernels of this process, which are built where they have to be.

    Without optimization: a third of the time, and every line and instruction of the source is in it. The rest of a
    library is that of the best tier's.
    """
    isa.FLAGS[isa.tier()] += ("-O0",)
    libraries.load()
    with Noting() as noting:
        return arm.run(noting.reached, (), calls=1, most=MOST)


@pytest.mark.skipif(ONE_TIER or triton.INTERPRETED, reason="this run is about other kernels")
@pytest.mark.parametrize("tier", LESSER)
def test_every_kernel_of_a_lesser_tier_on_the_smaller_samples(tier: str) -> None:
    environment = {**os.environ, "OPSMITH_ISA": tier, "OPSMITH_NATIVE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
    done = subprocess.run(
        [sys.executable, __file__], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert f"{len(registry()) + 1}" == f"{done.stdout.count(' checks ')}"


def test_a_kernel_that_nothing_reaches_is_named() -> None:
    reached = {kernel: set(arm.DTYPES) for kernel in libraries.kernels()}
    assert arm.unreached(reached) == []
    del reached["gelu"]
    reached["softmax"].remove(torch.float16)
    assert arm.unreached(reached) == [
        "gelu: no call reached it in float32, bfloat16, float16",
        "softmax: no call reached it in float16",
    ]


if __name__ == "__main__":
    wrong = verified()
    print(*wrong, sep="\n")
    sys.exit(bool(wrong))
