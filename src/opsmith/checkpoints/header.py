"""The header of a GGUF file: what it says of a model, and where its tensors lie; checked before anything is read.

Source: the GGUF format, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY, _U32, _FLOAT = 8, 9, 4, 0
_MOST_DIMENSIONS = 4
_MOST_KEYS, _MOST_TENSORS = 1 << 16, 1 << 20
_LONGEST_NAME = 1 << 12  # bytes of a key or of a tensor's name
_SCALING = ".rope.scaling."  # of rotations, which transformers 5.23 fails to read
_TOKENIZER = "tokenizer."  # its lists are most of the header, and nothing of the model


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded; the message says what is wrong with it, and the next step."""


@dataclass(frozen=True)
class Tensor:
    """Where a tensor lies."""

    file: Path
    name: str
    type: str  # as gguf calls it: "F32", "Q4_K", ...
    shape: tuple[int, ...]  # [rows, numbers of a row], as PyTorch has them
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    """What a GGUF file says before its tensors."""

    file: Path
    values: dict[str, Any]
    tensors: dict[str, Tensor]
    kept: list[bytes]  # the values as they lie in the file, without _SCALING and a tokenizer's lists

    @property
    def plain(self) -> bytes:
        """A file of its own of what is kept, with one number for each tensor."""
        alignment = self.values.get("general.alignment", 32)
        made = [_MAGIC, struct.pack("<IQQ", _VERSIONS[-1], len(self.tensors), len(self.kept)), *self.kept]
        for i, name in enumerate(map(str.encode, self.tensors)):
            made += [struct.pack("<Q", len(name)), name, struct.pack("<IQIQ", 1, 1, _FLOAT, i * alignment)]
        head = b"".join(made)
        return head + bytes(-len(head) % alignment + alignment * len(self.tensors))

    def rows(self, name: str) -> torch.Tensor:
        """The bytes of a tensor's rows, [rows, bytes] uint8, read from the file.

        Raises:
            CheckpointError: it has become shorter since.
        """
        tensor = self.tensors[name]
        found = torch.empty(tensor.nbytes, dtype=torch.uint8)
        with tensor.file.open("rb") as opened:
            opened.seek(tensor.offset)
            into: Any = found.numpy()
            got = opened.readinto(into)
        if got != tensor.nbytes:
            raise CheckpointError(
                f"{tensor.file}: {name} ends after {got} of {tensor.nbytes} bytes; copy it again"
            )
        return found.view(math.prod(tensor.shape[:-1]), -1)


def read(file: Path) -> Header:
    """Read the header of a GGUF file; where it is the first of several that a model was split into, of all of them.

    Every count, length and offset is held to the size of the file before memory is asked for.

    Raises:
        CheckpointError: there is no such file, or it is no whole GGUF file.
    """
    first = _part(file)
    if (count := first.values.get("split.count", 1)) in (0, 1):
        return first
    stem, _, end = file.name.rpartition("-00001-of-")
    if not isinstance(count, int) or end != f"{count:05}.gguf":
        raise CheckpointError(f"{file} is one of several: name the first of them, -00001-of-...")
    others = (_part(file.with_name(f"{stem}-{i:05}-of-{count:05}.gguf")) for i in range(2, count + 1))
    tensors = first.tensors | {name: t for other in others for name, t in other.tensors.items()}
    if (there := len(tensors)) != (said := first.values.get("split.tensors.count")):
        raise CheckpointError(f"{file}: its parts have {there} tensors, not {said}; copy them again")
    return replace(first, tensors=tensors)


def _part(file: Path) -> Header:
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            return _Reader(file, opened, size).header()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}; name a .gguf file") from error


