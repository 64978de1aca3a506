"""A small project to try the toolchain on: rows divided by their root mean square, then turned as RoPE turns them.

Its one kernel has everything that the planted faults need: a sum, an epsilon, a sine, a tail.
"""

from pathlib import Path

OPERATOR = '''"""A row divided by its root mean square, its pairs turned: rotate(x / sqrt(mean(x^2) + eps))."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from opsmith.authoring import project
from opsmith.kernels import triton
from opsmith.operator import Cost, Implementation, Kind, Make, Operator, Pattern, Sample, register

KERNELS = project.kernels(
    __file__,
    "NAME",
    inputs={"x": "... N", "cos": "N", "sin": "N"},
    outputs={"y": "... N"},
    attributes={"eps": 1e-5},
)


def reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    """The definition, in plain PyTorch."""
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    n = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    turned = torch.stack((-n[..., 1::2], n[..., ::2]), -1).flatten(-2)
    return (n * cos + turned * sin).to(x.dtype)


def run(backend: str, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    KERNELS.op(backend)(x.contiguous(), cos.contiguous(), sin.contiguous(), eps, y=y)
    return y


def NAME(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    """`rotate(x / sqrt(mean(x^2) + eps))` over the last dimension."""
    backend = KERNELS.backend(x.device)
    wants = torch.is_grad_enabled() and any(t.requires_grad for t in (x, cos, sin))
    if backend is None or wants or x.dtype == torch.float64:
        return reference(x, cos, sin, eps)
    return run(backend, x, cos, sin, eps)


def supports(backend: str, x: torch.Tensor, *more: object) -> bool | str:
    return KERNELS.offers(backend) if x.dtype != torch.float64 else "the kernels take no float64"


def samples(make: Make) -> Iterator[Sample]:
    for rows, n in ((1, 2), (3, 6), (17, 34), (5, 130), (64, 256)):
        yield Sample(f"{rows}x{n}", (make(rows, n), make(n), make(n)))
    yield Sample("strided", (make(34, 8).t(), make(34), make(34)))
    yield Sample("small", (make(4, 64, scale=1e-2), make(64), make(64)))
    yield Sample("empty", (make(0, 16), make(16), make(16)))


def workloads(make: Make) -> Iterator[Sample]:
    yield Sample("1024x512", (make(1024, 512), make(512), make(512)))


CARD = register(
    Operator(
        name="NAME",
        kind=Kind.ROPE,
        function=NAME,
        reference=reference,
        cost=lambda x, cos, sin, eps=1e-5: Cost(8.0 * x.numel(), 2 * x.nbytes + cos.nbytes + sin.nbytes),
        samples=samples,
        workloads=workloads,
        implementations=[
            Implementation("native", partial(run, "cpu"), "cpu", partial(supports, "cpu")),
            Implementation("triton", partial(run, "triton"), triton.DEVICE, partial(supports, "triton")),
            Implementation("eager", reference),
        ],
        patterns=(Pattern("NAME", reference, {"x": ("B", "N"), "cos": ("N",), "sin": ("N",), "eps": 1.5e-5}),),
    )
)
'''

CPU = """// A row at a time: its squares are summed, then it is turned.
#include <cmath>

#include "rows.h"

namespace NAME {
using namespace opsmith;

void forward(View x, View cos, View sin, double eps, View y) {
  const int64_t n = x.sizes[x.dim - 1];
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < x.dim; ++d) rows *= x.sizes[d];
  with_float_type(x.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    const T *c = cos.as<T>(), *s = sin.as<T>();
    parallel_for(rows, row_grain(n, 16384), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const T* in = x.as<T>() + r * n;
        T* out = y.as<T>() + r * n;
        double sum = 0;
        for (int64_t i = 0; i < n; ++i) sum += to_float(in[i]) * to_float(in[i]);
        const float scale = 1.0f / std::sqrt(float(sum / double(n)) + float(eps));
        for (int64_t i = 0; i < n; i += 2) {
          const float a = to_float(in[i]) * scale, b = to_float(in[i + 1]) * scale;
          out[i] = from_float<T>(a * to_float(c[i]) - b * to_float(s[i]));
          out[i + 1] = from_float<T>(b * to_float(c[i + 1]) + a * to_float(s[i + 1]));
        }
      }
    });
  });
}

}  // namespace NAME
"""

TRITON = '''"""A program takes a row."""

import torch
import triton
import triton.language as tl

from opsmith.kernels.triton.common import block_of, launch, rounded


@triton.jit
def _turn(x, cos, sin, y, n, eps, HALF: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = 2 * tl.arange(0, HALF)
    mask = i < n
    a = tl.load(x + row * n + i, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x + row * n + i + 1, mask=mask, other=0.0).to(tl.float32)
    total = tl.sum(a * a + b * b)
    scale = 1.0 / tl.sqrt(total / n + eps)
    c1 = tl.load(cos + i, mask=mask, other=0.0).to(tl.float32)
    s1 = tl.load(sin + i, mask=mask, other=0.0).to(tl.float32)
    c2 = tl.load(cos + i + 1, mask=mask, other=0.0).to(tl.float32)
    s2 = tl.load(sin + i + 1, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + row * n + i, rounded((a * c1 - b * s1) * scale, y), mask=mask)
    tl.store(y + row * n + i + 1, rounded((b * c2 + a * s2) * scale, y), mask=mask)


def forward(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float, *, y: torch.Tensor) -> None:
    n = x.shape[-1]
    launch(_turn, (x.numel() // max(n, 1),), x, cos, sin, y, n, eps, HALF=block_of(n) // 2)


KERNELS = {"forward": forward}
'''


def write(
    folder: Path,
    name: str,
    *,
    cpu: dict[str, str] | None = None,
    triton: dict[str, str] | None = None,
    backends: tuple[str, ...] = ("cpu", "triton"),
) -> Path:
    """Write the project into `folder/name`, with these pieces of its kernels replaced."""
    root = folder / name
    texts = {"cpu": (CPU, cpu, ".cpp"), "triton": (TRITON, triton, ".py")}
    root.mkdir(parents=True)
    (root / "operator.py").write_text(OPERATOR.replace("NAME", name))
    for backend in backends:
        text, changes, suffix = texts[backend]
        for old, new in (changes or {}).items():
            assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in the {backend} kernel"
            text = text.replace(old, new)
        (root / "kernels" / backend).mkdir(parents=True)
        (root / "kernels" / backend / f"{name}{suffix}").write_text(text.replace("NAME", name))
    return root
