"""Kernels on an ARM processor that QEMU plays: built as for this machine, by the compiler for that one.

    with Machine("dotprod") as machine:    built, started
        with machine.in_place():           every kernel of ours that PyTorch's dispatcher calls runs there
            opsmith.ops.gelu(x)
        machine.reached                    the kernels, with the dtypes of their calls

PyTorch itself stays here: a call's tensors go there as bytes, and what the kernel wrote comes back. So whatever judges
a kernel (a card, `opsmith verify`, a test) judges the one on ARM, by the same samples and the same bounds.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import opsmith.ops  # noqa: F401  declares the kernels
from opsmith.kernels import build, compiler, isa, libraries

COMPILER, EMULATOR, SYSTEM = "aarch64-linux-gnu-g++", "qemu-aarch64-static", "/usr/aarch64-linux-gnu"
# A processor that has the tier's instructions and no later ones: any other ends the process.
PROCESSORS = {"portable": "cortex-a72", "dotprod": "neoverse-n1"}

_DTYPES = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.float32,
    torch.float64,
)
_NUMBERS = {dtype: number for number, dtype in enumerate(_DTYPES)} | {torch.bool: 11, torch.bfloat16: 15}
_LINKS = (
    "-Wl,--unresolved-symbols=ignore-all",
)  # the machine has some of PyTorch's, and nobody calls the others
_PLAIN, _TENSOR, _OPTIONAL_NUMBER = range(3)


def missing() -> str | None:
    """What is not here and would be needed."""
    for program, package in ((COMPILER, "g++-aarch64-linux-gnu"), (EMULATOR, "qemu-user-static")):
        if shutil.which(program) is None:
            return f"{program} is not there (Debian, Ubuntu: apt-get install {package})"
    return None


class Machine:
    """An ARM processor with the libraries of kernels of one tier."""

    def __init__(self, tier: str, names: Sequence[str] | None = None) -> None:
        """Of a tier, "portable" or "dotprod", with these libraries of kernels or all."""
        self.tier = tier
        self.reached: dict[str, set[torch.dtype]] = {}
        self._names = sorted(set(libraries.kernels().values())) if names is None else names
        self._libraries: dict[str, Path] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Machine:
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        with _for_arm(folder):
            wanted = [replace(libraries._library(name, self.tier), links=_LINKS) for name in self._names]
            self._libraries = dict(zip(self._names, build.build_libraries(wanted), strict=True))
        self.compile(SOURCE, "machine", "-rdynamic", "-ldl", "-pthread")
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        assert self._folder
        self._folder.cleanup()

    def compile(self, source: Path, name: str, *flags: str) -> Path:
        """A file of ours beside the kernels."""
        assert self._folder
        folder = Path(self._folder.name)
        includes = [f"-I{place}" for place in libraries.HEADERS] + [f"-isystem{folder / 'include'}"]
        base = (*compiler.COMPILE_FLAGS, *isa.FLAGS[self.tier])
        subprocess.run(
            [COMPILER, *base, *includes, str(source), *flags, "-o", str(folder / name)], check=True
        )
        return folder / name

    def add(self, library: Path) -> None:
        """Load one more library, when the machine is next started."""
        self._libraries[library.stem] = library

    def _stop(self) -> int:
        if self._process is None:
            return 0
        process, self._process = self._process, None
        assert process.stdin
        assert process.stdout
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        process.stdout.close()
        return process.wait()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            assert self._folder
            command = [EMULATOR, "-cpu", PROCESSORS[self.tier], "-L", SYSTEM]
            command += [f"{self._folder.name}/machine", *map(str, self._libraries.values())]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        return self._process

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Kernels run there: in a process that has loaded none of its own."""
        if libraries._loaded:
            raise RuntimeError(
                "kernels for this processor are loaded already, and PyTorch would go on calling them"
            )
        mine = torch.library.Library("opsmith", "IMPL")
        for kernel in libraries.kernels():
            mine.impl(kernel, self._stand_in(kernel), "CPU")
        libraries._loaded.update(self._libraries)
        libraries._tier = "portable"
        try:
            yield
        finally:
            libraries._loaded.clear()
            mine._destroy()

    def _stand_in(self, kernel: str) -> Any:
        schema = getattr(torch.ops.opsmith, kernel).default._schema
        writes = [bool(a.alias_info and a.alias_info.is_write) for a in schema.arguments]

        def call(*args: Any, **kwargs: Any) -> None:
            given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
            values = [given.get(a.name, a.default_value) for a in schema.arguments]
            self.call(kernel, values, writes, [str(a.type) for a in schema.arguments])

        return call

    def call(self, kernel: str, values: Sequence[Any], writes: Sequence[bool], types: Sequence[str]) -> None:
        """Run a kernel there.

        Args:
            kernel: its name.
            values: the arguments.
            writes: which of them are tensors that it writes into.
            types: of the arguments, as a schema has them.

        Raises:
            RuntimeError: the kernel refuses the call, wrote where it may not, or ended the machine.
        """
        storages: dict[int, tuple[torch.UntypedStorage, bool]] = {}
        for value, is_written in zip(values, writes, strict=True):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                before = storages.get(storage.data_ptr(), (storage, False))[1]
                storages[storage.data_ptr()] = storage, before or is_written
        places = {at: place for place, at in enumerate(storages)}
        message = [_text(kernel), _numbers(len(storages))]
        for at, (storage, is_written) in storages.items():
            message += [_numbers(storage.nbytes(), is_written), ctypes.string_at(at, storage.nbytes())]
        tensors, arguments = [], []
        for value, kind in zip(values, types, strict=True):
            if isinstance(value, torch.Tensor):
                self.reached.setdefault(kernel, set()).add(value.dtype)
                arguments.append(_numbers(_TENSOR, len(tensors)))
                place = places[value.untyped_storage().data_ptr()]
                offset = value.storage_offset() * value.element_size()
                tensors.append(
                    _numbers(place, offset, _NUMBERS[value.dtype], value.dim(), *value.shape, *value.stride())
                )
            elif value is None:
                arguments.append(_numbers(_PLAIN, 0))
            else:
                pack = struct.pack("<d", value) if "float" in kind else _numbers(int(value))
                arguments.append(_numbers(_OPTIONAL_NUMBER if "Optional" in kind else _PLAIN) + pack)
        message += [_numbers(len(tensors)), *tensors, _numbers(len(arguments)), *arguments]
        process = self._started()
        assert process.stdin
        assert process.stdout
        try:
            process.stdin.write(b"".join(message))
            process.stdin.flush()
            wrong = self._read(*struct.unpack("<q", self._read(8))).decode()
        except (BrokenPipeError, EOFError):
            raise RuntimeError(f"{kernel} ended the ARM machine: exit status {self._stop()}") from None
        if wrong:
            raise RuntimeError(wrong)
        for at, (storage, is_written) in storages.items():
            if is_written:
                ctypes.memmove(at, self._read(storage.nbytes()), storage.nbytes())

    def _read(self, count: int) -> bytes:
        assert self._process
        assert self._process.stdout
        found = self._process.stdout.read(count)
        if len(found) < count:
            raise EOFError
        return found


SOURCE = Path(__file__).with_suffix(".cpp")


def _numbers(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}q", *numbers)


def _text(text: str) -> bytes:
    return _numbers(len(text)) + text.encode()


@contextlib.contextmanager
def _for_arm(folder: Path) -> Iterator[None]:
    """Builds are for ARM: by its compiler, with PyTorch's headers, and empty libraries for PyTorch's own."""
    torch_folder, compiler_before = build._torch_folder, os.environ.get("CXX")
    (folder / "include").symlink_to(torch_folder() / "include")
    (folder / "lib").mkdir()
    for name in ("torch_cpu", "c10"):
        (folder / "lib" / f"lib{name}.a").write_text("!<arch>\n")
    build._torch_folder = lambda: folder
    os.environ["CXX"] = COMPILER
    try:
        yield
    finally:
        build._torch_folder = torch_folder
        os.environ.pop("CXX")
        if compiler_before is not None:
            os.environ["CXX"] = compiler_before
