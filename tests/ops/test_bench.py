"""Benchmarks: what takes part, on what, and that a wrong result prints no time. No time is asserted."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from opsmith import measure
from opsmith.operator import Cost, Implementation, Kind, Make, Operator, Sample
from opsmith.ops.bench import bench, workloads


def negate(x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    return torch.neg(x, out=out)


def samples(make: Make) -> Iterator[Sample]:
    for n in (3, 5, 40):
        yield Sample(f"{n}", (make(n),))


def card(fn: Callable[..., Any] = negate, kind: Kind = Kind.ACTIVATION, **more: Any) -> Operator:
    return Operator(
        name="negate",
        kind=kind,
        function=torch.neg,
        reference=torch.neg,
        cost=lambda x: Cost(x.numel(), 2 * x.nbytes),
        samples=samples,
        implementations=[Implementation("mine", fn, takes_out=True), Implementation("eager", torch.neg)],
        **more,
    )


@pytest.fixture(autouse=True)
def small_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools, flushes and roof probes of a few kilobytes: these tests are not about the numbers."""
    for module in ("pool", "roofs"):
        monkeypatch.setattr(f"opsmith.measure.{module}.cold_bytes", lambda device="cpu": 1 << 16)
    monkeypatch.setattr(measure, "cold_bytes", lambda device="cpu": 1 << 16)


def run(operator: Operator, dtype: torch.dtype = torch.float32, **options: Any) -> list[Any]:
    return list(bench(operator, dtype, seconds=0.01, **{"compiled": False, **options}))


def test_the_largest_samples_stand_in_for_workloads() -> None:
    assert [s.name for s in workloads(card(), Make(torch.float32))] == ["40", "5"]


def test_workloads_of_the_card_are_what_is_timed() -> None:
    operator = card(workloads=lambda make: iter([Sample("big", (make(64, 64),))]))
    (result,) = run(operator)
    assert result.workload == "big"
    assert set(result.cold.names) == {"mine", "mine, out=", "eager"}
    assert result.cold.column == "cold"
    assert result.warm.column == "warm"
    assert set(result.roof) == set(result.cold.names)


def test_small_inputs_are_flushed() -> None:
    operator = card(workloads=lambda make: iter([Sample("small", (make(8),))]))
    (result,) = run(operator)
    assert result.cold.column == "cold, flushed"


def test_json_names_the_baseline_and_keeps_samples() -> None:
    data = run(card())[0].to_json()
    assert {"mine / eager", "mine, out= / eager"} <= set(data["ratios"]["cold"])
    assert data["cold"]["contestants"]["mine"]["samples"]
    assert data["cold"]["roofs"]["copy"]["rate"] > 0
    assert "out=" in data["cold"]["notes"]["outputs"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_matmul_is_judged_by_the_matmul_rate_where_that_is_known(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opsmith.measure.roofs._matmul_probes", _no_matmul)
    operator = card(kind=Kind.MATMUL, workloads=lambda make: iter([Sample("big", (make(64, 64),))]))
    (result,) = run(operator, dtype)
    known = dtype == torch.float32
    assert ("matmul float32" in result.cold.roofs.by_kind) == known
    assert (result.roof["mine"] is not None) == known


def _no_matmul(kind: str, n: int, device: torch.device) -> list[measure.Probe]:
    # A rate far above any machine's, so that the little work of this test stays below the roof.
    return [measure.Probe(f"roof: {kind}, {n}", kind, 1e18, lambda: None)]


def test_a_wrong_result_has_no_time() -> None:
    with pytest.raises(measure.WrongResult, match=r"negate mine: values of sample '3', float32"):
        run(card(lambda x, out=None: -x + 1))


def test_a_fault_that_only_the_workload_shows_has_no_time() -> None:
    def right_when_small(x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        y = torch.neg(x, out=out)
        if x.numel() > 1000:
            y.view(-1)[-1] = 0
        return y

    operator = card(right_when_small, workloads=lambda make: iter([Sample("big", (make(64, 64),))]))
    with pytest.raises(measure.WrongResult, match="wrong value in workload 'big'"):
        run(operator)


def test_a_baseline_that_does_not_compile_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError("no compiler here\nmore")

        return call

    monkeypatch.setattr(torch, "compile", fails)
    result = run(card(), compiled=True)[0]
    assert "torch.compile" not in result.cold.names
    assert "torch.compile takes no part: RuntimeError: no compiler here" in result.notes


def test_compiled_eager_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda fn, **options: fn)
    result = run(card(), compiled=True)[0]
    assert "torch.compile" in result.cold.names
    assert "mine / torch.compile" in result.to_json()["ratios"]["cold"]
