"""What is particular to the rotation of int8 rows: its error bound, its edges, its errors."""

from __future__ import annotations

import math

import pytest
import torch

from opsmith.ops import rope_int8, rope_table
from opsmith.ops.rope import CARD


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("spread", [1.0, 1e-3, 1e4])
def test_the_error_is_within_the_stated_bound(interleaved: bool, spread: float) -> None:
    cos, sin = rope_table(96, 50)
    x_q = torch.randint(-127, 128, (2, 3, 50, 96), dtype=torch.int8)
    x_scale = torch.rand(2, 3, 50) * spread
    y_q, y_scale = rope_int8(x_q, x_scale, cos, sin, interleaved=interleaved)
    x = x_q.double() * x_scale.double().unsqueeze(-1)
    exact = CARD.reference(x, cos.double(), sin.double(), interleaved=interleaved)
    error = (y_q.double() * y_scale.double().unsqueeze(-1) - exact).abs().amax(-1)
    slack = 1 + 1e-5  # float32
    assert (error <= exact.abs().amax(-1) / 254 * slack).all()
    assert (error <= 0.0056 * x.abs().amax(-1) * slack).all()
    assert y_q.abs().amax(-1).eq(127).all()


def test_one_token_at_a_time_gives_the_bits_of_the_whole_and_in_place() -> None:
    cos, sin = rope_table(40, 20)
    x_q, x_scale = torch.randint(-127, 128, (1, 3, 20, 40), dtype=torch.int8), torch.rand(1, 3, 20)
    whole = rope_int8(x_q, x_scale, cos, sin)
    for p in (0, 7, 19):
        token = rope_int8(
            x_q[:, :, p : p + 1], x_scale[:, :, p : p + 1], cos, sin, positions=torch.tensor([p])
        )
        assert torch.equal(token[0], whole[0][:, :, p : p + 1])
        assert torch.equal(token[1], whole[1][:, :, p : p + 1])
    got = rope_int8(x_q, x_scale, cos, sin, out=(x_q, x_scale))
    assert got[0] is x_q
    assert torch.equal(x_q, whole[0])
    assert torch.equal(x_scale, whole[1])


def test_zeros_and_what_is_not_finite() -> None:
    cos, sin = rope_table(8, 3)
    x_q, x_scale = torch.ones(1, 1, 3, 8, dtype=torch.int8), torch.tensor([[[1.0, math.nan, math.inf]]])
    y_q, y_scale = rope_int8(torch.zeros_like(x_q), torch.ones(1, 1, 3), cos, sin)
    assert not y_q.any()
    assert not y_scale.any()
    y_scale = rope_int8(x_q, x_scale, cos, sin)[1]
    assert y_scale[0, 0].isfinite().tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda x, s, t: rope_int8([1], s, *t),
            TypeError,
            "x_q and x_scale must be tensors, got list, Tensor",
        ),
        (lambda x, s, t: rope_int8(x.float(), s, *t), TypeError, "x_q must be int8, got float32"),
        (lambda x, s, t: rope_int8(x, s.half(), *t), TypeError, "x_scale must be float32, got float16"),
        (
            lambda x, s, t: rope_int8(x, s[..., :3], *t),
            ValueError,
            r"x_scale must have shape \(2, 3, 4\).*\(2, 3, 3\)",
        ),
        (
            lambda x, s, t: rope_int8(x[0, 0], s, *t),
            ValueError,
            r"expected \[B, H, L, D\].*got shape \(4, 8\)",
        ),
        (
            lambda x, s, t: rope_int8(x, s, *t, positions=torch.tensor([0, 1, 2, 4])),
            ValueError,
            r"positions must be in \[0, 4\).*got 4",
        ),
    ],
)
def test_errors_name_what_was_expected_and_what_came(call, error, message) -> None:
    with pytest.raises(error, match=f"rope(_int8)?: .*{message}"):
        call(torch.ones(2, 3, 4, 8, dtype=torch.int8), torch.ones(2, 3, 4), rope_table(8, 4))


def test_numbers_are_rounded_once_each_as_pytorch_rounds_them() -> None:
    """Products near a half: fused into the rounding, their own rounding would be missing."""
    n = 127
    largest = torch.arange(1, n + 1, dtype=torch.int32)[:, None]
    x_q = torch.cat([largest, torch.arange(1, n + 1).int().minimum(largest)], 1).to(torch.int8)[None, None]
    one, zero = torch.ones(n, n + 1), torch.zeros(n, n + 1)
    y_q, _ = rope_int8(x_q, torch.ones(1, 1, n), one, zero)
    inverse = torch.tensor(127.0) / largest.float()
    assert torch.equal(y_q[0, 0], (x_q[0, 0].float() * inverse).round().to(torch.int8))
