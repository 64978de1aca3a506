"""Run an Ascend C kernel file in the emulation of `ascend_emulation.h`, and say what it did."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opsmith.kernels import build
from opsmith_ascend import SHARED

__all__ = ["CORES", "LOCAL_MEMORY", "Emulation", "EmulationError", "Issued", "emulate"]

HEADERS = Path(__file__).parent
LOCAL_MEMORY = 192 * 1024  # bytes of a vector core of the 910B
CORES = 48  # vector cores of the 910B

_TYPES = {
    torch.float32: "float",
    torch.float16: "half",
    torch.bfloat16: "bfloat16_t",
    torch.int8: "int8_t",
    torch.uint8: "uint8_t",
    torch.bool: "bool",
    torch.int16: "int16_t",
    torch.int32: "int32_t",
    torch.int64: "int64_t",
}
_TILING_ROOM = 4096  # bytes: more than any tiling struct has
# The emulation is no metal: compiled fast, it runs the tests in less time than it would take to optimize it.
_FLAGS = ("-O1", "-g0", "-Wall", "-Werror=return-type")


class EmulationError(RuntimeError):
    """What a board would punish, found in emulation.

    `kernel`, `block`, `file`, `line` and `instruction` say where; `what` says what was expected and what came.
    """

    def __init__(self, kernel: str, block: int, file: str, line: int, instruction: str, what: str) -> None:
        self.kernel, self.block, self.file, self.line = kernel, block, file, line
        self.instruction, self.what = instruction, what
        where = f"{Path(file).name}:{line}, {instruction}: " if file else ""
        super().__init__(f"{kernel}, block {block}, {where}{what} (emulated)")


@dataclass(frozen=True)
class Issued:
    """One place of the source that issues instructions, and how many of them all blocks issued there."""

    name: str
    pipe: str
    file: str
    line: int
    count: int


@dataclass(frozen=True)
class Emulation:
    """What one emulated launch did. Counts are those of the kernel; `cycles` are an estimate, and no measurement."""

    kernel: str
    blocks: int
    tiling: bytes
    read: int  # bytes of global memory, all blocks together
    written: int
    tensors: dict[str, tuple[int, int]]  # bytes read and written of each argument
    queues: dict[str, tuple[int, int]]  # bytes copied in and out of local memory, by queue
    instructions: tuple[Issued, ...]
    local_peak: int  # bytes of local memory given out
    cycles: dict[str, float] = field(default_factory=dict)  # of the slowest block, by pipe: estimated

    @property
    def pipes(self) -> dict[str, int]:
        """Instructions by pipe."""
        counts = dict.fromkeys(("S", "V", "MTE2", "MTE3"), 0)
        for issued in self.instructions:
            counts[issued.pipe] += issued.count
        return counts

    @property
    def traffic(self) -> int:
        """Bytes of global memory read and written."""
        return self.read + self.written

    @property
    def binds(self) -> str:
        """The pipe that the estimate says is busy longest: "memory" for both copies, else "V" or "S"."""
        busy = self._busy()
        return max(busy, key=busy.__getitem__)

    def _busy(self) -> dict[str, float]:
        c = self.cycles
        return {"memory": c["MTE2"] + c["MTE3"], "V": c["V"], "S": c["S"]}

    def __str__(self) -> str:
        pipes = ", ".join(f"{name} {count}" for name, count in self.pipes.items())
        queues = ", ".join(f"{name} {a + b:,} B" for name, (a, b) in self.queues.items())
        busy = ", ".join(f"{name} {cycles:,.0f}" for name, cycles in self._busy().items())
        return (
            f"{self.kernel}: emulated, {self.blocks} blocks\n"
            f"  global memory: {self.read:,} B read, {self.written:,} B written\n"
            f"  by queue: {queues}\n"
            f"  local memory: {self.local_peak:,} of {LOCAL_MEMORY:,} B\n"
            f"  instructions: {pipes}\n"
            f"  estimate, not a measurement: {self.binds} binds (cycles of the slowest block: {busy})"
        )


class _Argument(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("readable", ctypes.c_int32),
        ("writable", ctypes.c_int32),
    )


def emulate(
    source: Path,
    inputs: Mapping[str, Tensor | None],
    outputs: Mapping[str, Tensor | None],
    sizes: Sequence[int | float] = (),
    *,
    entry: str | None = None,
    cores: int = CORES,
    blocks: int | None = None,
    tiling: bytes | None = None,
    workspace: int = 0,
    types: Mapping[str, str] | None = None,
) -> Emulation:
    """Build a kernel file with a C++ compiler, run every block of a launch, and fill the outputs.

    The kernel's parameters are the inputs, the outputs, `workspace` and `tiling`, by these names. As in a tree of
    msopgen, `DTYPE_<NAME>` is the C++ type of each tensor. Beside `STEM.cpp`, `STEM_tiling.h` may define
    `<Stem>TilingData` with a member `blocks`, and `<Stem>Tiling(sizes..., opsmith::Platform)`, which computes it.

    >>> from opsmith_ascend import SOURCES
    >>> gate, up, y = torch.randn(3, 2, 11008).unbind()
    >>> done = emulate(SOURCES / "silu_mul.cpp", {"gate": gate, "up": up}, {"y": y}, (1, y.numel(), 0, 4))
    >>> done.blocks, done.traffic == 3 * y.nbytes
    (43, True)

    Args:
        source: the kernel file.
        inputs: contiguous tensors on the CPU by parameter, in order; None for an optional one that is not given.
        outputs: the same, to write into. None for one that is not wanted. A tensor that is an
            input too is written in place: its values are there.
        sizes: for the tiling function, in its order.
        entry: the kernel's name, where it is not the file's stem.
        cores: 1 to 48, what the tiling may use.
        blocks: of the launch, where there is no tiling function.
        tiling: bytes for the kernel, where there is no tiling function, or instead of what it would compute.
        workspace: bytes of global memory that nobody has written, for the kernel.
        types: C++ types of parameters, for `DTYPE_<NAME>`, where they are not their tensors'.

    Raises:
        EmulationError: the kernel does what a board would punish, or leaves an output unwritten.
        BuildError: the kernel does not compile, or there is no compiler.
        ValueError, TypeError: tensors, sizes or blocks do not fit the kernel.
    """
    source = Path(source)
    entry = entry or source.stem
    tensors: dict[str, Tensor | None] = {**inputs, **outputs}
    shared = sorted(set(inputs) & set(outputs))
    parameters = _parameters(source, entry)
    expected = [*tensors, "workspace", "tiling"]
    if shared or parameters != expected:
        raise ValueError(
            f"{entry}: the kernel takes {', '.join(parameters)}; got inputs {', '.join(inputs)} "
            f"and outputs {', '.join(outputs)}"
        )
    for name, t in tensors.items():
        if t is not None and (t.device.type != "cpu" or not t.is_contiguous() or t.dtype not in _TYPES):
            raise TypeError(
                f"{entry}: {name} must be a contiguous tensor on the CPU of one of the types "
                f"{', '.join(_TYPES.values())}, got {t.dtype} on {t.device}"
            )
    library = _load(source, entry, tuple(_types(tensors, types or {})), len(parameters))
    if tiling is None:
        tiling, blocks = _tile(library, entry, sizes, cores, blocks)
    if not blocks or blocks < 1 or blocks > CORES:
        raise ValueError(f"{entry}: expected 1 to {CORES} blocks, got {blocks}")
    given = {id(t) for t in inputs.values() if t is not None}
    scratch = torch.empty(workspace, dtype=torch.uint8)
    listed = [(n, t, 1, 0) for n, t in inputs.items()]
    listed += [(n, t, int(id(t) in given), 1) for n, t in outputs.items()]
    listed.append(("workspace", scratch, 0, 1))
    arguments = (_Argument * len(listed))(
        *(
            _Argument(n.encode(), None if t is None else t.data_ptr(), 0 if t is None else t.nbytes, r, w)
            for n, t, r, w in listed
        )
    )
    text = library.opsmith_launch(arguments, blocks, tiling)
    return _read(
        source, entry, json.loads(text), tiling, [n for n, t in outputs.items() if id(t) not in given]
    )


def _parameters(source: Path, entry: str) -> list[str]:
    found = re.search(
        rf"__global__\s+__aicore__\s+void\s+{re.escape(entry)}\s*\(([^)]*)\)", source.read_text()
    )
    if found is None:
        raise ValueError(f"{source.name}: there is no `__global__ __aicore__ void {entry}(...)`")
    return [p.split()[-1].lstrip("*") for p in found[1].split(",")]


def _types(tensors: Mapping[str, Tensor | None], types: Mapping[str, str]) -> list[str]:
    first = next((t for t in tensors.values() if t is not None), None)
    names = {
        name: _TYPES[t.dtype]
        if t is not None
        else _TYPES[first.dtype]  # an absent one is of the first one's type
        for name, t in tensors.items()
        if first is not None
    }
    return [f"#define DTYPE_{name.upper()} {value}" for name, value in {**names, **types}.items()]


def _folders(source: Path) -> tuple[Path, ...]:
    return tuple(dict.fromkeys([HEADERS, source.parent.absolute(), SHARED]))


def _load(source: Path, entry: str, defines: tuple[str, ...], parameters: int) -> ctypes.CDLL:
    folders = _folders(source)
    files = [file for folder in folders for file in folder.iterdir() if file.suffix in (".h", ".cpp")]
    edited = tuple(sorted(file.stat().st_mtime_ns for file in files))
    return _built(source, entry, defines, parameters, folders, edited)


@functools.lru_cache(maxsize=256)
def _built(
    source: Path,
    entry: str,
    defines: tuple[str, ...],
    parameters: int,
    folders: tuple[Path, ...],
    edited: tuple[int, ...],
) -> ctypes.CDLL:
    """The library, looked for in the build system's cache once for each time that a file was edited."""
    header = source.with_name(f"{source.stem}_tiling.h")
    # The kernel comes before the launch: what it misses, it misses on a board.
    lines = [
        '#include "standard.h"',
        *defines,
        f'#include "{source.name}"',
        '#include "launch.h"',
        f"OPSMITH_KERNEL({entry}, {parameters})",
    ]
    if header.is_file():
        camel = "".join(map(str.capitalize, source.stem.split("_")))
        lines += [f'#include "{header.name}"', f"OPSMITH_TILING({camel}Tiling)"]
    with tempfile.TemporaryDirectory(prefix="opsmith-emulation-") as folder:
        host = Path(folder) / f"{source.stem}_host.cpp"
        host.write_text("\n".join([*lines, ""]))
        name = f"emulated_{entry}_{hashlib.sha256(' '.join(defines).encode()).hexdigest()[:6]}"
        # The core is one object for all kernels: its key has nothing of theirs.
        units = [host, HEADERS / "core.cpp"]
        include = [*folders, Path(build.__file__).parent]  # cpu/types.h
        emulated = build.Library(name, units, include_dirs=include, flags=_FLAGS, tier="portable")
        (built,) = build.build_libraries([emulated])
    library = ctypes.CDLL(str(built))
    library.opsmith_launch.restype = ctypes.c_char_p
    library.opsmith_launch.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p]
    return library


