"""The rotary embedding of one layer, step by step in PyTorch against one fused call: latency and peak memory.

python benchmarks/rope_stepwise.py [--shape 1,32,512,128] [--dtype float32] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

import torch

from opsmith import measure
from opsmith.ops import rope, rope_table


def stepwise(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Slice, negate, concatenate, two products, a sum: each an operator with a result in memory of its own."""
    half = x.shape[-1] // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * cos) + (rotated * sin)


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--shape", default="1,32,512,128")
    arguments.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    arguments.add_argument("--seconds", type=float, default=5.0)
    arguments.add_argument("--json", type=Path)
    given = arguments.parse_args()
    dtype = getattr(torch, given.dtype)
    shape = tuple(int(n) for n in given.shape.split(","))
    cos, sin = rope_table(shape[-1], shape[-2], dtype=dtype)
    calls = {
        "stepwise": lambda x, out: stepwise(x, cos, sin),
        "fused": lambda x, out: rope(x, cos, sin),
        "fused, out=": lambda x, out: rope(x, cos, sin, out=out),
        "fused, in place": lambda x, out: rope(x, cos, sin, out=x),  # keeps x's size however often
    }
    x, out = torch.randn(shape).to(dtype), torch.empty(shape, dtype=dtype)
    with torch.no_grad():
        exact = stepwise(x.double(), cos.double(), sin.double())
        bound = 2 * (stepwise(x, cos, sin).double() - exact).abs().max()
        bound += torch.finfo(dtype).eps * exact.abs().max()
        for name, call in calls.items():
            error = (call(x.clone(), out).double() - exact).abs().max()
            if not error <= bound:
                raise SystemExit(f"rope_stepwise: {name} is off by {error:.3g}, allowed are {bound:.3g}")
        peaks = {name: measure.peak_bytes(partial(call, x, out)) for name, call in calls.items()}
        pool = measure.Pool(lambda i: (x.clone(), out.clone()), total_bytes=2 * x.nbytes)
        taken = measure.compare(calls, pool=pool, warm=True, budget_s=given.seconds)
    print(f"rope {list(shape)} {given.dtype}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print("| | median, ms | against stepwise | memory at the peak, MB | with the input | against stepwise |")
    print("|---|---|---|---|---|---|")
    rows = []
    for name in calls:
        ms, with_input = taken.median(name) * 1e3, peaks[name] + x.nbytes
        faster = taken.median(name) / taken.median("stepwise") - 1
        smaller = with_input / (peaks["stepwise"] + x.nbytes) - 1
        rows.append({"name": name, "ms": ms, "peak_bytes": peaks[name], "with_input_bytes": with_input})
        print(
            f"| {name} | {ms:.3f} | {faster:+.0%} | {peaks[name] / 1e6:.1f} | {with_input / 1e6:.1f} "
            f"| {smaller:+.0%} |"
        )
    if given.json:
        given.json.write_text(json.dumps({"rows": rows, "comparison": taken.to_json()}, indent=1))


if __name__ == "__main__":
    main()
