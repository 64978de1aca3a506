"""Instructions that are emulated for whoever tunes a kernel, and that none of ours issues."""

from pathlib import Path

import torch

from opsmith_ascend.emulation import emulate


def test_reductions_of_all_elements_and_of_data_blocks() -> None:
    x, y = torch.randint(-99, 99, (200,)).float(), torch.empty(6, 8)
    emulate(Path(__file__).with_name("reductions.cpp"), {"x": x}, {"to": y}, blocks=1)
    blocks = x[:64].view(8, 8)
    assert y[:3, 0].tolist() == [x.sum(), x.max(), x.min()]
    assert y[:3, 1:].eq(0).all()
    assert y[3:].tolist() == [blocks.sum(1).tolist(), blocks.amax(1).tolist(), (2 * x[:8]).tolist()]
