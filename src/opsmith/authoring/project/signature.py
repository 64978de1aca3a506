"""What a project says of its operator once, and what follows: dispatcher schemas, and the C++ that binds kernels.

The kernels' own files see no torch header. Their binding, checks of shapes and dtypes included, is generated from the
same signature whenever they are built.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

__all__ = ["Signature"]

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "bool": torch.bool,
    "int8": torch.int8,
    "int32": torch.int32,
    "int64": torch.int64,
}
# What kernels can be given; see types.h.
_IN_KERNELS = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.bool: "boolean",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
}
_SCALARS = {float: ("float", "double"), int: ("int", "int64_t"), bool: ("bool", "bool")}

Sizes = tuple[int | str, ...]
Scalar = float | int | bool | None


@dataclass(frozen=True)
class Signature:
    """The tensors and attributes of an operator, its dtypes, and the inputs that have a gradient of their own."""

    name: str
    inputs: Mapping[str, Sizes]
    outputs: Mapping[str, Sizes]
    attributes: Mapping[str, Scalar]
    columns: tuple[tuple[torch.dtype, ...], ...]  # dtype combinations: inputs, then outputs
    gradients: tuple[str, ...]

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
        """Read what operator.py writes: sizes and dtypes as words.

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
        count = len(inputs) + len(outputs)
        columns = tuple(_column(name, words, count) for words in dtypes)
        given = {key: _sizes(name, key, words) for key, words in inputs.items()}
        made = {key: _sizes(name, key, words) for key, words in outputs.items()}
        return cls(name, given, made, dict(attributes), columns, tuple(gradients))

    def schemas(self) -> tuple[str, ...]:
        """`forward` and, where there are gradients, `backward`: out-style, as all operators of the house."""
        tensors = ", ".join(f"Tensor {name}" for name in self.inputs)
        scalars = "".join(f", {_kind(value)[0]} {name}" for name, value in self.attributes.items())
        outs = ", ".join(f"Tensor({_letter(i)}!) {name}" for i, name in enumerate(self.outputs))
        found = [f"forward({tensors}{scalars}, *, {outs}) -> ()"]
        if self.gradients:
            slopes = ", ".join(f"Tensor d{name}" for name in self.outputs)
            outs = ", ".join(f"Tensor({_letter(i)}!)? d{name}=None" for i, name in enumerate(self.gradients))
            found.append(f"backward({slopes}, {tensors}{scalars}, *, {outs}) -> ()")
        return tuple(found)

    def declarations(self) -> dict[str, str]:
        """The kernels as C++ declares them, by name."""
        scalars = [f"{_kind(value)[1]} {name}" for name, value in self.attributes.items()]
        views = [f"opsmith::View {name}" for name in self.inputs]
        outs = [f"opsmith::View {name}" for name in self.outputs]
        found = {"forward": f"void forward({', '.join([*views, *scalars, *outs])})"}
        if self.gradients:
            slopes = [f"opsmith::View d{name}" for name in self.outputs]
            outs = [f"opsmith::View d{name}" for name in self.gradients]
            found["backward"] = f"void backward({', '.join([*slopes, *views, *scalars, *outs])})"
        return found

    def binding(self) -> str:
        """The C++ that checks a call, and registers the kernels for the CPU."""
        declared = self.declarations()
        text = [
            f"// Generated from the signature of {self.name}: checks the calls of its kernels and registers them.",
            '#include "project_binding.h"',
            "",
            f"namespace {self.name} {{",
            *(f"{one};" for one in declared.values()),
            "namespace {",
            "using opsmith::dtype_of;",
            "using opsmith::Tensor;",
            "using opsmith::view_of;",
        ]
        for kernel in declared:
            text += self._bound(kernel)
        text += ["}  // namespace", f"}}  // namespace {self.name}", ""]
        text += [f"STABLE_TORCH_LIBRARY_IMPL({self.name}, CPU, m) {{"]
        text += [
            f'  m.impl("{kernel}", opsmith::kernel<&{self.name}::{kernel}_op>.boxed);' for kernel in declared
        ]
        return "\n".join([*text, "}", ""])

    def _bound(self, kernel: str) -> list[str]:
        backward = kernel == "backward"
        first = {f"d{name}": sizes for name, sizes in self.outputs.items()} if backward else {}
        last = {f"d{name}": self.inputs[name] for name in self.gradients} if backward else self.outputs
        given = {**first, **self.inputs}
        scalars = [f"{_kind(value)[1]} {name}" for name, value in self.attributes.items()]
        wanted = [f"const {'std::optional<Tensor>' if backward else 'Tensor'}& {name}" for name in last]
        parameters = ", ".join([*(f"const Tensor& {name}" for name in given), *scalars, *wanted])
        checks = [
            f'  call.tensor("{name}", {name}, {{{", ".join(_quoted(sizes))}}});'
            for name, sizes in {**given, **last}.items()
        ]
        order = self._order(backward)
        columns = ", ".join(
            "{" + ", ".join(f"opsmith::DType::{_IN_KERNELS[column[i]]}" for i in order) + "}"
            for column in self.kernel_columns()
        )
        dtypes = ", ".join(f"dtype_of({name})" for name in (*given, *last))
        views = [*(f"view_of({name})" for name in given), *self.attributes, *(f"view_of({n})" for n in last)]
        return [
            f"void {kernel}_op({parameters}) {{",
            f'  opsmith::Call call("{self.name}");',
            *checks,
            f"  call.dtypes({{{dtypes}}}, {{{columns}}});",
            f"  {kernel}({', '.join(views)});",
            "}",
        ]

    def _order(self, backward: bool) -> list[int]:
        """The place in a dtype column of each tensor of a kernel, in the order of its parameters."""
        inputs, outputs = (
            list(range(len(self.inputs))),
            [len(self.inputs) + i for i in range(len(self.outputs))],
        )
        if not backward:
            return inputs + outputs
        return outputs + inputs + [list(self.inputs).index(name) for name in self.gradients]

    def kernel_columns(self) -> list[tuple[torch.dtype, ...]]:
        """The dtype combinations that kernels can be given; the reference takes the others."""
        return [column for column in self.columns if all(dtype in _IN_KERNELS for dtype in column)]


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


def _kind(value: Scalar) -> tuple[str, str]:
    """An attribute's type in a schema and in C++; one without a default is a float."""
    return _SCALARS[float if value is None else type(value)]


def _letter(i: int) -> str:
    return chr(ord("a") + i)


def _quoted(sizes: Sizes) -> list[str]:
    return [f'"{size}"' for size in sizes]
