"""Every cheat is planted, and caught; honest calls pass."""

import math
from collections.abc import Callable

import pytest
import torch

from opsmith.measure import WrongResult, check_call, compare_outputs, poison, ulp

Tensor = torch.Tensor


def reference(x: Tensor) -> Tensor:
    return x.softmax(-1)


def honest(x: Tensor, y: Tensor) -> None:
    y.copy_(x.softmax(-1))


def unwritten(x: Tensor, y: Tensor) -> None:
    pass


def unwritten_row(x: Tensor, y: Tensor) -> None:
    good = x.softmax(-1)
    y[:3] = good[:3]
    y[4:] = good[4:]


def skipped_tail(x: Tensor, y: Tensor) -> None:
    y.view(-1)[:-5] = x.softmax(-1).view(-1)[:-5]


def zero_tail(x: Tensor, y: Tensor) -> None:
    y.copy_(x.softmax(-1))
    y.view(-1)[-5:] = 0


def mutated(x: Tensor, y: Tensor) -> None:
    y.copy_(x.softmax(-1))
    x.view(-1)[0] += 1


def mutated_and_consistent(x: Tensor, y: Tensor) -> None:
    x.mul_(2)
    y.copy_(x.softmax(-1))


class CachedForever:
    def __init__(self) -> None:
        self.answer: Tensor | None = None

    def __call__(self, x: Tensor, y: Tensor) -> None:
        if self.answer is None:
            self.answer = x.softmax(-1)
        y.copy_(self.answer)


class CachedByAddress:
    """Wrong only when the same memory holds other values."""

    def __init__(self) -> None:
        self.answers: dict[int, Tensor] = {}

    def __call__(self, x: Tensor, y: Tensor) -> None:
        y.copy_(self.answers.setdefault(x.data_ptr(), x.softmax(-1)))


def low_precision(x: Tensor, y: Tensor) -> None:
    e = (x - x.amax(-1, keepdim=True)).exp()
    total = torch.zeros(len(x), dtype=torch.bfloat16)
    for column in e.bfloat16().unbind(-1):
        total += column
    y.copy_(e / total.float()[:, None])


CHEATS: list[tuple[str, Callable[[], Callable[..., object]]]] = [
    ("unwritten output", lambda: unwritten),
    ("unwritten output", lambda: unwritten_row),
    ("skipped tail", lambda: skipped_tail),
    ("skipped tail", lambda: zero_tail),
    ("mutated input", lambda: mutated),
    ("mutated input", lambda: mutated_and_consistent),
    ("cached answer", CachedForever),
    ("cached answer", CachedByAddress),
    ("low precision", lambda: low_precision),
]


@pytest.mark.parametrize(("fault", "make"), CHEATS)
def test_a_cheat_is_caught_and_named(fault: str, make: Callable[[], Callable[..., object]]) -> None:
    x = torch.randn(8, 96)
    kept = x.clone()
    with pytest.raises(WrongResult) as caught:
        check_call(make(), (x,), reference, 1e-6, outs=(torch.empty(8, 96),), name="ours")
    assert caught.value.fault == fault
    assert caught.value.contestant == "ours"
    assert str(caught.value).startswith(f"ours: {fault}")
    assert torch.equal(x, kept)


def test_an_honest_call_passes() -> None:
    seen = check_call(honest, (torch.randn(8, 96),), reference, outs=(torch.empty(8, 96),))
    assert seen.calls == 3
    assert 0 < seen.error <= seen.allowed < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_honest_call_that_allocates_its_output_passes(dtype: torch.dtype) -> None:
    seen = check_call(lambda x: x.softmax(-1), (torch.randn(8, 96, dtype=dtype),), reference)
    assert 0 < seen.error <= seen.allowed <= 4 * ulp(dtype, 1.0)


def test_an_output_allocated_inside_and_not_written_is_caught() -> None:
    with pytest.raises(WrongResult) as caught:
        check_call(lambda x: torch.empty_like(x), (torch.randn(8, 96),), reference, 1e9)
    assert caught.value.fault == "unwritten output"
    assert not torch.are_deterministic_algorithms_enabled()


