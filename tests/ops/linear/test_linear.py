"""What is particular to linear: epilogues on every implementation, packed weights, its errors."""

from __future__ import annotations

import importlib
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from opsmith.call.dispatch import always_native, native_library
from opsmith.kernels import libraries, triton
from opsmith.measure import ulp
from opsmith.ops import linear
from opsmith.ops.linear import ACTIVATIONS, CARD


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_epilogues_in_their_order(activation: str | None, residual: bool) -> None:
    x, w, b, r = torch.randn(3, 16), torch.randn(9, 16), torch.randn(9), torch.randn(3, 9)
    y = x.double() @ w.double().T + b.double()
    y = y if activation is None else ACTIVATIONS[activation](y)
    y = y + r.double() if residual else y
    options = {"activation": activation, "residual": r if residual else None}
    for fn in (linear, *(i.fn for i in CARD.candidates(x, w, b, **options)[0])):
        torch.testing.assert_close(fn(x, w, b, **options).double(), y, rtol=1e-5, atol=1e-5)


def test_every_implementation_is_tried_for_gelu() -> None:
    accepted, _ = CARD.candidates(torch.randn(4, 16), torch.randn(8, 16), activation="gelu")
    assert "eager" in {i.name for i in accepted}
    assert any(i.prepack for i in CARD.implementations)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_weights_give_the_same_result(dtype: torch.dtype) -> None:
    x, w, b = torch.randn(5, 48).to(dtype), torch.randn(33, 48).to(dtype), torch.randn(33).to(dtype)
    for implementation in CARD.candidates(x, w, b)[0]:
        if implementation.prepack is not None:
            packed = implementation.prepack(w, 5)
            for rows in (5, 1, 3):  # packed for five rows, it still serves others
                exact = x[:rows].double() @ w.double().T + b.double()
                error = (implementation.fn(x[:rows], packed, b).double() - exact).abs().max()
                bound = 2 * (torch.nn.functional.linear(x[:rows], w, b).double() - exact).abs().max()
                assert error <= bound + exact.abs().max() * torch.finfo(dtype).eps


def test_the_residual_is_left_as_it_was() -> None:
    x, w, r = torch.randn(2, 4), torch.randn(3, 4), torch.randn(2, 3)
    before = r.clone()
    for activation in (None, "gelu", "relu"):
        linear(x, w, activation=activation, residual=r)
        assert torch.equal(r, before)


