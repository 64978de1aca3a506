"""The linear kernel for many rows: odd sizes, layouts, epilogues, accuracy on hard inputs, NaN, and packed weights."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from opsmith.kernels import libraries
from opsmith.operator import registry
from opsmith.ops.linear import ACTIVATIONS, pack_weight

pytestmark = pytest.mark.skipif(not libraries.load(), reason="the native library is not available")

CARD = registry()["linear"]
NATIVE = CARD.implementation("native")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


def normal(*shape: int, dtype: torch.dtype, seed: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def double(t: torch.Tensor | None) -> torch.Tensor | None:
    return None if t is None else t.double()


@by_dtype
@pytest.mark.parametrize("k", [1, 2, 7, 31, 64, 127, 129, 384, 1000])
def test_odd_sizes_layouts_and_epilogues(k: int, dtype: torch.dtype) -> None:
    """Rows that are apart in memory, outputs between guards, all epilogues in turn; weights packed or in any layout."""
    activations = [None, *ACTIVATIONS]
    for case, (m, n) in enumerate(
        (m, n) for m in (1, 2, 3, 4, 5, 6, 7, 13, 70, 201) for n in (2, 15, 17, 64, 65, 127)
    ):
        x = normal(m, k + case % 3, dtype=dtype, seed=case)[:, :k]
        weight = normal(n, k, dtype=dtype, seed=case + 1, scale=k**-0.5)
        bias = normal(n, dtype=dtype, seed=case + 2) if case % 3 else None
        residual = normal(m, n + 1, dtype=dtype, seed=case + 3)[:, :n] if case % 2 else None
        activation = activations[case % len(activations)]
        y = torch.full((m, n + 3), math.nan, dtype=dtype)
        call: dict[str, Any] = {"activation": activation}
        NATIVE.fn(x, pack_weight(weight), bias, **call, residual=residual, out=y[:, :n])
        eager = CARD.reference(x, weight, bias, **call, residual=residual)
        exact = CARD.reference(x.double(), weight.double(), double(bias), **call, residual=double(residual))
        # Few outputs make eager's largest error a matter of luck, so the bound is wider by what K can add up to.
        slack = torch.finfo(torch.float32).eps * math.sqrt(k)
        verdict = CARD.tolerance.check(y[:, :n], eager, exact)
        assert verdict.error <= verdict.bound + slack, (m, n, activation, verdict)
        assert bool(y[:, n:].isnan().all()), "written outside the output"
        apart = F.pad(weight, (0, 3), value=math.nan)[:, :k]
        for plain in (weight, weight.t().contiguous().t(), apart, apart.t().contiguous().t()):
            other = torch.full_like(y, math.nan)
            NATIVE.fn(x, plain, bias, **call, residual=residual, out=other[:, :n])
            assert torch.equal(other.nan_to_num(), y.nan_to_num()), (m, n, plain.stride())


@pytest.mark.parametrize("k", [384, 1536, 4096])
def test_more_accurate_than_eager(k: int) -> None:
    """On numbers as they are in models: activations with a few columns that are much larger than the others."""
    for outliers in (False, True):
        x = F.gelu(2 * normal(128, k, dtype=torch.float32, seed=k))
        if outliers:
            x[:, :: k // 4] *= 30
        weight = normal(192, k, dtype=torch.float32, seed=k + 1, scale=k**-0.5)
        exact = x.double() @ weight.double().t()
        error = (NATIVE.fn(x, weight).double() - exact).abs()
        eager = (F.linear(x, weight).double() - exact).abs()
        assert error.square().mean() <= eager.square().mean()
        assert error.max() <= 2 * eager.max()  # one number in 24,576 decides it


@by_dtype
def test_packed_holds_every_weight_once_and_nothing_else(dtype: torch.dtype) -> None:
    for n, k in ((1, 1), (65, 3), (70, 33), (128, 64)):
        weight = torch.arange(1, n * k + 1).remainder(251).add(1).view(n, k).to(dtype)
        packed = pack_weight(weight)
        assert packed.dtype == dtype
        assert packed.shape == (1, n, k + k % 2 if dtype == torch.bfloat16 else k)
        values = packed.flatten()
        assert values[values != 0].sort().values.equal(weight.flatten().sort().values)
        assert pack_weight(weight.t().contiguous().t()).equal(packed)


@by_dtype
def test_nan_and_infinity_stay_in_their_rows_and_columns(dtype: torch.dtype) -> None:
    x, weight = normal(9, 33, dtype=dtype, seed=1), normal(70, 33, dtype=dtype, seed=2)
    x[2, 32], x[7, 0], weight[69, 5] = math.nan, math.inf, math.nan
    y = NATIVE.fn(x, weight, activation="relu")
    expected = F.relu(F.linear(x, weight))
    assert y.isnan().equal(expected.isnan())
    assert y.isinf().equal(expected.isinf())
    assert bool(y[2].isnan().all())
    assert bool(y[:, 69].isnan().all())


@by_dtype
def test_empty(dtype: torch.dtype) -> None:
    bias = normal(5, dtype=dtype, seed=3)
    assert NATIVE.fn(torch.empty(0, 7, dtype=dtype), torch.empty(5, 7, dtype=dtype), bias).shape == (0, 5)
    assert NATIVE.fn(torch.empty(3, 7, dtype=dtype), torch.empty(0, 7, dtype=dtype)).shape == (3, 0)
    nothing_to_sum = NATIVE.fn(torch.empty(3, 0, dtype=dtype), torch.empty(5, 0, dtype=dtype), bias)
    assert nothing_to_sum.equal(bias.expand(3, 5))


def test_the_binding_refuses_what_would_be_read_out_of_bounds() -> None:
    packed = pack_weight(torch.ones(5, 7))
    op = torch.ops.opsmith.linear_packed.default
    with pytest.raises(RuntimeError, match="packed weight must be"):
        op(torch.ones(2, 8), packed, None, None, 0, y=torch.empty(2, 5))
    with pytest.raises(RuntimeError, match="y must be 2 rows of 5"):
        op(torch.ones(2, 7), packed, None, None, 0, y=torch.empty(2, 6))
    with pytest.raises(RuntimeError, match="bias must be"):
        op(torch.ones(2, 7), packed, torch.ones(4), None, 0, y=torch.empty(2, 5))
    with pytest.raises(RuntimeError, match="residual must be 2 rows of 5 in x's dtype"):
        op(torch.ones(2, 7), packed, None, torch.ones(2, 5).half(), 0, y=torch.empty(2, 5))
    op = torch.ops.opsmith.linear_unpacked.default
    for weight in (torch.ones(5, 8), torch.ones(5, 7).half(), torch.ones(5, 14)[:, ::2]):
        with pytest.raises(RuntimeError, match=r"weight must be \[5, 7\] in x's dtype"):
            op(torch.ones(2, 7), weight, None, None, 0, y=torch.empty(2, 5))
