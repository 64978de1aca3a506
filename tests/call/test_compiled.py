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


def test_an_unknown_option_is_named() -> None:
    x, w = torch.randn(5, 64), torch.zeros(32, 64, dtype=torch.int8)
    with pytest.raises(Exception, match=r"packed_linear: format must be"):
        _compiled(lambda x, w: ops.packed_linear(x, w, torch.ones(32), None, format="int9"), x, w)


_W, _ROW = torch.randn(64), (3, 7, 64)
_ANGLES = torch.randn(7, 32)
_LAYER = ops.PackedLinear.from_linear(torch.nn.Linear(64, 32), format="int8")
_QKV = (2, 4, 7, 64)
_CALLS: dict[str, tuple[Any, list[tuple[int, ...]], tuple[int, ...]]] = {
    "rms_norm": (lambda x: ops.rms_norm(x, _W), [_ROW], (0, 1)),
    "heads": (lambda x: ops.rms_norm(x[..., :128].unflatten(-1, (2, 64)), _W), [(3, 7, 192)], (0, 1)),
    "layer_norm": (lambda x, r: ops.layer_norm(x, _W, residual=r), [_ROW, _ROW], (0, 1)),
    "gelu": (ops.gelu, [_ROW], (0, 1)),
    "silu_mul": (ops.silu_mul, [_ROW, _ROW], (0, 1)),
    "rms_norm_quant": (lambda x: ops.rms_norm_quant(x, _W), [_ROW], (0, 1)),
    "packed_linear": (_LAYER, [_ROW], (0, 1)),
    "attention": (lambda q, k, v: ops.attention(q, k, v, causal=True, scale=0.1), [_QKV] * 3, (0, 2)),
    "rope_qk": (lambda q, k: ops.rope_qk(q, k, _ANGLES.cos(), _ANGLES.sin()), [_QKV] * 2, (0,)),
    "moe_route": (lambda x: ops.moe_route(x, 2), [(5, 64)], (0,)),
}


@pytest.mark.parametrize("name", _CALLS)
def test_sizes_stay_symbols(name: str) -> None:
    fn, shapes, dynamic = _CALLS[name]
    inputs = [torch.randn(shape) for shape in shapes]
    for x in inputs:
        for dim in dynamic:
            torch._dynamo.mark_dynamic(x, dim)  # an error where it becomes a number
    torch._dynamo.reset()
    with torch.no_grad():
        got = torch.compile(fn, backend="aot_eager", fullgraph=True)(*inputs)
        torch.testing.assert_close(got, fn(*inputs))


class _Exported(torch.nn.Module):
    """What has parameters, and calls public functions of them on rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.weight = (
            torch.nn.Parameter(torch.randn(shape) / 8) for shape in ((50, 64), (64,), (50, 64))
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = ops.embedding(ids, self.table)
        x = x + ops.rms_norm(ops.linear(x, self.weight[:1].expand(64, 64), activation="gelu"), self.norm)
        heads = x.view(1, 1, *x.shape)
        x = ops.attention(heads, heads, heads, causal=True).view(x.shape)
        return ops.linear_cross_entropy(x, self.weight, ids)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("learns", [False, True])
def test_an_exported_call_takes_any_size_and_learns(learns: bool, strict: bool) -> None:
    model, ids, size = _Exported(), torch.arange(5), torch.export.Dim("size")
    with torch.set_grad_enabled(learns):
        program = torch.export.export(model, (ids,), dynamic_shapes=({0: size},), strict=strict).module()
        got, want = (m(torch.arange(40) % 50) for m in (program, model))
    torch.testing.assert_close(got, want)
    if learns:
        got.backward()
        want.backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(program.get_parameter(name).grad, parameter.grad)
