"""LayerNorm over the last dimension in CUDA C++: kernels, declarations and binding written by hand.

The kernels are in kernels/cuda/: function.cu computes, function.h declares, function.cpp binds. Without a GPU the
reference answers.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from opsmith.authoring import project
from opsmith.authoring.project import function
from opsmith.call.layouts import nbytes
from opsmith.operator import Cost, Make, Pattern, Sample

KERNELS = project.kernels(
    __file__,
    "cuda_layer_norm",
    inputs={"x": "... N", "weight": "N", "bias": "N"},
    outputs={"y": "... N"},
    attributes={"eps": 1e-5},
    dtypes=("float32", "bfloat16 float32 float32 bfloat16", "float16 float32 float32 float16"),
    gradients=("x", "weight", "bias"),
)


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    """The definition, in plain PyTorch: (x - mean) / sqrt(variance + eps) * weight + bias."""
    wide = x.to(weight.dtype)
    return F.layer_norm(wide, x.shape[-1:], weight, bias, eps).to(x.dtype)


def cost(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-5) -> Cost:
    """Operations, and the bytes that must be read and written."""
    return Cost(8.0 * x.numel(), 2 * nbytes(x) + nbytes(weight, bias))


def inputs(make: Make, *shape: int, shift: float = 0.0) -> tuple[torch.Tensor, ...]:
    """Tensors of the given sizes."""
    n = shape[-1]
    return function.fit(KERNELS, make.dtype, make(*shape, shift=shift), make(n), make(n))


def samples(make: Make) -> Iterator[Sample]:
    """What `opsmith verify` tries: rows shorter than a warp, longer than registers hold, and a mean that is large."""
    for rows, n in ((1, 1), (3, 7), (17, 33), (5, 130), (4, 1000), (2, 8200)):
        yield Sample(f"{rows}x{n}", inputs(make, rows, n))
    yield Sample("mean 1e3", inputs(make, 4, 512, shift=1e3))
    x, weight, bias = inputs(make, 60, 64)
    yield Sample("strided", (x.t(), weight[:60], bias[:60]))
    yield Sample("empty", inputs(make, 0, 16))


def workloads(make: Make) -> Iterator[Sample]:
    """What `opsmith bench` times: the sizes that models use."""
    yield Sample("8192x4096", inputs(make, 8192, 4096))
    yield Sample("4096x768", inputs(make, 4096, 768))
    yield Sample("1x4096", inputs(make, 1, 4096))


CARD = function.card(
    KERNELS,
    reference,
    kind="norm",
    cost=cost,
    samples=samples,
    workloads=workloads,
    patterns=(
        Pattern(
            "cuda_layer_norm(x, weight, bias)",
            lambda x, weight, bias, eps: F.layer_norm(x, x.shape[-1:], weight, bias, eps),
            {"x": ("B", "N"), "weight": ("N",), "bias": ("N",), "eps": 1.25e-3},
        ),
    ),
)
cuda_layer_norm = CARD.function
