"""Benchmarks: what takes part, on what, and that a wrong result prints no time. No time is asserted."""

import dataclasses
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from opsmith import measure
from opsmith.operator import Cost, Implementation, Kind, Make, Operator, Sample
from opsmith.proof.bench import bench, workloads
from opsmith.proof.passes import cold_data

PUBLIC = ("opsmith", "opsmith, out=")  # the card's function, as users call it


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
    return list(bench(operator, dtype, seconds=0.01, **{"against": ("eager",), "backward": False, **options}))


def test_the_largest_samples_stand_in_for_workloads() -> None:
    assert [s.name for s in workloads(card(), Make(torch.float32))] == ["40", "5"]


def test_workloads_of_the_card_are_what_is_timed() -> None:
    operator = card(workloads=lambda make: iter([Sample("big", (make(64, 64),))]))
    (result,) = run(operator)
    assert result.workload == "big"
    assert set(result.columns["cold"].names) == {*PUBLIC, "mine", "mine, out=", "eager"}
    assert [c.column for c in result.columns.values()] == ["cold", "warm"]
    assert set(result.roof["cold"]) == set(result.columns["cold"].names)
    assert result.direction == "forward"


def test_the_public_function_is_timed_and_not_what_the_card_calls_alone() -> None:
    def function(x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        calls.append(out is not None)
        return torch.neg(x, out=out)

    calls: list[bool] = []
    operator = card()
    operator.function = function
    result = run(operator)[0]
    rounds = [len(result.columns["cold"].samples[name]) for name in PUBLIC]
    assert calls.count(False) >= rounds[0]
    assert calls.count(True) >= rounds[1]


def test_large_outputs_are_timed_on_fresh_pages_and_in_reused_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opsmith.proof.bench._FRESH_PAGES", 64 * 64 * 4)
    (small,) = run(card(workloads=lambda make: iter([Sample("big", (make(64, 64),))])))
    assert list(small.columns) == ["cold", "reused", "warm"]
    assert small.columns["cold"].notes == {"outputs": "as the allocator gives them"}
    monkeypatch.setattr("opsmith.proof.bench._ALWAYS_FRESH", 64 * 64 * 4)
    machine = dataclasses.replace(measure.describe(), caches=(measure.Cache(1, 64 * 64),))
    monkeypatch.setattr(measure, "describe", lambda: machine)
    (result,) = run(card(workloads=lambda make: iter([Sample("big", (make(64, 64),))])))
    assert list(result.columns) == ["cold", "reused"]
    assert result.columns["cold"].notes == {"outputs": "on fresh pages"}
    assert set(result.columns["cold"].names) == {"opsmith", "mine", "eager"}
    assert set(result.columns["reused"].names) == {*PUBLIC, "mine", "mine, out=", "eager"}
    assert result.columns["reused"].notes == {"outputs": "in memory of earlier ones"}


def test_autograds_code_is_back_after_a_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    grad = torch.autograd.grad

    def backward(*args: Any, **options: Any) -> Any:
        events.append("backward")
        return grad(*args, **options)

    monkeypatch.setattr(torch.autograd, "grad", backward)
    cold_data(lambda: events.append("flush"))()
    assert events == ["flush", "backward"]


def test_the_peak_is_that_of_each_contestant() -> None:
    def wasteful(x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        return torch.neg((x + 1) - 1, out=out)

    (result,) = run(card(wasteful, workloads=lambda make: iter([Sample("big", (make(64, 64).round(),))])))
    assert result.peak["eager"] == 64 * 64 * 4
    assert 2 * 64 * 64 * 4 <= result.peak["mine"] < 3 * 64 * 64 * 4
    assert run(card())[0].peak["mine, out="] == 0


class OnCpu:
    """`measure`, with the CPU in the place of the GPU; what would capture a graph runs at once, or refuses."""

    def __init__(self) -> None:
        self.devices: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        there = getattr(measure, name)
        if not callable(there) or (isinstance(there, type) and issubclass(there, Exception)):
            return there

        def call(*args: Any, **options: Any) -> Any:
            self.devices |= {str(options["device"])} if "device" in options else set()
            args = tuple("cpu" if isinstance(arg, str) and arg == "cuda" else arg for arg in args)
            return there(*args, **{**options, **({"device": "cpu"} if "device" in options else {})})

        return call

    @staticmethod
    def captured(call: Callable[..., Any], sets: list[Any]) -> measure.Repeated:
        if getattr(call, "args", [None])[0] is negate:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        return measure.Repeated(lambda: [call(*inputs) for inputs in sets], len(sets))


def test_a_gpu_rotates_its_inputs_and_has_a_column_of_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = OnCpu()
    monkeypatch.setattr("opsmith.proof.bench.measure", stand_in)
    monkeypatch.setattr("opsmith.proof.bench.Make", lambda dtype, device: Make(dtype))
    monkeypatch.setattr("opsmith.proof.bench.verify", lambda card, dtypes, device: [])
    (result,) = run(card(workloads=lambda make: iter([Sample("big", (make(64, 64),))])), device="cuda")
    assert list(result.columns) == ["cold", "warm", "graph"]
    assert result.columns["cold"].column == "cold"  # rotated, not flushed
    assert set(result.columns["cold"].names) == {*PUBLIC, "mine", "mine, out=", "eager"}
    assert set(result.columns["graph"].names) == {*PUBLIC, "mine, out=", "eager"}
    assert "mine cannot be captured in a CUDA graph: operation not permitted when stream is capturing" in (
        result.notes
    )
    assert "graph" in result.roof
    assert stand_in.devices == {"cuda"}
    (_, backward) = run(
        card(workloads=lambda make: iter([Sample("big", (make(64, 64),))])), device="cuda", backward=True
    )
    assert list(backward.columns) == ["cold", "warm"]
    assert backward.columns["cold"].column == "cold, flushed"


def square(x: torch.Tensor) -> torch.Tensor:
    return x * x


def test_gradients_are_timed_with_their_forward_off_the_clock() -> None:
    operator = card(workloads=lambda make: iter([Sample("big", (make(64, 64),))]))
    operator.function = operator.reference = square
    operator.implementations = [Implementation("mine", square)]
    forward, backward = run(operator, backward=True)
    assert (forward.direction, backward.direction) == ("forward", "backward")
    assert set(backward.columns["cold"].names) == {"opsmith", "eager"}
    assert backward.columns["cold"].column == "cold, flushed"
    # What comes in, what is kept (x), what goes out.
    assert backward.cost == Cost(2 * 64 * 64, 3 * 64 * 64 * 4)
    assert backward.peak["opsmith"] >= 2 * 64 * 64 * 4


def test_of_a_loss_both_directions_are_timed_together() -> None:
    operator = card(kind=Kind.LOSS, workloads=lambda make: iter([Sample("big", (make(64, 64),))]))
    operator.function = operator.reference = square
    operator.implementations = [Implementation("mine", square)]
    assert [result.direction for result in run(operator, backward=True)] == ["forward", "forward + backward"]


def test_a_wrong_gradient_has_no_time() -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * x

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
            return dy.clone()

    operator = card(workloads=lambda make: iter([Sample("big", (make(64, 64),))]))
    operator.reference, operator.function = square, Wrong.apply
    operator.implementations = []
    with pytest.raises(measure.WrongResult, match="gradients of sample"):
        run(operator, backward=True)
    operator.samples = lambda make: iter([])  # so that only the workload can tell
    results = bench(operator, torch.float32, against=("eager",), seconds=0.01)
    assert next(results).direction == "forward"
    with pytest.raises(measure.WrongResult, match="wrong value in workload 'big'"):
        next(results)


def test_a_hopeless_baseline_leaves_the_time_to_others() -> None:
    def slow(x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.005)
        return torch.neg(x)

    mine = Implementation("mine", negate)
    operator = dataclasses.replace(card(), implementations=[mine, Implementation("eager", slow)])
    cold = run(operator)[0].columns["cold"]
    assert list(cold.dropped) == ["eager"]
    assert len(cold.samples["eager"]) == 5 < len(cold.samples["mine"])
    assert cold.ratio("mine", "eager").pairs == 5


def test_what_hardly_writes_is_judged_by_the_read_roof() -> None:
    def total(x: torch.Tensor) -> torch.Tensor:
        return x.sum(-1)

    implementations = [Implementation("mine", total), Implementation("eager", total)]
    operator = dataclasses.replace(
        card(workloads=lambda make: iter([Sample("rows", (make(64, 64),))])),
        function=total,
        reference=total,
        implementations=implementations,
    )
    (result,) = run(operator)
    cold, cost = result.columns["cold"], result.cost
    read, copy = (
        cold.roofs.fraction(cold.median("mine"), flops=cost.flops, bytes=cost.min_bytes, memory=memory)
        for memory in ("read", "copy")
    )
    assert result.roof["cold"]["mine"] == read != copy


def test_small_inputs_are_flushed() -> None:
    operator = card(workloads=lambda make: iter([Sample("small", (make(8),))]))
    (result,) = run(operator)
    assert result.columns["cold"].column == "cold, flushed"


def test_json_names_the_baseline_and_keeps_samples() -> None:
    data = run(card())[0].to_json()
    assert {"mine / eager", "mine, out= / eager"} <= set(data["ratios"]["cold"])
    cold = data["columns"]["cold"]
    assert cold["contestants"]["mine"]["samples"]
    assert cold["roofs"]["copy"]["rate"] > 0
    assert cold["notes"]["outputs"] == "as the allocator gives them"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_matmul_is_judged_by_the_matmul_rate_where_that_is_known(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opsmith.measure.roofs._matmul_probes", _no_matmul)
    operator = card(kind=Kind.MATMUL, workloads=lambda make: iter([Sample("big", (make(64, 64),))]))
    operator.cost = lambda x: Cost(100 * x.nbytes, 2 * x.nbytes)
    (result,) = run(operator, dtype)
    known = dtype == torch.float32
    assert ("matmul float32" in result.columns["cold"].roofs.by_kind) == known
    assert ("cold" in result.roof) == known


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


@pytest.mark.parametrize("backward", [False, True])
def test_a_wrong_baseline_takes_no_part(monkeypatch: pytest.MonkeyPatch, backward: bool) -> None:
    monkeypatch.setattr(torch, "compile", lambda fn, **options: lambda x: fn(x) * 1.01)
    result = run(card(), against=("eager", "compile"), backward=backward)[-1]
    assert result.direction == ("backward" if backward else "forward")
    assert "eager" in result.columns["cold"].names
    assert "torch.compile" not in result.columns["cold"].names
    assert any(re.match(r"negate torch.compile: .* in workload '5'", note) for note in result.notes), (
        result.notes
    )


def test_a_baseline_that_does_not_compile_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError("no compiler here\nmore")

        return call

    monkeypatch.setattr(torch, "compile", fails)
    result = run(card(), against=("eager", "compile"))[0]
    assert "torch.compile" not in result.columns["cold"].names
    assert "torch.compile takes no part: RuntimeError: no compiler here" in result.notes


def test_compiled_eager_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda fn, **options: fn)
    result = run(card(), against=("compile",))[0]
    assert "torch.compile" in result.columns["cold"].names
    assert "eager" not in result.columns["cold"].names
    assert "mine / torch.compile" in result.to_json()["ratios"]["cold"]
