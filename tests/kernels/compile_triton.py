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
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from opsmith.kernels import triton as kernels
from opsmith.kernels.triton import common

# Half the kernels' variants for each, so that both generations see every kernel.
TARGETS = {torch.bfloat16: GPUTarget("cuda", 90, 32), torch.float32: GPUTarget("cuda", 80, 32)}
FEW = 3
POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float64: "*fp64",
    torch.bool: "*i1",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}

# Before the operators are imported, which is when they learn where their kernels run.
kernels.DEVICE = "cpu"
import opsmith.ops  # noqa: F401, E402  registers the cards
from opsmith.measure.pool import tensors_of  # noqa: E402
from opsmith.operator import Make, Operator, Sample, registry  # noqa: E402
from opsmith.ops.common import always_native  # noqa: E402
from opsmith.ops.verify import with_leaves  # noqa: E402

compiled: dict[Any, str | None] = {}  # a variant, and what was wrong with it
most = FEW  # variants of a kernel for a GPU
target = TARGETS[torch.bfloat16]


def kind(value: Any) -> str:
    """The type that Triton's launcher would give an argument."""
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    if value is None or value is True or value is False or (isinstance(value, int) and value == 1):
        return "constexpr"
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def compile_instead(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """What `common.launch` is replaced by."""
    if 0 in grid:
        return
    names = [p.name for p in kernel.params]
    values = dict(zip(names, args, strict=False))
    settings = {k: options.pop(k) for k in ("num_warps", "num_stages") if k in options}
    values.update(options)
    signature, constants = {}, {}
    for parameter in kernel.params:
        value = values.get(parameter.name, parameter.default)
        how = "constexpr" if parameter.is_constexpr else kind(value)
        signature[parameter.name] = how
        if how == "constexpr":
            constants[parameter.name] = value
    name = f"{kernel.__module__}.{kernel.__name__}"
    key = (name, target.arch, tuple(signature.values()), tuple(map(str, constants.values())), str(settings))
    if key in compiled or sum(other[:2] == key[:2] for other in compiled) >= most:
        return
    compiled[key] = None
    try:
        triton.compile(ASTSource(kernel, signature, constants), target=target, options=settings)
    except Exception as error:
        compiled[key] = f"{name} for sm_{target.arch}, {constants}: {error}"


def run(card: Operator, sample: Sample) -> None:
    """A call, forward and backward. Nothing is computed, so what a kernel says of its inputs is no news."""
    call = (sample.args, dict(sample.kwargs))
    args, kwargs, leaves = with_leaves(*call) if card.differentiable else (*call, [])
    try:
        with always_native():
            outputs = [t for t in tensors_of(card.function(*args, **kwargs)) if t.requires_grad]
            if outputs:
                seeds = [torch.ones_like(t) for t in outputs]
                torch.autograd.grad(outputs, leaves, seeds, allow_unused=True)
            # What the function leaves to PyTorch, or to a sequence of kernels, may have a kernel of its own.
            for one in card.candidates(*call[0], **call[1])[0]:
                if one.name == "triton":
                    one.fn(*call[0], **call[1])
    except (IndexError, RuntimeError) as error:
        print(f"  {card.name}, {sample.name}, stopped: {str(error)[:90]}")


common.launch = compile_instead
common.processors = lambda like: 132


def main(names: list[str]) -> int:
    """Compile what the cards launch."""
    global most, target
    if "--every" in names:
        names.remove("--every")
        most = sys.maxsize
    for card in registry().values():
        for dtype, chosen in TARGETS.items() if not names or card.name in names else ():
            target = chosen
            for sample in card.samples(Make(dtype)):
                run(card, sample)
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
