"""The inputs of a site: nodes of the graph, or small things made of them (a transpose, an inverted mask)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from opsmith.compiler.canon import Canon
from opsmith.compiler.terms import Atom, Poly, Shape


@dataclass(frozen=True)
class Made:
    """An ATen call on operands that the model does not contain and the plan inserts."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    shape: Shape


Operand = Node | Made


def nodes_in(value: Any) -> Iterator[Node]:
    """The graph nodes an operand is made of."""
    if isinstance(value, Node):
        yield value
    elif isinstance(value, Made):
        for arg in value.args:
            yield from nodes_in(arg)


def evaluate(value: Any, env: Callable[[Node], Any]) -> Any:
    """The value of an operand, given the values of nodes."""
    if isinstance(value, Node):
        return env(value)
    if isinstance(value, Made):
        return value.target(*[evaluate(a, env) for a in value.args])
    return value


def insert(value: Any, graph: fx.Graph, env: Callable[[Node], Node]) -> Any:
    """The operand as a node of `graph`, made there if need be."""
    if isinstance(value, Node):
        return env(value)
    if isinstance(value, Made):
        return graph.call_function(value.target, tuple(insert(a, graph, env) for a in value.args))
    return value


def materialize(poly: Poly, canon: Canon, root: Node) -> Operand | None:
    """The node that computes a term, or the call that would; None where that would take arithmetic."""
    nodes = canon.nodes.get(poly)
    if nodes:
        dtype = root.meta["val"].dtype
        same = [n for n in nodes if _dtype(n) == dtype]
        return min(same or nodes)
    atom = poly.atom
    if atom is None:
        return _sum(poly, canon, root)
    if isinstance(atom.leaf, Node):
        return atom.leaf
    return _made(atom, canon, root)


def _dtype(node: Node) -> Any:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None


def _sum(poly: Poly, canon: Canon, root: Node) -> Operand | None:
    """Several additive masks as their sum."""
    total: Operand | None = None
    for mono, coef in poly.terms:
        if coef != 1.0 or mono.expo is not None or len(mono.factors) != 1 or mono.factors[0][1] != 1:
            return None
        part = materialize(canon.space.from_atom(mono.factors[0][0]), canon, root)
        if part is None:
            return None
        total = part if total is None else Made(torch.ops.aten.add.Tensor, (total, part), poly.shape)
    return total


def _made(atom: Atom, canon: Canon, root: Node) -> Operand | None:
    inner = materialize(atom.args[0], canon, root) if atom.args else None
    if inner is None:
        return None
    if atom.name == "permute":
        return Made(torch.ops.aten.permute.default, (inner, list(atom.attrs)), atom.shape)
    if atom.name == "not":
        return Made(torch.ops.aten.logical_not.default, (inner,), atom.shape)
    if atom.name in ("fill", "keep"):
        fill = atom.attrs[0] if atom.attrs else float("-inf")
        return Made(torch.ops.aten.where.Scalar, (inner, 0.0, fill), atom.shape)
    return None
