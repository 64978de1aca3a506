"""Holds every kernel to its card on ARM: `make arm`.

    python -m tests.arm                       both tiers, all operators
    python -m tests.arm softmax --tier dotprod

Each call of a card's samples goes the way that `opsmith verify` sends it, and is judged by that very code; only the
kernel runs elsewhere. At the end every kernel there is must have been called, in every dtype that it takes.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from tests.arm.machine import PROCESSORS, Machine, missing

from opsmith.call.arguments import short
from opsmith.compiler.modules.linear_layers import layer_of
from opsmith.kernels import libraries
from opsmith.operator import Make, Operator, registry
from opsmith.ops import PackedExperts, PackedLinear
from opsmith.ops.packed_linear.formats import FORMATS
from opsmith.proof.verify import Finding, elements_of, verify

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FLOAT32_ALONE = {"linear_gradient"}  # PyTorch's own product is faster in the others

Reached = Mapping[str, set[torch.dtype]]  # kernels, with the dtypes of their calls


def kernels_alone(card: Operator, most: int) -> Operator:
    """The card with our kernels as its only implementation that takes calls, and without its larger samples."""

    def refused() -> str:
        return "it calls no kernel of ours"

    implementations = [
        i if i.name == "native" else replace(i, available=refused) for i in card.implementations
    ]
    samples = card.samples
    return replace(
        card,
        implementations=implementations,
        samples=lambda make: (s for s in samples(make) if elements_of(s) <= most),
    )


# A call that no card makes: the kernel, its results, eager PyTorch's, and what is right in float64.
Call = tuple[str, list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]


def further(dtype: torch.dtype) -> Iterator[Call]:
    """Calls of kernels that no card reaches in every dtype."""
    make = Make(dtype)
    part, total = make(1037), make(1037).float()
    eager, right = part + total, part.double() + total.double()
    torch.ops.opsmith.add_to_total.default(part, total=total)
    yield "add_to_total", [total], [eager], [right]

    def gradients(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
        return [dy @ weight, dy.t() @ x, dy.sum(0)]

    for rows, n, k in ((1, 5, 7), (3, 40, 70), (8, 67, 130)):
        given = make(rows, n), make(rows, k), make(n, k)
        eager = gradients(*given)
        results = [torch.full_like(t, torch.nan) for t in eager]
        names = dict(zip(("dx", "dweight", "dbias"), results, strict=True))
        torch.ops.opsmith.linear_rows_backward.default(*given, **names)
        yield "linear_rows_backward", results, eager, gradients(*(t.double() for t in given))

    def layers(n: int, k: int, format: str) -> PackedExperts:
        weights = make(3, n, k, scale=k**-0.5).float()
        return PackedExperts.of((PackedLinear.from_linear(layer_of(w), format=format) for w in weights), 3)

    experts = registry()["experts"]
    ids, shares = make.ids(9, 2, high=3), make(9, 2).softmax(-1)
    for format in ("int8", "bf16", "mxfp4"):
        x, gate_up, down = make(9, 72), layers(80, 72, format), layers(72, 40, format)
        y, of = torch.full_like(x, torch.nan), FORMATS[format]
        how = (of.bits, of.group, int(of.scales))  # of either weight
        numbers = (*gate_up.packed, *down.packed, ids, shares, None, None, 40, *how, *how, 0, math.inf)
        torch.ops.opsmith.experts_packed.default(x, *numbers, y=y)
        whole, exact = (
            experts.eager(x.to(t), gate_up.dequantize(t), down.dequantize(t), ids, shares.to(t))
            for t in (dtype, torch.float64)
        )
        yield "experts_packed", [y], [whole], [exact]


def judged(call: Call, dtype: torch.dtype) -> Finding:
    """By the policy of all cards."""
    kernel, *tensors = call
    verdicts = [registry()["linear"].tolerance.check(*three) for three in zip(*tensors, strict=True)]
    worst = max(verdicts, key=lambda v: v.error / v.bound if v.bound else v.error)
    why = f"error {worst.error:.3g}, allowed {worst.bound:.3g}"
    ok, elements = all(v.ok for v in verdicts), sum(t.numel() for t in tensors[0])
    return Finding(
        kernel, "native", short(dtype), "further", elements, "values", ok, worst.error, worst.bound, why
    )


def unreached(reached: Reached) -> list[str]:
    """Kernels without a call, and the dtypes without one of the others."""
    found = []
    for kernel in sorted(libraries.kernels()):
        calls = reached.get(kernel, set())
        lacking = [
            d for d in DTYPES if d not in calls and (kernel not in FLOAT32_ALONE or d is torch.float32)
        ]
        if lacking:
            found.append(f"{kernel}: no call reached it in {', '.join(map(short, lacking))}")
    return found


def run(reached: Reached, names: Sequence[str], calls: int, most: int) -> list[str]:
    """Verify operators where kernels run now, which note their calls in `reached`; returns what is wrong."""
    wrong: list[str] = []

    def report(name: str, findings: list[Finding], began: float) -> None:
        red = [finding for finding in findings if not finding.ok]
        worst = max((f.error / f.bound for f in findings if f.ok and f.bound), default=0.0)
        seconds = time.perf_counter() - began
        print(
            f"{name:22} {len(findings):4} checks  {len(red):3} failed  {worst:.2f} of the bound  {seconds:5.1f} s"
        )
        wrong.extend(f"{f.operator}, {f.dtype}, {f.check} of {f.sample!r}: {f.why}" for f in red)

    for name in names or registry():
        began = time.perf_counter()
        report(name, list(verify(kernels_alone(registry()[name], most), calls=calls)), began)
    if not names:
        began = time.perf_counter()
        report("further", [judged(call, dtype) for dtype in DTYPES for call in further(dtype)], began)
        wrong += unreached(reached)
    return wrong


def main(arguments: Sequence[str]) -> int:
    """Verify as the command line says; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.arm")
    parser.add_argument(
        "names", nargs="*", help="of operators; all by default, and then every kernel must be reached"
    )
    parser.add_argument("--tier", action="append", choices=list(PROCESSORS), help="both by default")
    parser.add_argument("--calls", type=int, default=3, help="of each implementation with each sample")
    parser.add_argument("--most", type=int, default=sys.maxsize, help="elements in a sample")
    given: Any = parser.parse_args(arguments)
    if (lacks := missing()) is not None:
        print(lacks, file=sys.stderr)
        return 2
    wrong: list[str] = []
    for tier in given.tier or PROCESSORS:
        print(f"{tier}, on a {PROCESSORS[tier]}")
        with Machine(tier) as machine, machine.in_place():
            wrong += [f"{tier}: {one}" for one in run(machine.reached, given.names, given.calls, given.most)]
    print("\n".join(wrong) or "every kernel does what its card says")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
