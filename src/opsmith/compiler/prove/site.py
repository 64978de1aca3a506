"""Proof of a site: the operator's result against the model's own arithmetic, in float64, on real inputs.

The nodes that the operator replaces are run again in float64 (casts to lower precision included), which gives
the exact result; what eager computed in the model's dtype gives the error to be compared with. The card's
tolerance policy decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node
from torch.fx.node import map_arg

from opsmith.compiler.algebra.canon import op_name
from opsmith.compiler.capture.mutation import filled
from opsmith.compiler.find.joined import in_float64
from opsmith.compiler.find.site import Site
from opsmith.compiler.prove.wide import widened
from opsmith.operator import Tolerance, Verdict

Value = Callable[[Node], Any]
Exact = Callable[[], Mapping[Node, torch.Tensor]]  # what `run_wide` finds


def prove(site: Site, value: Value, got: tuple[torch.Tensor | None, ...], exactly: Exact) -> list[Verdict]:
    """Hold each of the operator's results to the card's tolerance; `value` gives what eager computed at a node."""
    # Layers that one kernel does together stay what each was by itself, which is proved where it was packed.
    if site.columns and all(
        r is not None and r.equal(value(n)) for r, n in zip(got, site.outputs, strict=True)
    ):
        return [Verdict(True, 0.0, 0.0)]
    exact, results = exactly(), zip(got, site.outputs, strict=False)
    verdicts = [_check(site.card.tolerance, r, value(n), exact[n]) for r, n in results if r is not None]
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


def _check(tolerance: Tolerance, got: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> Verdict:
    if math.isnan(exact.sum()):  # as it is where one number is
        # A row in which every key is masked has no softmax: NaN in eager's arithmetic, zeros by definition here.
        undefined = exact.isnan() & eager.isnan() & (got == 0)
        exact, eager = exact.masked_fill(undefined, 0.0), eager.masked_fill(undefined, 0.0)
    return tolerance.check(got, eager, exact)


def run_wide(site: Site, value: Value) -> dict[Node, torch.Tensor]:
    """The site's nodes in float64, from the values that enter it."""
    env: dict[Node, Any] = {}

    def operand(node: Node) -> Any:
        return env[node] if node in env else value(node)

    for node in sorted(site.region):
        if node.target is filled:
            env[node] = in_float64(node, lambda n: widened(operand(n)))
            continue
        call: Callable[..., Any] = node.target  # type: ignore[assignment]
        args, kwargs = map_arg((node.args, node.kwargs), operand)
        if op_name(node) == "aten::embedding":
            # Rows of a table are what they are in any dtype: widening them spares widening the table.
            env[node] = widened(call(*args, **kwargs))
        elif op_name(node) == "aten::linear":
            env[node] = _product(*args, **kwargs)  # type: ignore[arg-type]
        else:
            env[node] = call(*widened(args), **widened(kwargs))
    return {node: env[node] for node in site.outputs}


_BLOCK = (
    1 << 24
)  # numbers of a weight that are in float64 at a time: an output layer's may be most of a model


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A linear layer in float64, so many columns at a time."""
    x, columns = widened(x), max(1, _BLOCK // max(weight.shape[-1], 1))
    if weight.dim() < 2 or len(weight) <= columns:
        return F.linear(x, widened(weight), widened(bias))
    parts = [F.linear(x, widened(w)) for w in weight.split(columns)]
    return torch.cat(parts, -1) if bias is None else torch.cat(parts, -1).add_(widened(bias))
