"""The published breakdown, on a model small enough for a test: its classes, and that optimizing changes no result."""

from pathlib import Path

import torch

from opsmith.authoring.project import imported

FILE = Path(__file__).parents[2] / "examples" / "profile_gpt.py"


def test_the_example_names_what_it_writes_out() -> None:
    module = imported(FILE, "profile_gpt")
    before, after = module.measured(layers=1, width=64, heads=4, length=32, budget_s=0.05)
    torch._dynamo.reset()
    for profile in (before, after):
        times = module.breakdown(profile)
        assert sum(times.values()) > 0
        assert all(times[name] > 0 for name in ("MatMul", "Attention", "Norm"))
    assert not any(
        r.operator == "gelu" for r in after.phases[0].rows
    )  # the linear layer before it has it now
    rows = {r.operator: r for r in before.phases[0].rows}
    assert rows["layer_norm"].composite
    assert rows["attention"].composite
    assert rows["gelu"].composite
    assert not any(
        r.composite
        for r in after.phases[0].rows
        if r.operator == "layer_norm" and r.implementation != "eager"
    )
