"""The rows of a gradient that are not zero: backward passes leave the others out of their products.

A loss that ignores targets gives the tokens it ignores rows of zeros: five of six in the training of masked language
models, the prompt in fine-tuning, the padding everywhere. A row stays zero on its way back through norms, activations
and linear layers, up to the attention that mixes the tokens.
"""

from __future__ import annotations

import torch

from opsmith.call.dispatch import native
from opsmith.call.fast import direct
from opsmith.kernels import libraries

_WORTH = 4  # one row of so many must be zero to be worth a copy of the others


def nonzero_rows(x: torch.Tensor) -> torch.Tensor | None:
    """The numbers of the rows of x [M, N] that are not zero; None where that are most, or where nobody looks.

    Where all are zero, row 0 stands for them. Float32 on a CPU is looked at: the products of the others are libraries'.
    """
    m = x.shape[0]
    if (
        torch.compiler.is_compiling()
        or x.dtype != torch.float32
        or native(x, "nonzero_rows") is not True
        or m < 2
    ):
        return None
    found = torch.empty(m + 1, dtype=torch.int64)
    direct.nonzero_rows(x, found=found)
    count = int(found[0])
    return found[1 : 1 + max(count, 1)] if count <= m - m / _WORTH else None


def among_zeros(few: torch.Tensor, rows: torch.Tensor, m: int) -> torch.Tensor:
    """[m, N]: these rows, and zeros elsewhere."""
    return few.new_zeros(m, few.shape[1]).index_copy_(0, rows, few)


libraries.offer("nonzero_rows", "nonzero_rows")
