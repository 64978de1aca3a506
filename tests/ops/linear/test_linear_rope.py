"""What is particular to the fused projection: the packed weight, its layout, its accuracy, its errors."""

from __future__ import annotations

import pytest
import torch

from opsmith.call.dispatch import always_native
from opsmith.kernels import libraries
from opsmith.ops import linear_rope, rope_table
from opsmith.ops.linear import pack_weight
from opsmith.ops.linear.rope import CARD

reference = CARD.reference

native = pytest.mark.skipif(not libraries.load(), reason="the native library is not available")


def operands(tokens: int, k: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype):
    n = (heads + 2 * kv_heads) * head_dim
    weight = (torch.randn(n, k) * k**-0.5).to(dtype)
    options = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    table = rope_table(head_dim, tokens, dtype=dtype)
    return torch.randn(2, tokens, k).to(dtype), weight, torch.randn(n).to(dtype), table, options


@native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
def test_a_packed_weight_gives_the_same_within_the_tolerance(dtype: torch.dtype, head_dim: int) -> None:
    x, weight, bias, table, options = operands(37, 66, 4, 2, head_dim, dtype)
    with always_native():
        got = linear_rope(x, pack_weight(weight), bias, *table, **options)
    exact = reference(x.double(), weight.double(), bias.double(), *(t.double() for t in table), **options)
    eager = reference(x, weight, bias, *table, **options)
    for mine, theirs, value in zip(got, eager, exact, strict=True):
        assert mine.is_contiguous()
        verdict = CARD.tolerance.check(mine, theirs, value)
        assert verdict.ok, verdict.why


def test_values_are_laid_out_and_not_turned() -> None:
    x, weight, _, table, options = operands(5, 8, 2, 1, 4, torch.float32)
    v = linear_rope(x, weight, None, *table, **options)[2]
    expected = (x @ weight[-4:].T).unsqueeze(1)
    torch.testing.assert_close(v, expected)


def test_tokens_without_a_batch_keep_their_order() -> None:
    x, weight, bias, table, options = operands(7, 12, 3, 1, 8, torch.float32)
    batched = linear_rope(x[:1], weight, bias, *table, **options)
    packed = linear_rope(x[0], weight, bias, *table, **options)
    for mine, value in zip(packed, batched, strict=True):
        torch.testing.assert_close(mine, value[0].transpose(0, 1))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_one_token_at_a_position_needs_no_checks_and_equals_the_rest(
    packed: bool, batched: bool, interleaved: bool
) -> None:
    x, weight, bias, _, options = operands(1, 24, 4, 2, 16, torch.float32)
    table = rope_table(16, 9)
    given = {"positions": torch.tensor([7]), "interleaved": interleaved, "rotary_dim": 16, **options}
    x = x[:1] if batched else x[0]
    for b in (bias, None):
        got = linear_rope(
            x, pack_weight(weight) if packed and libraries.load() else weight, b, *table, **given
        )
        wanted = reference(x, weight, b, *table, **given)
        for mine, value in zip(got, wanted, strict=True):
            assert mine.is_contiguous()
            torch.testing.assert_close(mine, value)
    for wrong in ({"positions": torch.tensor([9])}, {"rotary_dim": 0}, {"kv_heads": 0}):
        with pytest.raises(ValueError, match="linear_rope: "):
            linear_rope(x, weight, bias, *table, **{**given, **wrong})
    with pytest.raises(ValueError, match="bias must have shape"):
        linear_rope(x, weight, bias[:1], *table, **given)
    for rows in (torch.cat((weight, weight[:5])), weight[:-1]):
        with pytest.raises(ValueError, match="weight must have shape"):
            linear_rope(x, rows, None, *table, **given)


@pytest.mark.parametrize("grad", [True, False])
def test_nothing_to_multiply_gives_the_bias_turned(grad: bool) -> None:
    x, weight, bias, table, options = operands(2, 9, 4, 2, 16, torch.float32)
    x, weight = (t[..., :0].clone().requires_grad_(grad) for t in (x, weight))
    with torch.set_grad_enabled(grad):
        got = linear_rope(x, weight, bias, *table, **options)
    for mine, value in zip(got, reference(x, weight, bias, *table, **options), strict=True):
        torch.testing.assert_close(mine, value)
    if grad:
        of_x, of_weight = torch.autograd.grad(sum(t.sum() for t in got), (x, weight))
        assert of_x.shape == (2, 2, 0)
        assert of_weight.shape == (128, 0)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.randn(3)}, ValueError, r"at least 2 dimension\(s\), got shape \(3,\)"),
        (
            {"weight": torch.randn(40, 12)},
            ValueError,
            r"weight must have shape \(40, 8\), 3 \+ 2 \* 1 heads of 8",
        ),
        ({"weight": torch.randn(40, 8).half()}, TypeError, "weight must be float32 like x, got float16"),
        ({"bias": torch.randn(8)}, ValueError, r"bias must have shape \(40,\).*got \(8,\)"),
        ({"heads": 0}, ValueError, "must be positive, got 0, 1 and 8"),
        (
            {"rotary_dim": 12},
            ValueError,
            r"rotary_dim, by default the head size, must be an even number in \[2, 8\], got 12",
        ),
        ({"positions": torch.tensor([1, 2])}, ValueError, r"positions must have shape \(5,\) or \(2, 5\)"),
        ({"positions": torch.tensor([0, 1, 2, 3, 9])}, ValueError, r"positions must be in \[0, 5\).*got 9"),
        ({"out": (torch.randn(2, 3, 5, 8),)}, ValueError, "out must be a triple of tensors, got 1 tensor$"),
    ],
)
def test_errors_name_what_was_expected_and_what_came(change, error, message) -> None:
    cos, sin = rope_table(8, 5)
    given = {"x": torch.randn(2, 5, 8), "weight": torch.randn(40, 8), "bias": None, "cos": cos, "sin": sin}
    with pytest.raises(error, match=f"linear_rope: .*{message}"):
        linear_rope(**{**given, "heads": 3, "kv_heads": 1, "head_dim": 8, **change})


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("within", [torch.bfloat16, torch.float16])
def test_autocast_multiplies_in_its_dtype_and_results_keep_theirs(within: torch.dtype, grad: bool) -> None:
    x, weight, bias, table, options = operands(9, 32, 4, 2, 16, torch.float32)
    x.requires_grad_(grad)
    expected = linear_rope(x.detach(), weight, bias, *table, **options)
    with always_native(), torch.autocast("cpu", dtype=within):
        got = linear_rope(x, weight, bias, *table, **options)
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)
    if grad:
        sum(t.sum() for t in got).backward()
        assert x.grad is not None
        assert x.grad.dtype == torch.float32
