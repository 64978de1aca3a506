"""Kernels made from a formula against those written by hand, forward and backward, in cache and out of it.

    python benchmarks/generated.py [--only silu_mul,gelu] [--dtype bfloat16] [--rounds 25] [--threads 1] [--json FILE]

Both compute on the same contiguous tensors, in one process and in turns. A ratio above 1 says that the generated one is
faster.
"""

from __future__ import annotations

import argparse
import datetime
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import opsmith.ops  # noqa: F401  defines the kernels
from opsmith import measure
from opsmith.authoring import project
from opsmith.authoring.new import create
from opsmith.kernels import libraries
from opsmith.ops.softmax import METHODS


@dataclass(frozen=True)
class Case:
    """An operator as a formula, and the kernel by hand: a word among its arguments is the tensor of that name."""

    formula: str
    inputs: tuple[str, ...]
    kernel: str
    forward: tuple[Any, ...]
    backward: tuple[Any, ...]
    kept: tuple[str, ...] = ()  # of each row, what the forward keeps for the backward


GATED = ("gate", "up"), "gated"
CASES = {
    "silu_mul": Case("silu(gate) * up", *GATED, ("gate", "up", 0), ("dy", "gate", "up", 0)),
    "gelu_mul_tanh": Case("gelu_tanh(gate) * up", *GATED, ("gate", "up", 2), ("dy", "gate", "up", 2)),
    "gelu": Case("gelu(x)", ("x",), "gelu", ("x", None, False), ("dy", "x", None, False)),
    "gelu_tanh": Case("gelu_tanh(x)", ("x",), "gelu", ("x", None, True), ("dy", "x", None, True)),
    "rms_norm": Case(
        "x * rsqrt(mean(x * x) + 1e-6) * weight",
        ("x", "weight"),
        "rms_norm",
        ("x", None, "weight", 1e-6, 0.0, False),
        ("dy", None, "x", "rstd", "weight", 0.0),
        ("rstd",),
    ),
    "layer_norm": Case(
        "(x - mean(x)) * rsqrt(var(x) + 1e-5) * weight + bias",
        ("x", "weight", "bias"),
        "layer_norm",
        ("x", None, "weight", "bias", 1e-5),
        ("dy", None, "x", "mean", "rstd", "weight"),
        ("mean", "rstd"),
    ),
    "softmax": Case(
        "softmax(x)", ("x",), "softmax", ("x", None, 1.0, False, METHODS["auto"]), ("dy", "y", 1.0)
    ),
}
OF_A_COLUMN = ("weight", "bias")
SHAPES = {"in cache": (64, 768), "out of it": (4096, 8192)}

Call = Callable[[], object]


def generated(name: str, folder: Path) -> Any:
    """The kernels of a project that is made of a case's formula."""
    every = {"param_type": "required", "format": ["ND"], "type": ["float", "bf16", "fp16"]}
    shapes = {n: ["N"] if n in OF_A_COLUMN else ["...", "N"] for n in CASES[name].inputs}
    prototype = {
        "op": "".join(word.title() for word in (*name.split("_"), "generated")),
        "input_desc": [{"name": n, "shape": shape, **every} for n, shape in shapes.items()],
        "output_desc": [{"name": "y", **every}],
        "formula": CASES[name].formula,
    }
    file = folder / f"{name}.json"
    file.write_text(json.dumps(prototype))
    kernels = project.load(create(file, folder / name, backends=("cpu",))[0]).KERNELS
    ready = kernels.ready(torch.device("cpu"))
    if ready is not True:
        raise RuntimeError(ready)
    return kernels


def contestants(
    name: str, made: Any, dtype: torch.dtype, shape: tuple[int, int]
) -> Iterator[tuple[str, Call, Call]]:
    """By pass: the kernel by hand and the generated one, each with results of its own."""
    case = CASES[name]
    t = {n: torch.randn(shape[1:] if n in OF_A_COLUMN else shape).to(dtype) for n in ("dy", *case.inputs)}
    t |= {n: torch.empty(shape[:1]) for n in case.kept}
    given = [t[n] for n in case.inputs]
    by_hand = getattr(torch.ops.opsmith, case.kernel), getattr(torch.ops.opsmith, f"{case.kernel}_backward")

    def run(kernel: Callable[..., object], args: Sequence[Any], results: Sequence[str], kept: Any) -> Call:
        outputs = {n: torch.empty_like(t[n.removeprefix("d") if n != "y" else "dy"]) for n in results}
        t.update(outputs if "y" in outputs else {})

        def call() -> object:
            kernel(*args, **outputs, **kept)
            return tuple(outputs.values())

        return call

    def named(args: Sequence[Any]) -> list[Any]:
        return [t[a] if isinstance(a, str) else a for a in args]

    forward, backward = made.op("cpu"), made.op("cpu", "backward")
    own = run(forward, given, ["y"], {})
    hand = run(by_hand[0], named(case.forward), ["y"], {n: t[n] for n in case.kept})
    yield "forward", hand, own
    hand()  # what the backward reads of it
    gradients = [f"d{n}" for n in case.inputs]
    yield (
        "backward",
        run(by_hand[1], named(case.backward), gradients, {}),
        run(backward, [t["dy"], *given], gradients, {}),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(CASES), help="operators, separated by commas")
    parser.add_argument("--dtype", default="float32,bfloat16,float16")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--threads", type=int, help="by default those of PyTorch")
    parser.add_argument("--json", type=Path, help="a file to keep the samples in")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    libraries.load(*(n for case in CASES.values() for n in (case.kernel, f"{case.kernel}_backward")))
    print(
        f"{'operator':14} {'dtype':9} {'pass':9} {'where':10} {'by hand':>10} {'generated':>10} {'ratio':>7}"
    )
    kept = []
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
                        kept.append(
                            {"operator": name, "dtype": dtype, "direction": step, "where": where}
                            | {"samples": {n: list(run.samples[n]) for n in ("hand", "generated")}}
                        )
    if args.json:
        taken = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        found = {"taken": taken, "machine": measure.describe().to_json(), "shapes": SHAPES, "runs": kept}
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
