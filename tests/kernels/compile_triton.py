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


from opsmith.authoring.triton_check import FEW, take_the_cpus_place, walk
from opsmith.kernels.triton.ahead import Ahead

ahead = Ahead(FEW)
take_the_cpus_place(ahead)
import opsmith.ops  # noqa: F401, E402  registers the cards
from opsmith.operator import registry  # noqa: E402

compile_instead, compiled = ahead.launch, ahead.compiled


def main(names: list[str]) -> int:
    """Compile what the cards launch."""
    if "--every" in names:
        names.remove("--every")
        ahead.most = sys.maxsize
    chosen = [card for card in registry().values() if not names or card.name in names]
    for stopped in walk(chosen, ahead):
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
