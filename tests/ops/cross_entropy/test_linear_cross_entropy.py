"""What is particular to linear_cross_entropy: its memory, its chunks, targets, errors."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st

from opsmith.call.dispatch import always_native
from opsmith.ops import linear_cross_entropy
from opsmith.ops.cross_entropy import TargetError, chunks as logit_chunks
from opsmith.ops.cross_entropy.linear import CARD


def test_it_is_linear_then_cross_entropy() -> None:
    hidden, weight, target = torch.randn(9, 40), torch.randn(700, 40), torch.randint(0, 700, (9,))
    for options in ({}, {"label_smoothing": 0.3}, {"reduction": "sum"}, {"reduction": "none"}):
        got = linear_cross_entropy(hidden, weight, target, **options)
        torch.testing.assert_close(got, F.cross_entropy(F.linear(hidden, weight), target, **options))


@pytest.mark.parametrize(("rows", "k", "classes"), [(256, 256, 32000), (512, 128, 16000), (2048, 64, 8192)])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_logits_never_exist_as_a_whole(
    peak_bytes: Any, rows: int, k: int, classes: int, reduction: str, dtype: torch.dtype
) -> None:
    hidden = torch.randn(rows, k).to(dtype).requires_grad_()
    weight = (torch.randn(classes, k) * 0.1).to(dtype).requires_grad_()
    target = torch.randint(0, classes, (rows,))
    logits = rows * classes * dtype.itemsize

    def loss(weight: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(hidden, weight, target, reduction=reduction).sum() * 3

    def gradients(*wanted: torch.Tensor) -> Any:
        return torch.autograd.grad(loss(weight if len(wanted) > 1 else weight.detach()), wanted)

    with torch.no_grad():
        assert peak_bytes(lambda: loss(weight)) <= logits / 8
    assert peak_bytes(lambda: gradients(hidden, weight)) <= logits / 8 + hidden.nbytes + weight.nbytes
    assert peak_bytes(lambda: gradients(hidden)) <= logits / 8 + hidden.nbytes
    with torch.no_grad():  # and the probe sees them where they do
        assert peak_bytes(lambda: F.linear(hidden, weight)) >= logits


@pytest.mark.parametrize(
    ("rows", "k", "reduction", "wanted", "products"),
    [
        (256, 256, "mean", "hidden weight", 3),
        (256, 256, "sum", "weight", 2),
        (4096, 32, "mean", "hidden", 2),
        (512, 128, "mean", "hidden weight", 3 + 0.75),
        (256, 256, "none", "hidden weight", 4),
        (256, 256, "mean", "", 1),
    ],
)
def test_no_product_is_computed_twice_but_of_rows_beyond_k(
    rows: int, k: int, reduction: str, wanted: str, products: float
) -> None:
    hidden, weight = torch.randn(rows, k).bfloat16(), torch.randn(2048, k).bfloat16()
    leaves = [t.requires_grad_() for name, t in (("hidden", hidden), ("weight", weight)) if name in wanted]
    target = torch.randint(0, 2048, (rows,))
    with torch.profiler.profile(record_shapes=True) as seen:
        loss = linear_cross_entropy(hidden, weight, target, reduction=reduction)
        if leaves:
            torch.autograd.grad(loss.sum(), leaves)
    products_seen = [
        e for e in seen.events() if e.name in ("aten::mm", "aten::addmm", "opsmith::linear_unpacked")
    ]
    pairs = [[s for s in e.input_shapes if len(s) == 2][:2] for e in products_seen]
    assert sum(math.prod(x) * math.prod(w) // x[1] for x, w in pairs) == products * rows * k * 2048


def test_the_loss_is_the_same_whether_gradients_are_wanted_or_not() -> None:
    hidden, weight = torch.randn(300, 128), torch.randn(3000, 128)
    target = torch.randint(0, 3000, (300,)).masked_fill(torch.rand(300) < 0.3, -100)
    plain = linear_cross_entropy(hidden, weight, target, label_smoothing=0.1)
    for wanting in (hidden, weight):
        assert torch.equal(
            linear_cross_entropy(hidden, weight.requires_grad_(), target, label_smoothing=0.1), plain
        )
        wanting.requires_grad_()


def test_a_graph_that_is_kept_gives_the_same_gradients_again() -> None:
    leaves = [torch.randn(20, 32, requires_grad=True), torch.randn(300, 32, requires_grad=True)]
    loss = linear_cross_entropy(*leaves, torch.randint(0, 300, (20,))) * 3
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    kept = [g.clone() for g in first]
    for g in first:
        g.zero_()  # as an optimizer might
    for a, b in zip(torch.autograd.grad(loss, leaves), kept, strict=True):
        assert torch.equal(a, b)


def test_a_second_derivative_is_refused() -> None:
    hidden, weight = torch.randn(20, 32, requires_grad=True), torch.randn(300, 32)
    loss = linear_cross_entropy(hidden, weight, torch.randint(0, 300, (20,))) ** 2
    (once,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        once.sum().backward()


@pytest.mark.parametrize("largest", [1.0, 300.0, 700.0, 2000.0])
def test_float16_has_room_for_large_hidden_states(largest: float) -> None:
    """A mean over rows of one class: its gradient is as large as they are."""
    hidden, weight = torch.randn(6, 64), torch.randn(5000, 64) * 0.02
    hidden[:, 3], weight[9, 5] = largest, 20 * largest
    target = torch.tensor([7, 7, -100, 7, 7, 7])

    def gradients(fn: Any, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        mine = [t.half().to(dtype).requires_grad_() for t in (hidden, weight)]
        return torch.autograd.grad(fn(*mine, target), mine)

    results = [
        gradients(fn, d) for fn, d in ((linear_cross_entropy, torch.float16), (CARD.reference, torch.float16))
    ]
    for got, theirs, exact in zip(*results, gradients(CARD.reference, torch.float64), strict=True):
        verdict = CARD.tolerance.check(got, theirs, exact)
        assert verdict.ok, verdict.why


def test_float16_keeps_what_a_loss_scale_is_there_to_keep() -> None:
    """Probabilities of 1e-5, shared by 64 rows: below float16 until the scale is applied, which is afterwards."""
    leaves = [
        torch.randn(64, 64).half().requires_grad_(),
        (torch.randn(5000, 64) * 0.2).half().requires_grad_(),
    ]
    target = torch.randint(0, 5000, (64,))

    def gradients(fn: Any, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        mine = [t.detach().to(dtype).requires_grad_() for t in leaves]
        loss = fn(*mine, target, dtype=None if dtype == torch.float64 else torch.float32)
        return torch.autograd.grad(loss * 2.0**16, mine)

    results = [
        gradients(fn, d) for fn, d in ((linear_cross_entropy, torch.float16), (CARD.reference, torch.float16))
    ]
    for got, theirs, exact in zip(*results, gradients(CARD.reference, torch.float64), strict=True):
        verdict = CARD.tolerance.check(got, theirs, exact)
        assert verdict.ok, verdict.why
        assert float((got == 0).double().mean()) < 0.01


@pytest.fixture
def peak_bytes() -> Any:
    """The most bytes that tensors took at once during a call, beyond those there were before."""

    def measure(call: Any) -> int:
        with torch.profiler.profile(profile_memory=True) as seen:
            call()
        now = peak = 0
        for event in sorted(
            (e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"),
            key=lambda e: e.start_ns(),
        ):
            now += event.nbytes()
            peak = max(peak, now)
        return peak

    return measure


def test_several_chunks_give_what_one_gives() -> None:
    hidden, target = torch.randn(64, 96), torch.randint(0, 5000, (64,))
    weight, bias = torch.randn(5000, 96) * 0.2, torch.randn(5000)
    grads = []
    for fn, dtype in ((linear_cross_entropy, torch.float32), (CARD.reference, torch.float64)):
        leaves = [t.to(dtype).requires_grad_() for t in (hidden, weight, bias)]
        loss = fn(leaves[0], leaves[1], target, bias=leaves[2], label_smoothing=0.1, z_loss=1e-3)
        grads.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    for mine, exact in zip(*grads, strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [20, 1300])
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_only_the_gradients_asked_for_are_computed(rows: int, wanted: tuple[int, ...]) -> None:
    leaves = [torch.randn(rows, 32), torch.randn(600, 32), torch.randn(600)]
    target = torch.randint(0, 600, (rows,))
    for i in wanted:
        leaves[i].requires_grad_()
    mine = torch.autograd.grad(
        linear_cross_entropy(*leaves[:2], target, bias=leaves[2]), [leaves[i] for i in wanted]
    )
    theirs = torch.autograd.grad(
        CARD.reference(*leaves[:2], target, bias=leaves[2]), [leaves[i] for i in wanted]
    )
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_a_weight_with_gaps_between_its_rows() -> None:
    hidden, target = torch.randn(20, 1500), torch.randint(0, 300, (20,))
    weight = torch.randn(300, 1600)[:, :1500]
    got = linear_cross_entropy(hidden, weight, target)
    torch.testing.assert_close(got, F.cross_entropy(F.linear(hidden, weight), target))


def test_nothing_but_ignored_targets_is_what_pytorch_says() -> None:
    hidden, weight = torch.randn(3, 40, requires_grad=True), torch.randn(300, 40)
    target = torch.full((3,), -100)
    assert linear_cross_entropy(hidden, weight, target).isnan()
    linear_cross_entropy(hidden, weight, target, reduction="sum").backward()
    assert torch.equal(hidden.grad, torch.zeros(3, 40))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("rows", "classes"), [(40, 300), (700, 90), (40, 1500)])
def test_most_targets_ignored(rows: int, classes: int, reduction: str) -> None:
    inputs = torch.randn(rows, 48), torch.randn(classes, 48), torch.randn(classes)
    target = torch.randint(0, classes, (rows,)).masked_fill(torch.rand(rows) < 0.8, -100)
    target[0] = -100
    mine, theirs = ([t.clone().requires_grad_() for t in inputs] for _ in range(2))
    loss = linear_cross_entropy(*mine[:2], target, bias=mine[2], reduction=reduction)
    expected = CARD.reference(*theirs[:2], target, bias=theirs[2], reduction=reduction)
    torch.testing.assert_close(loss, expected)
    up = torch.randn_like(loss)
    for a, b in zip(
        torch.autograd.grad(loss, mine, up), torch.autograd.grad(expected, theirs, up), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(
            linear_cross_entropy(*inputs[:2], target, bias=inputs[2], reduction=reduction), expected.detach()
        )


def test_an_ignored_row_is_never_read() -> None:
    hidden, weight = torch.randn(20, 40), torch.randn(300, 40, requires_grad=True)
    target = torch.randint(0, 300, (20,))
    target[3:9] = -100
    hidden[3:9] = math.nan
    linear_cross_entropy(hidden, weight, target).backward()
    assert weight.grad.isfinite().all()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_row(value: float) -> None:
    hidden, weight = torch.randn(3, 40), torch.randn(300, 40)
    hidden[1, 5] = value
    loss = linear_cross_entropy(hidden, weight, torch.tensor([1, 2, 3]), reduction="none")
    assert loss.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("bad", [-1, 300, 2**40])
def test_a_target_outside_the_classes_is_named_with_its_position(bad: int) -> None:
    message = rf"linear_cross_entropy: targets must be in \[0, 300\) .* got {bad} at position \(0, 1\)"
    for wants_grad in (False, True):
        with pytest.raises(TargetError, match=message):
            linear_cross_entropy(
                torch.randn(1, 3, 40, requires_grad=wants_grad),
                torch.randn(300, 40),
                torch.tensor([[1, bad, -100]]),
            )


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda h, w, t: linear_cross_entropy(h.long(), w, t),
            TypeError,
            "hidden must be a floating-point tensor",
        ),
        (lambda h, w, t: linear_cross_entropy(h, w.t(), t), ValueError, r"weight must have shape \[V, 8\]"),
        (
            lambda h, w, t: linear_cross_entropy(h, w.half(), t),
            TypeError,
            "weight must be float32 like hidden, got",
        ),
        (
            lambda h, w, t: linear_cross_entropy(h, w, t.float()),
            TypeError,
            "target must hold classes as int64",
        ),
        (
            lambda h, w, t: linear_cross_entropy(h, w, t[:2]),
            ValueError,
            r"without the last dimension, got \(2,\)",
        ),
        (
            lambda h, w, t: linear_cross_entropy(h, w, t, bias=torch.zeros(3)),
            ValueError,
            r"bias must have shape \(20,\) \(the number of weight's rows\), got \(3,\)",
        ),
        (
            lambda h, w, t: linear_cross_entropy(h, w, t, reduction="max"),
            ValueError,
            "reduction must be one of",
        ),
        (lambda h, w, t: linear_cross_entropy(h, w[:0], t), ValueError, "weight must have at least one row"),
        (
            lambda h, w, t: linear_cross_entropy(h, w.to("meta"), t),
            ValueError,
            "weight is on meta, hidden on cpu",
        ),
    ],
)
def test_errors_name_what_is_wrong(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"linear_cross_entropy: .*{message}"):
        call(torch.randn(3, 8), torch.randn(20, 8), torch.tensor([1, 2, 3]))


@given(
    rows=st.sampled_from([0, 1, 2, 9, 17, 33]),
    k=st.integers(1, 70),
    classes=st.integers(1, 1300),
    scale=st.sampled_from([1e-3, 1.0, 30.0]),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    z_loss=st.sampled_from([0.0, 1e-4]),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    dtype=st.sampled_from(CARD.dtypes),
    biased=st.booleans(),
    strided=st.booleans(),
    frozen=st.booleans(),
    least=st.sampled_from([0, 1 << 19]),
    seed=st.integers(0, 1000),
)
def test_any_call_agrees_with_the_definition(
    rows: int,
    k: int,
    classes: int,
    scale: float,
    smoothing: float,
    z_loss: float,
    reduction: str,
    dtype: torch.dtype,
    biased: bool,
    strided: bool,
    frozen: bool,
    least: int,
    seed: int,
) -> None:
    make = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, k, generator=make).to(dtype)
    shape = (k, classes) if strided else (classes, k)
    weight = (torch.randn(shape, generator=make) * scale * k**-0.5).to(dtype)
    weight = weight.t() if strided else weight
    bias = torch.randn(classes, generator=make).to(dtype) if biased else None
    target = torch.randint(0, classes, (rows,), generator=make)
    target[torch.rand(rows, generator=make) < 0.2] = -100
    if reduction == "mean" and not bool((target != -100).any()):
        return
    options = {"label_smoothing": smoothing, "z_loss": z_loss, "reduction": reduction}

    def results(fn: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in (hidden, weight, bias) if t is not None]
        leaves[1].requires_grad_(not frozen)
        loss = fn(leaves[0], leaves[1], target, bias=leaves[2] if biased else None, **options)
        wanted = [t for t in leaves if t.requires_grad]
        return [loss.detach(), *torch.autograd.grad(loss.sum(), wanted)]

    # Chunks as many, and groups of rows as small, as a call of this size can have, or one.
    with (
        patch.object(logit_chunks, "_LEAST_BYTES", least),
        patch.object(logit_chunks, "_LIBRARIES", least),
        patch.object(logit_chunks, "_FEWEST_ROWS", 1),
        always_native(),
    ):
        mine = results(linear_cross_entropy, dtype)
    eager, exact = results(CARD.reference, dtype), results(CARD.reference, torch.float64)
    terms = _norms_of_terms(hidden, weight, bias, target, **options)
    if frozen:
        del terms[2]
    for got, theirs, right, norm in zip(mine, eager, exact, terms, strict=False):
        if got.numel():
            verdict = CARD.tolerance.check(got, theirs, right)
            rounding = torch.finfo(dtype).eps * norm if dtype == torch.float32 else 0.0
            assert verdict.ok or verdict.error <= verdict.bound + rounding, verdict.why


def _norms_of_terms(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    *,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
) -> list[float]:
    """For the loss and each gradient, the largest root of the sum of squares of what its elements are added up from.

    On a handful of numbers PyTorch's own error can be zero by luck, and the policy with it. What is then left to
    hold an error to is how it comes about. An output is a sum of products t_i, each with a relative rounding error
    of at most u = eps / 2 that knows nothing of the others: by Hoeffding's inequality the sum is off by more than
    r * u * norm(t) with a probability below 2 * exp(-r^2 / 2) in the worst case, for errors at +-u, and beyond
    r * sqrt(3) standard deviations where they are spread evenly. One eps is r = 2.

    The factor d in a term is itself made of numbers that may cancel: c * p, the target's 1 - e, and e / V. Its size
    is therefore that of its parts, and p = exp(z - lse) has the error of z besides its own: a factor of 1 + |z|.
    """
    h, w = hidden.double(), weight.double()
    z = F.linear(h, w, None if bias is None else bias.double())
    lse = z.logsumexp(-1, keepdim=True)
    valid = (target != -100).double()
    d = (1 + 2 * z_loss * lse).abs() * (z - lse).exp() * (1 + z.abs()) + label_smoothing / z.shape[1]
    d += (1 - label_smoothing) * F.one_hot(target.clamp(min=0), z.shape[1])
    d *= (valid / valid.sum() if reduction == "mean" else valid)[:, None]
    squares = [
        h.square() @ w.t().square(),
        d.square() @ w.square(),
        d.t().square() @ h.square(),
        d.square().sum(0),
    ]
    return [float(t.max().sqrt()) if t.numel() else 0.0 for t in squares]
