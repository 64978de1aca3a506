"""Run as a program: compiles the Triton kernels that a project's samples ask for, and prints what came of it as JSON.

python -m opsmith.authoring.project.triton_check FOLDER NAME
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from opsmith.kernels import triton
from opsmith.kernels.triton import common
from opsmith.kernels.triton.ahead import TARGETS, Ahead
from opsmith.operator import Make, Operator, Sample

FEW = 3  # variants of a kernel for a GPU


def run(card: Operator, sample: Sample) -> str | None:
    """A call, forward and backward, and why it stopped. Nothing is computed, so what a kernel says of its inputs is no
    news."""
    from opsmith.call.dispatch import always_native
    from opsmith.proof.verify import backward, forward

    call = (sample.args, dict(sample.kwargs))
    try:
        with always_native():
            (backward if card.differentiable else forward)(card.function, *call)
            # What the function leaves to PyTorch, or to a sequence of kernels, may have a kernel of its own.
            for one in card.candidates(*call[0], **call[1])[0]:
                if one.name == "triton":
                    one.fn(*call[0], **call[1])
    except (IndexError, RuntimeError) as error:
        return f"{card.name}, {sample.name}, stopped: {str(error)[:90]}"
    return None


def walk(cards: Iterable[Operator], ahead: Ahead, targets: Mapping[torch.dtype, Any] = TARGETS) -> list[str]:
    """Call every sample of the cards, for each dtype's target; what they launch goes to `ahead`. Says what stopped."""
    stopped = []
    for card in cards:
        for dtype, target in targets.items():
            ahead.target = target
            for sample in card.samples(Make(dtype)):
                stopped += [why] if (why := run(card, sample)) else []
    return stopped


def walk_project(folder: str, ahead: Ahead) -> list[str]:
    """The same for a project's cards, each in its own dtypes."""
    from opsmith.authoring.project import cards_of, load

    stopped = []
    for card in cards_of(load(folder)):
        stopped += walk([card], ahead, {d: TARGETS.get(d, TARGETS[torch.bfloat16]) for d in card.dtypes})
    return stopped


def take_the_cpus_place(ahead: Ahead) -> None:
    """From here on, a call of an operator on this CPU launches Triton kernels, which go to `ahead`. Before the
    operators are imported, which is when they learn where their kernels run."""
    triton.DEVICE = "cpu"
    common.launch = ahead.launch
    common.processors = lambda like: 132


def main(folder: str, name: str) -> None:
    """Compile what the project's card launches, in the place of the CPU's kernels."""
    ahead = Ahead(FEW)
    take_the_cpus_place(ahead)
    stopped = walk_project(folder, ahead)
    wrong = [text for text in ahead.compiled.values() if text]
    if not ahead.compiled:
        wrong = stopped or [
            f"no sample of {name} launches a Triton kernel through opsmith.kernels.triton.common.launch"
        ]
    result = {
        "wrong": wrong,
        "compiled": len(ahead.compiled) - len(wrong),
        "kernels": len({key[0] for key in ahead.compiled}),
        "targets": sorted({f"sm_{key[1]}" for key in ahead.compiled}),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
