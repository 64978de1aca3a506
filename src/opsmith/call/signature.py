"""What is said of a kernel once, and what follows: the parameters of forward and backward, and their schemas.

    Signature("layer_norm", (Input("x", "... N"), ..., Number("eps", float)), (Output("y", "... N"), ...), gradient=...)

Sizes are words: symbols and numbers, `...` in front for any leading dimensions. The checks (checks.py), memory for the
results and gradients (run.py), the C++ binding (binding.py) and the call without PyTorch's dispatcher
(fast/direct.py) are all read from here, for the library's operators and for a user's projects alike.
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# What kernels can be given; see types.h.
IN_KERNELS = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.bool: "boolean",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
}
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float64, *IN_KERNELS)}

Sizes = tuple[int | str, ...]
Scalar = float | int | bool | None


class Dtype(enum.Enum):
    """How a tensor's dtype follows from the first input's."""

    FIRST = enum.auto()
    FIRST_OR_FLOAT32 = enum.auto()


class Rows(enum.Enum):
    """The shape of float32 numbers that a forward keeps of each row for its backward."""

    EACH = "r"  # [rows]
    PAIR = "p"  # [2, rows]
    TWO_EACH = "e"  # [..., 2]


@dataclass(frozen=True)
class Input:
    """A tensor that a kernel reads."""

    name: str
    words: str
    dtype: Dtype | torch.dtype = Dtype.FIRST
    optional: bool = False
    scalar: bool = False  # whether a tensor without dimensions is a row of one number
    needs: str | None = None  # the input without which it means nothing

    @functools.cached_property
    def sizes(self) -> Sizes:
        return _sizes(self.name, self.name, self.words)


@dataclass(frozen=True)
class Number:
    """A number or a flag."""

    name: str
    type: type
    optional: bool = False
    within: tuple[float, float] | None = None  # the least and the greatest


@dataclass(frozen=True)
class Output:
    """A tensor that a kernel writes."""

    name: str
    words: str
    dtype: Dtype | torch.dtype | str = Dtype.FIRST  # a str: that of the input of this name
    when: str | None = None  # the input that has to be there for it
    unless: str | None = None  # the input that takes its place
    like: str | None = None  # the input that it lies in memory as
    optional: bool = False  # nobody needs it: it is written where it is asked for
    called: str = ""  # by messages, where not by its name
    halved_without: str | None = None  # the input without which its last size is half of what stands there
    onto: tuple[str, ...] = ()  # inputs that it may be written over, element for element

    @functools.cached_property
    def sizes(self) -> Sizes:
        return _sizes(self.name, self.name, self.words)


@dataclass(frozen=True)
class Kept:
    """What a forward writes for its backward alone: float32, where gradients are wanted."""

    name: str
    rows: Rows = Rows.EACH


@dataclass(frozen=True)
class Slope:
    """The gradient of an output, as an argument of the backward."""

    of: str
    name: str = ""


@dataclass(frozen=True)
class Saved:
    """An input, an output, a number or what was kept, as an argument of the backward."""

    of: str
    name: str = ""
    instead: str | None = None  # what stands for it where it is not there


@dataclass(frozen=True)
class Constant:
    """An argument of the backward that is always the same."""

    name: str
    value: bool | int | float


@dataclass(frozen=True)
class Made:
    """The gradient of an input, which the backward writes where it is wanted."""

    of: str
    name: str = ""
    shared: Sequence[str] = ()  # further inputs whose gradient it is
    optional: bool = True  # False: the kernel writes it whether it is wanted or not
    always: bool = False  # written wherever the input is there


@dataclass(frozen=True)
class Gradient:
    """The kernel of the gradients, and what each of its arguments is."""

    kernel: str
    given: Sequence[Slope | Saved | Constant]
    made: Sequence[Made]
    only: Mapping[str, int] = field(default_factory=dict)  # numbers of the only calls whose gradient it is


@dataclass(frozen=True)
class Parameter:
    """A parameter of a kernel: its declaration, its name there, and where a backward gets it from."""

    name: str
    of: Input | Number | Output | Kept | Constant
    written: bool = False
    optional: bool = False
    source: Slope | Saved | Constant | Made | None = None

    @property
    def type(self) -> type:
        """torch.Tensor, or that of a number."""
        if isinstance(self.of, Number):
            return self.of.type
        return type(self.of.value) if isinstance(self.of, Constant) else Tensor


@dataclass(frozen=True)
class Signature:
    """The parameters of a kernel and its results, their dtypes, and the gradients that it has."""

    name: str
    arguments: tuple[Input | Number, ...]
    results: tuple[Output, ...]
    kept: tuple[Kept, ...] = ()
    gradient: Gradient | None = None
    # Dtype combinations, where dtypes do not follow from the first.
    columns: tuple[tuple[torch.dtype, ...], ...] = ()
    attributes: Mapping[str, Scalar] = field(default_factory=dict)  # a project's numbers and their defaults
    contiguous: bool = False  # tensors are taken so; else rows may lie apart
    strided: bool = False  # or any dimensions but the last; then gradients lie as the inputs do
    kernel: str = ""  # what the dispatcher calls it, where not by its name
    even: tuple[str, ...] = ()  # sizes that are, of a project
    beside: tuple[str, ...] = ()  # what a call gives that the kernel does not take, such as a result's dtype

    def __post_init__(self) -> None:
        """Read all that is cached: Dynamo traces no lock, which cached properties take up to Python 3.11."""
        _ = self.inputs, self.outputs, self.numbers, self.forward, self.backward

    @classmethod
    def of(
        cls,
        name: str,
        inputs: Mapping[str, str],
        outputs: Mapping[str, str],
        attributes: Mapping[str, Scalar],
        dtypes: Sequence[str],
        gradients: Sequence[str],
    ) -> Signature:
        """Read what a project's operator.py writes: sizes and dtypes as words.

        Raises:
            ValueError: naming the operator, the field, what was expected and what came.
        """
        for word in (name, *inputs, *outputs, *attributes):
            if not _IDENTIFIER.fullmatch(word):
                raise ValueError(f"{name}: {word!r} is no name for C++ and Python; use letters, digits and _")
        if unknown := sorted(set(gradients) - set(inputs)):
            raise ValueError(
                f"{name}: gradients names {unknown[0]!r}, which is no input: {', '.join(inputs)}"
            )
        known = dict.fromkeys(size for key, words in inputs.items() for size in _sizes(name, key, words))
        for key, words in outputs.items():
            for size in _sizes(name, key, words):
                if isinstance(size, str) and size not in known:
                    there = ", ".join(s for s in known if isinstance(s, str))
                    raise ValueError(
                        f"{name}: {key}: no input has size {size!r}: expected a number or {there}"
                    )
        for key, value in attributes.items():
            if not isinstance(value, Scalar):
                raise ValueError(f"{name}: {key} must be a float, int, bool or None, got {value!r}")
        numbers = [Number(key, float if value is None else type(value)) for key, value in attributes.items()]
        slopes, saved = [Slope(key) for key in outputs], [Saved(key) for key in (*inputs, *attributes)]
        backward = Gradient("backward", (*slopes, *saved), tuple(map(Made, gradients)))
        return cls(
            name,
            (*(Input(key, words) for key, words in inputs.items()), *numbers),
            tuple(Output(key, words) for key, words in outputs.items()),
            gradient=backward if gradients else None,
            columns=tuple(_column(name, words, len(inputs) + len(outputs)) for words in dtypes),
            attributes=dict(attributes),
            contiguous=True,
            kernel="forward",
        )

    @functools.cached_property
    def tensors(self) -> tuple[Input, ...]:
        return tuple(one for one in self.arguments if isinstance(one, Input))

    @functools.cached_property
    def numbers(self) -> tuple[Number, ...]:
        return tuple(one for one in self.arguments if isinstance(one, Number))

    @property
    def entry(self) -> str:
        """The kernel among all that a process has; a project's operators may be named as ours are."""
        return f"{self.name}::{self.kernel}" if self.kernel else self.name

    @property
    def inputs(self) -> dict[str, Sizes]:
        return {one.name: one.sizes for one in self.tensors}

    @property
    def outputs(self) -> dict[str, Sizes]:
        return {one.name: one.sizes for one in self.results}

    @property
    def gradients(self) -> tuple[str, ...]:
        """The inputs whose gradient the backward writes."""
        made = self.gradient.made if self.gradient else ()
        return tuple(name for one in made for name in (one.of, *one.shared))

    @functools.cached_property
    def forward(self) -> tuple[Parameter, ...]:
        """The parameters of the kernel."""
        given = [Parameter(one.name, one, optional=one.optional) for one in self.arguments]
        made = [
            Parameter(one.name, one, True, bool(one.when or one.unless) or one.optional)
            for one in self.results
        ]
        return (*given, *made, *(Parameter(one.name, one, True, True) for one in self.kept))

    @functools.cached_property
    def backward(self) -> tuple[Parameter, ...]:
        """The parameters of the kernel of the gradients; none where there is none."""
        if self.gradient is None:
            return ()
        known = {p.name: p for p in self.forward}
        found = []
        for source in (*self.gradient.given, *self.gradient.made):
            if isinstance(source, Constant):
                found.append(Parameter(source.name, source, source=source))
                continue
            if (of := known.get(source.of)) is None:
                raise ValueError(
                    f"{self.name}: the gradient's kernel takes {source.of!r}, which is no argument and no "
                    f"result; there are {', '.join(known)}"
                )
            if isinstance(source, Made):
                found.append(Parameter(source.name or f"d{of.name}", of.of, True, source.optional, source))
            elif isinstance(source, Slope):
                found.append(Parameter(source.name or f"d{of.name}", of.of, False, of.optional, source))
            else:
                optional = of.optional and not source.instead and not isinstance(of.of, Kept)
                found.append(Parameter(source.name or of.name, of.of, False, optional, source))
        return tuple(found)

    def schemas(self) -> tuple[str, ...]:
        """Forward and, where there are gradients, backward: they write into outputs that they are given."""
        found = [_schema(self.kernel or self.name, self.forward)]
        if self.gradient is not None and self.gradient.kernel != self.name:
            found.append(_schema(self.gradient.kernel, self.backward))
        return tuple(found)

    def kernel_columns(self) -> list[tuple[torch.dtype, ...]]:
        """The dtype combinations that kernels can be given; the reference takes the others."""
        return [column for column in self.columns if all(dtype in IN_KERNELS for dtype in column)]

    def place(self, name: str) -> int:
        return [p.name for p in self.forward].index(name)

    def pieces(self, output: Output) -> tuple[tuple[int, bool, int], ...]:
        """Where an output's sizes come from: a parameter, whether from its first dimension on, and up to or at which
        one, counted from the last; a number stands for itself, as of parameter -1.
        """
        found = []
        for word in output.sizes:
            if isinstance(word, int):
                found.append((-1, False, word))
                continue
            one = next(one for one in self.tensors if word in one.sizes and not one.optional)
            behind = len(one.sizes) - one.sizes.index(word)
            found.append((self.place(one.name), word == "...", behind - (word == "...")))
        return tuple(found)

    def described(self, output: Output) -> tuple[Any, ...]:
        """An output as fast/direct.h has it: which parameters its presence, layout, dtype and sizes come from."""
        dtype, of = output.dtype, -1
        if not isinstance(dtype, torch.dtype):
            of = 0 if isinstance(dtype, Dtype) else self.place(dtype)
        when, unless, like, halved = (
            -1 if name is None else self.place(name)
            for name in (output.when, output.unless, output.like, output.halved_without)
        )
        pieces = () if output.like else self.pieces(output)
        onto = sum(1 << self.place(name) for name in output.onto)
        return self.place(output.name), when, unless, like, of, dtype, halved, onto, pieces


