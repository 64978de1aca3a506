"""A logit of each head without a value, and a bias by distance: against formulas of their own, in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from opsmith.ops import attention, attention_varlen
from opsmith.ops.attention import CARD

INFINITE = torch.inf, -torch.inf, torch.nan


def qkv(l: int = 6, s: int = 9, d: int = 8, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(*shape, dtype=dtype) for shape in ((2, 4, l, d), (2, 2, s, d), (2, 2, s, d)))


def written_out(q, k, v, sinks=None, alibi=None, causal=False, window=None, softcap=None, mask=None) -> Any:
    """Number by number, as the docstring has it."""
    batch, heads, rows, dim = q.shape
    columns, group = k.shape[2], heads // k.shape[1]
    y = torch.zeros(batch, heads, rows, v.shape[3], dtype=torch.float64)
    for b, h, i in ((b, h, i) for b in range(batch) for h in range(heads) for i in range(rows)):
        here = i + columns - rows
        total, weighted = (0.0 if sinks is None else math.exp(sinks[h])), torch.zeros(v.shape[3]).double()
        for j in range(columns):
            if (causal and j > here) or (window is not None and abs(here - j) >= window):
                continue
            if mask is not None and not mask[..., i, j].all():
                continue
            score = float(q[b, h, i].double() @ k[b, h // group, j].double()) / math.sqrt(dim)
            if softcap is not None:
                score = softcap * math.tanh(score / softcap)
            if alibi is not None:
                score += float(alibi[h]) * (j - here)
            total += math.exp(score)
            weighted += math.exp(score) * v[b, h // group, j].double()
        y[b, h, i] = weighted / total if total else weighted
    return y


@pytest.mark.parametrize(("l", "s"), [(6, 9), (9, 4), (1, 7)])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"causal": True, "window": 3}, {"window": 2}, {"softcap": 1.5}, {"mask": True}],
    ids=lambda o: ", ".join(o) or "plain",
)
@pytest.mark.parametrize("given", [("sinks",), ("alibi",), ("sinks", "alibi")], ids=" and ".join)
def test_against_the_formula(given: tuple[str, ...], options: dict[str, Any], l: int, s: int) -> None:
    q, k, v = qkv(l, s)
    more = {"sinks": torch.tensor([-2.0, 0.0, 1.0, 30.0]), "alibi": torch.tensor([0.5, -0.25, 0.0, 2.0])}
    more = {name: more[name] for name in given}
    if "mask" in options:
        options = {"mask": torch.rand(l, s) < 0.6}
    expected = written_out(q, k, v, **more, **options)
    torch.testing.assert_close(attention(q, k, v, **more, **options).double(), expected, rtol=1e-5, atol=2e-6)
    starts = torch.tensor([0, l]), torch.tensor([0, s])
    if "mask" not in options:
        alone = (t[1].transpose(0, 1) for t in (q, k, v))
        packed = attention_varlen(*alone, *starts, **more, **options)
        torch.testing.assert_close(packed.transpose(0, 1).double(), expected[1], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_sink_of_minus_infinity_is_none(dtype: torch.dtype) -> None:
    q, k, v = qkv(dtype=dtype)
    none = torch.full((4,), -torch.inf)
    for options in ({}, {"causal": True}, {"mask": torch.rand(6, 9) < 0.3}):
        assert torch.equal(attention(q, k, v, sinks=none, **options), attention(q, k, v, **options))


def test_sinks_that_are_not_finite_spoil_their_own_heads_alone() -> None:
    q, k, v = qkv()
    for value in (torch.inf, torch.nan):
        sinks = torch.tensor([0.0, value, 0.0, 0.0])
        y, expected = attention(q, k, v, sinks=sinks), CARD.reference(q, k, v, sinks=sinks)
        assert y[:, 1].isnan().all()
        torch.testing.assert_close(y, expected, equal_nan=True)


def test_a_row_that_sees_no_key_gives_zeros_beside_its_sink() -> None:
    q, k, v = (t.requires_grad_() for t in qkv(9, 4))
    sinks = torch.randn(4, requires_grad=True)
    y = attention(q, k, v, causal=True, sinks=sinks)
    assert torch.equal(y[:, :, :5], torch.zeros(2, 4, 5, 8))
    y.sum().backward()
    assert torch.equal(q.grad[:, :, :5], torch.zeros(2, 4, 5, 8))
    assert all(t.grad.isfinite().all() for t in (q, k, v, sinks))


@pytest.mark.parametrize("keys", [9, 140, 700])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True, "softcap": 3.0}, {"window": 5}, {"scale": -0.3}], ids=str
)
def test_gradients_of_sinks(options: dict[str, Any], keys: int) -> None:
    """Rows of one tile and of several, which find the gradient of their sum in two ways."""
    leaves = (*qkv(20, keys, 16), torch.randn(4))
    mine, exact = [t.clone().requires_grad_() for t in leaves], [t.double().requires_grad_() for t in leaves]
    alibi, slope = torch.tensor([0.1, 0.2, 0.0, -0.1]), torch.randn(2, 4, 20, 16)
    attention(*mine[:3], sinks=mine[3], alibi=alibi, **options).backward(slope)
    CARD.reference(*exact[:3], sinks=exact[3], alibi=alibi.double(), **options).backward(slope.double())
    for a, b in zip(mine, exact, strict=True):
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-4, atol=1e-5)


def test_gradients_by_finite_differences() -> None:
    q, k, v = (t.requires_grad_() for t in qkv(3, 5, 4, torch.float64))
    sinks, alibi = (torch.randn(4, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def call(*given: torch.Tensor) -> torch.Tensor:
        return attention(*given[:3], sinks=given[3], alibi=given[4], causal=True)

    assert torch.autograd.gradcheck(call, (q, k, v, sinks, alibi))


def test_slopes_that_learn() -> None:
    leaves = (*qkv(), torch.rand(4))
    mine, exact = [t.clone().requires_grad_() for t in leaves], [t.double().requires_grad_() for t in leaves]
    attention(*mine[:3], alibi=mine[3]).square().sum().backward()
    CARD.reference(*exact[:3], alibi=exact[3]).square().sum().backward()
    for a, b in zip(mine, exact, strict=True):
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-4, atol=1e-5)


def test_sinks_in_the_dtype_of_the_model_and_in_float32_are_the_same_numbers() -> None:
    q, k, v = qkv(dtype=torch.bfloat16)
    sinks = torch.randn(4).bfloat16()
    strided = torch.stack((sinks, sinks), 1)[:, 0]
    expected = attention(q, k, v, sinks=sinks)
    assert torch.equal(attention(q, k, v, sinks=sinks.float()), expected)
    assert torch.equal(attention(q, k, v, sinks=strided), expected)


def test_compiled_graphs_have_both() -> None:
    q, k, v = qkv()
    sinks, alibi = torch.randn(4), torch.rand(4)

    def call(sinks: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v, sinks=sinks, alibi=alibi, causal=True)

    leaf = sinks.clone().requires_grad_()
    y = torch.compile(call, backend="aot_eager", fullgraph=True)(leaf)
    torch.testing.assert_close(y, call(sinks))
    (made,) = torch.autograd.grad(y.sum(), leaf)
    other = sinks.clone().requires_grad_()
    (expected,) = torch.autograd.grad(call(other).sum(), other)
    torch.testing.assert_close(made, expected)


@pytest.mark.parametrize("name", ["sinks", "alibi"])
@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (torch.randn(2), ValueError, r"must have shape \[4\] to fit q, got \(2,\)"),
        (torch.randn(4, 1), ValueError, r"must have shape \[4\] to fit q, got \(4, 1\)"),
        (torch.randn(4).half(), TypeError, "must be float32 like q, got float16; cast it first"),
        (torch.arange(4), TypeError, "must be float32 like q, got int64; cast it first"),
        (torch.empty(4, device="meta"), ValueError, "is on meta, q on cpu; move one of them"),
        (0.5, TypeError, "must be a tensor, got float"),
    ],
)
def test_what_is_no_number_for_each_head(name: str, given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"attention: {name} {message}"):
        attention(*qkv(), **{name: given})
    q, k, v = (t[0].transpose(0, 1) for t in qkv())
    with pytest.raises(error, match=f"attention_varlen: {name} {message}"):
        attention_varlen(q, k, v, torch.tensor([0, 6]), torch.tensor([0, 9]), **{name: given})
