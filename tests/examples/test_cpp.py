"""A C++ program that calls the library's kernels: it builds, and its results are the formula's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import opsmith.ops  # noqa: F401  declares the kernels
from opsmith.call.dispatch import native_library

HERE = Path(__file__).parents[2]


@pytest.mark.skipif(not native_library(), reason="the kernels are what is called")
def test_a_program_calls_mla_preprocess(tmp_path: Path) -> None:
    command = [sys.executable, HERE / "examples/cpp/build.py", "--folder", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 tokens, 4 heads: largest error against double" in done.stdout
    no_library = subprocess.run(
        [tmp_path / "mla_preprocess", tmp_path / "none.so"], capture_output=True, text=True, check=False
    )
    assert no_library.returncode == 1
    assert "none.so: cannot open shared object file" in no_library.stderr
