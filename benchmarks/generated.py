"""Kernels made from a formula against those written by hand, forward and backward, in cache and out of it.

    python benchmarks/generated.py [--only silu_mul,gelu] [--dtype bfloat16] [--rounds 25] [--threads 1]

Both compute on the same contiguous tensors, in one process and in turns. A ratio above 1 says that the generated one is
faster.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import opsmith.ops  # noqa: F401  defines the kernels
from opsmith import measure
from opsmith.authoring import project
from opsmith.authoring.new import create
from opsmith.kernels import libraries

CASES = {  # by operator: the formula, its inputs, and the kernels by hand
    "silu_mul": ("silu(gate) * up", ("gate", "up"), "gated"),
    "gelu_mul_tanh": ("gelu_tanh(gate) * up", ("gate", "up"), "gated"),
    "gelu": ("gelu(x)", ("x",), "gelu"),
    "gelu_tanh": ("gelu_tanh(x)", ("x",), "gelu"),
}
CURVES = {"silu_mul": 0, "gelu_mul_tanh": 2}
SHAPES = {"in cache": (64, 768), "out of it": (4096, 8192)}

Call = Callable[[], object]


def generated(name: str, folder: Path) -> Any:
    """The kernels of a project that is made of a case's formula."""
    formula, inputs, _ = CASES[name]
    every = {"param_type": "required", "format": ["ND"], "type": ["float", "bf16", "fp16"]}
    file = folder / f"{name}.json"
    file.write_text(
        json.dumps(
            {
                "op": "".join(word.title() for word in (*name.split("_"), "generated")),
                "input_desc": [{"name": n, "shape": ["...", "N"], **every} for n in inputs],
                "output_desc": [{"name": "y", **every}],
                "formula": formula,
            }
        )
    )
    kernels = project.load(create(file, folder / name, backends=("cpu",))[0]).KERNELS
    ready = kernels.ready(torch.device("cpu"))
    if ready is not True:
        raise RuntimeError(ready)
    return kernels


def contestants(
    name: str, made: Any, dtype: torch.dtype, shape: tuple[int, int]
) -> Iterator[tuple[str, Call, Call]]:
    """By pass: the kernel by hand and the generated one, each with results of its own."""
    _, inputs, kernel = CASES[name]
    dy, *given = (torch.randn(shape).to(dtype) for _ in range(1 + len(inputs)))
    forward, backward = made.ops("cpu")
    by_hand = getattr(torch.ops.opsmith, kernel)
    by_hand_backward = getattr(torch.ops.opsmith, f"{kernel}_backward")
    how: tuple[Any, ...] = (None, name.endswith("tanh")) if kernel == "gelu" else (CURVES[name],)
    hand, own = ([torch.empty_like(dy) for _ in inputs] for _ in range(2))

    def of(results: list[torch.Tensor], run: Callable[..., object], *args: Any, **outputs: Any) -> Call:
        def call() -> object:
            run(*args, **outputs)
            return tuple(results)

        return call

    yield ("forward", of(hand[:1], by_hand, *given, *how, y=hand[0]), of(own[:1], forward, *given, y=own[0]))
    gradients = ("dx",) if kernel == "gelu" else ("dgate", "dup")
    outputs = dict(zip(gradients, hand, strict=True)), dict(zip(gradients, own, strict=True))
    yield (
        "backward",
        of(hand, by_hand_backward, dy, *given, *how, **outputs[0]),
        of(own, backward, dy, *given, **outputs[1]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(CASES), help="operators, separated by commas")
    parser.add_argument("--dtype", default="float32,bfloat16,float16")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--threads", type=int, help="by default those of PyTorch")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    libraries.load("gated", "gated_backward", "gelu", "gelu_backward")
    print(
        f"{'operator':14} {'dtype':9} {'pass':9} {'where':10} {'by hand':>10} {'generated':>10} {'ratio':>7}"
    )
    with tempfile.TemporaryDirectory() as folder:
        for name in args.only.split(","):
            made = generated(name, Path(folder))
            for dtype in args.dtype.split(","):
                for where, shape in SHAPES.items():
                    for step, hand, own in contestants(name, made, getattr(torch, dtype), shape):
                        run = measure.compare(
                            {"hand": hand, "generated": own}, check=hand(), rounds=args.rounds
                        )
                        times = " ".join(f"{run.median(n) * 1e6:8.1f}us" for n in ("hand", "generated"))
                        least = min(run.samples["hand"]) / min(run.samples["generated"])
                        ratio = run.ratio("hand", "generated")
                        print(
                            f"{name:14} {dtype:9} {step:9} {where:10} {times} {ratio.median:7.3f} "
                            f"[{ratio.lo:.3f}, {ratio.hi:.3f}], of the least {least:.3f}",
                            flush=True,
                        )


if __name__ == "__main__":
    main()
