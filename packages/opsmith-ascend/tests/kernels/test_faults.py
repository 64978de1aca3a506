"""Every fault that the emulation promises to find: planted, found on its line; and the same kernel without one."""

import re
import struct
from pathlib import Path

import pytest
import torch

from opsmith_ascend.emulation import Emulation, EmulationError, emulate

SOURCE = Path(__file__).with_name("faulty.cpp")

# What marks the line in faulty.cpp, the fault's number there, the instruction named, and a part of what is said.
FAULTS = [
    (1, "// local memory", "InitBuffer", "needs 102400 bytes of local memory behind 102400 that are given out"),
    (2, "pipe.InitBuffer(in, 2", "InitBuffer", "there are 8 events"),
    (3, "// unaligned size", "DataCopy", "copies 20 bytes, expected a multiple of 32"),
    (4, "// unaligned address of a copy", "DataCopy", "byte 4 of local memory, expected a multiple of 32"),
    (5, "// read outside a tensor", "DataCopy", "reads 64 bytes at byte 224 of x, which has 256: outside"),
    (6, "// write outside local memory of a queue", "DataCopy", "x, which has 256"),
    (7, "// too many rows", "DataCopyPad", "blockCount is 4096, expected 1 to 4095"),
    (8, "// read of padding", "Muls", "nobody has written all of them"),
    (9, "// no queue between copy and vector", "Muls", "wrote, and no event orders pipe V behind pipe MTE2"),
    (10, "// queued twice", "EnQue", "is in VECIN 0 already"),
    (11, "// given back while queued", "FreeTensor", "waits in VECIN 0"),
    (12, "// nothing in the queue", "DeQue", "VECIN 0 is empty, and a board would wait for ever"),
    (13, "// read of what nobody wrote", "Muls", "reads 256 bytes at 1280 of local memory, and nobody"),
    (14, "// unaligned address of a vector", "Add", "a source begins at byte 4"),
    (15, "// mask", "Muls", "mask is 65, expected 1 to 64"),
    (16, "// repeats", "Muls", "repeatTime is 256, expected 1 to 255"),
    (17, "// stride", "Muls", "a stride in data blocks is 256, expected 0 to 255"),
    (18, "// no elements", "Muls", "no elements"),
    (19, "// write outside local memory of a buffer", "Muls", "0 to 256 of a tensor of TBuf VECCALC 2 that has 224"),
    (20, "// overlap", "Muls", "dst begins 32 bytes from a source that it overlaps"),
    (21, "// event never set", "WaitFlag", "event V_S 0, which nobody has set: a board would wait for ever"),
    (22, "// scalar read behind a vector", "GetValue", "no event orders pipe S behind pipe V"),
    (23, "// event never waited for", "SetFlag", "nobody has waited for event V_S"),
    (24, "// event set twice", "SetFlag", "event V_S 0 was set in line"),
    (25, "// used after it was given back", "Muls", "after FreeTensor gave its memory back"),
    (26, "// no queue between vector and copy", "DataCopy", "no event orders pipe MTE3 behind pipe V"),
    (27, "// write outside a tensor", "DataCopy", "outside"),
    (28, "// write to an input", "DataCopy", "writes 256 bytes to x, which is an input"),
    (32, "// a vector writes what a copy still reads", "Muls", "writes what DataCopy"),
    (33, "LocalTensor<float> y = out.AllocTensor", "AllocTensor", "FreeTensor is missing"),
    (34, "// given back twice", "FreeTensor", "was given back before"),
    (35, "// never given back", "AllocTensor", "the kernel ends, and a tensor of VECIN 0 was never given back"),
    (36, "// no buffer left", "AllocTensor", "all 2 buffers of VECIN 0 are in use"),
    (37, "// more than the buffer", "TBuf::Get", "for 1028 bytes, InitBuffer gave it 1024"),
    (38, "// rounding", "Cast", "RoundMode::CAST_RINT"),
    (39, "// no event left", "AllocEventID", "all 8 events MTE2_V are taken"),
    (40, "// no memory", "DataCopy", "a tensor without memory"),
]  # fmt: skip


