"""The worked example in Python: generated, tuned by hand, as exact as published, and put into a Llama-like model."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from opsmith.kernels import triton
from opsmith.kernels.compiler import find_compiler

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.skipif(
    not find_compiler() or triton.INTERPRETED, reason="there is no compiler, or the interpreter has the CPU"
)


def run(*arguments: str) -> str:
    """In a process of its own: other tests have operators of the same name."""
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "OPSMITH_INDUCTOR": "0"},
        cwd=sys.prefix,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_right_in_every_dtype_at_every_length_and_in_decoding() -> None:
    script = f"""
import torch
from opsmith.authoring import load
from opsmith.call.dispatch import always_native
from opsmith.proof.verify import verify
card = load({str(EXAMPLES / "rope_custom")!r}).CARD
red = [str(f) for dtype in card.dtypes for f in verify(card, [dtype]) if not f.ok]
assert not red, red
rope = card.function
with always_native():
    for length in (1, 7, 64, 1000):
        angles = torch.arange(length)[:, None] * torch.logspace(0, -4, 32).repeat_interleave(2)
        cos, sin = angles.cos().half(), angles.sin().half()
        x = torch.rand(2, 5, length, 64).half()  # five heads: four at once, and one
        y = rope(x, cos, sin)
        exact = card.reference(x.double(), cos.double(), sin.double())
        assert (y - exact).abs().max() < 1e-3, length
        last = rope(x[:, :, -1:], cos[length - 1 : length], sin[length - 1 : length])  # streaming decode: one row
        assert torch.equal(last, y[:, :, -1:]), length
print("all is well")
"""
    assert "all is well" in run("-c", script)


def test_a_model_gets_it_and_computes_the_same() -> None:
    said = run(str(EXAMPLES / "rope_in_llama.py"), str(EXAMPLES / "rope_custom"))
    assert "'rope_custom': 8" in said  # queries and keys of four layers
    found = next(line for line in said.splitlines() if line.startswith("found:"))
    page = (EXAMPLES.parent / "docs/authoring/index.md").read_text()
    # In which order they are found depends on what was measured.
    assert sorted(found.replace(",", " ").split()) in [
        sorted(x.replace(",", " ").split()) for x in page.splitlines()
    ]
    difference = re.search(r"largest difference to before: (\S+)", said)
    assert difference is not None
    assert float(difference[1]) < 1e-4
