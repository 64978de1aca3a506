"""Attention, dense and packed, on inputs that nobody chose, infinities and NaN among them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from opsmith.kernels import triton
from opsmith.operator import Make, Operator, Sample
from opsmith.ops import attention, attention_varlen
from opsmith.ops.attention import CARD
from opsmith.ops.attention.eager import visible
from opsmith.ops.attention.varlen import CARD as VARLEN
from opsmith.proof.verify import verify

pytestmark = pytest.mark.skipif(
    triton.INTERPRETED, reason="the cards' samples are enough for a slow interpreter"
)

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    drawn: dict[str, Any] = {"causal": draw(st.booleans())}
    if draw(st.booleans()):
        drawn["window"] = draw(st.integers(1, 50))
    if draw(st.integers(0, 3)) == 0:
        drawn["softcap"] = draw(st.sampled_from([0.5, 3.0, 30.0]))
    if draw(st.integers(0, 3)) == 0:
        drawn["scale"] = draw(st.sampled_from([-0.2, 0.0, 1.0]))
    return drawn


@st.composite
def heads(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """Query heads, key heads, D and Dv."""
    key_heads = draw(st.integers(1, 3))
    dims = st.integers(1, 72)
    return key_heads * draw(st.integers(1, 3)), key_heads, draw(dims), draw(dims)


@st.composite
def dense(draw: st.DrawFn, make: Make) -> Sample:
    batch, (h, hkv, d, dv) = draw(st.integers(1, 2)), draw(heads())
    l, s = draw(st.integers(1, 80)), draw(st.integers(1, 140))

    def tensor(heads: int, length: int, dim: int) -> torch.Tensor:
        order = draw(st.sampled_from(["heads outside", "heads inside", "apart"]))
        if order == "heads inside":
            return make(batch, length, heads, dim).transpose(1, 2)
        return (
            make(batch, heads, length, dim)
            if order == "heads outside"
            else make(batch, heads, length, dim, 2)[..., 0]
        )

    chosen = draw(options())
    shape = [n if draw(st.booleans()) else 1 for n in (batch, h, l, s)]
    kind = draw(st.sampled_from(["none", "boolean", "additive"]))
    if kind != "none":
        chosen["mask"] = make.mask(*shape) if kind == "boolean" else make(*shape)
    inputs = (tensor(h, l, d), tensor(hkv, s, d), tensor(hkv, s, dv))
    return Sample(f"{h}/{hkv} {[tuple(t.shape) for t in inputs]} {chosen}", inputs, chosen)


@st.composite
def packed(draw: st.DrawFn, make: Make) -> Sample:
    h, hkv, d, dv = draw(heads())
    pairs = draw(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 90)), min_size=1, max_size=5))
    ends = [torch.tensor([0, *lengths]).cumsum(0) for lengths in zip(*pairs, strict=True)]
    t, s = (int(e[-1]) for e in ends)
    starts = [e.to(draw(st.sampled_from([torch.int32, torch.int64]))) for e in ends]
    inputs = (make(t, h, d), make(s, hkv, d), make(s, hkv, dv), *starts)
    return Sample(f"{h}/{hkv} {d} {dv} {pairs}", inputs, draw(options()))


def failures(card: Operator, sample: Sample, dtype: torch.dtype) -> list[str]:
    def only(make: Make) -> Iterator[Sample]:
        yield sample

    return [
        f"{f.implementation} {f.check}: {f.why}"
        for f in verify(replace(card, samples=only), [dtype])
        if not f.ok
    ]


@settings(max_examples=40)
@given(st.data(), DTYPES)
def test_attention_keeps_the_tolerance(data: st.DataObject, dtype: torch.dtype) -> None:
    assert failures(CARD, data.draw(dense(Make(dtype))), dtype) == []


@settings(max_examples=30)
@given(st.data(), DTYPES)
def test_packed_attention_keeps_the_tolerance(data: st.DataObject, dtype: torch.dtype) -> None:
    assert failures(VARLEN, data.draw(packed(Make(dtype))), dtype) == []


@settings(max_examples=60)
@given(st.data(), DTYPES, st.booleans())
def test_infinities_and_nan_stand_where_the_reference_has_them(
    data: st.DataObject, dtype: torch.dtype, causal: bool
) -> None:
    l, s = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 140))
    inputs = torch.randn(1, 2, l, 24), torch.randn(1, 1, s, 24), torch.randn(1, 1, s, 7)
    spoiled = data.draw(st.sampled_from([0, 1, 2]))
    key = data.draw(st.integers(0, inputs[spoiled].shape[2] - 1))
    value = data.draw(st.sampled_from([torch.inf, -torch.inf, torch.nan]))
    inputs[spoiled][0, 0, key, data.draw(st.integers(0, 6))] = value
    q, k, v = (t.to(dtype) for t in inputs)
    mine = attention(q, k, v, causal=causal)
    starts = torch.tensor([0, l]), torch.tensor([0, s])
    alone = attention_varlen(
        q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1), *starts, causal=causal
    )
    exact = CARD.reference(q.double(), k.double(), v.double(), causal=causal)
    # A row whose mask hides the spoiled key need not multiply it by zero, as the reference does.
    seen = visible(q, k, causal, 0)
    rows = torch.ones(l, dtype=torch.bool) if spoiled == 0 or seen is None else seen[:, key]
    for y in (mine, alone.transpose(0, 1)[None]):
        a, b = y[:, :, rows].double(), exact[:, :, rows]
        assert torch.equal(a.isnan(), b.isnan())
        torch.testing.assert_close(a[b.isinf()], b[b.isinf()])
        finite = b.isfinite()
        torch.testing.assert_close(a[finite], b[finite], rtol=0.0, atol=8 * torch.finfo(dtype).eps)
