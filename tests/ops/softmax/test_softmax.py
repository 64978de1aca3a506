"""What is particular to softmax: methods, masks of every layout, rows in which nothing is left."""

from __future__ import annotations

import math

import pytest
import torch

from opsmith.call.dispatch import native_library
from opsmith.kernels import triton
from opsmith.ops import softmax
from opsmith.ops.softmax import CARD


def test_narrow_rows_of_large_numbers_do_not_overflow() -> None:
    x = torch.linspace(1000, 1001, 50).expand(3, 50)
    assert torch.allclose(softmax(x), torch.softmax(x, -1))
    assert torch.allclose(softmax(-x), torch.softmax(-x, -1))


@pytest.mark.parametrize("method", ["auto", "stable"])
@pytest.mark.parametrize("spread", [0.1, 30.0, 3000.0])
def test_methods_agree_with_float64_for_any_range(method: str, spread: float) -> None:
    x = torch.randn(6, 200) * spread
    exact = CARD.reference(x.double())
    error = (softmax(x, method=method).double() - exact).abs().max()
    assert error <= 2 * (torch.softmax(x, -1).double() - exact).abs().max() + 2**-24


def test_fully_masked_rows_are_zeros_and_have_no_gradient() -> None:
    x = torch.randn(3, 7, requires_grad=True)
    mask = torch.ones(3, 7, dtype=torch.bool)
    mask[1] = False
    y = softmax(x, mask=mask)
    assert torch.equal(y[1], torch.zeros(7))
    torch.testing.assert_close(y[[0, 2]].sum(-1), torch.ones(2))
    y.square().sum().backward()
    assert torch.equal(x.grad[1], torch.zeros(7))
    assert x.grad.isfinite().all()


def test_causal_is_aligned_to_the_end() -> None:
    y = softmax(torch.zeros(2, 4), causal=True)
    assert torch.equal(y > 0, torch.tensor([[True, True, True, False], [True, True, True, True]]))
    assert torch.equal(softmax(torch.zeros(3, 2), causal=True)[0], torch.zeros(2))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "shape",
    [(5,), (4, 1), (1, 1, 1, 5), (2, 1, 1, 5), (2, 1, 4, 5), (1, 3, 1, 5), (2, 3, 4, 5), (2, 3, 4, 1), ()],
)
def test_a_mask_of_any_broadcast_shape(shape: tuple[int, ...], causal: bool) -> None:
    x = torch.randn(2, 3, 4, 5)
    for mask in (torch.rand(shape) < 0.7, torch.randn(shape)):
        expected = CARD.reference(
            x.double(), mask=mask if mask.dtype == torch.bool else mask.double(), causal=causal
        )
        torch.testing.assert_close(
            softmax(x, mask=mask, causal=causal).double(), expected, rtol=1e-5, atol=1e-6
        )


def test_a_float32_mask_serves_bfloat16_and_learns() -> None:
    x, mask = torch.randn(4, 30).bfloat16(), torch.randn(4, 30, requires_grad=True)
    y = softmax(x, mask=mask)
    assert y.dtype == torch.bfloat16
    y.float().square().sum().backward()
    assert mask.grad.abs().max() > 0


def test_other_dimensions_go_through_pytorch_and_say_so() -> None:
    x = torch.randn(4, 5)
    assert torch.equal(softmax(x, 0), torch.softmax(x, 0))
    assert CARD.candidates(x, 0)[1]["native"] == "the kernel works on the last dimension, not on dim 0"


def test_out_with_gaps_is_written_through() -> None:
    x, out = torch.randn(4, 6), torch.full((6, 4), torch.nan).t()
    assert softmax(x, out=out) is out
    torch.testing.assert_close(out, torch.softmax(x, -1))


