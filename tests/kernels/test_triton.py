"""The Triton kernels compile for GPUs; that they are right is shown by the operators' tests under the interpreter."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent


def test_every_kernel_compiles_to_machine_code(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, HERE / "compile_triton.py"],
        capture_output=True,
        text=True,
        cwd=HERE.parent.parent,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    last = done.stdout.strip().splitlines()[-1].split()
    assert last[0] == "compiled"
    assert last[1] == last[3]  # all of them
    assert int(last[1]) > 100


def test_a_kernel_that_no_gpu_takes_is_found(tmp_path: Path) -> None:
    script = f"""
import sys; sys.path.insert(0, {str(HERE)!r})
import torch, triton, triton.language as tl
import compile_triton as c

@triton.jit
def wrong(x, N: tl.constexpr):
    tl.store(x + tl.arange(0, N), 1.0)   # N must be a power of two

c.ahead.every = True
c.compile_instead(wrong, (1,), torch.zeros(3), N=3)
assert any(c.compiled.values()), c.compiled
c.compile_instead(wrong, (1,), torch.zeros(4), N=4)
assert None in c.compiled.values(), c.compiled
"""
    (tmp_path / "wrong.py").write_text(script)
    done = subprocess.run(
        [sys.executable, tmp_path / "wrong.py"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
