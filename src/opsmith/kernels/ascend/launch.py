"""One call of a kernel: the tensors it gets, what its tiling function is told, and where the results are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from opsmith.kernels.ascend.harness import CORES, SOURCES, Emulation, emulate

__all__ = ["Launch"]


@dataclass(frozen=True)
class Launch:
    """A call of the kernel `STEM.cpp`, on contiguous tensors; `STEM.py` makes it from the operator's arguments."""

    stem: str
    inputs: Mapping[str, torch.Tensor | None]
    outputs: Mapping[str, torch.Tensor | None]
    sizes: tuple[int | float, ...]
    result: Any  # what the operator returns: outputs, or views of them
    types: Mapping[str, str] = field(default_factory=dict)

    @property
    def source(self) -> Path:
        """The kernel file."""
        return SOURCES / f"{self.stem}.cpp"

    @property
    def empty(self) -> bool:
        """True where there is nothing to compute: then no kernel is launched."""
        return not any(t.numel() for t in self.outputs.values() if t is not None)

    def emulated(self, cores: int = CORES) -> Emulation | None:
        """Fill the outputs in emulation; None where there was nothing to do.

        Raises:
            EmulationError, BuildError: see `emulate`.
        """
        if self.empty:
            return None
        return emulate(self.source, self.inputs, self.outputs, self.sizes, cores=cores, types=self.types)
