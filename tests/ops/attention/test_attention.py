"""What is particular to attention: who sees whom, layouts, learned masks, exact costs, its errors."""

from __future__ import annotations

import pytest
import torch

from opsmith.ops import attention
from opsmith.ops.attention import CARD
from opsmith.ops.attention.eager import visible

reference = CARD.reference


def qkv(h: int = 2, hkv: int = 2, l: int = 6, s: int = 9) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(2, h, l, 8), torch.randn(2, hkv, s, 8), torch.randn(2, hkv, s, 8)


def seen(**options: object) -> torch.Tensor:
    """Which of 9 keys each of 6 queries sees, read off values that are the keys' indicators."""
    values = torch.eye(9).expand(2, 2, 9, 9)
    q, k, _ = qkv()
    return attention(q, k, values, **options)[0, 0] > 0


@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize("causal", [False, True])
def test_who_sees_whom(causal: bool, window: int | None) -> None:
    i, j = torch.arange(6)[:, None] + 3, torch.arange(9)[None]  # aligned to the end: query 5 stands at key 8
    expected = (j <= i) | torch.tensor(not causal)
    if window is not None:
        expected = expected & ((i - j).abs() < window)
    assert torch.equal(seen(causal=causal, window=window), expected)


@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("l", "s"), [(6, 6), (4, 9), (9, 4), (1, 7), (7, 1), (0, 3), (3, 0)])
def test_cost_counts_exactly_the_pairs_that_are_seen(
    l: int, s: int, causal: bool, window: int | None
) -> None:
    q, k, v = torch.empty(2, 4, l, 8), torch.empty(2, 2, s, 8), torch.empty(2, 2, s, 5)
    seen = visible(q, k, causal, window or 0)
    pairs = l * s if seen is None else int(seen.sum())
    cost = CARD.cost(q, k, v, causal=causal, window=window)
    assert cost.flops == 2 * (2 * 4) * pairs * (8 + 5)
    assert cost.min_bytes == 4 * (q.numel() + k.numel() + v.numel() + 2 * 4 * l * 5)


def test_a_query_that_sees_nothing_gives_zeros_and_no_gradient() -> None:
    q, k, v = (t.requires_grad_() for t in qkv(l=9, s=4))
    y = attention(q, k, v, causal=True)  # the first five queries stand before every key
    assert torch.equal(y[:, :, :5], torch.zeros(2, 2, 5, 8))
    y.square().sum().backward()
    assert torch.equal(q.grad[:, :, :5], torch.zeros(2, 2, 5, 8))
    assert all(t.grad.isfinite().all() for t in (q, k, v))


