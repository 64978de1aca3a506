"""A card's pattern in normal form: traced as the model is traced, with variables for its parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from opsmith.compiler import arithmetic, contractions, layouts, losses, reductions  # noqa: F401  register their rules
from opsmith.compiler.canon import Canon
from opsmith.compiler.pieces import lower
from opsmith.compiler.terms import Poly, Space
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
    names: frozenset[str]
    variables: tuple[str, ...]
    cut: (
        str | None
    )  # the variable to look for among the root's ancestors, where the pattern is no contraction

    @classmethod
    def trace(cls, space: Space, card: Operator, pattern: Pattern) -> Template:
        """Trace the pattern's function as the model is traced, and read it as a term."""
        sizes: dict[str, int] = {}
        primes = iter((3, 5, 7, 11, 13, 17, 19, 23))
        tensors: dict[str, torch.Tensor] = {}
        holes: dict[str, float] = {}
        for name, spec in pattern.inputs.items():
            if isinstance(spec, int | float):
                holes[name] = float(spec)
                continue
            shape = [
                d if isinstance(d, int) else sizes.setdefault(d, 0) or _size(sizes, d, primes) for d in spec
            ]
            dtype = {"ids": torch.int64, "bool": torch.bool}.get(pattern.dtypes.get(name, ""), torch.float32)
            tensors[name] = torch.zeros(shape, dtype=dtype)

        def call(*values: torch.Tensor) -> Any:
            return pattern.fn(**dict(zip(tensors, values, strict=True)), **holes)

        graph = make_fx(call, pre_dispatch=True)(*tensors.values()).graph
        output = next(n for n in graph.nodes if n.op == "output").args[0]
        root = output[0] if isinstance(output, list | tuple) else output
        cut = {}
        for placeholder, name in zip((n for n in graph.nodes if n.op == "placeholder"), tensors, strict=True):
            cut[placeholder] = space.leaf(Var(name), tuple(int(d) for d in tensors[name].shape))
        term = Canon(space, cut, root)(root)
        term = lower(space, term, tuple(int(d) for d in root.meta["val"].shape))
        names = frozenset(function_names(term))
        first = next(iter(tensors))
        contraction = names & {"matmul", "gather", "nll"}
        return cls(card, pattern, term, holes, names, tuple(tensors), None if contraction else first)


def _size(sizes: dict[str, int], symbol: str, primes: Any) -> int:
    sizes[symbol] = next(primes)
    return sizes[symbol]


def function_names(poly: Poly, seen: set[int] | None = None) -> set[str]:
    """The names of the functions in a term; `exp` when it has an exponential."""
    seen = set() if seen is None else seen
    names: set[str] = set()
    if poly.uid in seen:
        return names
    seen.add(poly.uid)
    for mono, _ in poly.terms:
        if mono.expo is not None:
            names |= {"exp"} | function_names(mono.expo, seen)
        for atom, _power in mono.factors:
            if atom.leaf is None:
                names.add(atom.name)
            for arg in atom.args:
                names |= function_names(arg, seen)
    return names
