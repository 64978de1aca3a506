"""Rounding for a layer's inputs: what it gains in results, what it needs, and what it refuses."""

import pytest
import torch
from torch import nn

from opsmith.ops import PackedLinear
from opsmith.ops.packed_linear.inputs import Inputs


def correlated(rows: int, k: int, of: int = 20) -> torch.Tensor:
    """Rows that are mixtures of a few directions, with a little of their own."""
    return torch.randn(rows, of) @ torch.randn(of, k) + 0.1 * torch.randn(rows, k)


def seen(x: torch.Tensor) -> Inputs:
    inputs = Inputs(x.shape[-1])
    inputs.add(x)
    return inputs


def change(module: PackedLinear, weight: torch.Tensor, x: torch.Tensor) -> float:
    """Of a layer's results, relative, in float64."""
    exact = x.double() @ weight.double().t()
    return float((x.double() @ module.dequantize(torch.float64).t() - exact).norm() / exact.norm())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_results_on_such_inputs_change_less(group_size: int, symmetric: bool) -> None:
    k = 300  # no multiple of a group
    x, linear = correlated(2000, k), nn.Linear(k, 70)
    options = {"format": "int4", "group_size": group_size, "symmetric": symmetric}
    plain = PackedLinear.from_linear(linear, **options)
    made = PackedLinear.from_linear(linear, **options, inputs=seen(x))
    before, after = (change(module, linear.weight.detach(), x) for module in (plain, made))
    assert after < 0.25 * before
    assert plain.error is not None
    assert made.error is not None
    assert made.error.result == pytest.approx(after, rel=1e-3)
    assert plain.error.result is None
    assert made.error.relative > plain.error.relative  # of the weight itself more is lost: that is the trade
    assert made.scale is not None
    assert plain.scale is not None
    assert made.scale.equal(plain.scale)
    assert (made.zero is None) == symmetric


def test_inputs_that_know_nothing_of_each_other_change_nothing() -> None:
    """With a sum that is diagonal no column makes up for another: every number goes to the nearest."""
    inputs = Inputs(96)
    inputs.sum = torch.diag(torch.rand(96) + 0.5)
    linear = nn.Linear(96, 40)
    made = PackedLinear.from_linear(linear, format="int4", group_size=32, inputs=inputs)
    assert made.weight.equal(PackedLinear.from_linear(linear, format="int4", group_size=32).weight)


def test_two_columns_by_hand() -> None:
    """Two inputs that are always the same number: what the first column loses the second makes up for."""
    linear = nn.Linear(2, 1)
    linear.weight.data = torch.tensor([[7.0, 0.4]])  # a scale of 1: 0.4 is rounded to 0, and 7 is exact
    third = nn.Linear(3, 1)
    third.weight.data = torch.tensor([[7.0, 0.4, 0.4]])
    x = torch.randn(500, 1) * torch.tensor([[0.0, 1.0, 1.0]]) + torch.randn(500, 1) * torch.tensor(
        [[1.0, 0.0, 0.0]]
    )
    plain = PackedLinear.from_linear(third, format="int4", group_size=32)
    made = PackedLinear.from_linear(third, format="int4", group_size=32, inputs=seen(x))
    assert plain.dequantize().tolist() == [[7.0, 0.0, 0.0]]
    assert sorted(made.dequantize()[0].tolist()) == [0.0, 1.0, 7.0]  # 0.8 in all is nearer to 1 than to 0


def test_inputs_may_come_in_parts_and_be_few() -> None:
    x = correlated(60, 96)
    whole, parts = seen(x), Inputs(96)
    for part in x.view(6, 2, 5, 96):
        parts.add(part.bfloat16().float() if part.dtype != torch.float32 else part)
    assert parts.rows == whole.rows == 60
    torch.testing.assert_close(parts.sum, whole.sum, rtol=1e-5, atol=1e-4)
    linear = nn.Linear(96, 33)
    made = PackedLinear.from_linear(
        linear, format="int4", group_size=32, inputs=seen(x[:3])
    )  # far from definite
    assert bool(made.dequantize().isfinite().all())
    assert change(made, linear.weight.detach(), x[:3]) < 0.05


@pytest.mark.parametrize(
    "inputs", [torch.zeros(10, 64), torch.full((10, 64), 1e-18), torch.full((10, 64), 1e15)]
)
def test_inputs_of_any_size(inputs: torch.Tensor) -> None:
    linear = nn.Linear(64, 33)
    made = PackedLinear.from_linear(linear, format="int4", group_size=32, inputs=seen(inputs))
    step = made.scale.float().abs().t().repeat_interleave(32, 1)  # type: ignore[union-attr]
    assert bool(made.dequantize().isfinite().all())
    assert bool(((made.dequantize() - linear.weight).abs() <= 9 * step).all())


def test_what_is_refused() -> None:
    inputs = Inputs(64)
    with pytest.raises(ValueError, match=r"Inputs: expected inputs \[\.\.\., 64\], got \(3, 65\)"):
        inputs.add(torch.randn(3, 65))
    with pytest.raises(ValueError, match="Inputs: inputs must be finite"):
        inputs.add(torch.full((2, 64), torch.inf))
    assert inputs.rows == 0
    assert not inputs.sum.any()
    for format, k in (("int8", 64), ("int4", 65)):
        with pytest.raises(
            ValueError, match=f"inputs are for int4 and must be of {k} numbers, got {format} and 64"
        ):
            PackedLinear.from_linear(nn.Linear(k, 8), format=format, inputs=inputs)
