"""Compiles Triton kernels for devices that need not be here: where one would be launched, it is compiled instead."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from opsmith.kernels.triton.common import SETTINGS

# Half the kernels' variants for each, so that both generations see every kernel.
TARGETS = {torch.bfloat16: GPUTarget("cuda", 90, 32), torch.float32: GPUTarget("cuda", 80, 32)}
_ROW = re.compile(r"\bat (\d+):\d+:")
_POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float64: "*fp64",
    torch.bool: "*i1",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


class Variant(NamedTuple):
    """A kernel as one launch asked for it: the types of its arguments, and the values of its constants."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    settings: dict[str, int]

    @property
    def name(self) -> str:
        return f"{self.kernel.__module__}.{self.kernel.__name__}"


def compiled(variant: Variant, target: GPUTarget) -> Any:
    """What Triton makes of a variant for a GPU."""
    kernel, signature, constants, settings = variant
    return triton.compile(ASTSource(kernel, signature, constants), target=target, options=settings)


def machine_code(
    variant: Variant, target: GPUTarget, compiler: Callable[[Variant, GPUTarget], Any] = compiled
) -> str | None:
    """Compile a variant for a GPU, and say what was wrong with it."""
    kernel, _, constants, _ = variant
    try:
        compiler(variant, target)
    except Exception as error:  # whatever its compiler raises is what is wrong with the kernel
        return f"{place(kernel, error)}: {variant.name} for sm_{target.arch}, {constants}: {error}"
    return None


class Ahead:
    """Every variant of a kernel that was asked for, compiled for the target that was set: at most so many of each."""

    def __init__(
        self, most: int = sys.maxsize, compiler: Callable[[Variant, GPUTarget], str | None] = machine_code
    ):
        self.most = most
        self.compiler = compiler
        self.target = TARGETS[torch.bfloat16]
        self.compiled: dict[Any, str | None] = {}  # a variant, and what was wrong with it

    def launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        """What `common.launch` is replaced by."""
        if 0 in grid:
            return
        names = [p.name for p in kernel.params]
        values = dict(zip(names, args, strict=False))
        settings: dict[str, int] = {k: options.pop(k) for k in SETTINGS if k in options}
        values.update(options)
        signature, constants = {}, {}
        for parameter in kernel.params:
            value = values.get(parameter.name, parameter.default)
            kind = "constexpr" if parameter.is_constexpr else _kind(value)
            signature[parameter.name] = kind
            if kind == "constexpr":
                constants[parameter.name] = value
        variant = Variant(kernel, signature, constants, settings)
        how = tuple(signature.values()), tuple(map(str, constants.values())), str(settings)
        key = (variant.name, self.target.arch, *how)
        if key not in self.compiled and self.wanted(variant):
            self.compiled[key] = self.compiler(variant, self.target)

    def wanted(self, variant: Variant) -> bool:
        """Whether this one more variant of its kernel is to be compiled."""
        alike = [key for key in self.compiled if key[:2] == (variant.name, self.target.arch)]
        return len(alike) < self.most


def place(kernel: Any, error: object) -> str:
    """The file and line of an error; Triton counts lines from the kernel's `def`."""
    source, first = inspect.getsourcelines(kernel.fn)
    before = next(i for i, line in enumerate(source) if line.lstrip().startswith("def "))
    row = _ROW.search(str(error))
    return f"{inspect.getsourcefile(kernel.fn)}:{first + before + (int(row[1]) - 1 if row else 0)}"


def _kind(value: Any) -> str:
    """The type that Triton's launcher would give an argument."""
    if isinstance(value, Tensor):
        return _POINTERS[value.dtype]
    if value is None or value is True or value is False or (isinstance(value, int) and value == 1):
        return "constexpr"
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"