def _schema(kernel: str, parameters: Sequence[Parameter]) -> str:
    given: list[str] = []
    written: list[str] = []
    for p in parameters:
        mark = "?" if p.optional else ""
        if p.written:
            letter = chr(ord("a") + len(written))
            written.append(f"Tensor({letter}!){mark} {p.name}{'=None' if p.optional else ''}")
        elif p.type is Tensor:
            given.append(f"Tensor{mark} {p.name}")
        elif isinstance(p.of, Constant):
            given.append(f"{p.type.__name__} {p.name}={p.of.value}")
        else:
            given.append(f"{p.type.__name__}{mark} {p.name}")
    return f"{kernel}({', '.join(given)}, *, {', '.join(written)}) -> ()"


def _column(op: str, words: str, count: int) -> tuple[torch.dtype, ...]:
    found = words.split()
    if unknown := [word for word in found if word not in _DTYPES]:
        raise ValueError(f"{op}: {unknown[0]!r} is no dtype: expected one of {', '.join(_DTYPES)}")
    if len(found) not in (1, count):
        raise ValueError(
            f"{op}: a dtype combination names 1 dtype or {count} (every tensor's), got {words!r}"
        )
    return tuple(_DTYPES[word] for word in (found * count if len(found) == 1 else found))


def _sizes(op: str, name: str, words: str) -> Sizes:
    found = words.split()
    for i, word in enumerate(found):
        if not (word.isdigit() or _IDENTIFIER.fullmatch(word) or (word == "..." and i == 0)):
            raise ValueError(
                f"{op}: {name}: {word!r} is no size: expected a symbol or a number, or ... in front of the others"
            )
    return tuple(int(word) if word.isdigit() else word for word in found)
