"""RopeCustom: y = x * cos + rotate_interleaved(x) * sin

The card of the operator: what is true of it, for dispatch, verification, benchmarks and the compiler.
Its kernels are in kernels/; after a change there, `opsmith verify` this folder.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from opsmith.authoring import project
from opsmith.authoring.project import function
from opsmith.authoring.project.function import rotate_interleaved
from opsmith.call.layouts import nbytes
from opsmith.operator import Cost, Make, Pattern, Sample

KERNELS = project.kernels(
    __file__,
    "rope_custom",
    inputs={"x": "B H L D", "cos": "L D", "sin": "L D"},
    outputs={"y": "B H L D"},
    dtypes=("float16", "bfloat16", "float32"),
    gradients=("x",),
)


def reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The definition, in plain PyTorch."""
    return x * cos + rotate_interleaved(x) * sin


def cost(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Cost:
    """Operations, and the bytes that must be read and written."""
    elements = x.numel()
    return Cost(3.0 * elements, nbytes(x, cos, sin) + elements * x.element_size())


def inputs(make: Make, B: int, H: int, L: int, D: int) -> tuple[torch.Tensor, ...]:
    """Tensors of the given sizes."""
    return make(B, H, L, D), make(L, D), make(L, D)


def samples(make: Make) -> Iterator[Sample]:
    """What `opsmith verify` tries: add the sizes and values that matter to you."""
    for B, H, L, D in ((1, 1, 1, 2), (1, 2, 3, 6), (2, 1, 9, 34), (1, 3, 2, 130), (3, 2, 5, 384)):
        yield Sample(f"{B}x{H}x{L}x{D}", inputs(make, B, H, L, D))
    x, cos, sin = inputs(make, 1, 3, 2, 130)
    yield Sample("strided", (x.transpose(-1, -2).contiguous().transpose(-1, -2), cos, sin))
    yield Sample("empty", inputs(make, 0, 2, 3, 6))


def workloads(make: Make) -> Iterator[Sample]:
    """What `opsmith bench` times: the sizes that your models use."""
    yield Sample("2x32x2048x128", inputs(make, 2, 32, 2048, 128))
    yield Sample("1x1x1x128", inputs(make, 1, 1, 1, 128))


CARD = function.card(
    KERNELS,
    reference,
    kind="rope",
    cost=cost,
    samples=samples,
    workloads=workloads,
    even=("D",),
    patterns=(
        Pattern(
            "rope_custom(x, cos, sin)",
            reference,
            {"x": ("B", "H", "L", "D"), "cos": ("L", "D"), "sin": ("L", "D")},
        ),
    ),
)
rope_custom = CARD.function
