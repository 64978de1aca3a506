"""What layer_norm and rms_norm share: the residual that comes in, and the pair that goes out."""

from __future__ import annotations

from typing import Any

import torch

from opsmith.call.common import alike, check_like, check_out, earlier, short, writable
from opsmith.kernels import nodes

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]  # y, or (y, x + residual)


# The node of both: the sum that was normalized is x's own where nothing was added.
NODE: dict[str, Any] = {
    "names": {"s": ("summed", "x")},
    "kept": {"mean": nodes.EACH_ROW, "rstd": nodes.EACH_ROW},
    "shared": {"residual": "dx"},
}


def check_pair(op: str, x: torch.Tensor, residual: Any, out: Any, **weights: Any) -> None:
    """Refuse a residual that is not like x, and an `out` that is not like the result."""
    if residual is not None and not alike(residual, x, x.shape):
        check_like(op, residual, x, "residual", x.shape, "the shape of x")
        raise TypeError(
            f"{op}: residual must be {short(x.dtype)} like x, got {short(residual.dtype)}; cast it"
        )
    if out is not None:
        pair = out if isinstance(out, tuple) else (out,)
        if len(pair) != (1 if residual is None else 2):
            raise ValueError(f"{op}: out must be one tensor, or a pair (y, sum) when residual is given")
        for i, t in enumerate(pair):
            memory = {"x": x, "residual": residual, **weights, **earlier(pair, i)}
            check_out(op, t, x, onto=("x", "residual"), **memory)


def writes_rows(out: Result | None) -> bool:
    """True where a kernel can write into what was asked for."""
    if isinstance(out, tuple):
        return all(writable(t) for t in out)
    return out is None or writable(out)


def store(result: Result, out: Result | None) -> Result:
    """Copy a computed result into `out` where one was asked for."""
    if out is None:
        return result
    if isinstance(result, tuple) and isinstance(out, tuple):
        return tuple(o.copy_(r) for o, r in zip(out, result, strict=True))  # type: ignore[return-value]
    assert isinstance(out, torch.Tensor)
    assert isinstance(result, torch.Tensor)
    return out.copy_(result)