def run(fault: int, blocks: int = 1, room: int | None = None) -> tuple[Emulation, torch.Tensor]:
    x = torch.arange(64.0 * (room or blocks))
    y = torch.full_like(x, torch.nan)
    done = emulate(SOURCE, {"x": x}, {"y": y}, tiling=struct.pack("I", fault), blocks=blocks)
    return done, y


def line_of(marker: str) -> int:
    lines = [i for i, text in enumerate(SOURCE.read_text().splitlines(), 1) if text.endswith(marker)]
    lines = lines or [i for i, text in enumerate(SOURCE.read_text().splitlines(), 1) if marker in text]
    assert len(lines) == 1, marker
    return lines[0]


@pytest.mark.parametrize("blocks", [1, 48])
def test_without_a_fault_it_passes(blocks: int) -> None:
    done, y = run(0, blocks)
    assert torch.equal(y, 2 * torch.arange(64.0 * blocks))
    assert done.blocks == blocks
    assert (done.read, done.written) == (256 * blocks, 256 * blocks)


@pytest.mark.parametrize(("fault", "marker", "instruction", "what"), FAULTS)
def test_a_planted_fault_is_found(fault: int, marker: str, instruction: str, what: str) -> None:
    with pytest.raises(EmulationError, match=re.escape(what)) as caught:
        run(fault)
    error = caught.value
    assert (error.kernel, error.block, error.instruction) == ("faulty", 0, instruction)
    assert (Path(error.file), error.line) == (SOURCE, line_of(marker))
    assert str(error).startswith(f"faulty, block 0, faulty.cpp:{error.line}, {instruction}: ")
    assert str(error).endswith("(emulated)")


@pytest.mark.parametrize(
    ("fault", "marker", "what"),
    [
        (29, "// two blocks, one place", r"byte \d+ of y, to which block 0 has given another value"),
        (30, "// read across blocks", "reads byte 0 of y, which block 0 writes"),
    ],
)
def test_blocks_that_depend_on_each_other_are_found(fault: int, marker: str, what: str) -> None:
    with pytest.raises(EmulationError, match=what) as caught:
        run(fault, blocks=2)
    assert (caught.value.block, caught.value.line) == (1, line_of(marker))


def test_an_output_that_nobody_writes_is_found() -> None:
    with pytest.raises(EmulationError, match="256 bytes of y were written by no block"):
        run(31)
    with pytest.raises(EmulationError, match="256 bytes of y were written by no block"):
        run(0, blocks=1, room=2)


def test_what_does_not_fit_the_kernel_is_refused() -> None:
    x = torch.zeros(64)
    tiling = struct.pack("I", 0)
    with pytest.raises(ValueError, match="the kernel takes x, y, workspace, tiling; got inputs a"):
        emulate(SOURCE, {"a": x}, {"y": x.clone()}, tiling=tiling, blocks=1)
    with pytest.raises(ValueError, match="expected 1 to 48 blocks, got 49"):
        emulate(SOURCE, {"x": x}, {"y": x.clone()}, tiling=tiling, blocks=49)
    with pytest.raises(ValueError, match="sizes are for a tiling function"):
        emulate(SOURCE, {"x": x}, {"y": x.clone()}, (64,), blocks=1)
    with pytest.raises(TypeError, match="x must be a contiguous tensor on the CPU"):
        emulate(SOURCE, {"x": torch.zeros(64, 2)[:, 0]}, {"y": x}, tiling=tiling, blocks=1)
    with pytest.raises(ValueError, match="there is no `__global__ __aicore__ void other"):
        emulate(SOURCE, {"x": x}, {"y": x.clone()}, tiling=tiling, blocks=1, entry="other")


def test_the_report_counts_and_calls_an_estimate_by_its_name() -> None:
    done, _ = run(0, blocks=4)
    assert done.pipes["V"] == 4
    assert done.pipes["MTE2"] == done.pipes["MTE3"] == 4
    assert done.queues == {"VECIN 0": (1024, 0), "VECOUT 1": (0, 1024)}
    assert done.tensors == {"x": (1024, 0), "y": (0, 1024)}
    assert done.local_peak == 2 * 256 + 2 * 256 + 1024
    assert done.binds == "memory"
    text = str(done)
    assert "emulated" in text
    assert "estimate, not a measurement: memory binds" in text
