"""Softmax, alone or fused with the scale and the mask before it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from opsmith.call.arguments import check_float, check_mask, check_number
from opsmith.call.dispatch import compiling
from opsmith.call.layouts import nbytes, spread
from opsmith.call.run import Call, declare
from opsmith.call.signature import Gradient, Input, Made, Number, Output, Saved, Signature, Slope
from opsmith.operator import Cost, Kind, Make, Pattern, Sample, Supports

METHODS = {"auto": 0, "stable": 1, "fast": 2}

SIGNATURE = Signature(
    "softmax",
    (
        Input("x", "... N"),
        Input("mask", "... N", optional=True),
        *(Number("scale", float), Number("causal", bool), Number("method", int)),
    ),
    (Output("y", "... N", onto=("x",)),),
    gradient=Gradient(
        "softmax_backward", (Slope("y"), Saved("y"), Saved("scale")), (Made("x", optional=False),)
    ),
    beside=("dim",),
)


def softmax(
    x: Tensor,
    dim: int = -1,
    *,
    scale: float = 1.0,
    mask: Tensor | None = None,
    causal: bool = False,
    method: str = "auto",
    out: Tensor | None = None,
) -> Tensor:
    """Exponentials of a dimension, divided by their sum; scale and mask cost no pass of their own.

    `y = exp(s - max(s)) / sum(exp(s - max(s)))`, with `s = scale * x + mask`. A row in which everything
    is masked gives zeros.

    >>> softmax(torch.randn(2, 4, 8, 8), scale=0.125, causal=True).shape
    torch.Size([2, 4, 8, 8])

    Args:
        x: any shape, float32, bfloat16 or float16 (float64 through PyTorch).
        dim: the dimension that sums to 1; the kernel takes the last one, PyTorch the others.
        scale: multiplies x before the mask.
        mask: broadcastable to x; boolean (True = keep), or added to `scale * x`.
        causal: also mask element j of row i where `j > i + S - L`, for x [..., L, S] and the last dimension.
        method: "stable" subtracts the row's maximum; "fast" does not, and is for rows known to be small;
            "auto" takes the fast way for the rows in which it is no less accurate.
        out: a tensor like x to write into; x itself is allowed when no gradient is needed.

    Raises:
        TypeError, ValueError: for a wrong dtype, shape, device or method.

    Source: Bridle, 1990; Milakov, Gimelshein, "Online normalizer calculation for softmax", 2018.
    """
    code = METHODS[method] if method in METHODS else repr(method)
    call = _CALL.traced if compiling() or mask is not None or causal else _CALL.fast.call
    return call(x, mask, scale, causal, code, _other(x, dim), out)  # type: ignore[no-any-return]


def _other(x: Tensor, dim: int) -> int | None:
    """The dimension, where it is not the last one."""
    return None if dim == -1 or (isinstance(x, Tensor) and dim == x.dim() - 1) else dim


def definition(
    x: Tensor, mask: Tensor | None, scale: float, causal: bool, method: int, dim: int | None = None
) -> Tensor:
    """The definition, in plain PyTorch."""
    dim = -1 if dim is None else dim
    s = x if scale == 1.0 else x * scale
    if mask is not None:
        s = s.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else s + mask
    if causal:
        rows, columns = x.shape[-2:]
        visible = torch.ones(rows, columns, dtype=torch.bool, device=x.device).tril(columns - rows)
        s = s.masked_fill(~visible, -math.inf)
    if mask is None and not causal:
        return torch.softmax(s, dim)
    # A fully masked row is set to zeros before and after, so that no NaN reaches the gradient either.
    dead = (s == -math.inf).all(dim, keepdim=True)
    return torch.softmax(s.masked_fill(dead, 0.0), dim).masked_fill(dead, 0.0).to(x.dtype)


class _Softmax(Call):
    """Masks broadcast, and with one or with causality a row's place counts."""

    def __init__(self) -> None:
        converted = {"method": lambda method: METHODS[method], "dim": _other}
        super().__init__(SIGNATURE, softmax, definition, converted=converted)
        self.saved, self.likes = {"y": "x"}, []  # the result alone is kept, which lies as x would

    def check(self, values: Sequence[Any]) -> None:
        x, mask, scale, causal, code, dim = values
        dim = -1 if dim is None else dim
        check_float("softmax", x)
        check_number("softmax", "dim", dim, whole=True)
        if not -x.dim() <= dim < x.dim():
            raise ValueError(
                f"softmax: dim must be in [{-x.dim()}, {x.dim()}) for shape {tuple(x.shape)}, got {dim}"
            )
        check_number("softmax", "scale", scale)
        if isinstance(code, str):
            raise ValueError(f"softmax: method must be one of {', '.join(METHODS)}, got {code}")
        if causal and (x.dim() < 2 or dim % x.dim() != x.dim() - 1):
            raise ValueError(
                f"softmax: causal needs x [..., L, S] and the last dimension, got {tuple(x.shape)}, dim {dim}"
            )
        if mask is not None:
            check_mask("softmax", mask, x, x.shape, "the shape of x")

    def apart(self, values: Sequence[Any]) -> Sequence[str]:
        *_, causal, _, dim = values
        return () if causal or dim is not None else ("...",)

    def backend(self, values: Sequence[Any], training: bool) -> str | None:
        _, mask, *_ = values
        learned = training and mask is not None and mask.requires_grad
        return None if learned else super().backend(values, training)

    def supported(self, values: Sequence[Any], *more: str) -> Supports:
        if values[-1] is not None:
            return f"the kernel works on the last dimension, not on dim {values[-1]}"
        return super().supported(values, *more)

    def run(
        self, backend: str, values: Sequence[Any], out: Any = None, keep: bool = False
    ) -> tuple[list[Tensor], dict[str, Any]]:
        x, mask, scale, causal, method, _ = values
        y = out if out is not None and out.is_contiguous() else self.fresh(x)
        if x.numel():
            self.over_rows(x, None if mask is None else spread(mask, x.shape), y, scale, causal, method)
        return [y], {**self.named(values), "y": y}

    def over_rows(
        self, x: Tensor, mask: Tensor | None, y: Tensor, scale: float, causal: bool, method: int
    ) -> None:
        """Call the kernel on [outer, L, S] views; where the mask's strides allow none, once per leading index."""
        if x.dim() < 3:
            shape: tuple[int, ...] = (1, 1, *x.shape)[-3:]
            views = [None if t is None else t.view(shape) for t in (x, mask, y)]
        elif mask is None:
            shape = (-1, *x.shape[-2:])
            views = [x.reshape(shape), None, y.view(shape)]
        else:
            # The causal rule reads a row's place: only without it may leading dimensions be merged into rows.
            last = x.dim() - 2
            split = next((k for k in range(last, last - 1 if causal else 0, -1) if _mergeable(mask, k)), 0)
            if not split:
                for part in zip(x, mask, y, strict=True):
                    self.over_rows(*part, scale, causal, method)
                return
            shape = (math.prod(x.shape[:split]), math.prod(x.shape[split:-1]), x.shape[-1])
            views = [x.reshape(shape), mask.view(shape), y.view(shape)]
        rows = [
            None if t is None else t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()
            for t in views[:2]
        ]
        self.kernel("opsmith")(rows[0], rows[1], scale, causal, method, y=views[2])


