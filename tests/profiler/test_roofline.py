"""Roofs and what is judged by them."""

import pytest
import torch

from opsmith.profiler.api import profile
from opsmith.profiler.data import FRAMEWORK, MATMUL, NORM, Phase, Row
from opsmith.profiler.roofline import Roofs, judge
from tests.profiler.conftest import RATES


@pytest.fixture
def roofs() -> Roofs:
    found = Roofs()
    found.rates = {**RATES, "far cache": 2e11}
    return found


def row(**values: object) -> Row:
    return Row(**{"kind": NORM, "operator": "rms_norm", "shape": "", "seconds": 1e-3, "calls": 1, **values})  # type: ignore[arg-type]


def test_roofs_are_measured() -> None:
    found = Roofs()
    Roofs.measured_for_tests(found, ["float32", "int4"])  # type: ignore[attr-defined]
    assert found.bandwidth(1 << 40)
    assert (found.bandwidth(1 << 10) or 0) >= (found.bandwidth(1 << 40) or 0)
    assert found.compute("float32")
    assert found.compute("float64") is None  # nothing here was measured for it, and nothing is made up
    assert 0 < found.call < 1e-2
    once = dict(found.rates)
    found._keep("memory", once["memory"] / 2)
    assert found.rates == once


def test_the_least_time_is_the_larger_of_both(roofs: Roofs) -> None:
    by_bytes = row(bytes=5e8, flops=1e9)
    by_flops = row(kind=MATMUL, bytes=5e6, flops=2e9, dtype="float32", seconds=2e-2)
    judge([by_bytes, by_flops], roofs)
    assert by_bytes.least == pytest.approx(1e-2)
    assert by_bytes.bound == "memory"
    assert by_flops.least == pytest.approx(1e-2)
    assert by_flops.bound == "compute"
    assert by_flops.of_roof == pytest.approx(0.5)


def test_products_of_int8_are_judged_by_their_own_rate(roofs: Roofs) -> None:
    roofs.rates["matmul int8"] = 8e11
    mixed, whole = (
        row(kind=MATMUL, bytes=1.0, flops=3e9, int8_ops=int8_ops, dtype="float32") for int8_ops in (2e9, 3e9)
    )
    judge([mixed, whole], roofs)
    assert mixed.least == pytest.approx(1e9 / 2e11 + 2e9 / 8e11)
    assert whole.least == pytest.approx(3e9 / 8e11)
    assert mixed.bound == whole.bound == "compute"


def test_products_of_int8_are_found_and_their_rate_is_measured() -> None:
    class Integers(torch.nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return torch._int_mm(a, b)

    a, b = (torch.ones(64, 32, dtype=torch.int8), torch.ones(32, 48, dtype=torch.int8))
    with pytest.MonkeyPatch.context() as patch:
        wanted: list[str] = []
        fixed = Roofs.measure
        patch.setattr(Roofs, "measure", lambda self, dtypes: (wanted.extend(dtypes), fixed(self, dtypes)))
        found = profile(Integers(), (a, b), phase="forward")
    product = next(r for r in found.phases[0].rows if r.operator == "_int_mm")
    assert product.int8_ops == product.flops == product.calls * 2 * 64 * 32 * 48
    assert product.bytes == product.calls * (a.nbytes + b.nbytes + 64 * 48 * 4)
    assert "int8" in wanted


def test_small_data_is_judged_by_the_cache(roofs: Roofs) -> None:
    small = row(bytes=2e6, calls=1)
    many = row(bytes=2e9, calls=1000)
    judge([small, many], roofs)
    assert small.least == pytest.approx(1e-5)
    assert many.least == pytest.approx(1e-2)


def test_what_bounds_short_calls(roofs: Roofs) -> None:
    overhead = row(bytes=1e3, seconds=5e-6)
    latency = row(bytes=4e5, seconds=1.5e-5)
    gap, unknown = row(kind=FRAMEWORK), row(known=False)
    judge([overhead, latency, gap, unknown], roofs)
    assert [r.bound for r in (overhead, latency, gap, unknown)] == [
        "overhead",
        "latency",
        "overhead",
        "unknown",
    ]
    assert unknown.of_roof is None
    assert gap.lost == gap.seconds


def test_a_row_above_its_roof_is_flagged(roofs: Roofs) -> None:
    fast, fine = row(bytes=5e8, seconds=5e-3), row(bytes=5e8, seconds=1e-2)
    judge([fast, fine], roofs)
    assert Phase("forward", 1.5e-2, rows=[fast, fine]).over_roof == [fast]


def test_without_a_roof_nothing_is_made_up() -> None:
    alone = row(bytes=1e6)
    judge([alone], Roofs())
    assert alone.bound == "unknown"
    assert alone.of_roof is None
