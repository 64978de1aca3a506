"""Packed linear layers: every format at sizes that fit nothing, what rounding may cost, round trips, and refusals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from opsmith.kernels import isa, libraries
from opsmith.operator import registry
from opsmith.ops import PackedLinear, packed_linear
from opsmith.ops.linear import pack_weight
from opsmith.ops.packed_linear import weight as packed_weight
from opsmith.ops.packed_linear.formats import FORMATS, GROUPS
from opsmith.ops.packed_linear.weight import (
    pack_integers,
    pack_pairs,
    packed_shape,
    unpack_integers,
    unpack_pairs,
)

CARD = registry()["packed_linear"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS = (0, 1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 512)

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
by_format = pytest.mark.parametrize("format", FORMATS)
native = pytest.mark.skipif(not libraries.load(), reason="the native library is not available")


def layer(k: int, n: int, format: str, *, seed: int = 0, bias: bool = True, **options: Any) -> PackedLinear:
    torch.manual_seed(seed)
    if format == "fp8" and seed % 2:
        options["group_size"] = 0
    return PackedLinear.from_linear(nn.Linear(k, n, bias=bias), format=format, **options)


def exact(module: PackedLinear, x: torch.Tensor) -> torch.Tensor:
    bias = None if module.bias is None else module.bias.to(x.dtype).double()
    return CARD.reference(
        x.double(),
        module.weight,
        module.scale,
        module.zero,
        bias,
        format=module.format,
        group_size=module.group_size,
        outer=module.outer,
    )


def assert_close(got: torch.Tensor, right: torch.Tensor, k: int) -> None:
    """One rounding of the result, and of float32 sums what K numbers may add up to."""
    scale = float(right.abs().max()) if right.numel() else 0.0
    unit = torch.finfo(got.dtype).eps + 2 * torch.finfo(torch.float32).eps * math.sqrt(k)
    if got.dtype != torch.float32:
        unit += 2.0**-14  # what two digits leave of the smallest numbers of a block
    assert float((got.double() - right).abs().max() if got.numel() else 0.0) <= unit * scale


@by_dtype
@by_format
def test_every_number_of_rows(format: str, dtype: torch.dtype) -> None:
    """Rows that are apart in memory, into memory with guards around it."""
    module = layer(331, 77, format, group_size=32)
    for m in ROWS:
        x = torch.randn(m, 340).to(dtype)[:, :331]
        y = torch.full((m, 80), math.nan, dtype=dtype)
        bias = None if module.bias is None else module.bias.to(dtype)
        got = packed_linear(
            x,
            module.weight,
            module.scale,
            module.zero,
            bias,
            format=format,
            group_size=module.group_size,
            outer=module.outer,
            out=y[:, :77],
        )
        assert got.data_ptr() == y.data_ptr()
        assert_close(got, exact(module, x), 331)
        assert bool(y[:, 77:].isnan().all()), "written outside the output"


@by_format
@pytest.mark.parametrize("k", [0, 1, 2, 7, 8, 9, 31, 33, 63, 100, 128, 129, 511, 513, 1025])
def test_every_depth_and_width(format: str, k: int) -> None:
    for n in (1, 2, 15, 16, 17, 31, 32, 33, 64, 97):
        module = layer(k, n, format, seed=n, symmetric=n % 2 == 0, group_size=GROUPS[n % 3])
        x = torch.randn(5, k, dtype=torch.bfloat16)
        with torch.no_grad():
            assert_close(module(x), exact(module, x), k)


@pytest.mark.parametrize("format", ["q5_k", "q6_k"])
def test_a_deep_product_of_few_rows_keeps_the_bits_of_float32(format: str) -> None:
    """Sums of 16 numbers are exact, and those of 688 such, one after the other, would lose more than eager."""
    torch.manual_seed(0)
    module = PackedLinear.from_linear(nn.Linear(11008, 1024, bias=False), format=format)
    x, w = torch.randn(4, 11008), module.dequantize()
    with torch.no_grad():
        verdict = CARD.tolerance.check(module(x), x @ w.t(), x.double() @ w.double().t())
    assert verdict.ok, verdict.why


@native
@pytest.mark.parametrize("format", ["int8", "int8_dynamic", "int4"])
@by_dtype
def test_a_row_has_one_result_however_many_others_there_are(format: str, dtype: torch.dtype) -> None:
    """Sums of integers are exact, so tiles, threads and neighbors leave no trace; those of floats keep their order."""
    module = layer(700, 80, format)
    x = torch.randn(65, 700).to(dtype)
    floats = dtype == torch.float32 and format != "int8_dynamic" and isa.tier() != "avx512_bf16"
    some = 12 if floats else 1  # fewer rows are numbers in fixed point, as everywhere else
    with torch.no_grad():
        together = module(x)
        for r in (0, 7, 65 - some):
            assert module(x[r : r + some]).equal(together[r : r + some])


@native
def test_dynamic_is_the_integer_product() -> None:
    module = layer(257, 50, "int8_dynamic", bias=False)
    x = torch.randn(9, 257)
    scale = x.abs().amax(1) / 127
    numbers = (x * (torch.full_like(scale, 127) / x.abs().amax(1))[:, None]).round()
    q = unpack_integers(module.weight, "int8", 50, 257).double() - 128
    assert module.scale is not None
    right = (numbers.double() @ q.t()) * scale.double()[:, None] * module.scale.double()
    torch.testing.assert_close(module(x).double(), right, rtol=3e-7, atol=0)


@by_format
def test_not_finite_rows_give_nan_and_touch_no_other(format: str) -> None:
    module = layer(100, 20, format)
    x = torch.randn(6, 100)
    clean = module(x)
    x[1, 99], x[4, 0] = math.nan, math.inf
    y = module(x)
    assert bool(y[1].isnan().all())
    assert not bool(y[4].isfinite().any())
    for r in (0, 2, 3, 5):
        assert y[r].equal(clean[r])


def test_formats_lose_what_they_say() -> None:
    torch.manual_seed(1)
    linear = nn.Linear(512, 200)
    weight = linear.weight.detach()
    seen = {}
    for format, options in (
        ("bf16", {}),
        ("int8", {}),
        ("int4", {"group_size": 32}),
        ("int4", {"group_size": 32, "symmetric": False}),
        ("int4", {"group_size": 128}),
    ):
        module = PackedLinear.from_linear(linear, format=format, **options)
        lost = module.dequantize() - weight
        assert module.error is not None
        torch.testing.assert_close(
            module.error.relative, float(lost.double().norm() / weight.double().norm())
        )
        seen[(format, *options.values())] = module.error.relative
    assert seen[("bf16",)] < seen[("int8",)] < seen["int4", 32] < seen["int4", 128] < 0.1


def test_rounding_is_within_half_a_step_of_int8_and_one_of_int4() -> None:
    torch.manual_seed(2)
    linear = nn.Linear(300, 70)
    linear.weight.data[3] = 0
    linear.weight.data[5, 40:] = 0
    weight = linear.weight.detach()
    int8 = PackedLinear.from_linear(linear, format="int8")
    assert bool(
        ((int8.dequantize() - weight).abs() <= weight.abs().amax(1, keepdim=True) / 254 * 1.0001).all()
    )
    for symmetric in (True, False):
        int4 = PackedLinear.from_linear(linear, format="int4", group_size=64, symmetric=symmetric)
        assert int4.scale is not None
        step = int4.scale.float().abs().t().repeat_interleave(64, 1)[:, :300]
        assert bool(((int4.dequantize() - weight).abs() <= step * 1.01).all())
        assert bool((int4.dequantize()[3] == 0).all()), "zeros stay zeros"


@given(st.integers(1, 100), st.integers(1, 100), st.sampled_from(["int8", "int4"]), st.integers(0, 1 << 30))
def test_integers_survive_packing(n: int, k: int, format: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randint(0, 16 if format == "int4" else 256, (n, k), generator=generator, dtype=torch.uint8)
    packed = pack_integers(q, format)
    assert packed.shape == packed_shape(format, n, k)
    assert unpack_integers(packed, format, n, k).equal(q)


@pytest.mark.parametrize("n", [1, 63, 64, 65, 200])
def test_a_layer_packed_a_few_rows_at_a_time_is_the_same(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = layer(33, n, "bf16")
    monkeypatch.setattr(packed_weight, "_AT_ONCE", 1)  # a panel at a time
    assert layer(33, n, "bf16").weight.equal(whole.weight)


@given(st.integers(1, 140), st.integers(1, 40))
def test_pairs_survive_packing(n: int, k: int) -> None:
    weight = torch.randn(n, k).bfloat16()
    packed = PackedLinear.from_linear(linear_of(weight), format="bf16").weight
    assert unpack_pairs(packed, k).equal(weight)
    assert packed.equal(pack_pairs(weight))
    if libraries.load():
        assert packed.equal(pack_weight(weight))


def linear_of(weight: torch.Tensor) -> nn.Linear:
    linear = nn.Linear(*reversed(weight.shape), bias=False)
    linear.weight.data = weight
    return linear


def test_where_a_number_lies() -> None:
    """The layout that the documentation promises to checkpoints."""
    n, k = 48, 24
    q = torch.arange(n * k).remainder(251).to(torch.uint8).view(n, k)
    flat = pack_integers(q, "int8").flatten()
    nibbles = pack_integers(q & 15, "int4").flatten()
    for row in (0, 5, 31, 32, 47):
        first = row // 32 * 32
        width = min(32, n - first)
        for column in range(k):
            at = first * k + column // 4 * 4 * width + (row - first) * 4 + column % 4
            assert flat[at] == q[row, column]
            at = first * k // 2 + column // 8 * 4 * width + (row - first) * 4 + column % 4
            assert nibbles[at] >> (4 if column % 8 > 3 else 0) & 15 == q[row, column] & 15


@by_format
@pytest.mark.parametrize("symmetric", [True, False])
def test_state_dict_and_safetensors_round_trip(format: str, symmetric: bool, tmp_path: Path) -> None:
    module = layer(130, 50, format, symmetric=symmetric, group_size=32)
    x = torch.randn(3, 130)
    for state in (
        module.state_dict(),
        through_safetensors(module.state_dict(), tmp_path / "layer.safetensors"),
    ):
        twin = PackedLinear(130, 50, format=format, symmetric=symmetric, group_size=32)
        assert twin.load_state_dict(state) == ([], [])
        assert twin(x).equal(module(x))
        assert twin.error is None
    other = PackedLinear(139, 50, format=format, symmetric=symmetric, group_size=32)
    with pytest.raises(RuntimeError, match="size mismatch"):
        other.load_state_dict(module.state_dict())


def through_safetensors(state: dict[str, torch.Tensor], path: Path) -> dict[str, torch.Tensor]:
    save_file(state, path)
    return load_file(path)


@by_format
def test_a_change_of_dtype_is_the_bias_s(format: str) -> None:
    module = layer(64, 32, format)
    before = {name: t.clone() for name, t in module.state_dict().items()}
    x = torch.randn(2, 64)
    y = module(x)
    module.half()
    for name, t in module.state_dict().items():
        assert t.dtype == (torch.float16 if name == "bias" else before[name].dtype)
    torch.testing.assert_close(module(x), y, rtol=1e-3, atol=1e-3)


@by_format
def test_a_layer_without_memory_packs_to_its_shapes(format: str) -> None:
    with torch.device("meta"):
        module = PackedLinear.from_linear(nn.Linear(40, 30), format=format)
    assert module(torch.empty(3, 40, device="meta")).shape == (3, 30)


def test_release_gives_the_weight_back() -> None:
    linear = nn.Linear(40, 30)
    module = PackedLinear.from_linear(linear, format="int8", release=True)
    assert linear.weight.numel() == 0
    assert module.nbytes == 32 * 40 + 30 * 4
    assert "in_features=40, out_features=30, bias=True, format='int8'" in repr(module)


@pytest.mark.parametrize("format", ["bf16", "int8", "int4"])
def test_the_input_has_a_gradient(format: str) -> None:
    module = layer(70, 20, format)
    x = torch.randn(3, 70, requires_grad=True)
    (grad,) = torch.autograd.grad(module(x).sum(), x)
    torch.testing.assert_close(grad, module.dequantize().sum(0).expand(3, 70))


def test_dynamic_rounding_has_no_gradient() -> None:
    module = layer(70, 20, "int8_dynamic")
    with pytest.raises(ValueError, match=r"packed_linear: rounding the activations has no gradient.*no_grad"):
        module(torch.randn(3, 70, requires_grad=True))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"format": "int3"},
            ValueError,
            "format must be one of bf16, int8, int8_dynamic, int4, .*, got 'int3'",
        ),
        (
            {"format": "int4", "group_size": 48},
            ValueError,
            r"group_size must be one of \(32, 64, 128\), got 48",
        ),
        ({"format": "int4", "symmetric": 1}, TypeError, "symmetric must be True or False, got 1"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match="PackedLinear: " + message):
        PackedLinear.from_linear(nn.Linear(8, 8), **options)
    with pytest.raises(error, match="PackedLinear: " + message):
        PackedLinear(8, 8, **options)


def test_what_cannot_be_packed() -> None:
    linear = nn.Linear(8, 40)
    with torch.no_grad():
        linear.weight[33, 2] = math.inf
    with pytest.raises(ValueError, match="row 33 holds NaN or an infinity"):
        PackedLinear.from_linear(linear, format="int8")
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Linear, got Embedding"):
        PackedLinear.from_linear(nn.Embedding(3, 4), format="int8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="in_features must be a whole number, 0 or more, got -1"):
        PackedLinear(-1, 8, format="int8")


def test_calls_that_do_not_fit() -> None:
    module = layer(64, 32, "int8")
    call = {"format": "int8"}
    with pytest.raises(ValueError, match=r"packed_linear: weight must have shape \(32, 72\)"):
        packed_linear(torch.randn(2, 65), module.weight, module.scale, **call)
    with pytest.raises(TypeError, match="packed_linear: x must be a floating-point tensor, got int64"):
        module(torch.ones(2, 64, dtype=torch.int64))
    with pytest.raises(ValueError, match="packed_linear: an int8 weight needs its scale"):
        packed_linear(torch.randn(2, 64), module.weight, **call)
    with pytest.raises(ValueError, match="packed_linear: format must be one of"):
        packed_linear(torch.randn(2, 64), module.weight, module.scale, format="q8")
    with pytest.raises(
        ValueError, match=r"packed_linear: group_size must be one of \(32, 64, 128\) for int4"
    ):
        packed_linear(torch.randn(2, 64), module.weight, module.scale, format="int4", group_size=16)
    with pytest.raises(
        TypeError, match="packed_linear: scale must be float32 for format='int8', got float16"
    ):
        packed_linear(torch.randn(2, 64), module.weight, torch.ones(32).half(), **call)
    with pytest.raises(ValueError, match="packed_linear: an int8 weight has no zero"):
        packed_linear(torch.randn(2, 64), module.weight, module.scale, torch.zeros(1), **call)
    with pytest.raises(ValueError, match=r"packed_linear: bias must have shape \(32,\)"):
        packed_linear(torch.randn(2, 64), module.weight, module.scale, None, torch.ones(33), **call)
    with pytest.raises(TypeError, match="packed_linear: bias must be float32 like x, got float16"):
        packed_linear(torch.randn(2, 64), module.weight, module.scale, None, torch.ones(32).half(), **call)


@native
def test_the_binding_refuses_what_would_be_read_out_of_bounds() -> None:
    op = torch.ops.opsmith.packed_linear.default
    x, weight, scale = torch.ones(2, 8), torch.zeros(16, 8, dtype=torch.uint8), torch.ones(5)
    nested, outer = torch.ones(1, 5, dtype=torch.int8), torch.ones(1, 1, 5, dtype=torch.float16)
    op(x, weight, scale, None, None, None, 8, 0, 0, y=torch.empty(2, 5))
    for wrong, message in (
        ((torch.ones(2, 9), weight, scale, None, None, None, 8, 0, 0), "packed weight must be"),
        ((x, weight, torch.ones(4), None, None, None, 8, 0, 0), "scale must be"),
        ((x, weight, scale, None, torch.ones(4), None, 8, 0, 0), "bias must be"),
        ((x, weight, scale, None, None, None, 4, 0, 0), "no group of 0"),
        ((x, weight, scale, None, None, None, 4, 48, 0), "no group of 48"),
        ((x, weight, scale, None, None, None, 8, 0, 0), "as many rows"),
        ((x, weight, scale.half()[None], None, None, None, 8, 0, 2), "no group of 0"),
        ((x, weight, scale.half()[None], None, None, None, 8, 16, 2), "no group of 16"),
        ((x, weight, nested, None, None, None, 8, 16, 3), "outer belongs"),
        ((x, weight, scale[None], None, None, None, 8, 64, 4), "no group of 64"),
        ((x, weight, nested, None, None, outer, 8, 16, 6), "no scales of kind 6"),
        ((x, weight, nested, None, None, None, 8, 32, 5), "no group of 32 for 8 bits"),
        ((x, weight[:, :4].contiguous(), nested, None, None, None, 4, 32, 5), "scale must be a Byte"),
        (
            (x, weight[:, :4].contiguous(), nested.view(torch.uint8), nested, None, None, 4, 32, 5),
            "zeros belong",
        ),
        ((x, weight, nested, nested, None, outer, 8, 16, 3), r"outer must be a float16 \[2, 1, 5\]"),
        ((x, weight, nested, None, None, outer.float(), 8, 16, 3), r"outer must be a float16 \[1, 1, 5\]"),
        ((x, weight.view(torch.int8), scale, None, None, None, 8, 0, 0), "packed weight must be"),
    ):
        with pytest.raises(RuntimeError, match=message):
            op(*wrong, y=torch.empty(3 if message == "as many rows" else 2, 5))
