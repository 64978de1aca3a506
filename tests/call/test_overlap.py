"""Outputs that share memory: an operator's result is right, or it is an error before anything is written."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from opsmith import ops
from opsmith.call.arguments import short
from opsmith.measure.pool import tensors_of
from opsmith.operator import Make, Operator, registry

WITH_OUT = [c for c in registry().values() if "out" in inspect.signature(c.function).parameters]

Call = dict[str, Any]


def copied(call: Call) -> Call:
    """The same arguments in memory of their own, laid out as they are."""

    def copy(t: Any) -> Any:
        if not isinstance(t, torch.Tensor):
            return t
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(t)

    return {name: copy(value) for name, value in call.items()}


def calls(card: Operator, dtype: torch.dtype) -> Iterator[tuple[str, Call, list[torch.Tensor]]]:
    """Each sample's arguments by name, and its results."""
    parameters = list(inspect.signature(card.function).parameters)
    for sample in card.samples(Make(dtype)):
        call = {**dict(zip(parameters, sample.args, strict=False)), **sample.kwargs}
        with torch.no_grad():
            results = list(tensors_of(card.function(**call)))
        if results[0].numel():
            yield sample.name, call, results


def run(card: Operator, call: Call, outs: list[torch.Tensor]) -> None:
    with torch.no_grad():
        card.function(**call, out=outs[0] if len(outs) == 1 else tuple(outs))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=short)
@pytest.mark.parametrize("card", WITH_OUT, ids=lambda c: c.name)
def test_an_output_that_is_an_input_holds_the_result_or_is_refused(
    card: Operator, dtype: torch.dtype
) -> None:
    allowed = {(i, name) for i, names in enumerate(card.onto) for name in names}
    tried = set()
    for sample, call, results in calls(card, dtype):
        for i, result in enumerate(results):
            for name in call:
                t = call[name]
                if not isinstance(t, torch.Tensor) or t.shape != result.shape or t.dtype != result.dtype:
                    continue
                tried.add((i, name))
                own = copied(call)
                outs = [own[name] if j == i else torch.empty_like(r) for j, r in enumerate(results)]
                if (i, name) not in allowed:
                    with pytest.raises(ValueError, match=f"{card.name}: out .* shares memory with {name} "):
                        run(card, own, outs)
                    assert all(same(own[n], v) for n, v in call.items() if isinstance(v, torch.Tensor)), (
                        sample
                    )
                    continue
                run(card, own, outs)
                for got, expected in zip(outs, results, strict=True):
                    assert_close(got, expected, rtol=0, atol=0, equal_nan=True, msg=sample)
    assert tried >= allowed


@pytest.mark.parametrize("card", WITH_OUT, ids=lambda c: c.name)
def test_an_output_that_reaches_into_an_input_is_refused_before_it_is_written(card: Operator) -> None:
    refused = 0
    for sample, call, results in calls(card, torch.float32):
        for i, result in enumerate(results):
            for name, t in call.items():
                if not isinstance(t, torch.Tensor) or not t.numel():
                    continue
                from_byte = (t.nbytes - 1) // 16 * 16  # of the output, within the input's last bytes
                if not from_byte:  # all of a tiny input: the test above
                    continue
                halves = name == "gate" and "up" not in call
                reaches = f"{card.name}: out .* shares memory with {'(gate|up)' if halves else name} "
                memory = torch.zeros(from_byte + result.nbytes + t.nbytes, dtype=torch.uint8)
                within = memory[: t.nbytes].view(t.dtype).view(t.shape).copy_(t)
                out = memory[from_byte : from_byte + result.nbytes].view(result.dtype).view(result.shape)
                before = memory.clone()
                outs = [out if j == i else torch.empty_like(r) for j, r in enumerate(results)]
                with pytest.raises(ValueError, match=reaches):
                    run(card, {**call, name: within}, outs)
                assert torch.equal(memory, before), f"{sample}, {name}"
                refused += 1
    assert refused


@pytest.mark.parametrize("card", WITH_OUT, ids=lambda c: c.name)
def test_outputs_are_apart_from_each_other_and_from_themselves(card: Operator) -> None:
    for _, call, results in calls(card, torch.float32):
        for i, result in enumerate(results):
            outs = [torch.empty_like(r) for r in results]
            if result.numel() > 1:
                folded = [
                    result.new_zeros(1).expand(result.shape) if j == i else t for j, t in enumerate(outs)
                ]
                with pytest.raises(
                    ValueError, match=f"{card.name}: several elements of out are in one place"
                ):
                    run(card, call, folded)
            if i and result.shape == results[0].shape and result.dtype == results[0].dtype:
                twice = [outs[0] if j == i else t for j, t in enumerate(outs)]
                with pytest.raises(ValueError, match=r"shares memory with out\[0\]"):
                    run(card, call, twice)


def test_half_of_a_packed_gate_holds_the_result() -> None:
    packed = torch.randn(5, 32)
    expected = ops.silu_mul(packed)
    assert torch.equal(ops.silu_mul(packed, out=packed[:, 16:]), expected)


def test_columns_of_one_matrix_are_apart() -> None:
    """Their spans reach into each other; no element is shared."""
    memory = torch.randn(5, 48)
    x, out = memory[:, :16], memory[:, 16:32]
    expected = ops.gelu(x)
    assert ops.gelu(x, out=out) is out
    assert torch.equal(out, expected)
    with pytest.raises(ValueError, match=r"gelu: out \(5, 16\) shares memory with x \(5, 16\)"):
        ops.gelu(x, out=memory[:, 15:31])
    weight = torch.randn(16, 16)
    expected = ops.linear(x, weight)
    assert torch.equal(ops.linear(x, weight, out=memory[:, 32:]), expected)


def test_out_is_allowed_where_memory_has_no_address() -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        return ops.silu_mul(x, x, out=torch.empty_like(x))

    x = torch.randn(3, 8)
    assert_close(torch.compile(call, backend="eager", fullgraph=True)(x), call(x))
    assert ops.gelu(x.to("meta"), out=x.to("meta")).shape == x.shape
