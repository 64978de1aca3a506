"""A project's kernels for Ascend NPUs: bound to PyTorch where there is one, and run emulated where there is none.

CANN builds the kernels (kernels/ascendc/README.md). What is emulated here is the very kernel file, by
`opsmith.kernels.ascend`; that says nothing about a board but that the kernel does what it should under its rules.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from opsmith.call.common import short
from opsmith.measure.pool import tensors_of
from opsmith.operator import Make, Operator, Sample
from opsmith.proof.verify import Finding, examine, forward

if TYPE_CHECKING:
    from opsmith.authoring.project import Kernels
    from opsmith.kernels.ascend import Emulation

__all__ = ["EMULATED", "call", "compiles", "emulating", "findings", "load"]

EMULATED = "ascendc, emulated"  # how the implementation is called in a report
_CORES = (1, 48)  # the same result is due from both


def load(kernels: Kernels) -> bool | str:
    """Bind the operator package that CANN has built to PyTorch; True, or why that cannot be here."""
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed: an Ascend NPU is reached through it and CANN"
    from torch.utils import cpp_extension

    file = kernels.source("ascendc").parents[1] / "framework" / "pytorch" / "build.py"
    if not file.is_file():
        return f"{kernels.name} is for tensors of a format that PyTorch does not hand over"
    try:
        _imported(file).load(cpp_extension)
    except (ImportError, OSError, RuntimeError) as wrong:
        return f"the binding of {kernels.name} does not build: {str(wrong).splitlines()[0]}"
    return True


def _sizes(kernels: Kernels) -> Callable[..., tuple[float, ...]]:
    """What the tiling takes of a call, as kernels/ascendc/launch.py says."""
    sizes: Callable[..., tuple[float, ...]] = _imported(
        kernels.source("ascendc").parents[1] / "launch.py"
    ).sizes
    return sizes


def _imported(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"opsmith_ascendc_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def call(kernels: Kernels, cores: int = 48) -> Callable[..., Emulation | None]:
    """`forward(*inputs, *attributes, **outputs)` of a project, emulated on some of the cores of a 910B.

    Raises, when it is called:
        EmulationError: the kernel does what a board would punish.
        BuildError: it does not compile.
    """
    from opsmith.kernels.ascend import emulate

    sizes = _sizes(kernels)

    def run(*args: Any, **outputs: torch.Tensor) -> Emulation | None:
        inputs = dict(zip(kernels.inputs, args, strict=False))
        attributes = dict(zip(kernels.attributes, args[len(inputs) :], strict=True))
        if not all(t.numel() for t in (*inputs.values(), *outputs.values())):
            return None  # a board is not asked either
        numbers = sizes(**inputs, **outputs, **attributes)
        return emulate(kernels.source("ascendc"), inputs, outputs, numbers, cores=cores)

    return run


def compiles(kernels: Kernels, column: Sequence[torch.dtype]) -> None:
    """Compile the kernel for one combination of dtypes, as the emulation does.

    Raises:
        BuildError: with the first error, at its line.
    """
    from opsmith.kernels.ascend import EmulationError

    symbols = {**kernels.inputs, **kernels.outputs}
    tensors = {
        name: torch.zeros([16 if isinstance(d, str) else d for d in sizes], dtype=dtype)
        for (name, sizes), dtype in zip(symbols.items(), column, strict=True)
    }
    outputs = {name: tensors.pop(name) for name in kernels.outputs}
    attributes = [1.0 if value is None else value for value in kernels.attributes.values()]
    try:
        call(kernels)(*tensors.values(), *attributes, **outputs)
    except EmulationError:
        return  # it runs: what it does wrong, `findings` say


@contextmanager
def emulating(kernels: Kernels, cores: int = 48) -> Iterator[None]:
    """Let an emulation answer for the back end, so that the project's own code calls it as it would call a board."""
    run = call(kernels, cores)

    def quiet(*args: Any, **outputs: torch.Tensor) -> None:
        run(*args, **outputs)

    kernels.stand_ins["ascendc"] = quiet
    try:
        yield
    finally:
        del kernels.stand_ins["ascendc"]


def findings(
    kernels: Kernels, card: Operator, dtypes: Sequence[torch.dtype], *, quick: bool = False
) -> Iterator[Finding]:
    """Hold the emulated kernel to its card: every sample in every dtype, and one core against all."""
    from opsmith.kernels.build import BuildError

    (implementation,) = (i for i in card.implementations if i.name == "ascendc")
    for dtype in dtypes:
        try:
            for column in kernels.signature.kernel_columns():
                if column[0] == dtype:
                    compiles(kernels, column)
        except BuildError as error:
            why = str(error).partition("\n")[0]
            yield Finding(card.name, EMULATED, short(dtype), "", 0, "compiles", False, math.inf, 0.0, why)
            return
        with emulating(kernels):
            for sample in card.samples(Make(dtype)):
                run = partial(forward, implementation.fn)
                yield examine(card, short(dtype), sample, EMULATED, "values", run)
    if not quick:
        largest = max(card.samples(Make(dtypes[0])), key=_elements)
        yield _cores(kernels, card, implementation.fn, largest, short(dtypes[0]))


def _elements(sample: Sample) -> int:
    return sum(t.numel() for t in tensors_of((sample.args, dict(sample.kwargs))))


def _cores(kernels: Kernels, card: Operator, fn: Callable[..., Any], sample: Sample, dtype: str) -> Finding:
    """Whether a result depends on how many cores there are."""
    results, why = [], ""
    try:
        for cores in _CORES:
            with emulating(kernels, cores):
                results.append(forward(fn, sample.args, dict(sample.kwargs)))
    except RuntimeError as wrong:
        why = str(wrong)
    else:
        same = all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        why = "" if same else f"{_CORES[0]} core and {_CORES[1]} give different bits"
    error = math.inf if why else 0.0
    return Finding(
        card.name, EMULATED, dtype, sample.name, _elements(sample), "cores", not why, error, 0.0, why
    )
