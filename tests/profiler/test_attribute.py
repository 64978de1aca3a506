"""Which calls make up an operator: all of them, and at the sizes of the run."""

from __future__ import annotations

from typing import Any

import torch

import opsmith
from opsmith.profiler.attribute import attribute
from opsmith.profiler.collect import Op, Watched
from opsmith.profiler.composites import CallSequence, of_sites
from opsmith.profiler.data import MATMUL, Row, Unit
from tests.compiler.models import Encoder, ids, optimized, seeded


def ran(*names: str) -> Watched:
    """A repetition of these calls, a microsecond each."""
    return Watched(0, 10_000, [Op(name, 1000 * i, 1000 * (i + 1)) for i, name in enumerate(names)])


def test_part_of_an_operator_is_not_that_operator() -> None:
    """Where the product runs as a kernel and the curve behind it by itself, the curve is no linear layer."""
    pieces = ["aten::linear", "aten::gelu"]
    found = Unit(Row(MATMUL, "linear", "x 4×8", dtype="float32", composite=True, pieces=pieces, known=False))
    calls = CallSequence(["aten::linear", "aten::gelu"], [0, 0], [found])
    whole = attribute(ran("aten::linear", "aten::gelu"), [calls])
    assert [(u.row.operator, u.row.composite) for u in whole.units] == [("linear", True)]
    part = attribute(ran("opsmith::linear_packed", "aten::gelu"), [calls])
    assert [u.row.operator for u in part.units] == ["opsmith::linear_packed", "gelu"]


def test_an_operator_left_to_pytorch_has_the_sizes_of_the_run() -> None:
    """A graph for every length knows one as an example; a row of another length is not of that one."""
    model = optimized(seeded(Encoder), ids(2, 16))
    try:
        graphs = [g for g in model.opsmith.graphs if g.sites]
        calls = [of_sites(g.original.graph, [known.site for known in g.sites.values()]) for g in graphs]
        one = next(c for c in calls if any(_symbols(shape) for call in c.shapes for shape in call))
        symbols = {d for call in one.shapes for shape in call for d in _symbols(shape)}
        sizes = {d: 37 + i for i, d in enumerate(sorted(symbols, key=str))}
        runs = [
            (place, [torch.empty([_size(d, sizes) for d in shape], device="meta") for shape in shapes])
            for place, shapes in enumerate(one.shapes)
        ]
        wrong = (
            0,
            [torch.empty([9] * len(shape), device="meta") for shape in one.shapes[0]],
        )  # taken for another
        shapes = " ".join(f.row.shape for f in one.at([*runs, wrong]))
        assert any(f"{size}×" in shapes for size in sizes.values())
        assert one.at([]) is one.found
    finally:
        opsmith.restore(model)
        torch._dynamo.reset()


def _symbols(shape: Any) -> list[Any]:
    return [d for d in shape if not isinstance(d, int) and d.is_Symbol]


def _size(d: Any, sizes: dict[Any, int]) -> int:
    return d if isinstance(d, int) else int(d.xreplace(sizes))
