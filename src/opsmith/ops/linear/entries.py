"""What an entry of the dispatcher costs when it is called by itself, where the card's own cost does not say.

The profiler sees such a call as shapes without values, under the names of the entry's schema; a card's `entries` names
the formula. Tensors are on the meta device, and None where a call left them out.
"""

from __future__ import annotations

from typing import Any

import torch

from opsmith.call.layouts import nbytes
from opsmith.operator import Cost

Maybe = torch.Tensor | None


def linear_pack(weight: torch.Tensor, packed: torch.Tensor) -> Cost:
    """A weight in another layout: nothing is computed."""
    return Cost(0.0, nbytes(weight, packed))


def gradients(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: Maybe = None,
    dx: Maybe = None,
    dweight: Maybe = None,
    dbias: Maybe = None,
    **rest: Any,
) -> Cost:
    """A product for each of the two matrices, of which it reads the other, and the sum of the rows."""
    products = [other for to, other in ((dx, weight), (dweight, x)) if to is not None]
    flops = 2.0 * len(products) * dy.numel() * x.shape[-1] + (0 if dbias is None else dy.numel())
    return Cost(flops, nbytes(dy, *products, dx, dweight, dbias))


def product(x: torch.Tensor, y: torch.Tensor, **rest: Any) -> Cost:
    """Rows times a weight, which may be packed: what the entry takes and writes, once."""
    tensors = [t for t in rest.values() if isinstance(t, torch.Tensor)]
    return Cost(2.0 * y.numel() * x.shape[-1], nbytes(x, y, *tensors))
