"""What the losses mean in the algebra; see `canon`."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from opsmith.compiler.canon import Canon, Unreadable, rule, shape_of
from opsmith.compiler.reductions import log_softmax
from opsmith.compiler.terms import Poly


@rule("cross_entropy_loss")
def _cross_entropy(
    c: Canon,
    node: Node,
    self: Any,
    target: Any,
    weight: Any = None,
    reduction: int = 1,
    ignore_index: Any = -100,
    label_smoothing: float = 0.0,
) -> Poly:
    scores = log_softmax(c.space, c(self), shape_of(self)[-1])
    return _nll(c, node, scores, self, target, weight, reduction, ignore_index, label_smoothing)


@rule("nll_loss", "nll_loss_nd")
def _nll_loss(
    c: Canon,
    node: Node,
    self: Any,
    target: Any,
    weight: Any = None,
    reduction: int = 1,
    ignore_index: Any = -100,
) -> Poly:
    return _nll(c, node, c(self), self, target, weight, reduction, ignore_index, 0.0)


def _nll(
    c: Canon,
    node: Node,
    scores: Poly,
    x: Any,
    target: Any,
    weight: Any,
    reduction: int,
    ignore_index: Any,
    label_smoothing: float,
) -> Poly:
    """The loss of class numbers under logarithms of probabilities, with its settings."""
    ids = target.meta["val"]
    settings = (ignore_index, label_smoothing)
    if (
        weight is not None
        or len(shape_of(x)) > 2
        or ids.is_floating_point()
        or ids.dim() != len(shape_of(x)) - 1
    ):
        raise Unreadable
    if not all(isinstance(v, int | float) for v in settings):
        raise Unreadable
    return c.space.fn("nll", (scores, c(target)), shape_of(node), (reduction, *settings))