def _mergeable(t: Tensor, split: int) -> bool:
    """True when the dimensions before `split`, and those up to the last but one, merge without a copy."""
    dims = list(zip(t.shape, t.stride(), strict=True))
    for group in (dims[:split], dims[split:-1]):
        real = [(size, step) for size, step in group if size != 1]
        if any(step != size * inner for (_, step), (size, inner) in pairwise(real)):
            return False
    return True


_CALL = _Softmax()


def _cost(x: Tensor, dim: int = -1, *, mask: Tensor | None = None, **options: Any) -> Cost:
    masked = 0 if mask is None else 1
    return Cost((5.0 + masked) * x.numel(), 2 * x.numel() * x.element_size() + nbytes(mask))


def _samples(make: Make) -> Iterator[Sample]:
    for rows, n in ((1, 1), (1, 384), (3, 7), (17, 33), (64, 512), (5, 4097)):
        yield Sample(f"{rows}x{n}", (make(rows, n, scale=3.0),))
    yield Sample("vector", (make(19),))
    yield Sample("narrow around 1000", (make(4, 130, scale=0.3, shift=1000.0),))
    yield Sample("narrow around -1000", (make(4, 130, scale=0.3, shift=-1000.0),))
    yield Sample("wide", (make(4, 130, scale=60.0),))
    yield Sample("fast", (make(4, 130),), {"method": "fast"})
    yield Sample("stable", (make(4, 130, scale=20.0),), {"method": "stable", "scale": 0.5})
    x = make(2, 3, 9, 33)
    yield Sample("scale", (x,), {"scale": 0.125})
    yield Sample("causal", (x,), {"causal": True, "scale": 0.3})
    yield Sample("causal, more rows than columns", (make(2, 9, 4),), {"causal": True})
    yield Sample("boolean mask", (x,), {"mask": make.mask(2, 3, 9, 33)})
    yield Sample("padding mask", (x,), {"mask": make.mask(2, 1, 1, 33), "scale": 0.3})
    yield Sample("mask per sequence", (x,), {"mask": make.mask(2, 1, 9, 33), "causal": True})
    yield Sample("additive mask", (x,), {"mask": make(1, 3, 9, 33)})
    yield Sample("additive mask of a column", (x,), {"mask": make(9, 1)})
    yield Sample("all masked", (make(3, 70),), {"mask": make.mask(3, 70, keep=0.0)})
    yield Sample("strided", (make(6, 64).t(),))
    yield Sample("sliced rows", (make(8, 200)[:, 20:84],), {"scale": 2.0})
    yield Sample("first dimension", (make(12, 5),), {"dim": 0})
    yield Sample("empty", (make(0, 16),))
    yield Sample("no columns", (make(4, 0),))


def _promised(x: Tensor, dim: int = -1, *, scale: float = 1.0, method: str = "auto", **options: Any) -> bool:
    """All calls but those to the fast method whose exponentials a float32 cannot hold."""
    return method != "fast" or not bool((x.float() * scale).abs().nan_to_num(math.inf).gt(60.0).any())


def _workloads(make: Make) -> Iterator[Sample]:
    yield Sample("4096x4096", (make(4096, 4096),))
    mask = make.mask(8, 1, 1, 512, keep=0.9)
    yield Sample("8x12x512x512 padding mask", (make(8, 12, 512, 512),), {"mask": mask, "scale": 0.125})
    yield Sample("1x32000", (make(1, 32000, scale=3.0),))


CARD = _CALL.card(
    kind=Kind.SOFTMAX,
    cost=_cost,
    samples=_samples,
    workloads=_workloads,
    domain=_promised,
    patterns=(
        Pattern("softmax(x)", lambda x: torch.softmax(x, -1), {"x": ("B", "L", "S")}),
        Pattern(
            "softmax(x, scale)",
            lambda x, scale: torch.softmax(x * scale, -1),
            {"x": ("B", "L", "S"), "scale": 0.3},
        ),
    ),
    schemas=declare(SIGNATURE),
    source="Bridle, 1990; Milakov, Gimelshein, 2018",
)
