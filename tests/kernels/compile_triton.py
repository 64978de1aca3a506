"""Compiles the Triton kernels for GPUs that need not be here, in the variants that the cards' samples ask for.

Run by test_triton.py in a process of its own: the kernels take the CPU's place, and where one would be launched, it
is compiled instead, down to machine code. Prints a line for each that does not compile; the last says how many did.

    python tests/kernels/compile_triton.py [--every] [--table FILE] [name of a card ...]

Without --every, each kernel for each GPU, and of each kernel a few variants that take different ways through it: all
of them take a quarter of an hour. With --table, what of a multiprocessor each variant takes is written to a file: the
registers of a thread, bytes that it spills to memory, and the shared memory of a program.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


import triton

from opsmith.authoring.project.triton_check import FEW, take_the_cpus_place, walk
from opsmith.kernels.triton import ahead as how
from opsmith.kernels.triton.ahead import Ahead, Variant

_CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
_USED = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
# Bytes that a kernel may spill: int8 of 1 to 16 tokens, where no row is aligned, which others copy past registers.
EXPLAINED = {"opsmith.ops.mla.triton.stages.project_kernel": 16}
resources: list[dict[str, Any]] = []


def measured(variant: Variant, target: Any) -> Any:
    """Compile, and keep what the machine code says of itself."""
    made = how.compiled(variant, target)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        said = subprocess.run(
            [_CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        )
    found = _USED.search(said.stdout)
    assert found is not None, said.stdout
    registers, stack, fixed, local = map(int, found.groups())
    shared = made.metadata.shared or fixed
    row = {
        "registers": registers,
        "spilled": stack + local,
        "shared": shared,
        "warps": made.metadata.num_warps,
    }
    resources.append({"kernel": variant.name, "gpu": f"sm_{target.arch}"} | row)
    return made


class EachWay(Ahead):
    """The first variant of a kernel for a GPU, and a few that differ from those before by more than sizes.

    What decides the way through a kernel is which arguments are there, flags and dtypes. Another size of a block
    compiles the same lines; that it is a power of two, the interpreter asks of every sample. The ways are compiled
    for the first GPU; the second has a variant of each kernel, to show what is particular to it.
    """

    every = False

    def __init__(self) -> None:
        super().__init__(compiler=lambda variant, target: how.machine_code(variant, target, measured))
        self.ways: dict[str, set[object]] = {}

    def wanted(self, variant: Variant) -> bool:
        way = tuple((k, str(v)) for k, v in variant.constants.items() if type(v) is not int)
        ways = self.ways.setdefault(variant.name, set())
        first = not any(key[:2] == (variant.name, self.target.arch) for key in self.compiled)
        if not (self.every or first or (way not in ways and len(ways) < FEW)):
            return False
        ways.add(way)
        return True


ahead = EachWay()
take_the_cpus_place(ahead)
import opsmith.ops  # noqa: F401, E402  registers the cards
from opsmith.operator import registry  # noqa: E402

compile_instead, compiled = ahead.launch, ahead.compiled


def main(names: list[str]) -> int:
    """Compile what the cards launch."""
    if "--every" in names:
        names.remove("--every")
        ahead.every = True
    table = None
    if "--table" in names:
        at = names.index("--table")
        table = Path(names[at + 1])
        del names[at : at + 2]
    chosen = [card for card in registry().values() if not names or card.name in names]
    for stopped in walk(chosen, ahead):
        print(f"  {stopped}")
    wrong = [text for text in compiled.values() if text]
    if names:
        print(*sorted({key[0] for key in compiled}), sep="\n")
    kernels_seen = {key[0] for key in compiled}
    wrong += [
        f"{row['kernel']} for {row['gpu']} spills {row['spilled']} bytes"
        for row in resources
        if row["spilled"] > EXPLAINED.get(row["kernel"], 0)
    ]
    print("\n".join(wrong))
    if table is not None:
        table.write_text(json.dumps(sorted(resources, key=str), indent=1) + "\n")
    print(f"compiled {len(compiled) - len(wrong)} of {len(compiled)} variants of {len(kernels_seen)} kernels")
    return bool(wrong)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main(sys.argv[1:]))
