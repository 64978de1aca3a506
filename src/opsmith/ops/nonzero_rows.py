"""The rows of a gradient that are not zero: backward passes leave the others out of their products.

A loss that ignores targets gives the tokens it ignores rows of zeros: five of six in the training of masked language
models, the prompt in fine-tuning, the padding everywhere. A row stays zero on its way back through norms, activations
and linear layers, up to the attention that mixes the tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORTH = 4  # one row of so many must be zero to be worth a copy of the others
_LOOK = 16  # numbers of each row that are looked at first, a cache line: of a dense gradient no others


def nonzero_rows(x: Tensor) -> Tensor | None:
    """The numbers of the rows of x [M, N] that are not zero; None where that are most, or where nobody looks.

    Where all are zero, row 0 stands for them. Float32 on a CPU is looked at: the products of the others are libraries'.
    """
    m, n = x.shape
    looked_at = x.dtype == torch.float32 and x.is_cpu and m > 1 and n > 0
    if not looked_at or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return None
    live = x[:, :_LOOK].any(1)
    if bool(live.all()):
        return None
    if n > _LOOK:
        live = (x.amax(1) != 0) | (x.amin(1) != 0)
    rows = live.nonzero().squeeze(1)
    if len(rows) > m - m / _WORTH:
        return None
    return rows if len(rows) else rows.new_zeros(1)


def among_zeros(few: Tensor, rows: Tensor, m: int) -> Tensor:
    """[m, N]: these rows, and zeros elsewhere."""
    return few.new_zeros(m, few.shape[1]).index_copy_(0, rows, few)
