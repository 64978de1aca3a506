"""What is particular to the rotary embedding: positions, layouts, writing in place, tables, errors."""

from __future__ import annotations

import math

import pytest
import torch

from opsmith.call.dispatch import always_native
from opsmith.kernels import triton
from opsmith.ops import rope, rope_qk, rope_table
from opsmith.ops.rope import CARD, CARD_QK
from opsmith.ops.rope.check import PositionError

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_one_token_at_a_time_gives_the_bits_of_the_whole(dtype: torch.dtype, interleaved: bool) -> None:
    cos, sin = rope_table(80, 40, dtype=dtype)
    x = torch.randn(2, 3, 37, 96).to(dtype)
    options = {"interleaved": interleaved, "rotary_dim": 80}
    whole = rope(x, cos, sin, **options)
    for p in (0, 1, 17, 36):
        token = rope(x[:, :, p : p + 1], cos, sin, positions=torch.tensor([p]), **options)
        assert torch.equal(token, whole[:, :, p : p + 1])


def test_positions_choose_rows_in_any_order() -> None:
    cos, sin = rope_table(16, 30)
    x, at = torch.randn(2, 3, 5, 16), torch.tensor([[4, 4, 0, 29, 7], [1, 2, 3, 2, 1]])
    y = rope(x, cos, sin, positions=at)
    for b in range(2):
        assert torch.equal(y[b], rope(x[b : b + 1], cos[at[b]], sin[at[b]])[0])
    assert torch.equal(rope(x, cos[at], sin[at]), y)
    packed = x[0].transpose(0, 1).contiguous()  # [T, H, D]
    assert torch.equal(rope(packed, cos, sin, positions=at[0]), y[0].transpose(0, 1))


def test_rotation_keeps_lengths_and_depends_on_distance_alone() -> None:
    cos, sin = rope_table(64, 200)
    q, k = torch.randn(2, 1, 1, 1, 64, dtype=torch.float32).unbind()
    dots = []
    for p, r in ((0, 5), (100, 105), (194, 199)):
        turned = [rope(t, cos, sin, positions=torch.tensor([i])) for t, i in ((q, p), (k, r))]
        torch.testing.assert_close(turned[0].norm(), q.norm())
        dots.append(float((turned[0] * turned[1]).sum()))
    assert max(dots) - min(dots) < 1e-4


def test_both_layouts_are_one_rotation_of_permuted_dimensions() -> None:
    cos, sin = rope_table(48, 9)
    x = torch.randn(1, 2, 9, 48)
    apart = torch.cat((x[..., ::2], x[..., 1::2]), -1)
    half = rope(apart, cos, sin)
    together = torch.stack((half[..., :24], half[..., 24:]), -1).flatten(-2)
    torch.testing.assert_close(rope(x, cos, sin, interleaved=True), together, rtol=0, atol=0)


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_complex_product_is_the_same_rotation(interleaved: bool) -> None:
    cos, sin = rope_table(32, 7, dtype=torch.float64)
    x = torch.randn(1, 2, 7, 32)
    pairs = x if interleaved else torch.stack((x[..., :16], x[..., 16:]), -1).flatten(-2)
    turned = torch.view_as_complex(pairs.double().unflatten(-1, (16, 2))) * torch.complex(cos, sin)[:, :16]
    exact = torch.view_as_real(turned)
    exact = exact.flatten(-2) if interleaved else torch.cat(exact.unbind(-1), -1)
    y = rope(x, cos.float(), sin.float(), interleaved=interleaved)
    torch.testing.assert_close(y.double(), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "slice", "every second dimension"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_in_place_gives_the_same_and_touches_nothing_else(layout: str, interleaved: bool) -> None:
    cos, sin = rope_table(24, 9)
    memory = torch.randn(2, 9, 5, 60)
    x = {
        "contiguous": lambda m: m[..., :30].transpose(1, 2).contiguous(),
        "transposed": lambda m: m[..., :30].transpose(1, 2),
        "slice": lambda m: m[:, :, 1:3, 7:37].transpose(1, 2),
        "every second dimension": lambda m: m[..., ::2].transpose(1, 2),
    }[layout]
    with always_native():
        expected, before = rope(x(memory), cos, sin, interleaved=interleaved, rotary_dim=24), memory.clone()
        view = x(memory)
        assert rope(view, cos, sin, interleaved=interleaved, rotary_dim=24, out=view) is view
    assert torch.equal(view, expected)
    x(before).copy_(expected)
    assert layout == "contiguous" or torch.equal(memory, before)


def test_queries_and_keys_in_one_call_are_what_they_are_apart() -> None:
    cos, sin = rope_table(40, 12)
    fused = torch.randn(2, 12, 9, 40).transpose(1, 2)
    q, k, _ = fused.split((6, 2, 1), dim=1)
    at = torch.randint(0, 12, (2, 12))
    y = rope_qk(q, k, cos, sin, positions=at)
    expected = rope(q, cos, sin, positions=at), rope(k, cos, sin, positions=at)
    assert all(torch.equal(a, b) for a, b in zip(y, expected, strict=True))
    assert all(a is b for a, b in zip(rope_qk(q, k, cos, sin, positions=at, out=(q, k)), (q, k), strict=True))
    assert torch.equal(q, expected[0])
    assert torch.equal(k, expected[1])


def test_the_gradient_turns_back() -> None:
    cos, sin = rope_table(32, 10)
    x = torch.randn(2, 3, 10, 32, requires_grad=True)
    g = torch.randn(2, 3, 10, 32)
    (dx,) = torch.autograd.grad(rope(x, cos, sin), x, g)
    torch.testing.assert_close(rope(dx, cos, sin), g)
    q, k = torch.randn(1, 2, 10, 32, requires_grad=True), torch.randn(1, 1, 10, 32)
    rope_qk(q, k, cos, sin)[0].sum().backward()
    assert q.grad is not None
    assert k.grad is None


def test_a_table_that_wants_gradients_gets_them() -> None:
    x, cos, sin = torch.randn(1, 2, 3, 8), torch.randn(3, 8, requires_grad=True), torch.randn(3, 8)
    rope(x, cos, sin).sum().backward()
    torch.testing.assert_close(cos.grad, x.sum((0, 1)))


def test_infinity_and_nan_stay_with_their_pair() -> None:
    cos, sin = rope_table(8, 2)
    x = torch.randn(1, 1, 2, 8)
    x[0, 0, 1, 2] = math.nan
    assert rope(x, cos, sin).isnan().nonzero()[:, -1].tolist() == [2, 6]
    assert rope(x, cos, sin, interleaved=True).isnan().nonzero()[:, -1].tolist() == [2, 3]


def test_sixteen_bits_are_rounded_once() -> None:
    x, (cos, sin) = torch.randn(1, 4, 50, 64).bfloat16(), rope_table(64, 50)
    with always_native():
        y = rope(x, cos, sin)
    exact = CARD.reference(x.double(), cos.double(), sin.double())
    unit = 2**-7 if triton.INTERPRETED else 2**-8  # the interpreter truncates to bfloat16
    assert (y.double() - exact).abs().max() <= exact.abs().max() * unit


def test_cost_counts_the_rows_that_are_used() -> None:
    x, (cos, sin) = torch.empty(1, 4, 6, 8), rope_table(8, 100)
    assert CARD.cost(x, cos, sin).min_bytes == 2 * x.nbytes + 2 * 6 * 8 * 4
    at = torch.arange(6)
    assert CARD_QK.cost(x, x, cos, sin, positions=at).min_bytes == 4 * x.nbytes + 2 * 6 * 8 * 4 + 6 * 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [-1, 9, 2**40])
