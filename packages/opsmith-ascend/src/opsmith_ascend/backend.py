"""What opsmith asks of this package. The rest, and PyTorch with it, is imported when it is needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import opsmith_ascend
from opsmith.backends import Backend

if TYPE_CHECKING:
    import torch

    from opsmith.authoring.new.generate import Project
    from opsmith.authoring.project import Kernels
    from opsmith.implementation import Implementation, Supports


class Ascend(Backend):
    """Kernels in Ascend C, for NPUs."""

    name = "ascendc"
    device = "npu"
    kernels = "op_kernel/*.cpp"
    layouts = True
    targets = ("ascend-triton",)

    def here(self) -> Supports:
        return (
            super().here()
            if opsmith_ascend.torch_npu()
            else "no npu device: torch_npu, which brings it, is not installed"
        )

    def implementations(self, operator: str) -> Sequence[Implementation]:
        from opsmith_ascend import library

        return library.implementations(operator)

    def write(self, project: Project) -> Mapping[str, str]:
        from opsmith_ascend.project.files import write

        return write(project)

    def compile(self, kernels: Kernels, dtypes: Sequence[torch.dtype] = ()) -> str:
        from opsmith_ascend.project.run import compile_all

        return compile_all(kernels, dtypes)

    def load(self, kernels: Kernels) -> Supports:
        from opsmith_ascend.project.run import load

        return load(kernels)

    def emulations(self, kernels: Kernels) -> Mapping[str, Callable[..., Any]]:
        from opsmith_ascend.project.run import call

        return {"1 core": call(kernels, 1), "48": call(kernels, 48)}

    def make(self, target: str, folder: Path | None) -> tuple[str, dict[str, Any]]:
        from opsmith_ascend.lowering import lower, report, table

        results = lower(folder)
        return table(results), report(results)


BACKEND = Ascend()
