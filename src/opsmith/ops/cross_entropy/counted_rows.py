"""`linear_cross_entropy` of the rows that count: those whose targets are ignored are left out of every product.

In training of masked language models five tokens of six are ignored, in fine-tuning the whole prompt.
"""

from __future__ import annotations

import torch

from opsmith.ops.cross_entropy import REDUCTIONS
from opsmith.ops.cross_entropy import chunks as logit_chunks

_WORTH = 8  # one row of so many must be ignored to be worth a copy of the others


def _counted(target: torch.Tensor, ignore_index: int) -> torch.Tensor | None:
    """The rows that count, or None: all, none, or on a GPU, which would have to be waited for."""
    if not target.is_cpu:
        return None
    rows = (target != ignore_index).nonzero().squeeze(1)
    return rows if 0 < len(rows) <= len(target) - len(target) / _WORTH else None


def _spread(out: torch.Tensor | None, rows: torch.Tensor, values: torch.Tensor | None, dim: int = 0) -> None:
    if out is not None and values is not None:
        out.zero_().index_copy_(dim, rows, values)


def forward(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: int,
    *,
    loss: torch.Tensor,
    stats: torch.Tensor | None = None,
) -> None:
    """`logit_chunks.forward` of those rows; the others' losses are 0."""
    options = (ignore_index, label_smoothing, z_loss, reduction)
    rows = _counted(target, ignore_index)
    if rows is None:
        logit_chunks.forward(hidden, weight, target, bias, *options, loss=loss, stats=stats)
        return
    each = loss.new_empty(len(rows)) if reduction == REDUCTIONS["none"] else loss
    few = None if stats is None else stats.new_empty(2, len(rows))
    logit_chunks.forward(hidden[rows], weight, target[rows], bias, *options, loss=each, stats=few)
    if each is not loss:
        _spread(loss, rows, each)
    _spread(stats, rows, few, 1)


def forward_with_gradients(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: int,
    scale: float,
    *,
    loss: torch.Tensor,
    dhidden: torch.Tensor | None = None,
    dweight: torch.Tensor | None = None,
    dbias: torch.Tensor | None = None,
) -> None:
    """`logit_chunks.forward_with_gradients` of those rows; the others' gradients are 0."""
    rows = _counted(target, ignore_index)
    few = dhidden if dhidden is None or rows is None else dhidden.new_empty(len(rows), dhidden.shape[1])
    if rows is not None:
        hidden, target = hidden[rows], target[rows]
    logit_chunks.forward_with_gradients(
        hidden,
        weight,
        target,
        bias,
        ignore_index,
        label_smoothing,
        z_loss,
        reduction,
        scale,
        loss=loss,
        dhidden=few,
        dweight=dweight,
        dbias=dbias,
    )
    if rows is not None:
        _spread(dhidden, rows, few)


def backward(
    dloss: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    stats: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: int,
    *,
    dhidden: torch.Tensor | None = None,
    dweight: torch.Tensor | None = None,
    dbias: torch.Tensor | None = None,
) -> None:
    """`logit_chunks.backward` of those rows; the others' gradients are 0."""
    options = (ignore_index, label_smoothing, z_loss, reduction)
    rows = _counted(target, ignore_index)
    few = dhidden if dhidden is None or rows is None else dhidden.new_empty(len(rows), dhidden.shape[1])
    if rows is not None:
        hidden, target, stats = hidden[rows], target[rows], stats[:, rows]
        dloss = dloss[rows] if reduction == REDUCTIONS["none"] else dloss
    logit_chunks.backward(
        dloss, hidden, weight, target, bias, stats, *options, dhidden=few, dweight=dweight, dbias=dbias
    )
    if rows is not None:
        _spread(dhidden, rows, few)