def test_a_position_without_a_row_is_refused(bad: int, dtype: torch.dtype) -> None:
    x, (cos, sin) = torch.randn(2, 3, 4, 8, dtype=dtype), rope_table(8, 9, dtype=dtype)
    at = torch.tensor([[0, 1, 2, 3], [0, bad, 2, 3]])
    with (
        always_native(),
        pytest.raises(PositionError, match=rf"rope: positions must be in \[0, 9\).*got {bad}"),
    ):
        rope(x, cos, sin, positions=at)
    with always_native(), pytest.raises(PositionError, match=rf"rope.*got {bad}"):
        rope_qk(x, x, cos, sin, positions=at)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x, c, s: rope([1.0], c, s), TypeError, "x must be a tensor, got list"),
        (lambda x, c, s: rope(x.long(), c, s), TypeError, "x must be a floating-point tensor, got int64"),
        (lambda x, c, s: rope(x[0, 0], c, s), ValueError, r"at least 3 dimension\(s\), got shape \(4, 8\)"),
        (
            lambda x, c, s: rope(x[None], c, s),
            ValueError,
            r"expected \[B, H, L, D\].*got shape \(1, 2, 3, 4, 8\)",
        ),
        (lambda x, c, s: rope(x[..., :7], c, s), ValueError, r"an even number in \[2, 7\].*got 7"),
        (lambda x, c, s: rope(x, c, s, rotary_dim=10), ValueError, r"an even number in \[2, 8\].*got 10"),
        (lambda x, c, s: rope(x, c.half(), s.half()), TypeError, "cos must be float32, got float16"),
        (
            lambda x, c, s: rope(x, c, s[:5]),
            ValueError,
            r"cos and sin must be alike, got .*\(9, 8\).*\(5, 8\)",
        ),
        (
            lambda x, c, s: rope(x, c[:, :6], s[:, :6]),
            ValueError,
            r"shape \[rows, 8\] or \[rows, 4\].*\(9, 6\)",
        ),
        (
            lambda x, c, s: rope(x, c.expand(3, 9, 8), s.expand(3, 9, 8)),
            ValueError,
            r"B = 2, got \(3, 9, 8\)",
        ),
        (lambda x, c, s: rope(x, c[:3], s[:3]), ValueError, "a row for each of the 4 tokens, got 3"),
        (lambda x, c, s: rope(x, c, s, positions=[0]), TypeError, "positions must be a tensor, got list"),
        (lambda x, c, s: rope(x, c, s, positions=torch.zeros(4)), TypeError, "int64 or int32, got float32"),
        (
            lambda x, c, s: rope(x, c, s, positions=torch.zeros(3, 4, dtype=torch.long)),
            ValueError,
            r"positions must have shape \(4,\) or \(2, 4\).*got \(3, 4\)",
        ),
        (
            lambda x, c, s: rope(
                x, c.expand(2, 9, 8), s.expand(2, 9, 8), positions=torch.zeros(4, dtype=torch.long)
            ),
            ValueError,
            "positions choose rows of one table, got one table for each of 2",
        ),
        (
            lambda x, c, s: rope_qk(x, x[:, :, :2], c, s),
            ValueError,
            r"k must have shape \[2, Hkv, 4, 8\] to fit q, got \(2, 3, 2, 8\)",
        ),
        (lambda x, c, s: rope_qk(x, x.half(), c, s), TypeError, "k must be float32 .*got float16"),
    ],
)
def test_errors_name_what_was_expected_and_what_came(call, error, message) -> None:
    with pytest.raises(error, match=f"rope(_qk)?: .*{message}"):
        call(torch.randn(2, 3, 4, 8), *rope_table(8, 9))
