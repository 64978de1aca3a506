"""What an entry of the dispatcher costs when it is called by itself, where the card's own cost does not say.

The profiler sees such a call as shapes without values, under the names of the entry's schema; a card's `entries` names
the formula. Tensors are on the meta device, and None where a call left them out.
"""

from __future__ import annotations

from typing import Any

import torch

from opsmith.call.layouts import nbytes
from opsmith.operator import Cost
from opsmith.ops.attention.samples import visible_pairs


def attention_entry(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor | None, **rest: Any
) -> Cost:
    """Of the pairs that are visible; the gradients have the scores once more.

    Of several packed sequences the lengths are values, which a call's shapes do not tell.
    """
    heads, length, keys = q.shape[:-2].numel(), q.shape[-2], k.shape[-2]
    if cu_seqlens_q is not None:
        if cu_seqlens_q.shape[0] != 2:
            raise NotImplementedError
        heads, length, keys = q.shape[1], q.shape[0], k.shape[0]
    seen = visible_pairs(length, keys, bool(rest["causal"]), rest["window"] or None)
    tensors = [t for t in (cu_seqlens_q, *rest.values()) if isinstance(t, torch.Tensor)]
    flops = 2.0 * heads * seen * (q.shape[-1] + v.shape[-1])
    return Cost(2.5 * flops if "dout" in rest else flops, nbytes(q, k, v, *tensors))
