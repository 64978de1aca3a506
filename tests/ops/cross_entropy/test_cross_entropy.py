"""What is particular to cross_entropy: targets, overwriting, extreme logits, what PyTorch answers, its errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st

from opsmith.ops import cross_entropy
from opsmith.ops.cross_entropy import CARD, TargetError


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_it_is_pytorchs_cross_entropy(reduction: str, smoothing: float) -> None:
    x, target = torch.randn(7, 90), torch.tensor([3, -100, 89, 0, 5, -100, 7])
    got = cross_entropy(x, target, reduction=reduction, label_smoothing=smoothing)
    expected = F.cross_entropy(x, target, reduction=reduction, label_smoothing=smoothing)
    torch.testing.assert_close(got, expected)


def test_z_loss_is_the_square_of_the_log_sum_exp() -> None:
    x, target = torch.randn(4, 33), torch.tensor([1, 2, -100, 4])
    more = cross_entropy(x, target, z_loss=0.5, reduction="none") - cross_entropy(x, target, reduction="none")
    expected = 0.5 * x.logsumexp(-1).square() * (target != -100)
    torch.testing.assert_close(more, expected)


def test_nothing_but_ignored_targets_is_what_pytorch_says() -> None:
    x = torch.randn(3, 40, requires_grad=True)
    target = torch.full((3,), -100)
    assert cross_entropy(x, target).isnan()
    assert cross_entropy(x, target, reduction="sum") == 0
    assert torch.equal(cross_entropy(x, target, reduction="none"), torch.zeros(3))
    cross_entropy(x, target, reduction="sum", label_smoothing=0.1, z_loss=0.1).backward()
    assert torch.equal(x.grad, torch.zeros(3, 40))


def test_an_empty_batch() -> None:
    x, target = torch.randn(0, 40, requires_grad=True), torch.empty(0, dtype=torch.long)
    assert cross_entropy(x, target).isnan()
    assert cross_entropy(x, target, reduction="none").shape == (0,)
    cross_entropy(x, target, reduction="sum").backward()
    assert x.grad.shape == (0, 40)


def test_ignored_rows_may_hold_anything() -> None:
    x = torch.randn(3, 50)
    x[1] = math.nan
    x.requires_grad_()
    loss = cross_entropy(x, torch.tensor([1, -100, 2]))
    loss.backward()
    assert loss.isfinite()
    assert x.grad.isfinite().all()
    assert torch.equal(x.grad[1], torch.zeros(50))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 40, 4000])
def test_what_is_not_finite_stands_where_pytorch_has_it(value: float, at: int) -> None:
    rows = torch.randn(2, 5000)
    rows[0, at] = value
    target = torch.tensor([17, 20])
    results = []
    for fn in (cross_entropy, F.cross_entropy):
        x = rows.clone().requires_grad_()
        loss = fn(x, target, reduction="none")
        loss.sum().backward()
        results.append((loss.detach(), x.grad))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, equal_nan=True)


def test_a_masked_vocabulary() -> None:
    x = torch.randn(2, 3000)
    x[:, :2500] = -math.inf  # longer than what is summed before the pivot is known
    target = torch.tensor([2600, 3])
    got = cross_entropy(x, target, reduction="none")
    assert got[1] == math.inf
    torch.testing.assert_close(got, F.cross_entropy(x, target, reduction="none"))
    assert cross_entropy(torch.full((1, 60), -math.inf), torch.tensor([5])).isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_that_rise_and_fall_by_thousands(dtype: torch.dtype) -> None:
    x = torch.cat([torch.linspace(-1e4, 1e4, 6000), torch.linspace(1e4, -1e4, 6000)]).to(dtype).expand(2, -1)
    target = torch.tensor([5990, 11000])
    exact = F.cross_entropy(x.double(), target, reduction="none")
    got = cross_entropy(x, target, reduction="none", dtype=torch.float32)
    torch.testing.assert_close(got.double(), exact, rtol=2e-7, atol=1e-6)


def test_a_loss_near_zero_keeps_its_digits() -> None:
    x = torch.zeros(1, 32000)
    x[0, 77] = 25.0
    exact = float(F.cross_entropy(x.double(), torch.tensor([77])))
    assert cross_entropy(x, torch.tensor([77])).item() == pytest.approx(exact, abs=1.2e-7)


def test_bfloat16_logits_can_have_a_float32_loss() -> None:
    x, target = torch.randn(16, 500).bfloat16().requires_grad_(), torch.randint(0, 500, (16,))
    loss = cross_entropy(x, target, dtype=torch.float32)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, F.cross_entropy(x.float(), target))
    (mine,) = torch.autograd.grad(loss, x)
    (theirs,) = torch.autograd.grad(F.cross_entropy(x.float(), target), x)
    assert mine.dtype == torch.bfloat16
    torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_the_gradient_can_take_the_place_of_the_logits(layout: str) -> None:
    weight = torch.randn(70, 70)
    target = torch.randint(0, 70, (30,))
    target[4] = -100

    def gradient(overwrite: bool) -> tuple[torch.Tensor, torch.Tensor]:
        w = weight.clone().requires_grad_()
        logits = torch.ones(30, 70) @ w * 0.1
        if layout == "transposed":
            logits = (w @ torch.ones(70, 30) * 0.1).t()
        loss = cross_entropy(logits, target, overwrite=overwrite, label_smoothing=0.1)
        before = logits.detach().clone()
        (grad,) = torch.autograd.grad(loss, w)
        changed = torch.tensor(not torch.equal(before, logits))
        return grad, changed

    plain, kept = gradient(False)
    written, changed = gradient(True)
    assert not kept
    assert changed.item() is (layout == "contiguous")
    assert torch.equal(plain, written)


def test_logits_that_were_overwritten_are_not_used_again() -> None:
    x = torch.randn(30, 200, requires_grad=True)
    logits = x * 1.0
    loss = cross_entropy(logits, torch.randint(0, 200, (30,)), overwrite=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["kernel", "pytorch"])
@pytest.mark.parametrize("bad", [-1, 50, 2**40, -(2**40)])
def test_a_target_outside_the_classes_is_named_with_its_position(dtype: torch.dtype, bad: int) -> None:
    target = torch.tensor([[1, -100, 3], [4, bad, -7]])
    message = (
        rf"targets must be in \[0, 50\) or ignore_index=-100, got {bad} at position \(1, 1\); check the tok"
    )
    for wants_grad in (False, True):
        with pytest.raises(TargetError, match=message) as raised:
            cross_entropy(torch.randn(2, 3, 50, dtype=dtype, requires_grad=wants_grad), target)
        assert isinstance(raised.value, IndexError)
        assert isinstance(raised.value, ValueError)


def test_an_ignored_class_may_be_a_real_one() -> None:
    x, target = torch.randn(6, 12), torch.tensor([0, 1, 2, 0, 1, 2])
    got = cross_entropy(x, target, ignore_index=1)
    torch.testing.assert_close(got, F.cross_entropy(x, target, ignore_index=1))


def test_more_than_2_to_the_31_logits() -> None:
    row = torch.randn(1, 600).bfloat16()
    x = row.expand(4_000_000, 600)  # one row in memory, 2.4e9 elements
    target = torch.zeros(4_000_000, dtype=torch.int32)
    got = cross_entropy(x, target, dtype=torch.float32)
    torch.testing.assert_close(got, F.cross_entropy(row.float(), target[:1].long()))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x, t: cross_entropy([1.0], t), TypeError, "logits must be a tensor, got list"),
        (
            lambda x, t: cross_entropy(x.long(), t),
            TypeError,
            "logits must be a floating-point tensor, got int64",
        ),
        (lambda x, t: cross_entropy(x, [1]), TypeError, "target must be a tensor, got list"),
        (
            lambda x, t: cross_entropy(x, x),
            TypeError,
            "target must hold classes as int64 or int32, got float32; probabilities are not supported",
        ),
        (lambda x, t: cross_entropy(x, t.short()), TypeError, "got int16; cast it first"),
        (
            lambda x, t: cross_entropy(x, t[:2]),
            ValueError,
            r"logits \(3, 8\) without the last dimension, got \(2,\); expected \(3,\)",
        ),
        (
            lambda x, t: cross_entropy(x.view(1, 3, 8), torch.zeros(1, 8, dtype=torch.long)),
            ValueError,
            r"classes are the last dimension here, not the second: pass logits.movedim\(1, -1\)",
        ),
        (
            lambda x, t: cross_entropy(x, t.to("meta")),
            ValueError,
            "target is on meta, logits on cpu; move one",
        ),
        (
            lambda x, t: cross_entropy(x, t, reduction="avg"),
            ValueError,
            "reduction must be one of none, sum, mean, got 'avg'",
        ),
        (
            lambda x, t: cross_entropy(x, t, label_smoothing=1.5),
            ValueError,
            r"label_smoothing must be in \[0, 1\], got 1.5",
        ),
        (lambda x, t: cross_entropy(x, t, dtype=torch.float16), TypeError, "dtype must be float32, got"),
        (lambda x, t: cross_entropy(x[:, :0], t), ValueError, r"at least one class, got \(3, 0\)"),
    ],
)
def test_errors_name_what_is_wrong(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"cross_entropy: .*{message}"):
        call(torch.randn(3, 8), torch.tensor([1, 2, 3]))


@given(
    rows=st.integers(0, 5),
    classes=st.integers(1, 2600),
    scale=st.sampled_from([0.0, 1e-3, 1.0, 30.0, 1e4]),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    z_loss=st.sampled_from([0.0, 1e-4]),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    dtype=st.sampled_from(CARD.dtypes),
    strided=st.booleans(),
    narrow=st.booleans(),
    odd=st.sampled_from([None, math.inf, -math.inf, math.nan]),
    seed=st.integers(0, 1000),
)
def test_any_call_agrees_with_the_definition(
    rows: int,
    classes: int,
    scale: float,
    smoothing: float,
    z_loss: float,
    reduction: str,
    dtype: torch.dtype,
    strided: bool,
    narrow: bool,
    odd: float | None,
    seed: int,
) -> None:
    make = torch.Generator().manual_seed(seed)
    shape = (classes, rows) if strided else (rows, classes)
    x = (torch.randn(shape, generator=make) * scale).to(dtype)
    x = x.t() if strided else x
    target = torch.randint(0, classes, (rows,), generator=make)
    target[torch.rand(rows, generator=make) < 0.2] = -100
    if odd is not None and x.numel():
        x[0, seed % classes] = odd
    target = target.int() if narrow else target
    options = {"label_smoothing": smoothing, "z_loss": z_loss, "reduction": reduction}
    results = []
    for fn, leaf in ((cross_entropy, x), (CARD.reference, x), (CARD.reference, x.double())):
        leaf = leaf.detach().clone().requires_grad_()
        loss = fn(leaf, target, **options)
        (grad,) = torch.autograd.grad(loss.sum(), leaf)
        results.append((loss.detach(), grad))
    (mine, dmine), (eager, deager), (exact, dexact) = results
    if (target == -100).any():  # where PyTorch has NaN in the gradient of an ignored row, ours is zero
        dead = target == -100
        assert torch.equal(dmine[dead], torch.zeros_like(dmine[dead]))
        dmine, deager, dexact = (d.masked_fill(dead[:, None], 0.0) for d in (dmine, deager, dexact))
    for got, theirs, right in ((mine, eager, exact), (dmine, deager, dexact)):
        verdict = CARD.tolerance.check(got, theirs, right)
        assert verdict.ok, verdict.why
