"""GGUF's formats: a file's blocks to the last bit, as the library that defines the files reads them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from opsmith.ops import PackedLinear
from opsmith.ops.packed_linear.formats import FORMATS
from opsmith.ops.packed_linear.gguf import BLOCKS, KEPT

by_format = pytest.mark.parametrize("format", BLOCKS)
HALVES = {
    "q6_k": (208,),
    "q3_k": (108,),
    "q5_k": (0, 2),
    "q4_k": (0, 2),
}  # where scales lie in a block; else at its beginning


def blocks(format: str, n: int, count: int) -> torch.Tensor:
    """Rows of random blocks, all bits of them, with finite scales of either sign."""
    made = torch.randint(0, 256, (n, count, BLOCKS[format][1]), dtype=torch.uint8)
    if format == "mxfp4":
        made[..., 0] = torch.randint(112, 124, (n, count))
        return made.flatten(1)
    for at in HALVES.get(format, (0,)):
        made[..., at : at + 2] = (torch.randn(n, count, 1) / 64).half().view(torch.uint8)
    return made.flatten(1)


@by_format
def test_values_are_the_files_to_the_last_bit(format: str) -> None:
    gguf = pytest.importorskip("gguf")
    torch.manual_seed(0)
    for n, count in ((1, 1), (33, 3), (80, 2)):
        rows = blocks(format, n, count)
        if format == "mxfp4" and n > 1:
            rows[:5, 0] = torch.tensor([0, 1, 2, 251, 252])  # an exponent that a float has no bits for, too
        packed = PackedLinear.from_blocks(rows, format=format)
        right = gguf.quants.dequantize(rows.numpy(), gguf.GGMLQuantizationType[format.upper()])
        assert packed.dequantize().equal(torch.from_numpy(right))
        assert packed.dequantize(torch.float64).equal(torch.from_numpy(right).double())


@by_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_the_files_values(format: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    packed = PackedLinear.from_blocks(blocks(format, 70, 4), format=format)
    for m in (1, 4, 40, 400):
        x = torch.randn(m, packed.in_features).to(dtype)
        right = x.double() @ packed.dequantize(torch.float64).t()
        unit = torch.finfo(dtype).eps + 2 * torch.finfo(torch.float32).eps * math.sqrt(packed.in_features)
        assert float((packed(x).double() - right).abs().max() / right.abs().max()) <= unit + 2.0**-14 * (
            dtype != torch.float32
        )


@pytest.mark.parametrize("format", sorted(BLOCKS.keys() - KEPT.keys()))
def test_a_weight_of_floats_is_rounded_to_the_nearest_steps(format: str) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(600, 40)
    packed = PackedLinear.from_linear(layer, format=format)
    assert packed.error is not None
    steps = (
        12 if format == "mxfp4" else FORMATS[format].steps
    )  # of floats, which have large ones and small ones
    # Of numbers that are spread evenly, as these are, half a step at most and 0.29 of one on average.
    assert 0.2 / steps < packed.error.relative < 1.7 / steps
    again = PackedLinear.from_linear(nn.Linear(600, 40), format=format)
    again.load_state_dict(packed.state_dict())
    assert again.dequantize().equal(packed.dequantize())
    zeros = nn.Linear(64, 8)
    nn.init.zeros_(zeros.weight)
    assert not PackedLinear.from_linear(zeros, format=format).dequantize().any()


def test_a_float8_weight_is_kept_as_it_is() -> None:
    """Every number that the format has, and the scales of blocks, of rows, and of an incomplete block."""
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    weight = every[every.float().isfinite()].repeat(100)[: 130 * 190].view(130, 190)
    by_row, blocks = torch.rand(130) + 0.5, torch.tensor([[0.5, 3.0], [1e-4, 7.0]])
    spread = blocks.repeat_interleave(128, 0)[:130].repeat_interleave(128, 1)[:, :190]
    for scale, wide in ((by_row, by_row[:, None]), (by_row[:, None], by_row[:, None]), (blocks, spread)):
        packed = PackedLinear.from_float8(weight, scale)
        assert packed.dequantize().equal(weight.float() * wide)
        for m in (1, 3, 8, 9, 70):
            x = torch.randn(m, 190)
            right = x.double() @ packed.dequantize(torch.float64).t()
            assert float((packed(x).double() - right).abs().max() / right.abs().max()) < 1e-6
    with pytest.raises(TypeError, match=r"numbers must be float8_e4m3fn \[N, K\], got float32 \[130, 190\]"):
        PackedLinear.from_float8(weight.float(), by_row)
    with pytest.raises(
        ValueError, match=r"scale must be float32 \[2, 2\], \[130\] or \[130, 1\], got float32 \[190\]"
    ):
        PackedLinear.from_float8(weight, torch.ones(190))
    for wrong in ((every.view(2, 128), torch.ones(2)), (weight, by_row / 0)):
        with pytest.raises(ValueError, match="must be finite, got NaN or an infinity"):
            PackedLinear.from_float8(*wrong)
    with pytest.raises(ValueError, match=r"group_size must be one of \(32, 64, 128, 0\), got 16"):
        PackedLinear.from_linear(nn.Linear(64, 8), format="fp8", group_size=16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5, 8, 9, 96])
def test_every_float8_number_is_multiplied_exactly(dtype: torch.dtype, rows: int) -> None:
    """Those without an exponent of their own, too; at each of four places of a word, which kernels take apart."""
    numbers = torch.arange(256, dtype=torch.uint8)
    numbers = numbers[(numbers & 127) != 127]
    weight = torch.zeros(len(numbers), 128, dtype=torch.uint8)
    places = torch.arange(len(numbers)) % 4
    weight[torch.arange(len(numbers)), places] = numbers
    weight = weight.view(torch.float8_e4m3fn)
    module = PackedLinear.from_float8(weight, torch.ones(2, 1))
    x = torch.zeros(rows, 128, dtype=dtype)
    x[:, :4] = 1
    with torch.no_grad():
        assert module(x).float().equal(weight.float().sum(1).expand(rows, -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 5, 9, 96])
def test_every_float4_number_is_multiplied_exactly(dtype: torch.dtype, rows: int) -> None:
    numbers = torch.arange(16, dtype=torch.uint8).repeat_interleave(8)
    weight = torch.zeros(len(numbers), 64, dtype=torch.uint8)
    weight[torch.arange(len(numbers)), torch.arange(len(numbers)) % 8] = numbers
    scale = torch.randint(124, 131, (len(numbers), 2)).byte()
    module = PackedLinear.from_float4(weight[:, ::2] | weight[:, 1::2] << 4, scale)
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    right = torch.cat((magnitudes, -magnitudes))[numbers.int()] * 2.0 ** (scale[:, 0].float() - 127)
    x = torch.zeros(rows, 64, dtype=dtype)
    x[:, :8] = 1
    with torch.no_grad():
        assert module.dequantize().sum(1).equal(right)
        assert module(x).float().equal(right.expand(rows, -1))


def test_float4_that_is_none() -> None:
    weight, scale = torch.zeros(4, 32, dtype=torch.uint8), torch.full((4, 2), 127).byte()
    assert PackedLinear.from_float4(weight, scale).in_features == 64
    for wrong, message in (
        ((weight[:, :20], scale[:, :1]), "rows of mxfp4 must be whole groups of 16 bytes, got 20"),
        ((weight, scale + 128), "every scale must be finite, got 255"),
        ((weight, scale[:, :1]), r"scale must be uint8 \[4, 2\], got uint8 \[4, 1\]"),
        ((weight, scale.float()), r"scale must be uint8 \[4, 2\], got float32 \[4, 2\]"),
    ):
        with pytest.raises(ValueError, match=message):
            PackedLinear.from_float4(*wrong)
    with pytest.raises(TypeError, match=r"numbers must be uint8 \[N, K\], got float32 \[4, 32\]"):
        PackedLinear.from_float4(weight.float(), scale)
    rows = torch.zeros(2, 34, dtype=torch.uint8)
    rows[1, 17] = 255
    with pytest.raises(ValueError, match="mxfp4: every scale must be finite"):
        PackedLinear.from_blocks(rows, format="mxfp4")


def test_blocks_that_are_none() -> None:
    with pytest.raises(ValueError, match=r"format of blocks must be one of q8_0, .*, got 'int8'"):
        PackedLinear.from_blocks(torch.zeros(2, 34, dtype=torch.uint8), format="int8")
    with pytest.raises(
        ValueError, match=r"q8_0 rows must be uint8 \[N, a multiple of 34\], got uint8 \(2, 33\)"
    ):
        PackedLinear.from_blocks(torch.zeros(2, 33, dtype=torch.uint8), format="q8_0")
    with pytest.raises(ValueError, match=r"q4_k rows must be uint8 .* got int8 \(2, 144\)"):
        PackedLinear.from_blocks(torch.zeros(2, 144, dtype=torch.int8), format="q4_k")
    rows = torch.zeros(2, 144, dtype=torch.uint8)
    rows[1, :2] = torch.tensor([math.nan]).half().view(torch.uint8)
    with pytest.raises(ValueError, match="q4_k: every scale must be finite"):
        PackedLinear.from_blocks(rows, format="q4_k")


@pytest.mark.parametrize("format", ["q4_k", "q5_k"])
def test_rows_of_one_sign_lose_nothing_to_what_is_taken_off(format: str) -> None:
    torch.manual_seed(0)
    packed = PackedLinear.from_linear(nn.Linear(72, 64, bias=False), format=format)
    weight, errors = packed.dequantize(), torch.zeros(2)
    for _ in range(20):
        x = torch.rand(1, 72)
        right = x.double() @ weight.double().t()
        both = torch.stack(
            [(y.double() - right).abs().max() for y in (packed(x), nn.functional.linear(x, weight))]
        )
        errors = torch.maximum(errors, both.float())
    assert errors[0] <= 2 * errors[1]
