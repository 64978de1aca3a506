"""Compiles the Triton kernels for GPUs that need not be here, in the variants that the cards' samples ask for.

Run by test_triton.py in a process of its own: the kernels take the CPU's place, and where one would be launched, it
is compiled instead, down to machine code. Prints a line for each that does not compile; the last says how many did.

    python tests/kernels/compile_triton.py [--every] [name of a card ...]

Without --every, the first few variants of each kernel for each GPU: all of them take a quarter of an hour.
"""

from __future__ import annotations

import os
import sys
import warnings

os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


from opsmith.kernels import triton as kernels
from opsmith.kernels.triton import common
from opsmith.kernels.triton.ahead import TARGETS, Ahead

FEW = 3

# Before the operators are imported, which is when they learn where their kernels run.
kernels.DEVICE = "cpu"
import opsmith.ops  # noqa: F401, E402  registers the cards
from opsmith.authoring.triton_check import run  # noqa: E402
from opsmith.operator import Make, registry  # noqa: E402

ahead = Ahead(FEW)
compile_instead, compiled = ahead.launch, ahead.compiled
common.launch = compile_instead
common.processors = lambda like: 132


def main(names: list[str]) -> int:
    """Compile what the cards launch."""
    if "--every" in names:
        names.remove("--every")
        ahead.most = sys.maxsize
    for card in registry().values():
        for dtype, chosen in TARGETS.items() if not names or card.name in names else ():
            ahead.target = chosen
            for sample in card.samples(Make(dtype)):
                if stopped := run(card, sample):
                    print(f"  {stopped}")
    wrong = [text for text in compiled.values() if text]
    if names:
        print(*sorted({key[0] for key in compiled}), sep="\n")
    kernels_seen = {key[0] for key in compiled}
    print("\n".join(wrong))
    print(f"compiled {len(compiled) - len(wrong)} of {len(compiled)} variants of {len(kernels_seen)} kernels")
    return bool(wrong)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main(sys.argv[1:]))
