"""Operators whose tensors are spread over ranks, beside one process: what each rank finds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from opsmith import ops
from opsmith.call.dispatch import always_native
from opsmith.ops.packed_linear.formats import FORMATS
from tests.distributed.losses import Bytes

Tensor = torch.Tensor
R = Replicate()


class Case(NamedTuple):
    """A call, its tensors, how each is spread, and how the first result is."""

    call: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    spread: tuple[Placement, ...]
    result: Placement


def _rope(x: Tensor, **how: Any) -> Tensor:
    cos, sin = ops.rope_table(8, 16)
    return ops.rope(x, cos, sin, **how)


def _rope_qk(q: Tensor, k: Tensor) -> Any:
    return ops.rope_qk(q, k, *ops.rope_table(8, 16))


def _causal(q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Tensor:
    return ops.attention(q, k, v, causal=True, **dict(zip(("sinks",), sinks, strict=False)))


def _summed(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
    return ops.rms_norm(x, weight, residual=residual)


def _layer(format: str, order: bool = False) -> ops.PackedLinear:
    """The same packed layer each time, with inputs in an order of their own or not."""
    made = torch.Generator().manual_seed(2)
    if order:
        numbers = torch.randint(0, 16, (6, 64), generator=made).byte()
        groups = torch.arange(64) % 2  # every other number is of the same group
        return ops.PackedLinear.from_int4(numbers, torch.ones(2, 6).half() / 32, group_size=32, groups=groups)
    layer = torch.nn.Linear(64, 6)
    for t in layer.parameters():
        t.data.uniform_(-0.25, 0.25, generator=made)
    return ops.PackedLinear.from_linear(layer, format=format, group_size=32, symmetric=False)


def _packed(format: str, order: bool = False) -> Callable[..., Tensor]:
    return lambda x: _layer(format, order)(x.detach() if format == "int8_dynamic" else x)


def _packed_bias(x: Tensor, bias: Tensor) -> Tensor:
    layer = _layer("int8")
    return ops.packed_linear(x, layer.weight, layer.scale, bias=bias, format="int8")


def _routed(logits: Tensor, bias: Tensor) -> Tensor:
    ids, weights = ops.moe_route(logits, 3, scoring="sigmoid", bias=bias, groups=4, topk_groups=2)
    return weights * (1 + ids)


def _ids(x: Tensor) -> Tensor:
    return (4 * x.detach()).abs().long().clamp(max=15)


def _dequantized(x: Tensor, *following: Tensor, **how: Any) -> Tensor:
    made = ops.QuantizedEmbedding.from_float(torch.arange(128.0).sin().view(16, 8), **how)
    more = dict(zip(("next_ids",), map(_ids, following), strict=False))
    y = ops.quantized_embedding(_ids(x), made.table, made.scale, **more)
    return y + made(_ids(x))


X, P, N, Q, KV = (3, 5, 16), (3, 5, 64), (16,), (2, 4, 6, 8), (2, 2, 6, 8)
CASES = {
    "rms_norm": Case(ops.rms_norm, (X, N), (Shard(0), R), Shard(0)),
    "rms_norm, second dimension": Case(ops.rms_norm, (X, N), (Shard(1), R), Shard(1)),
    "rms_norm, residual": Case(_summed, (X, X, N), (Shard(1), R, R), Shard(1)),
    "rms_norm, alike on all": Case(ops.rms_norm, (X, N), (R, R), R),
    "layer_norm": Case(ops.layer_norm, (X, N, N), (Shard(0), R, R), Shard(0)),
    "silu_mul": Case(ops.silu_mul, (X, X), (Shard(2), Shard(2)), Shard(2)),
    "silu_mul, packed": Case(ops.silu_mul, (X,), (Shard(0),), Shard(0)),
    "gelu_mul": Case(ops.gelu_mul, (X, X), (Shard(1), Shard(1)), Shard(1)),
    "gelu": Case(ops.gelu, (X,), (Shard(2),), Shard(2)),
    "bias_gelu": Case(ops.bias_gelu, (X, N), (Shard(2), Shard(0)), Shard(2)),
    "bias_gelu, rows": Case(ops.bias_gelu, (X, N), (Shard(0), R), Shard(0)),
    "softmax": Case(ops.softmax, (X,), (Shard(1),), Shard(1)),
    "rope": Case(_rope, (Q,), (Shard(1),), Shard(1)),
    "rope, batch": Case(_rope, (Q,), (Shard(0),), Shard(0)),
    "rope_qk": Case(_rope_qk, (Q, KV), (Shard(1), Shard(1)), Shard(1)),
    "attention": Case(_causal, (Q, KV, KV), (Shard(1),) * 3, Shard(1)),
    "attention, sinks": Case(_causal, (Q, KV, KV, (4,)), (Shard(1),) * 3 + (R,), Shard(1)),
    "attention, one key head": Case(_causal, (Q, (2, 1, 6, 8), (2, 1, 6, 8)), (Shard(1), R, R), Shard(1)),
    "attention, batch": Case(_causal, (Q, KV, KV), (Shard(0),) * 3, Shard(0)),
    "linear, columns": Case(ops.linear, (X, (6, 16), (6,)), (R, Shard(0), Shard(0)), Shard(2)),
    "linear, rows": Case(ops.linear, (X, (6, 16), (6,)), (Shard(0), R, R), Shard(0)),
    **{f"packed_linear, {one}": Case(_packed(one), (P,), (Shard(1),), Shard(1)) for one in FORMATS},
    "packed_linear, bias": Case(_packed_bias, (P, (6,)), (Shard(0), R), Shard(0)),
    "packed_linear, order": Case(_packed("int4", order=True), (P,), (Shard(1),), Shard(1)),
    "packed_linear, alike on all": Case(_packed("int4"), (P,), (R,), R),
    "moe_route": Case(_routed, ((5, 16), (16,)), (Shard(0), R), Shard(0)),
    "moe_route, alike on all": Case(_routed, ((5, 16), (16,)), (R, R), R),
    "embedding": Case(lambda x, table: ops.embedding(_ids(x), table), (X, N * 2), (Shard(1), R), Shard(1)),
    "quantized_embedding": Case(_dequantized, (X,), (Shard(2),), Shard(2)),
    "quantized_embedding, next ids": Case(_dequantized, (X, X), (Shard(2), R), Shard(2)),
    "quantized_embedding, cache": Case(partial(_dequantized, cache_rows=4), (X,), (Shard(0),), Shard(0)),
    "quantized_embedding, alike on all": Case(_dequantized, (X,), (R,), R),
}


def _results(case: Case, tensors: list[Tensor]) -> tuple[Any, list[Tensor]]:
    leaves = [t.requires_grad_() for t in tensors]
    y = case.call(*leaves)
    first = y[0] if isinstance(y, tuple) else y
    if isinstance(first, DTensor):
        torch.manual_seed(1)
        slope: Tensor = DTensor.from_local(torch.randn(first.shape), first.device_mesh, [Replicate()])
    else:
        torch.manual_seed(1)
        slope = torch.randn(first.shape)
    if first.requires_grad:
        first.backward(slope)
    return first, [first.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def over_rows(mesh: DeviceMesh) -> dict[str, Any]:
    """Each case: how the result is spread, the largest distance to one process, the bytes of the forward."""
    found = {}
    for name, case in CASES.items():
        tensors = [torch.randn(shape) for shape in case.shapes]
        spread = [distribute_tensor(t, mesh, [p]) for t, p in zip(tensors, case.spread, strict=True)]
        with always_native():
            _, alone = _results(case, [t.clone() for t in tensors])
            with Bytes() as counted, torch.no_grad():
                quiet = case.call(*spread)  # may go another way than where gradients are wanted
            y, got = _results(case, spread)
            got.append(quiet[0] if isinstance(quiet, tuple) else quiet)
            alone.append(alone[0])
        whole = [t.full_tensor() if isinstance(t, DTensor) else t for t in got]
        far = [float((a - b).abs().max()) for a, b in zip(whole, alone, strict=True)]
        found[name] = {"placed": str(y.placements[0]), "far": max(far), "bytes": sum(counted.sizes)}
    return found


def refused(mesh: DeviceMesh) -> dict[str, str]:
    """What calls are told for which there is no rule."""
    x, q, kv = torch.randn(4, 16), torch.randn(1, 6, 6, 8), torch.randn(1, 3, 6, 8)
    last, heads = distribute_tensor(x, mesh, [Shard(1)]), distribute_tensor(q, mesh, [Shard(1)])
    rows = distribute_tensor(x, mesh, [Shard(0)])
    wide = distribute_tensor(torch.randn(4, 64), mesh, [Shard(1)])
    calls: dict[str, Callable[[], Any]] = {
        "a norm's numbers": lambda: ops.rms_norm(last),
        "tokens": lambda: _rope(distribute_tensor(q, mesh, [Shard(2)])),
        "causal rows": lambda: ops.softmax(rows, causal=True),
        "halves": lambda: ops.silu_mul(last),
        "heads": lambda: ops.attention(heads, kv, kv),
        "out": lambda: ops.rms_norm(rows, out=torch.empty_like(x)),
        "a packed sum": lambda: _layer("int8")(wide),
        "a packed sum in order": lambda: _layer("int4", order=True)(wide),
        "experts": lambda: ops.moe_route(last, 2),
        "a table's rows": lambda: ops.quantized_embedding(
            torch.zeros(4).long(), distribute_tensor(x.to(torch.int8), mesh, [Shard(0)]), torch.ones(4)
        ),
        "a sum": lambda: ops.linear(last, distribute_tensor(torch.randn(6, 16), mesh, [Shard(1)])),
        "two ways": lambda: ops.linear(rows, distribute_tensor(torch.randn(6, 16), mesh, [Shard(0)])),
        "float64": lambda: ops.cross_entropy(
            distribute_tensor(x.double(), mesh, [Shard(1)]), torch.zeros(4, dtype=torch.int64)
        ),
        "a class": lambda: ops.cross_entropy(last, torch.tensor([0, 16, 1, 2])),
    }
    found = {}
    for name, call in calls.items():
        try:
            found[name] = f"nothing: {call()}"
        except (TypeError, ValueError) as error:
            found[name] = str(error)
    return found
