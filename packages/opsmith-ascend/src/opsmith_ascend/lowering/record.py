"""Run as a program: prints what a project's samples, or the library's, would launch of Triton kernels, as JSON.

    python -m opsmith_ascend.lowering.record [FOLDER]

Nothing is compiled: what another environment's Triton makes of the kernels is for that environment to say.
"""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any

import torch
import triton.language as tl

from opsmith.authoring.project.triton_check import take_the_cpus_place, walk, walk_project
from opsmith.kernels.triton.ahead import TARGETS, Ahead, Variant

# Ascend's vector units compute in float32 and float16; bfloat16 they load and store. Two variants a dtype.
_TARGETS = {torch.float32: TARGETS[torch.float32], torch.bfloat16: TARGETS[torch.bfloat16]}
_FEW = 2


def main(folder: str | None = None) -> None:
    """Record, then print."""
    launched: list[Variant] = []
    ahead = Ahead(_FEW, compiler=lambda variant, target: launched.append(variant))
    take_the_cpus_place(ahead)
    if folder is None:
        import opsmith.ops  # noqa: F401  registers the cards
        from opsmith.operator import registry

        walk(registry().values(), ahead, _TARGETS)
    else:
        walk_project(folder, ahead)
    print(json.dumps([_described(variant) for variant in launched]))


def _described(variant: Variant) -> dict[str, Any]:
    """What another environment needs to find this kernel and to compile it; plain data."""
    kernel, signature, constants, _ = variant
    return {
        "module": kernel.__module__,
        "kernel": kernel.__name__,
        "file": str(Path(inspect.getsourcefile(kernel.fn) or "").resolve()),
        "signature": signature,
        "constants": {
            name: {"dtype": value.name} if isinstance(value, tl.dtype) else value
            for name, value in constants.items()
        },
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
