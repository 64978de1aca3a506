"""A new tensor and the kernel that fills it, as one value."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from opsmith.compiler.algebra.canon import op_name

_EMPTY = {"aten::empty", "aten::empty_like", "aten::new_empty"}


def filled(
    kernel: torch._ops.OpOverload,
    out: str,
    make: torch._ops.OpOverload,
    made_of: tuple[Sequence[Any], Mapping[str, Any]],
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """The tensor that `make` allocates and the kernel writes to, as its argument `out`."""
    sizes, options = made_of
    y: torch.Tensor = make(*sizes, **options)
    kernel(*args, **kwargs, **{out: y})
    return y


def join(graph: fx.Graph) -> None:
    """Write each call of a kernel of ours that fills a new tensor as one node, which has a value as others do.

    A packed linear layer is such a call: an allocation and a kernel that writes to it. As changes in place they would
    hide the arithmetic behind them.
    """
    for node in list(graph.nodes):
        out = _out(node)
        new = node.kwargs.get(out) if out is not None else None
        if not isinstance(new, Node) or not isinstance(new.target, torch._ops.OpOverload):
            continue
        if new.target._schema.name not in _EMPTY or any(u < node for u in new.users):
            continue
        given = {k: v for k, v in node.kwargs.items() if k != out}
        read: list[Node] = []
        fx.map_arg((node.args, given), read.append)
        if new in read:
            continue
        with graph.inserting_before(node):
            value = graph.call_function(
                filled, (node.target, out, new.target, (new.args, new.kwargs), *node.args), given
            )
        value.meta = dict(new.meta)
        new.replace_all_uses_with(value, partial(operator.is_not, node))
        graph.erase_node(node)
        graph.erase_node(new)


def _out(node: Node) -> str | None:
    """The one argument that a kernel of ours writes to."""
    target: Any = node.target
    if not op_name(node).startswith("opsmith::") or target._schema.returns:
        return None
    written = [a for a in target._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return written[0].name if len(written) == 1 and written[0].kwarg_only else None
