"""The gradients of experts: each expert's products for its own tokens, behind one entry of the dispatcher."""

from __future__ import annotations

import torch
from torch import Tensor

from opsmith.ops.experts.middle import middle_backward
from opsmith.ops.linear.onednn import our_product


def experts_backward(
    dy: Tensor,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: int,
    limit: float,
    *,
    dx: Tensor | None = None,
    dgate_up: Tensor | None = None,
    ddown: Tensor | None = None,
    dweights: Tensor | None = None,
    dgate_up_bias: Tensor | None = None,
    ddown_bias: Tensor | None = None,
) -> None:
    """What stands between the products is computed again; an expert that no token was sent to costs its zeros."""
    each = ids.shape[1]
    order = ids.reshape(-1).sort(stable=True).indices
    counts = torch.bincount(ids.reshape(-1), minlength=len(down)).tolist()
    total = None if dx is None else torch.zeros(dx.shape, dtype=torch.float32, device=dx.device)
    slopes = None if dweights is None else torch.empty(order.shape, dtype=torch.float32, device=x.device)
    shares = weights.reshape(-1, 1).float()
    further = any(t is not None for t in (dx, dgate_up, dgate_up_bias))
    for expert, some in enumerate(order.split(counts)):
        mine = [None if t is None else t[expert] for t in (dgate_up, ddown, dgate_up_bias, ddown_bias)]
        if not len(some):
            for t in mine:
                if t is not None:
                    t.zero_()
            continue
        dfirst, dlast, dfirst_bias, dlast_bias = mine
        first, last, token = gate_up[expert], down[expert], some // each
        rows, seen, share = x[token], dy[token], shares[some]
        between = our_product(rows, first, None if gate_up_bias is None else gate_up_bias[expert])
        # The gradient of the hidden numbers, but for the token's weight.
        through = our_product(seen, last.t())
        acted, back = middle_backward(between, through, share, activation, limit, further)
        if slopes is not None:
            slope = (through.float() * acted.float()).sum(1)
            slopes[some] = slope if down_bias is None else slope + seen.float() @ down_bias[expert].float()
        if dlast is not None:
            our_product((seen * share).to(x.dtype).t(), acted.t(), y=dlast)
        if dlast_bias is not None:
            dlast_bias.copy_((seen.float() * share).sum(0))
        if back is None:
            continue
        if dfirst_bias is not None:
            dfirst_bias.copy_(back.sum(0))
        back = back.to(x.dtype)
        if dfirst is not None:
            our_product(back.t(), rows.t(), y=dfirst)
        if total is not None:
            total.index_add_(0, token, our_product(back, first.t()).float())
    if dx is not None and total is not None:
        dx.copy_(total)
    if dweights is not None and slopes is not None:
        dweights.copy_(slopes.view(dweights.shape))
