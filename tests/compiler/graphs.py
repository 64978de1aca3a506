"""A function as the compiler sees it: what is recognized in it, and what the rewritten graph computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from opsmith.compiler.capture.trace import capture
from opsmith.compiler.find.recognize import Recognized, recognize
from opsmith.compiler.program.rewrite import rewrite
from opsmith.operator import registry


def found_in(
    fn: Callable[..., Any], values: list[torch.Tensor], dynamic: bool
) -> tuple[Recognized, Any, Any]:
    """What was recognized in a function, the result of the rewritten graph, and that of the function."""
    found: list[Recognized] = []

    def backend(gm: Any, example_inputs: Any) -> Any:
        captured = capture(gm, example_inputs)
        found.append(recognize(captured.graph, registry().values()))
        return rewrite(captured, [(f"site_{i}", site) for i, site in enumerate(found[-1].sites)])

    torch._dynamo.reset()
    for value in values:  # as `optimize` does: the size of a feature vector is the model's, not the input's
        if value.is_floating_point():
            torch._dynamo.mark_static(value, value.dim() - 1)
    with torch.no_grad(), torch._dynamo.config.patch(specialize_float=True):
        got = torch.compile(fn, backend=backend, dynamic=dynamic, fullgraph=True)(*values)
        want = fn(*values)
    assert len(found) == 1
    return found[0], got, want
