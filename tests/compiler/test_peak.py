"""What memory optimizing and running a model takes at most, beside its weights, and what of it stays behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import opsmith.ops  # noqa: F401  declares the kernels
from opsmith.kernels import libraries

pytestmark = [
    pytest.mark.skipif(
        not Path("/proc/self/clear_refs").exists(), reason="the system does not tell the peak"
    ),
    pytest.mark.skipif(not libraries.load(), reason="the native library is not available"),
]

# In a process of its own, which has optimized something before: what PyTorch imports and keeps is no matter of weights.
# More than half of 540 MB is a head, as of a decoder with many tokens; they are mapped from a file as a checkpoint is.
PEAK = """
import gc, sys
from pathlib import Path
import torch
from torch import nn
import opsmith

class Decoder(nn.Module):
    def __init__(self, k, n):
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(k, 8 * k) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(8 * k, k) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(k), nn.Linear(k, n, bias=False)

    def forward(self, x):
        for up, down in zip(self.up, self.down):
            x = x + down(torch.relu(up(x)))
        return self.head(self.norm(x))

def bytes_of(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))

@torch.no_grad()
def run(k, n):
    with torch.device("meta"):
        model = Decoder(k, n).eval()
    file = Path(sys.argv[1]) / f"{n}.pt"
    torch.save({name: torch.randn(t.shape) * 0.02 for name, t in model.state_dict().items()}, file)
    gc.collect()
    before = bytes_of("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    model.load_state_dict(torch.load(file, mmap=True), assign=True)
    quantize = None if sys.argv[2] == "float32" else sys.argv[2]
    opsmith.optimize(model, torch.randn(2, 8, k), quantize=quantize, config=opsmith.Config(inductor=False))
    model(torch.randn(2, 8, k))
    return (bytes_of("VmHWM") - before) / sum(p.nbytes for p in model.parameters())

run(64, 1 << 10)
print(run(1024, 5 << 14))
"""


@pytest.mark.parametrize("format", ["float32", "int8"])
def test_no_weight_is_there_twice_at_any_time(format: str, tmp_path: Path) -> None:
    """The least of six runs: of a file just written the system keeps as much mapped as it likes, 0 to 0.4 of it."""
    command = [sys.executable, "-c", PEAK, str(tmp_path), format]
    found: list[float] = []
    while len(found) < 6 and not any(peak < 1.25 for peak in found):
        run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
        found.append(float(run.stdout))
    assert min(found) < 1.25, found


# Weights as small as most models' come from the heap, where what PyTorch keeps of each compilation lies above them.
ROUNDS = """
import gc, sys
from pathlib import Path
import torch
from torch import nn
import opsmith

class Decoder(nn.Module):
    def __init__(self, k):
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(k, 4 * k) for _ in range(6))
        self.down = nn.ModuleList(nn.Linear(4 * k, k) for _ in range(6))
        self.norm = nn.LayerNorm(k)

    def forward(self, x):
        for up, down in zip(self.up, self.down):
            x = x + down(torch.relu(up(x)))
        return self.norm(x)

def size():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))

def run(k):
    model, x = Decoder(k).eval(), torch.randn(2, 8, k)
    if sys.argv[1] == "compiled":
        fast = torch.compile(model, backend="opsmith", options={"tune": False, "inductor": False})
    else:
        quantize = "int8" if sys.argv[1] == "int8" else None
        config = opsmith.Config(tune=False, inductor=False)
        fast = opsmith.optimize(model, x, quantize=quantize, config=config)
    if sys.argv[1] == "training":
        fast(x).sum().backward()
    with torch.no_grad():
        fast(x), fast(torch.randn(3, 9, k))
    return sum(p.nbytes for p in model.parameters())

run(64), gc.collect()
before = size()
for _ in range(3):
    weights = run(1024)
    gc.collect()
    print((size() - before) / weights)
"""


@pytest.mark.parametrize("kind", ["float32", "int8", "training", "compiled"])
def test_models_that_nobody_holds_leave_their_memory(kind: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", ROUNDS, kind]
    found = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    first, *_, last = (float(line) for line in found.stdout.split())
    assert first < 0.15  # once: what a process loads with its first large model, pools of its threads
    assert last - first < 2 * 0.05
