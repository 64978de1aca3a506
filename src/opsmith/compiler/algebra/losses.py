"""What the losses mean in the algebra; see `canon`."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from opsmith.compiler.algebra import views
from opsmith.compiler.algebra.canon import Canon, Unreadable, last_axis, op_name, rule, shape_of
from opsmith.compiler.algebra.reductions import log_softmax
from opsmith.compiler.algebra.terms import Poly

# For a loss that ignores nothing: a class number that nothing has.
_NONE_IGNORED = -(2**63)
_MORE_AXES = ("aten::unsqueeze", "aten::view", "aten::reshape")


@rule("cross_entropy_loss", "nll_loss", "nll_loss_nd")
def _loss(
    c: Canon,
    node: Node,
    self: Any,
    target: Any,
    weight: Any = None,
    reduction: int = 1,
    ignore_index: Any = -100,
    label_smoothing: float = 0.0,
) -> Poly:
    """The loss of class numbers under scores, or under logarithms of probabilities, with its settings."""
    ids, shape = target.meta["val"], shape_of(self)
    if weight is not None or len(shape) > 2 or ids.is_floating_point() or ids.dim() != len(shape) - 1:
        raise Unreadable
    settings = (ignore_index, label_smoothing)
    if not all(isinstance(v, int | float) for v in settings):
        raise Unreadable
    scores = c(self)
    if op_name(node) == "aten::cross_entropy_loss":
        scores = log_softmax(c.space, scores, shape[-1])
    return c.space.fn("nll", (scores, c(target)), shape_of(node), (reduction, *settings))


@rule("gather")
def _gather(c: Canon, node: Node, self: Any, dim: int, index: Any, sparse_grad: bool = False) -> Poly:
    """One score of each row, by its class number: a loss without a sign, where the scores are logarithms."""
    rows = shape_of(self)[:-1]
    ids = index.args[0] if op_name(index) in _MORE_AXES else None
    if not last_axis(node, dim) or shape_of(index) != (*rows, 1) or shape_of(ids) != rows:
        raise Unreadable
    losses = c.space.fn("nll", (c(self), c(ids)), rows, (0, _NONE_IGNORED, 0.0))
    return views.reshape(c.space, c.space.scale(losses, -1), rows, (*rows, 1))
