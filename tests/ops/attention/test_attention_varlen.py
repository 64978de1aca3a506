"""What is particular to packed sequences: each is on its own, offsets of any kind, and what is wrong with them."""

from __future__ import annotations

import pytest
import torch

from opsmith.ops import attention, attention_varlen
from opsmith.ops.attention.varlen import CARD

LENGTHS = [5, 0, 33, 1, 12]


def starts(lengths: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def packed(lengths: list[int], keys: list[int]) -> tuple[torch.Tensor, ...]:
    q, k, v = torch.randn(sum(lengths), 4, 8), torch.randn(sum(keys), 2, 8), torch.randn(sum(keys), 2, 5)
    return q, k, v, starts(lengths), starts(keys)


@pytest.mark.parametrize("causal", [False, True])
def test_each_sequence_is_attention_alone(causal: bool) -> None:
    keys = [9, 2, 33, 40, 0]
    q, k, v, at, keys_at = packed(LENGTHS, keys)
    y = attention_varlen(q, k, v, at, keys_at, causal=causal)
    parts = zip(q.split(LENGTHS), k.split(keys), v.split(keys), strict=True)
    alone = [attention(*(t.transpose(0, 1)[None] for t in part), causal=causal)[0] for part in parts]
    torch.testing.assert_close(y, torch.cat([t.transpose(0, 1) for t in alone]))


def test_a_sequence_never_hears_of_its_neighbors() -> None:
    q, k, v, at, _ = packed(LENGTHS, LENGTHS)
    expected = attention_varlen(q, k, v, at, at)
    for t in (k, v):
        t[5:38] = torch.nan  # the third sequence's
    y = attention_varlen(q, k, v, at, at)
    assert torch.equal(y[:5], expected[:5])
    assert torch.equal(y[38:], expected[38:])
    assert y[5:38].isnan().all()


def test_keys_that_no_query_sees_get_zeros() -> None:
    q, k, v, at, keys_at = packed([3, 0, 2], [4, 6, 2])
    leaves = [t.requires_grad_() for t in (q, k, v)]
    attention_varlen(*leaves, at, keys_at, causal=True).sum().backward()
    for t in (k, v):
        assert torch.equal(t.grad[4:10], torch.zeros_like(t[4:10]))
        assert t.grad[:4].abs().sum() > 0


def test_offsets_of_either_dtype_and_any_stride() -> None:
    q, k, v, at, _ = packed(LENGTHS, LENGTHS)
    expected = attention_varlen(q, k, v, at, at)
    apart = torch.stack([at, at + 1], 1)[:, 0]
    assert torch.equal(attention_varlen(q, k, v, at.long(), apart), expected)


def test_cost_counts_the_pairs_of_each_sequence() -> None:
    q, k, v, at, _ = packed(LENGTHS, LENGTHS)
    full = CARD.cost(q, k, v, at, at)
    assert full.flops == 2 * 4 * sum(n * n for n in LENGTHS) * (8 + 5)
    causal = CARD.cost(q, k, v, at, at, causal=True)
    assert causal.flops == 2 * 4 * sum(n * (n + 1) // 2 for n in LENGTHS) * (8 + 5)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": torch.randn(1, 4, 51, 8)}, ValueError, r"q must have shape \[T, H, D\]"),
        ({"k": torch.randn(51, 2, 7)}, ValueError, r"k must have shape \[S, Hkv, 8\] to fit q"),
        ({"v": torch.randn(50, 2, 5)}, ValueError, r"v must have shape \[51, 2, Dv\] to fit q"),
        ({"q": torch.randn(51, 3, 8)}, ValueError, "q's 3 heads must be a multiple of the 2 heads"),
        ({"k": torch.randn(51, 2, 8).half()}, TypeError, "k must be float32 like q, got float16"),
        ({"cu_seqlens_q": [0, 51]}, TypeError, "cu_seqlens_q must be a tensor, got list"),
        (
            {"cu_seqlens_k": starts(LENGTHS).float()},
            TypeError,
            "cu_seqlens_k must be int32 or int64, got float32",
        ),
        ({"cu_seqlens_k": starts(LENGTHS)[None]}, ValueError, r"cu_seqlens_k must have shape \[6\]"),
        ({"cu_seqlens_q": torch.empty(0, dtype=torch.int32)}, ValueError, r"cu_seqlens_q must have shape"),
        ({"cu_seqlens_q": starts(LENGTHS) + 1}, ValueError, "cu_seqlens_q must start at 0, got 1"),
        ({"cu_seqlens_q": starts([*LENGTHS[:-1], 11])}, ValueError, "cu_seqlens_q must end at 51, .* got 50"),
        (
            {"cu_seqlens_k": torch.tensor([0, 40, 30, 50, 51, 51])},
            ValueError,
            "cu_seqlens_k must not decrease, got 40 before 30 at position 1",
        ),
        ({"cu_seqlens_k": starts([51])}, ValueError, r"cu_seqlens_k must have shape \[6\] .* got \(2,\)"),
        ({"cu_seqlens_q": starts(LENGTHS).to("meta")}, ValueError, "cu_seqlens_q is on meta, q on cpu"),
        ({"window": 0}, ValueError, "window must be at least 1, got 0"),
        ({"softcap": -1.0}, ValueError, r"softcap must be positive, got -1\.0"),
        ({"out": torch.empty(51, 4, 8)}, ValueError, r"out must be float32 \(51, 4, 5\)"),
    ],
)
def test_errors_name_what_was_expected_and_what_came(change, error, message) -> None:
    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")
    call = dict(zip(names, packed(LENGTHS, LENGTHS), strict=True))
    with pytest.raises(error, match=f"attention_varlen: .*{message}"):
        attention_varlen(**{**call, **change})


@pytest.mark.parametrize("bad", [[1, 51], [0, 60], [0, 40, 30, 51], [0, -1, 51]])
def test_the_kernel_itself_refuses_offsets_that_lead_astray(bad: list[int]) -> None:
    q, k, v, _, _ = packed(LENGTHS, LENGTHS)
    at, good = torch.tensor(bad), torch.tensor([0] * (len(bad) - 1) + [51])
    for pair in ((at, good), (good, at)):
        with pytest.raises(RuntimeError, match=r"attention_varlen: cu_seqlens_[qk] must"):
            torch.ops.opsmith.attention(
                q, k, v, None, *pair, None, None, 1.0, False, 0, 0.0, y=torch.empty(51, 4, 5)
            )