def test_strided_shared_and_integer_inputs_are_copied_as_they_are() -> None:
    qkv = torch.randn(6, 3, 8)
    q, k, _ = qkv.unbind(1)
    mask = torch.zeros(6, 1).expand(6, 6)
    ids = torch.tensor([0, 3, 5])
    strides = []

    def call(q: Tensor, k: Tensor, mask: Tensor, ids: Tensor) -> Tensor:
        strides.append((q.stride(), k.data_ptr() - q.data_ptr(), mask.stride()))
        return ((q @ k.T + mask).softmax(-1))[ids]

    def exact(q: Tensor, k: Tensor, mask: Tensor, ids: Tensor) -> Tensor:
        return ((q @ k.T + mask).softmax(-1))[ids]

    check_call(call, (q, k, mask, ids), exact, 1e-6)
    assert strides == [((24, 1), 32, (1, 0))] * 3


def test_fewer_calls_are_the_first_ones() -> None:
    x = torch.randn(8)
    seen: list[torch.Tensor] = []

    def exp(given: torch.Tensor) -> torch.Tensor:
        seen.append(given.clone())
        return given.exp()

    assert check_call(exp, (x,), torch.exp, 1e-5, calls=1).calls == 1
    assert len(seen) == 1
    assert torch.equal(seen[0], x)
    assert check_call(exp, (x,), torch.exp, 1e-5).calls == 3
    assert len(seen) == 4
    for calls in (0, 4):
        with pytest.raises(ValueError, match=rf"calls must be 1, 2 or 3, got {calls}"):
            check_call(exp, (x,), torch.exp, 1e-5, calls=calls)


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (math.nan, 1.0),
        (math.nan, math.nan),
        (math.inf, 1.0),
        (1.0, math.inf),
        (math.inf, -math.inf),
        (1.0, math.nan),
    ],
)
@pytest.mark.parametrize("tolerance", [1e30, math.nan])
def test_nan_and_misplaced_infinities_never_pass(got: float, expected: float, tolerance: float) -> None:
    with pytest.raises(WrongResult):
        compare_outputs("ours", torch.tensor([got, 1.0]), torch.tensor([expected, 1.0]), tolerance)


def test_infinities_in_their_place_pass() -> None:
    got, exact = torch.tensor([-math.inf, 1.0]), torch.tensor([-math.inf, 1.0], dtype=torch.float64)
    assert compare_outputs("ours", got, exact)[0] == 0.0
    overflow = torch.tensor([math.inf], dtype=torch.float16), torch.tensor([1e6], dtype=torch.float64)
    assert compare_outputs("ours", *overflow)[0] == 0.0


def test_offsets_stay_offsets_when_the_values_change() -> None:
    seen = []

    def sums(x: Tensor, starts: Tensor) -> Tensor:
        seen.append(starts.tolist())
        return torch.stack([part.sum() for part in x.tensor_split(starts[1:-1])])

    check_call(sums, (torch.randn(30), torch.tensor([0, 3, 3, 10, 30])), sums, 1e-4)
    assert all(starts[0] == 0 and starts[-1] == 30 and starts == sorted(starts) for starts in seen)
    assert len({tuple(starts) for starts in seen}) == 3


def test_shape_and_number_of_outputs_count() -> None:
    with pytest.raises(WrongResult, match=r"\(2,\), expected \(3,\)"):
        compare_outputs("ours", torch.ones(2), torch.ones(3))
    with pytest.raises(WrongResult, match="expected 2 tensors, got 1"):
        compare_outputs("ours", torch.ones(2), (torch.ones(2), torch.ones(2)))


def test_a_tolerance_may_be_a_function_of_the_outputs() -> None:
    seen = []

    def tolerance(got: Tensor, exact: Tensor) -> float:
        seen.append((got.dtype, exact.dtype))
        return 0.5

    assert compare_outputs("ours", torch.ones(2), torch.ones(2).double() + 0.25, tolerance) == (0.25, 0.5)
    assert seen == [(torch.float32, torch.float64)]


def test_poison_fills_every_dtype() -> None:
    assert bool(poison(torch.zeros(3, dtype=torch.bfloat16)).isnan().all())
    assert poison(torch.zeros(2, dtype=torch.int32)).tolist() == [-(2**31)] * 2
    assert poison(torch.zeros(2, dtype=torch.bool)).tolist() == [True, True]


def test_ulp_is_that_of_the_dtype_at_the_scale() -> None:
    assert ulp(torch.float32, 1.5) == 2.0**-23
    assert ulp(torch.bfloat16, 4.0) == 2.0**-5
    assert 0 < ulp(torch.float32, 0.0) < 1e-37