class _Reader:
    """Reads a header from its beginning to its end."""

    def __init__(self, file: Path, opened: BinaryIO, size: int) -> None:
        self.file, self.opened, self.size = file, opened, size

    def wrong(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.file} is no whole GGUF file: {what}; download or convert it again")

    def take(self, count: int) -> bytes:
        if count > self.size - self.opened.tell():
            raise self.wrong(f"it ends before what its header counts, at byte {self.size}")
        return self.opened.read(count)

    def number(self, kind: str) -> Any:
        return struct.unpack("<" + kind, self.take(struct.calcsize("<" + kind)))[0]

    def name(self) -> str:
        length = self.number("Q")
        if length > _LONGEST_NAME:
            raise self.wrong(f"a name of {length} bytes")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError as error:
            raise self.wrong("a name that is not UTF-8") from error

    def value(self, kind: int) -> Any:
        """A value; None for one that nothing of a model is said in, a list of lists."""
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.take(self.number("Q")).decode(errors="replace")
        if kind != _ARRAY:
            raise self.wrong(f"a value of type {kind}")
        of, count = self.number("I"), self.number("Q")
        if of in _SCALARS:
            one = struct.calcsize("<" + _SCALARS[of])
            if count > self.size // one:
                raise self.wrong(f"a list of {count} numbers")
            return list(struct.unpack(f"<{count}{_SCALARS[of]}", self.take(count * one)))
        if of != _STRING or count > self.size // 8:
            raise self.wrong(f"a list of {count} values of type {of}")
        return [self.value(_STRING) for _ in range(count)]

    def header(self) -> Header:
        if self.take(4) != _MAGIC:
            raise self.wrong(f"it does not begin with {_MAGIC.decode()}")
        version = self.number("I")
        if version not in _VERSIONS:
            raise self.wrong(f"version {version}, where 2 and 3 are known")
        tensors, keys = self.number("Q"), self.number("Q")
        if tensors > min(_MOST_TENSORS, self.size // 24) or keys > min(_MOST_KEYS, self.size // 12):
            raise self.wrong(f"it counts {tensors} tensors and {keys} values")
        values: dict[str, Any] = {}
        kept: list[bytes] = []
        for _ in range(keys):
            start = self.opened.tell()
            key, kind = self.name(), self.number("I")
            if key in values:
                raise self.wrong(f"{key[:64]!r} stands in it twice")
            values[key] = self.value(kind)
            if not (_SCALING in key or (key.startswith(_TOKENIZER) and kind == _ARRAY)):
                end = self.opened.tell()
                self.opened.seek(start)
                kept.append(self.opened.read(end - start))
        infos = [self.info() for _ in range(tensors)]
        alignment = values.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20 or alignment & alignment - 1:
            raise self.wrong(f"an alignment of {alignment!r}")
        start = -(-self.opened.tell() // alignment) * alignment
        found = {t.name: replace(t, offset=start + t.offset) for t in infos}
        if len(found) < len(infos):
            raise self.wrong("two tensors have one name")
        end = start
        for tensor in sorted(found.values(), key=lambda t: t.offset):
            if tensor.offset < end or tensor.offset % alignment:
                raise self.wrong(f"{tensor.name[:64]!r} lies over another tensor, or at an odd place")
            end = tensor.offset + tensor.nbytes
            if end > self.size:
                raise self.wrong(f"{tensor.name[:64]!r} ends at byte {end} of {self.size}")
        return Header(self.file, values, found, kept)

    def info(self) -> Tensor:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        name, dimensions = self.name(), self.number("I")
        if not 0 < dimensions <= _MOST_DIMENSIONS:
            raise self.wrong(f"{name[:64]!r} has {dimensions} dimensions")
        shape = tuple(self.number("Q") for _ in range(dimensions))[::-1]
        if not math.prod(shape):
            raise self.wrong(f"{name[:64]!r} has no numbers")
        kind, offset = self.number("I"), self.number("Q")
        try:
            of = GGMLQuantizationType(kind)
        except ValueError as error:
            raise self.wrong(f"{name[:64]!r} has the unknown type {kind}") from error
        numbers, size = GGML_QUANT_SIZES[of]
        if shape[-1] % numbers:
            raise self.wrong(f"{name[:64]!r} has rows of {shape[-1]}, which are no blocks of {of.name}")
        return Tensor(self.file, name, of.name, shape, offset, math.prod(shape) // numbers * size)
