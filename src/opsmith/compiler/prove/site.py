"""Proof of a site: the operator's result against the model's own arithmetic, in float64, on real inputs.

The nodes that the operator replaces are run again in float64 (casts to lower precision included), which gives
the exact result; what eager computed in the model's dtype gives the error to be compared with. The card's
tolerance policy decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from opsmith.compiler.algebra.canon import op_name
from opsmith.compiler.capture.mutation import filled
from opsmith.compiler.find.joined import in_float64
from opsmith.compiler.find.site import Site
from opsmith.compiler.prove.wide import widened
from opsmith.operator import Tolerance, Verdict

Value = Callable[[Node], Any]
Part = tuple[slice, Mapping[Node, Tensor]]  # columns of results, and what they are exactly
Exact = Callable[[], Iterable[Part]]  # what `run_wide` finds


def prove(site: Site, value: Value, got: tuple[Tensor | None, ...], exactly: Exact) -> list[Verdict]:
    """Hold each of the operator's results to the card's tolerance; `value` gives what eager computed at a node."""
    # Layers that one kernel does together stay what each was by itself, which is proved where it was packed.
    same = (r is not None and r.equal(value(n)) for r, n in zip(got, site.outputs, strict=True))
    if site.columns and all(same):
        return [Verdict(True, 0.0, 0.0)]
    verdicts = [
        _check(site.card.tolerance, r, value(n), ((at, exact[n]) for at, exact in exactly()))
        for r, n in zip(got, site.outputs, strict=False)
        if r is not None
    ]
    if len(got) != len(site.outputs):
        why = f"{len(got)} results, expected {len(site.outputs)}"
        verdicts.append(Verdict(False, math.inf, 0.0, why))
    return verdicts


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The first verdict that fails, else the last with the largest error."""
    found = Verdict(True, 0.0, 0.0)
    for verdict in verdicts:
        if not verdict.ok:
            return verdict
        found = verdict if verdict.error >= found.error else found
    return found


def _check(
    tolerance: Tolerance, got: Tensor, eager: Tensor, exact: Iterable[tuple[slice, Tensor]]
) -> Verdict:
    if got.shape != eager.shape:
        return Verdict(False, math.inf, 0.0, f"shape {tuple(got.shape)}, expected {tuple(eager.shape)}")
    return tolerance.check_parts(
        _defined(got[..., at] if got.dim() else got, eager[..., at] if got.dim() else eager, truth)
        for at, truth in exact
    )


def _defined(got: Tensor, eager: Tensor, exact: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if math.isnan(exact.sum()):  # as it is where one number is
        # A row in which every key is masked has no softmax: NaN in eager's arithmetic, zeros by definition here.
        undefined = exact.isnan() & eager.isnan() & (got == 0)
        exact, eager = exact.masked_fill(undefined, 0.0), eager.masked_fill(undefined, 0.0)
    return got, eager, exact


def run_wide(site: Site, value: Value) -> Iterable[Part]:
    """The site's nodes in float64, from the values that enter it: all of each result, or a wide product by columns."""
    env: dict[Node, Any] = {}
    last = {n: max((u for u in n.users if u in site.region), default=n) for n in site.region}

    def operand(node: Node) -> Any:
        return env[node] if node in env else value(node)

    for node in sorted(site.region):
        call: Callable[..., Any] = node.target  # type: ignore[assignment]
        args, kwargs = map_arg((node.args, node.kwargs), operand)
        if node.target is filled:
            env[node] = in_float64(node, lambda n: widened(operand(n)))
        elif op_name(node) == "aten::embedding":
            # Rows of a table are what they are in any dtype: widening them spares widening the table.
            env[node] = widened(call(*args, **kwargs))
        elif op_name(node) == "aten::linear":
            product = _Product(node, *args, **kwargs)  # type: ignore[arg-type]
            if site.outputs == (node,):
                return product
            env[node] = product.whole()
        else:
            env[node] = call(*widened(args), **widened(kwargs))
        for used in node.all_input_nodes:
            if last.get(used) is node and used not in site.outputs:
                env.pop(used, None)
    return [(slice(None), {node: env[node] for node in site.outputs})]


# Numbers of a weight that are in float64 at a time: an output layer's may be most of a model.
_BLOCK = 1 << 21


@dataclass(frozen=True)
class _Product:
    """A linear layer in float64, so many columns at a time."""

    node: Node
    x: Tensor
    weight: Tensor
    bias: Tensor | None = None

    def __iter__(self) -> Iterator[Part]:
        x, columns = widened(self.x), max(1, _BLOCK // max(self.weight.shape[-1], 1))
        if self.weight.dim() < 2:
            yield slice(None), {self.node: F.linear(x, widened(self.weight), widened(self.bias))}
            return
        for first in range(0, max(1, len(self.weight)), columns):
            at = slice(first, first + columns)
            bias = None if self.bias is None else widened(self.bias[at])
            yield at, {self.node: F.linear(x, widened(self.weight[at]), bias)}

    def whole(self) -> Tensor:
        return torch.cat([part[self.node] for _, part in self], -1)
