"""Sites that are alike: one is proved in float64, each of the others is held to eager's own result.

Layers of a model do the same arithmetic on other numbers. How far eager's result is from the exact one, relative to its
magnitude, follows from the arithmetic, so what was found of the first site of a class is taken for all of them. Then
a result near enough to eager's is within the card's tolerance by the triangle inequality (`Tolerance.near`), and no
product in float64 is needed. What is further away, or not finite, has its own proof.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from opsmith.compiler.find.operands import evaluate
from opsmith.compiler.find.site import Site
from opsmith.compiler.prove.site import Value, worst
from opsmith.operator import Verdict


class Alike:
    """What was proved of the first site of each class, for one run of a graph."""

    def __init__(self) -> None:
        self._proved: dict[tuple[str, str], tuple[str, list[float]]] = {}

    def put(self, form: str, implementation: str, name: str, verdicts: Sequence[Verdict]) -> None:
        """Enter a site by its name, and eager's errors in it, one for each result."""
        if all(v.ok for v in verdicts):
            self._proved.setdefault((form, implementation), (name, [v.eager for v in verdicts]))

    def check(
        self, form: str, implementation: str, site: Site, value: Value, got: Sequence[Tensor | None]
    ) -> tuple[str, Verdict] | None:
        """The name of the proved site that this one is like, and the verdict; None where it has to be proved itself."""
        name, errors = self._proved.get((form, implementation), ("", []))
        if not name or len(got) != len(site.outputs):
            return None
        results = [(r, value(n)) for r, n in zip(got, site.outputs, strict=True) if r is not None]
        if len(errors) != len(results):
            return None
        near = site.card.tolerance.near
        verdict = worst(near(r, eager, e) for (r, eager), e in zip(results, errors, strict=True))
        return (name, verdict) if verdict.ok else None


def form(site: Site, value: Value) -> str:
    """What a site computes of which shapes, strides and dtypes: the same text wherever in a graph it stands."""
    names: dict[Node, str] = {}
    given: list[str] = []

    def name(node: Node) -> str:
        if node not in names:
            names[node] = f"%{len(names)}"
            if node not in site.region:
                given.append(f"{names[node]} = {_kind(value(node))}")
        return names[node]

    steps = [f"{name(n)} = {n.target} {map_arg((n.args, n.kwargs), name)}" for n in sorted(site.region)]
    call = {k: evaluate(v, name, lambda made, args: (made.target, args)) for k, v in site.arguments.items()}
    outputs = [name(n) for n in site.outputs]
    card = (site.card.name, site.pattern, site.columns, site.after)
    return "\n".join([str(card), *steps, str(call), str(outputs), *given])


def _kind(value: Any) -> str:
    """A tensor by what it is and not what is in it; anything else by its value."""
    if not isinstance(value, Tensor):
        return repr(value)
    return f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.device}"
