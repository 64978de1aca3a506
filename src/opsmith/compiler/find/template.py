"""A card's pattern in normal form: traced as the model is traced, with variables for its parameters."""

from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from opsmith.compiler.algebra import rules  # noqa: F401  registers them
from opsmith.compiler.algebra.canon import Canon, shape_of
from opsmith.compiler.algebra.pieces import lower
from opsmith.compiler.algebra.terms import Poly, Space
from opsmith.operator import Operator, Pattern


@dataclass(frozen=True)
class Var:
    """A variable of a pattern."""

    name: str


@dataclass
class Template:
    """A pattern in normal form."""

    card: Operator
    pattern: Pattern
    term: Poly
    holes: dict[str, float]
    variables: tuple[str, ...]
    cut: str | None  # the variable to look for among the root's ancestors; None where that has another shape

    @classmethod
    def trace(cls, space: Space, card: Operator, pattern: Pattern) -> Template:
        """Trace the pattern's function as the model is traced, and read it as a term."""
        holes = {n: float(spec) for n, spec in pattern.inputs.items() if isinstance(spec, int | float)}
        variables = tuple(n for n in pattern.inputs if n not in holes)
        graph = _traced(pattern)
        output = graph.find_nodes(op="output")[0].args[0]
        root = output[0] if isinstance(output, list | tuple) else output
        cut = {}
        for node, name in zip(graph.find_nodes(op="placeholder"), variables, strict=True):
            cut[node] = space.leaf(Var(name), shape_of(node))
        term = lower(Canon(space, cut, root, keeps=pattern.recognition.keeps)(root), shape_of(root))
        other = term.names & {"matmul", "gather", "nll"} or shape_of(next(iter(cut))) != shape_of(root)
        return cls(card, pattern, term, holes, variables, None if other else variables[0])


@functools.lru_cache(maxsize=256)
def _traced(pattern: Pattern) -> fx.Graph:
    """A pattern's function as a graph; tracing takes longer than reading it, so once in a process."""
    # Even, as some pair up the elements of an axis, and otherwise without common factors.
    primes = iter((7, 11, 13, 17, 19, 23, 29, 31))
    sizes: defaultdict[str, int] = defaultdict(lambda: 2 * next(primes))
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, float] = {}
    for name, spec in pattern.inputs.items():
        if isinstance(spec, int | float):
            numbers[name] = float(spec)
            continue
        dtype = {"ids": torch.int64, "bool": torch.bool}.get(pattern.dtypes.get(name, ""), torch.float32)
        tensors[name] = torch.zeros([d if isinstance(d, int) else sizes[d] for d in spec], dtype=dtype)

    def call(*values: Tensor) -> Any:
        return pattern.fn(**dict(zip(tensors, values, strict=True)), **numbers)

    return make_fx(call, pre_dispatch=True)(*tensors.values()).graph