def test_cost_counts_the_mask_once_however_it_is_broadcast() -> None:
    x = torch.empty(2, 3, 4, 5)
    small = torch.empty(2, 1, 1, 5, dtype=torch.bool)
    assert CARD.cost(x, mask=small).min_bytes == 2 * 120 * 4 + 10
    assert CARD.cost(x, mask=small.expand(2, 3, 4, 5)).min_bytes == 2 * 120 * 4 + 10


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: softmax(x, 2), ValueError, r"dim must be in \[-2, 2\) for shape \(4, 5\), got 2"),
        (
            lambda x: softmax(x, method="quick"),
            ValueError,
            "method must be one of auto, stable, fast, got 'quick'",
        ),
        (lambda x: softmax(x, 0, causal=True), ValueError, "causal needs x .* and the last dimension"),
        (lambda x: softmax(x[0], causal=True), ValueError, "causal needs x .* and the last dimension"),
        (lambda x: softmax(x, mask=x[:3]), ValueError, r"mask must broadcast to \(4, 5\).*got \(3, 5\)"),
        (lambda x: softmax(x, mask=x[None]), ValueError, r"mask must broadcast to \(4, 5\).*got \(1, 4, 5\)"),
        (lambda x: softmax(x, mask=x.long()), TypeError, "mask must be bool .* float32, got int64"),
        (lambda x: softmax(x, mask=1.0), TypeError, "mask must be a tensor, got float"),
    ],
)
def test_errors_name_what_was_expected_and_what_came(call, error, message) -> None:
    with pytest.raises(error, match=f"softmax: .*{message}"):
        call(torch.randn(4, 5))


@pytest.mark.parametrize("method", ["auto", "stable"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_boolean_mask_hides_nan_and_infinity(method: str, dtype: torch.dtype) -> None:
    x = torch.randn(5, 70, dtype=dtype)
    mask = torch.rand(5, 70) < 0.6
    hidden = torch.tensor([math.nan, math.inf, -math.inf, 1e30], dtype=dtype).repeat(88)[:350].view(5, 70)
    got = softmax(torch.where(mask, x, hidden), mask=mask, method=method)
    assert torch.equal(got, softmax(x, mask=mask, method=method))
    assert bool((got[~mask] == 0).all())


@pytest.mark.parametrize("method", ["auto", "stable", "fast"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sequences", [1, 50], ids=["in cache", "past it"])
def test_padding_is_neither_read_nor_left_unwritten(sequences: int, dtype: torch.dtype, method: str) -> None:
    lengths = torch.tensor([0, 1, 31, 63, 64, 65, 128, 130, 499, 500, 511, 512])
    mask = (torch.arange(512) < lengths[:, None]).view(-1, 1, 1, 512)
    x = torch.randn(len(lengths), sequences, 33, 512, dtype=dtype)
    expected = CARD.reference(x.float(), mask=mask)
    y = torch.full_like(x, math.nan)
    softmax(x.masked_fill(~mask, math.nan), mask=mask, method=method, out=y)
    assert not y.masked_select(~mask).any()
    bound = 2**-21 if dtype is torch.float32 else torch.finfo(dtype).eps
    torch.testing.assert_close(y.float(), expected, atol=2**-24, rtol=bound)


def test_a_row_of_nan_is_nan_where_padding_is_hidden() -> None:
    x = torch.randn(4, 200)
    x[2, 7] = math.nan
    y = softmax(x, mask=torch.arange(200) < 100)
    assert y[2].isnan().all()
    assert y[[0, 1, 3]].isfinite().all()


@pytest.mark.skipif(not native_library() or triton.INTERPRETED, reason="C++ kernels are not what runs here")
def test_the_kernel_takes_no_tensors_of_other_sizes() -> None:
    x, y = torch.randn(2, 3, 5), torch.empty(2, 3, 5)
    kernel = torch.ops.opsmith.softmax
    for wrong in (torch.empty(2, 3, 4), torch.empty(3, 5), torch.empty(2, 3, 5, dtype=torch.bfloat16)):
        with pytest.raises(RuntimeError, match="softmax: x and y must have one shape and dtype"):
            kernel(x, None, 1.0, False, 0, y=wrong)
    with pytest.raises(RuntimeError, match="softmax: the mask must have the sizes of x"):
        kernel(x, torch.ones(3, 5, dtype=torch.bool), 1.0, False, 0, y=y)
    with pytest.raises(RuntimeError, match=r"softmax: with a mask or causality, x must be \[outer, L, S\]"):
        kernel(x[0], None, 1.0, True, 0, y=y[0])
    for given in ((y[:, :, :4], y, y), (y, y, torch.empty(2, 3, 6))):
        with pytest.raises(RuntimeError, match="softmax: dy, y and dx must have one shape"):
            torch.ops.opsmith.softmax_backward(*given[:2], 1.0, dx=given[2])
