"""Where the rows of a kernel's tensors lie: which tensor has them all, and how the others follow from its row."""

from __future__ import annotations

from opsmith.authoring.formula.nodes import walk
from opsmith.authoring.formula.shapes import ANY, Shape, strides_of
from opsmith.authoring.lower.plan import FULL, Plan


class Rows:
    """The places of rows, in terms that C++, Triton and CUDA share: `row`, and counts of rows by name.

    `counts` maps the names of products of the whole's sizes to (first, last) dimension, counted from the right, where
    the last axis is 1; last is None for all leading dimensions.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        used = {n.value for n in walk(o.node for o in plan.outputs) if n.kind == "input"}
        self.read = [n for n in plan.inputs if n in used]
        self.names: dict[tuple[int, int], str] = {}
        self.counts: dict[str, tuple[int, int | None]] = {}
        for name in self.read:
            for run, behind in strides_of(plan.inputs[name], plan.space) or ():
                self._count(behind, 0)
                self._count(run, len(behind))
        self.whole = self._widest()

    def _count(self, dims: Shape, offset: int) -> None:
        key = (2 + offset, 1 + offset + len(dims))
        if dims and key not in self.names:
            self.names[key] = f"count_{len(self.names) + 1}"
            self.counts[self.names[key]] = (key[0], None if ANY in dims else key[1])

    def _widest(self) -> str:
        shapes = {n: self.plan.inputs[n] for n in self.read}
        shapes |= {o.name: self.plan.space for o in self.plan.outputs if o.extent == FULL and not o.optional}
        for name, shape in shapes.items():
            if shape == self.plan.space:
                return name
        raise ValueError(
            "no input or output has the shape to which all of them broadcast; write it as two operators"
        )

    def place(self, name: str) -> str | None:
        """The index of an input's row, None where it is 0 for all."""
        runs = strides_of(self.plan.inputs[name], self.plan.space)
        if runs is None:
            return "row"
        terms = []
        for i, (run, behind) in enumerate(runs):
            index = f"row / {self.names[2, 1 + len(behind)]}" if behind else "row"
            if len(run) + len(behind) < len(self.plan.space) - 1:
                index = f"{index} % {self.names[2 + len(behind), 1 + len(behind) + len(run)]}"
            for later, after in runs[i + 1 :]:
                index = f"({index}) * {self.names[2 + len(after), 1 + len(after) + len(later)]}"
            terms.append(index)
        return " + ".join(terms) or None