def _tile(
    library: ctypes.CDLL, entry: str, sizes: Sequence[int | float], cores: int, blocks: int | None
) -> tuple[bytes, int | None]:
    if not hasattr(library, "opsmith_tiling"):
        if sizes:
            raise ValueError(f"{entry}: sizes are for a tiling function, and there is none beside the kernel")
        return b"", blocks
    if blocks is not None:
        raise ValueError(f"{entry}: the tiling function says how many blocks there are; give it cores")
    if not 1 <= cores <= CORES:
        raise ValueError(f"{entry}: expected 1 to {CORES} cores, got {cores}")
    room = ctypes.create_string_buffer(_TILING_ROOM)
    numbers = (ctypes.c_double * len(sizes))(*sizes)
    found = int(library.opsmith_tiling(numbers, len(sizes), cores, LOCAL_MEMORY, room, _TILING_ROOM))
    if found < 0:
        raise ValueError(f"{entry}: the tiling function takes {-found - 1} sizes, got {len(sizes)}")
    return room.raw, found


def _read(
    source: Path, entry: str, report: dict[str, Any], tiling: bytes, outputs: Sequence[str]
) -> Emulation:
    if fault := report.get("fault"):
        # The library may have been built of the same content at another place, whose names it knows.
        name = Path(fault["file"]).name
        here = [source.absolute(), *(folder / name for folder in _folders(source))]
        file = next((str(path) for path in here if path.name == name and path.is_file()), fault["file"])
        raise EmulationError(entry, report["block"], file, fault["line"], fault["instruction"], fault["text"])
    tensors = report["tensors"]
    for name in outputs:
        if name in tensors and (missing := tensors[name][2]):
            raise EmulationError(
                entry, report["block"], "", 0, "", f"{missing} bytes of {name} were written by no block"
            )
    return Emulation(
        kernel=entry,
        blocks=report["blocks"],
        tiling=tiling,
        read=sum(t[0] for t in tensors.values()),
        written=sum(t[1] for t in tensors.values()),
        tensors={name: (t[0], t[1]) for name, t in tensors.items()},
        queues={name: (q[0], q[1]) for name, q in report["queues"].items()},
        instructions=tuple(Issued(*i) for i in report["instructions"]),
        local_peak=report["local_peak"],
        cycles=report["cycles"],
    )
