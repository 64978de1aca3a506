"""A project's kernels for Ascend NPUs: bound to PyTorch where there is one, and run emulated where there is none.

CANN builds the kernels (kernels/ascendc/README.md). What is emulated here is the very kernel file; that says nothing
about a board but that the kernel does what it should under its rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import opsmith_ascend
from opsmith.authoring.project import Kernels, imported
from opsmith.implementation import Supports
from opsmith_ascend.emulation import CORES, Emulation, EmulationError, emulate

_NAME = "opsmith_ascendc"  # of a project's files of Python, while they are imported


def load(kernels: Kernels) -> Supports:
    """Bind the operator package that CANN has built to PyTorch; True, or why that cannot be here."""
    if not opsmith_ascend.torch_npu():
        return "torch_npu is not installed: an Ascend NPU is reached through it and CANN"
    from torch.utils import cpp_extension

    file = _folder(kernels) / "framework" / "pytorch" / "build.py"
    if not file.is_file():
        return f"{kernels.name} is for tensors of a format that PyTorch does not hand over"
    try:
        imported(file, _NAME).load(cpp_extension)
    except (ImportError, OSError, RuntimeError) as wrong:
        return f"the binding of {kernels.name} does not build: {str(wrong).splitlines()[0]}"
    return True


def _folder(kernels: Kernels) -> Path:
    return kernels.source("ascendc").parents[1]


def call(kernels: Kernels, cores: int = CORES) -> Callable[..., Emulation | None]:
    """`forward(*inputs, *attributes, **outputs)` of a project, emulated on some of the cores of a 910B.

    Raises, when it is called:
        EmulationError: the kernel does what a board would punish.
        BuildError: it does not compile.
    """
    sizes = imported(_folder(kernels) / "launch.py", _NAME).sizes  # what the tiling takes of a call

    def run(*args: Any, **outputs: Tensor) -> Emulation | None:
        inputs = dict(zip(kernels.signature.inputs, args, strict=False))
        attributes = dict(zip(kernels.signature.attributes, args[len(inputs) :], strict=True))
        if not all(t.numel() for t in (*inputs.values(), *outputs.values())):
            return None  # a board is not asked either
        numbers = sizes(**inputs, **outputs, **attributes)
        return emulate(kernels.source("ascendc"), inputs, outputs, numbers, cores=cores)

    return run


def compile_all(kernels: Kernels, dtypes: Sequence[torch.dtype] = ()) -> str:
    """Compile the kernel for the combinations of dtypes that begin with one of these, as the emulation does.

    Raises:
        BuildError: with the first error, at its line.
    """
    columns = [c for c in kernels.signature.kernel_columns() if c[0] in (dtypes or c)]
    run = call(kernels)
    for column in columns:
        symbols = {**kernels.signature.inputs, **kernels.signature.outputs}
        tensors = {
            name: torch.zeros([16 if isinstance(d, str) else d for d in sizes], dtype=dtype)
            for (name, sizes), dtype in zip(symbols.items(), column, strict=True)
        }
        outputs = {name: tensors.pop(name) for name in kernels.signature.outputs}
        attributes = [1.0 if value is None else value for value in kernels.signature.attributes.values()]
        try:
            run(*tensors.values(), *attributes, **outputs)
        except EmulationError:
            continue  # it runs: what it does wrong is said where it is held to its card
    how = f"for emulation, in {len(columns)} combination{'s' * (len(columns) > 1)} of types"
    return f"compiles {how}; CANN builds it for a board ({_folder(kernels)}/README.md)"