@pytest.mark.parametrize("hidden", [torch.finfo(torch.float32).min, -torch.inf])
def test_the_lowest_float_as_a_mask_leaves_no_row_without_weights(hidden: float) -> None:
    """Added to every score of a row it hides nothing, as all are then equal; only -inf gives zeros."""
    mask = torch.zeros(6, 9)
    mask[2] = hidden
    mask[4, 3:] = hidden
    mine, wanted = ([t.detach().requires_grad_() for t in qkv(l=6, s=9)] for _ in range(2))
    for a, b in zip(mine, wanted, strict=True):
        b.data.copy_(a.data)
    weights = torch.randn(2, 2, 6, 8)
    (attention(*mine, mask=mask) * weights).sum().backward()
    (reference(*wanted, mask=mask) * weights).sum().backward()
    for a, b in zip(mine, wanted, strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    assert (mine[2].grad.abs().sum() > 0).item()


def test_key_heads_are_shared_by_neighbors() -> None:
    q, k, v = qkv(h=6, hkv=2)
    y = attention(q, k, v)
    for head in range(6):
        alone = attention(q[:, head : head + 1], k[:, head // 3, None], v[:, head // 3, None])
        torch.testing.assert_close(y[:, head : head + 1], alone)


def test_the_softcap_comes_before_the_mask() -> None:
    q, k, v = qkv()
    mask = torch.zeros(6, 9)
    mask[:, 4:] = -torch.inf
    torch.testing.assert_close(
        attention(q * 9, k, v, softcap=3.0, mask=mask),
        reference(q * 9, k[:, :, :4], v[:, :, :4], softcap=3.0),
    )


@pytest.mark.parametrize("shape", [(9,), (6, 1), (2, 1, 1, 9), (1, 2, 6, 9), (2, 2, 1, 1), (1, 1, 6, 9), ()])
def test_a_mask_of_any_broadcast_shape(shape: tuple[int, ...]) -> None:
    q, k, v = qkv()
    some_rows_see_all = (torch.rand(shape) < 0.7) | (torch.rand((*shape[:-1], 1)) < 0.5)
    for mask in (torch.rand(shape) < 0.7, some_rows_see_all, torch.randn(shape)):
        torch.testing.assert_close(attention(q, k, v, mask=mask), reference(q, k, v, mask=mask))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"mask": torch.ones(6, 9, dtype=torch.bool)}, "does not promise zeros"),
        ({"window": 3}, "neither window nor softcap"),
        ({"softcap": 3.0}, "neither window nor softcap"),
        ({"causal": True}, "aligns the causal rule to the first key"),
        ({}, "none of PyTorch's fused kernels"),  # which have no GPU to run on here
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_pytorch_is_refused_with_a_reason_where_it_would_compute_something_else(options, reason) -> None:
    sdpa = CARD.implementation("sdpa")
    assert reason in str(sdpa.supports(*qkv(), **options))
    assert "there is no GPU here" in str(sdpa.accepts(*qkv()))


@pytest.mark.parametrize(("l", "s"), [(6, 6), (1, 9)])
@pytest.mark.parametrize("causal", [False, True])
def test_what_goes_to_pytorch_on_a_gpu_is_the_same_function(causal: bool, l: int, s: int) -> None:
    q, k, v = qkv(h=4, hkv=2, l=l, s=s)
    mine = CARD.implementation("sdpa").fn(q, k, v, causal=causal, scale=0.3)
    torch.testing.assert_close(mine, reference(q, k, v, causal=causal, scale=0.3))


def test_pytorchs_takes_lengths_that_are_symbols() -> None:
    q = torch.randn(2, 2, 7, 8, dtype=torch.float64)
    torch._dynamo.mark_dynamic(q, 2)
    got = torch.compile(lambda q: attention(q, q, q, causal=True), backend="eager", fullgraph=True)(q)
    torch.testing.assert_close(got, reference(q, q, q, causal=True))


def test_a_learned_mask_gets_its_gradient() -> None:
    q, k, v = qkv()
    mask = torch.randn(6, 9, requires_grad=True)
    wanted = mask.detach().clone().requires_grad_()
    attention(q, k, v, mask=mask).square().sum().backward()
    reference(q, k, v, mask=wanted).square().sum().backward()
    torch.testing.assert_close(mask.grad, wanted.grad)


def test_heads_inside_stay_inside() -> None:
    q = torch.randn(2, 6, 3, 8).transpose(1, 2)
    y = attention(q, q, q)
    assert y.transpose(1, 2).is_contiguous()
    for wider in (attention(q, q, q[..., :5]), attention(q.detach().requires_grad_(), q, q)):
        assert wider.transpose(1, 2).is_contiguous()


def test_out_of_any_layout_is_written_through() -> None:
    q, k, v = qkv()
    expected = attention(q, k, v)
    for out in (torch.empty(2, 6, 2, 8).transpose(1, 2), torch.empty(2, 2, 8, 6).transpose(2, 3)):
        assert attention(q, k, v, out=out) is out
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize(
    "mask", [torch.arange(6)[:, None] % 3 > 0, torch.linspace(-9, 9, 6)[:, None], torch.ones(())]
)
def test_a_mask_may_be_one_number_for_all_keys_of_a_query(mask: torch.Tensor) -> None:
    q, k, v = qkv()
    torch.testing.assert_close(attention(q, k, v, mask=mask), reference(q, k, v, mask=mask))
    whole = mask.expand(6, 9)
    assert torch.equal(attention(q, k, v, mask=mask), attention(q, k, v, mask=whole))


def test_queries_expanded_over_heads() -> None:
    q, k, v = qkv()
    shared = q[:, :1].expand(2, 2, 6, 8)
    torch.testing.assert_close(attention(shared, k, v), reference(shared, k, v))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": torch.randn(6, 8)}, ValueError, r"q must have shape \[B, H, L, D\]"),
        (
            {"k": torch.randn(2, 2, 9, 7)},
            ValueError,
            r"k must have shape \[2, Hkv, S, 8\] to fit q, got \(2, 2, 9, 7\)",
        ),
        (
            {"v": torch.randn(2, 2, 8, 8)},
            ValueError,
            r"v must have shape \[2, 2, 9, Dv\] to fit q, got \(2, 2, 8, 8\)",
        ),
        (
            {"q": torch.randn(2, 3, 6, 8)},
            ValueError,
            "q's 3 heads must be a multiple of the 2 heads of k and v",
        ),
        (
            {"k": torch.randn(2, 2, 9, 8).half()},
            TypeError,
            "k must be float32 like q, got float16; cast it first",
        ),
        (
            {"v": torch.empty(2, 2, 9, 8, device="meta")},
            ValueError,
            "v is on meta, q on cpu; move one of them",
        ),
        ({"v": [1.0]}, TypeError, "v must be a tensor, got list"),
        ({"mask": torch.ones(6, 8)}, ValueError, r"mask must broadcast to \(2, 2, 6, 9\) .*, got \(6, 8\)"),
        ({"mask": torch.ones(6, 9).long()}, TypeError, "mask must be bool"),
        ({"window": 0}, ValueError, "window must be at least 1, got 0; pass None for no window"),
        ({"softcap": 0.0}, ValueError, "softcap must be positive, got 0.0; pass None for no cap"),
        ({"out": torch.empty(2, 2, 9, 8)}, ValueError, r"out must be float32 \(2, 2, 6, 8\)"),
    ],
)
def test_errors_name_what_was_expected_and_what_came(change, error, message) -> None:
    q, k, v = qkv()
    with pytest.raises(error, match=f"attention: {message}"):
        attention(**{"q": q, "k": k, "v": v, **change})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_vectors_of_no_numbers_are_no_fault(dtype: torch.dtype) -> None:
    """Scores of nothing are all alike, and values of nothing are nothing; both at once divided by zero."""
    q, k, v = (torch.randn(1, 2, 3, d, dtype=dtype, requires_grad=True) for d in (0, 0, 5))
    for values in (v, v[..., :0]):
        y = attention(q, k, values)
        torch.testing.assert_close(y, values.mean(2, keepdim=True).expand_as(y))
        torch.autograd.grad(y.sum(), [q, k, v], allow_unused=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (9,), (1, 9), (2, 1, 1, 9)])
def test_a_mask_of_any_dimensions_broadcasts(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    given = [t.to(dtype) for t in qkv()]
    mask = torch.rand(shape) > 0.3
    whole = mask.expand(2, 2, 6, 9)
    torch.testing.assert_close(attention(*given, mask=mask), reference(*given, mask=whole))
