"""What torch.compile reads of a call: one operator, which it takes apart itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import AotEagerAndRecordGraphs, EagerAndRecordGraphs

from opsmith import ops


def _targets(graphs: list[torch.fx.GraphModule]) -> list[str]:
    return [str(n.target) for gm in graphs for n in gm.graph.nodes if "opsmith" in str(n.target)]


def _compiled(fn: Any, *args: Any, backend: Any = None) -> tuple[Any, list[str]]:
    backend = backend or EagerAndRecordGraphs()
    torch._dynamo.reset()
    return torch.compile(fn, backend=backend, fullgraph=True)(*args), _targets(backend.graphs)


def test_a_call_without_gradients_is_one_operator() -> None:
    x, w = torch.randn(2, 3, 64), torch.randn(64)
    got, targets = _compiled(lambda x, w: ops.rms_norm(x, w) + 1, x, w)
    torch.testing.assert_close(got, ops.rms_norm(x, w) + 1)
    assert targets == ["opsmith.call_rms_norm.default"]


def test_results_come_as_they_do_without_it() -> None:
    x, w = torch.randn(5, 64), torch.randn(64)
    (y, s), targets = _compiled(lambda x, w: ops.layer_norm(x, w, residual=x), x, w)
    assert len(targets) == 1
    torch.testing.assert_close((y, s), ops.layer_norm(x, w, residual=x))


def test_a_compiler_finds_the_kernel_in_it() -> None:
    backend = AotEagerAndRecordGraphs()
    x, layer = torch.randn(3, 64), ops.PackedLinear.from_linear(torch.nn.Linear(64, 32), format="int8")
    with torch.no_grad():
        got, _ = _compiled(layer, x, backend=backend)
        torch.testing.assert_close(got, layer(x))
    (graph,) = backend.fw_graphs
    assert "opsmith.packed_linear.default" in graph.code
    assert "opsmith.call_" not in graph.code


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_gradients_are_those_without_it(backend: str) -> None:
    x, w = torch.randn(5, 64, requires_grad=True), torch.randn(64, requires_grad=True)
    torch._dynamo.reset()
    fn = torch.compile(lambda x, w: ops.rms_norm(x, w).square().sum(), backend=backend, fullgraph=True)
    got = torch.autograd.grad(fn(x, w), (x, w))
    torch.testing.assert_close(got, torch.autograd.grad(ops.rms_norm(x, w).square().sum(), (x, w)))


def test_a_result_is_written_where_it_is_asked_for() -> None:
    x, y = torch.randn(5, 64), torch.empty(5, 64)
    _, targets = _compiled(lambda x, y: ops.rms_norm(x, out=y), x, y)
    torch.testing.assert_close(y, ops.rms_norm(x))
    assert "opsmith.call_rms_norm.default" not in targets


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(Exception, match=r"rms_norm: weight must have shape"):
        _compiled(lambda x, w: ops.rms_norm(x, w), torch.randn(5, 64), torch.randn(32))