def test_cost_counts_the_multiplications() -> None:
    cost = CARD.cost(torch.empty(2, 3, 8), torch.empty(5, 8))
    assert cost.flops == 2 * 6 * 8 * 5
    assert cost.min_bytes == 4 * (48 + 40 + 30)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda x, w: linear(x, w[:, :7]),
            ValueError,
            r"weight must have shape \[N, 8\] for x \(2, 8\), got \(5, 7\)",
        ),
        (lambda x, w: linear(x, w[0]), ValueError, r"weight must have shape \[N, 8\].*got \(8,\)"),
        (
            lambda x, w: linear(x, w.half()),
            TypeError,
            "weight must be float32 like x, got float16; cast it first",
        ),
        (lambda x, w: linear(x, w, w[0]), ValueError, r"bias must have shape \(5,\).*got \(8,\)"),
        (
            lambda x, w: linear(x, w, residual=x),
            ValueError,
            r"residual must have shape \(2, 5\).*got \(2, 8\)",
        ),
        (
            lambda x, w: linear(x, w, activation="tanh"),
            ValueError,
            "activation must be None or one of gelu, .*'tanh'",
        ),
        (lambda x, w: linear(x, w.to("meta")), ValueError, "weight is on meta, x on cpu; move one of them"),
        (lambda x, w: linear(x, w, out=x), ValueError, r"out must be float32 \(2, 5\)"),
    ],
)
def test_errors_name_what_was_expected_and_what_came(call, error, message) -> None:
    with pytest.raises(error, match=f"linear: {message}"):
        call(torch.randn(2, 8), torch.randn(5, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", [None, "gelu", "silu"])
@pytest.mark.parametrize("rows", [1, 17])
def test_the_result_may_go_over_the_input_or_the_residual(
    rows: int, activation: str | None, dtype: torch.dtype
) -> None:
    x, w, r = torch.randn(rows, 32).to(dtype), torch.randn(32, 32).to(dtype), torch.randn(rows, 32).to(dtype)
    right = linear(x, w, activation=activation, residual=r)
    for over_x in (True, False):
        x2, r2 = x.clone(), r.clone()
        y = linear(x2, w, activation=activation, residual=r2, out=x2 if over_x else r2)
        torch.testing.assert_close(y, right)


@pytest.mark.parametrize(("rows", "k", "n"), [(300, 2048, 1024), (64, 1536, 1024), (32, 2048, 384)])
def test_long_sums_err_by_no_more_than_the_policy_allows(rows: int, k: int, n: int) -> None:
    x, w, b = torch.randn(rows, k), torch.randn(n, k) * k**-0.5, torch.randn(n)
    exact = F.linear(x.double(), w.double(), b.double())
    verdict = CARD.tolerance.check(linear(x, w, b), F.linear(x, w, b), exact)
    assert verdict.ok, verdict.why


@pytest.mark.parametrize(("dtype", "learns"), [(torch.bfloat16, False), (torch.float32, True)])
def test_inductor_compiles_it(dtype: torch.dtype, learns: bool) -> None:
    def layers(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = linear(linear(x, w), w, activation="relu", residual=x)
        return linear(y, w, activation="gelu")

    inputs = [t.to(dtype).requires_grad_(learns) for t in (torch.randn(40, 64), torch.randn(64, 64) / 8)]
    compiled = torch.compile(layers)
    with torch.set_grad_enabled(learns):
        y, right = compiled(*inputs), layers(*inputs)
        near = 2e-2 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(y, right, rtol=near, atol=near)
    if learns:
        for got, expected in zip(*(torch.autograd.grad(t.sum(), inputs) for t in (y, right)), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def _gradients(fn, *inputs: torch.Tensor, dy: torch.Tensor, **options: object) -> list[torch.Tensor]:
    leaves = [t.clone().requires_grad_() for t in inputs]
    return list(torch.autograd.grad(fn(*leaves, **options), leaves, dy))


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize(("rows", "k", "n"), [(2, 3000, 1), (130, 37, 70), (300, 257, 390), (128, 64, 6)])
def test_gradients_are_as_exact_as_pytorchs(rows: int, k: int, n: int, activation: str | None) -> None:
    x, w, b, dy = torch.randn(rows, k), torch.randn(n, k) * k**-0.5, torch.randn(n), torch.randn(rows, n)

    def eager(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.linear(x, w, b)
        return y if activation is None else ACTIVATIONS[activation](y)

    exact = _gradients(eager, x.double(), w.double(), b.double(), dy=dy.double())
    theirs = _gradients(eager, x, w, b, dy=dy)
    mine = _gradients(linear, x, w, b, dy=dy, activation=activation)
    for right, them, me in zip(exact, theirs, mine, strict=True):
        allowed = 2 * (them.double() - right).abs().max() + ulp(torch.float32, float(right.abs().max()))
        assert (me.double() - right).abs().max() <= allowed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("activation", "cast"), [(None, False), (None, True), ("gelu", False), ("silu", False)]
)
@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_of_16_bits_are_our_kernels_where_pytorch_has_no_unit(
    dtype: torch.dtype, activation: str | None, cast: bool, transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a region of autocast too, where there is nothing to cast any more."""
    # Modules, of which some share their name with a function.
    package, onednn, training = (
        importlib.import_module(f"opsmith.ops.linear{m}") for m in ("", ".onednn", ".training")
    )
    monkeypatch.setattr(package, "SLOW_DTYPES", {dtype})
    monkeypatch.setattr(training, "our_product", partial(onednn.product, ours={dtype}))
    x, b, dy = torch.randn(300, 257).to(dtype), torch.randn(390).to(dtype), torch.randn(300, 390).to(dtype)
    w = (torch.randn(257, 390).t() if transposed else torch.randn(390, 257)).mul(0.06).to(dtype)
    act = ACTIVATIONS.get(activation, lambda y: y)

    def layer(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return act(torch.nn.functional.linear(x, w, b))

    exact = _gradients(layer, x.double(), w.double(), b.double(), dy=dy.double())
    exact.append(layer(x.double(), w.double(), b.double()))
    with torch.profiler.profile() as seen, torch.autocast("cpu", dtype=dtype, enabled=cast):
        mine = _gradients(linear, x, w, b, dy=dy, activation=activation)
        with torch.no_grad():
            mine.append(linear(x, w, b, activation=activation))
    assert not {"aten::mm", "aten::addmm"} & {e.key for e in seen.key_averages()}
    theirs = [*_gradients(layer, x, w, b, dy=dy), layer(x, w, b)]
    for right, them, me in zip(exact, theirs, mine, strict=True):
        assert me.dtype == dtype
        allowed = 1.5 * (them.double() - right).abs().max() + ulp(dtype, float(right.abs().max()))
        assert (me.double() - right).abs().max() <= allowed


def test_gradients_of_views() -> None:
    x, w = torch.randn(2, 3, 48).transpose(0, 1), torch.randn(48, 66).t()[:, :48]
    dy = torch.randn(66, 2, 3).permute(2, 1, 0)
    theirs = _gradients(torch.nn.functional.linear, x, w, dy=dy)
    with always_native():
        mine = _gradients(linear, x, w, dy=dy)
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activation", [None, "gelu"])
def test_the_gradient_of_a_transposed_weight_lies_as_the_weight_does(activation: str | None) -> None:
    x, w, b, dy = torch.randn(130, 37), torch.randn(37, 70) * 37**-0.5, torch.randn(70), torch.randn(130, 70)

    def eager(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        y = x @ w + b
        return y if activation is None else ACTIVATIONS[activation](y)

    mine = _gradients(lambda x, w, b: linear(x, w.t(), b, activation=activation), x, w, b, dy=dy)
    assert mine[1].stride() == w.stride()
    exact = _gradients(eager, x.double(), w.double(), b.double(), dy=dy.double())
    for right, them, me in zip(exact, _gradients(eager, x, w, b, dy=dy), mine, strict=True):
        allowed = 2 * (them.double() - right).abs().max() + ulp(torch.float32, float(right.abs().max()))
        assert (me.double() - right).abs().max() <= allowed


def test_a_second_backward_finds_what_the_first_one_did() -> None:
    x, w = torch.randn(8, 16, requires_grad=True), torch.randn(24, 16, requires_grad=True)
    with always_native():
        y = linear(x, w, activation="gelu")
    first = torch.autograd.grad(y, (x, w), torch.ones_like(y), retain_graph=True)
    second = torch.autograd.grad(y, (x, w), torch.ones_like(y))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_autocast_multiplies_in_its_own_dtype() -> None:
    x, w = torch.randn(64, 128, requires_grad=True), torch.randn(96, 128)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(x, w).dtype == torch.bfloat16


@pytest.mark.skipif(triton.INTERPRETED, reason="the interpreter has the CPU")
@pytest.mark.parametrize(
    ("dy", "x", "message"),
    [
        (torch.zeros(0, 3), torch.zeros(0, 2), "nothing to multiply"),
        (torch.zeros(4, 3), torch.zeros(5, 2), "dy must be"),
        (torch.zeros(4, 3).double(), torch.zeros(4, 2).double(), "dy and x|kernels take"),
    ],
)
def test_the_kernel_of_the_weights_gradient_refuses(dy: torch.Tensor, x: torch.Tensor, message: str) -> None:
    native_library()
    with pytest.raises(RuntimeError, match=message):
        torch.ops.opsmith.linear_gradient(dy, x, dweight=x.new_zeros(3, 2))


@pytest.mark.skipif(not libraries.load(), reason="the native library is not available")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_few_rows_meet_the_weight_as_it_is(dtype: torch.dtype) -> None:
    """Odd sizes, rows that are apart in memory, all epilogues in turn, results between guards."""
    rows_kernel, activations = CARD.implementation("rows"), [None, *ACTIVATIONS]
    rows = (1, 2, 3, 4, 6, 8, 9, 16, 17, 33, 49, 64, 70)
    sizes = [(m, k, n) for m in rows for k in (1, 7, 33, 130, 1100) for n in (1, 3, 64, 69, 140)]
    for case, (m, k, n) in enumerate(sizes):
        generator = torch.Generator().manual_seed(case)
        x = torch.randn(m, k + case % 3, generator=generator).to(dtype)[:, :k]
        weight = (torch.randn(n, k + case % 2, generator=generator) * k**-0.5).to(dtype)[:, :k]
        bias = torch.randn(n, generator=generator).to(dtype) if case % 3 else None
        residual = torch.randn(m, n + 1, generator=generator).to(dtype)[:, :n] if case % 2 else None
        call = {"activation": activations[case % len(activations)]}
        # More are not for it to be chosen; a program for a range of sizes may come to them all the same.
        assert (rows_kernel.supports(x, weight, bias, **call, residual=residual) is True) == (m <= 64)
        y = torch.full((m, n + 3), torch.nan, dtype=dtype)
        rows_kernel.fn(x, weight, bias, **call, residual=residual, out=y[:, :n])
        eager = CARD.reference(x, weight, bias, **call, residual=residual)
        double = [None if t is None else t.double() for t in (bias, residual)]
        exact = CARD.reference(x.double(), weight.double(), double[0], **call, residual=double[1])
        slack = (
            torch.finfo(torch.float32).eps * k**0.5
        )  # eager's largest error of few results is a matter of luck
        verdict = CARD.tolerance.check(y[:, :n], eager, exact)
        assert verdict.error <= verdict.bound + slack, (m, k, n, call, verdict)
        assert bool(y[:, n:].isnan().all()), "written outside the output"


@pytest.mark.skipif(not libraries.load(), reason="the native library is not available")
def test_more_rows_a_transposed_weight_or_another_dtype_are_not_for_that_kernel() -> None:
    rows_kernel, x, weight = CARD.implementation("rows"), torch.randn(4, 8), torch.randn(5, 8)
    assert rows_kernel.supports(x, weight) is True
    assert "64 rows at most, x has 65" in str(rows_kernel.supports(torch.randn(65, 8), weight))
    assert "rows contiguous" in str(rows_kernel.supports(x, torch.randn(8, 5).t()))
    assert "x's dtype" in str(rows_kernel.supports(x, weight.bfloat16()))
    for given in (torch.randn(8, 5).t(), torch.randn(5, 16)[:, ::2]):
        torch.testing.assert_close(linear(x, given), F.linear(x, given))


@pytest.mark.skipif(not libraries.load(), reason="the native library is not available")
def test_a_row_with_nan_or_infinity_keeps_to_itself() -> None:
    x, weight = torch.ones(2, 70), torch.ones(9, 70)
    x[0, 69], weight[3, 5] = torch.nan, torch.inf
    y = linear(x, weight)
    assert bool(y[0].isnan().all())
    assert y[1].tolist() == [70, 70, 70, torch.inf, 70, 70, 70, 70, 70]


def test_gradients_of_inputs_in_float32_are_as_exact_as_eagers() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(512, 384, requires_grad=True), torch.randn(1536, 384) / 384**0.5
    dy = torch.randn(512, 1536)
    (dx,) = torch.autograd.grad(linear(x, weight), x, dy)
    exact = dy.double() @ weight.double()
    errors = [float((t.double() - exact).abs().max()) for t in (dx, dy @ weight)]
    assert errors[0] <= 2 * errors[1]
