"""The gradients of experts: each expert's products for its own tokens, behind one entry of the dispatcher."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from opsmith.call.dispatch import native
from opsmith.call.layouts import dense, dense_rows
from opsmith.ops.experts.middle import middle_backward
from opsmith.ops.linear.onednn import EMULATED_DTYPES, ONEDNN_DTYPES

_FEW = 16  # tokens of an expert up to which its weights are not worth packing


def experts_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    activation: int,
    limit: float,
    *,
    dx: torch.Tensor | None = None,
    dgate_up: torch.Tensor | None = None,
    ddown: torch.Tensor | None = None,
    dweights: torch.Tensor | None = None,
    dgate_up_bias: torch.Tensor | None = None,
    ddown_bias: torch.Tensor | None = None,
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
        between = _forward(rows, first, None if gate_up_bias is None else gate_up_bias[expert])
        through = _back(seen, last)  # the gradient of the hidden numbers, but for the token's weight
        acted, back = middle_backward(between, through, share, activation, limit, further)
        if slopes is not None:
            slope = (through.float() * acted.float()).sum(1)
            slopes[some] = slope if down_bias is None else slope + seen.float() @ down_bias[expert].float()
        if dlast is not None:
            _outer((seen * share).to(x.dtype), acted, dlast)
        if dlast_bias is not None:
            dlast_bias.copy_((seen.float() * share).sum(0))
        if back is None:
            continue
        if dfirst_bias is not None:
            dfirst_bias.copy_(back.sum(0))
        back = back.to(x.dtype)
        if dfirst is not None:
            _outer(back, rows, dfirst)
        if total is not None:
            total.index_add_(0, token, _back(back, first).float())
    if dx is not None and total is not None:
        dx.copy_(total)
    if dweights is not None and slopes is not None:
        dweights.copy_(slopes.view(dweights.shape))


# The products of a linear layer with a weight [n, k], for m rows: by our kernels where rows are few, which they sum
# more exactly than the libraries, or where PyTorch would emulate the dtype; else by PyTorch.


def _ours(x: torch.Tensor, few: bool = True) -> bool:
    if few and len(x) <= _FEW:
        return x.is_cpu and native(x, "linear_rows", "linear_rows_backward") is True
    slow = x.dtype in EMULATED_DTYPES or x.dtype not in ONEDNN_DTYPES
    return x.is_cpu and slow and native(x, "linear_unpacked") is True


def _unpacked(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor
) -> torch.Tensor:
    torch.ops.opsmith.linear_unpacked.default(dense_rows(x), weight, dense(bias), None, 0, y=y)
    return y


def _forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [m, k] times the weight's rows: [m, n]."""
    few = weight.stride(1) == 1
    if not _ours(x, few):
        return F.linear(x, weight, bias)
    y = x.new_empty(len(x), len(weight))
    if few and len(x) <= _FEW:
        torch.ops.opsmith.linear_rows.default(x, weight, dense(bias), None, 0, y=y)
        return y
    return _unpacked(x, weight, bias, y)


def _back(dy: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """dy [m, n] times the weight: [m, k]."""
    few = weight.stride(1) == 1
    if not _ours(dy, few):
        return dy @ weight
    dx = dy.new_empty(len(dy), weight.shape[1])
    if few and len(dy) <= _FEW:
        torch.ops.opsmith.linear_rows_backward.default(dy, dx, weight, dx=dx)  # x itself is not read for dx
        return dx
    return _unpacked(dy, weight.t(), None, dx)


def _outer(dy: torch.Tensor, x: torch.Tensor, dweight: torch.Tensor) -> None:
    """dy [m, n] and x [m, k] into [n, k], which is contiguous."""
    if not _ours(dy):
        torch.mm(dy.t(), x, out=dweight)
    elif len(dy) <= _FEW:
        torch.ops.opsmith.linear_rows_backward.default(
            dy, x, dweight, dweight=dweight
        )  # the weight is not read
    else:
        _unpacked(dy.t().contiguous(), x.t(), None, dweight)
