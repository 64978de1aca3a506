"""Roofs: the best of several ways, counted right, and what they forbid."""

import pytest
import torch

from opsmith.measure import KINDS, ImpossibleTime, Roof, RoofProbes, Roofs, compare, measure_roofs


def roof(kind: str, rate: float, peak: float | None = None) -> Roof:
    return Roof(kind, rate, peak or rate, "a way", {})


ROOFS = Roofs(
    {
        "read": roof("read", 100.0, 110.0),
        "copy": roof("copy", 80.0),
        "matmul float32": roof("matmul float32", 1000.0),
        "matmul bfloat16": roof("matmul bfloat16", 2000.0, 2100.0),
    }
)


def test_the_best_way_by_median_is_the_roof_and_the_fastest_sample_the_peak() -> None:
    probes = RoofProbes(("copy",), block_bytes=1 << 14)
    work = 2.0 * (1 << 14)
    names = list(probes.contestants())
    found = probes.roofs({names[0]: [1.0, 2.0, 3.0], names[1]: [1.5, 1.5, 9.0]}).by_kind["copy"]
    assert f"roof: {found.way}" == names[1]
    assert (found.rate, found.peak) == (work / 1.5, work / 1.0)
    assert found.others == {names[0].removeprefix("roof: "): work / 2.0, found.way: work / 1.5}


def test_the_work_of_every_probe_is_what_it_moves() -> None:
    probes = RoofProbes(("read", "copy", "update"), block_bytes=1 << 16)
    for probe in probes.contestants().values():
        blocks = 2 if probe.kind != "read" or "dot" in probe.name else 1
        assert probe.work == blocks * (1 << 16), probe.name


def test_all_libraries_are_tried_and_compute_the_same_product() -> None:
    probes = RoofProbes(("matmul float32", "matmul bfloat16", "matmul int8"), sizes=(64,))
    by_kind: dict[str, list[torch.Tensor]] = {}
    for probe in probes.contestants().values():
        assert probe.work == 2 * 64**3
        result = probe(torch.zeros(1))  # whatever the pool holds is ignored
        assert isinstance(result, torch.Tensor)
        by_kind.setdefault(probe.kind, []).append(result.double())
    assert set(by_kind) == {kind for kind in KINDS if kind.startswith("matmul")}
    for kind in ("matmul float32", "matmul bfloat16"):
        for other in by_kind[kind][1:]:
            torch.testing.assert_close(other, by_kind[kind][0], rtol=0, atol=0.3)


@pytest.mark.parametrize(
    ("flops", "size", "dtype", "memory", "fraction"),
    [
        (0, 50, None, "best", 0.5),
        (0, 40, None, "copy", 0.5),
        (500, 10, torch.float32, "best", 0.5),
        (500, 10, torch.bfloat16, "best", 0.25),
        (500, 80, torch.bfloat16, "best", 0.8),
        (500, 10, None, "best", 0.1),
    ],
)
def test_the_nearer_roof_judges(
    flops: float, size: float, dtype: torch.dtype | None, memory: str, fraction: float
) -> None:
    found = ROOFS.fraction(1.0, flops=flops, bytes=size, dtype=dtype, memory=memory)  # type: ignore[arg-type]
    assert found == pytest.approx(fraction)


def test_products_of_integers_are_judged_by_their_own_rate() -> None:
    roofs = Roofs({**ROOFS.by_kind, "matmul int8": roof("matmul int8", 4000.0)})
    # 500 of 2000 a second, and 1000 of 4000.
    assert roofs.fraction(1.0, flops=1500, bytes=0, dtype=torch.bfloat16, int8_ops=1000) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="int8 was not measured"):
        ROOFS.fraction(1.0, flops=1500, bytes=0, dtype=torch.bfloat16, int8_ops=1000)


def test_above_the_roof_is_an_error_when_cold_and_a_cache_when_warm() -> None:
    with pytest.raises(ImpossibleTime, match="cost formula"):
        ROOFS.fraction(1.0, flops=0, bytes=120)
    assert ROOFS.fraction(1.0, flops=0, bytes=120, cold=False) == pytest.approx(1.2)
    # Between the median and the fastest sample lies the noise of the roof itself.
    assert ROOFS.fraction(1.0, flops=0, bytes=105) == pytest.approx(1.05)
    with pytest.raises(ImpossibleTime):
        ROOFS.fraction(1.0, flops=2400, bytes=0, dtype=torch.bfloat16)
    # The libraries' products are no ceiling: one may be a tenth faster.
    assert ROOFS.fraction(1.0, flops=2200, bytes=0, dtype=torch.bfloat16) == pytest.approx(1.1)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_that_is_none_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="seconds above zero"):
        ROOFS.fraction(seconds, flops=1, bytes=1)


def test_a_roof_that_did_not_run_is_not_guessed() -> None:
    with pytest.raises(ValueError, match="int8 was not measured"):
        ROOFS.fraction(1.0, flops=1, bytes=0, dtype=torch.int8)
    with pytest.raises(ValueError, match="'update' was not measured"):
        ROOFS.bandwidth("update")
    with pytest.raises(ValueError, match="expected kinds"):
        RoofProbes(("write",))


def test_probes_leave_their_blocks_fit_for_the_next_call() -> None:
    probes = RoofProbes(("read", "copy", "update"), block_bytes=1 << 14)
    result = compare({"sum": lambda: None}, roofs=probes, rounds=3, min_time=0.0)
    assert result.roofs is not None
    assert set(result.roofs.by_kind) == {"read", "copy", "update"}
    sums = [
        probe() for probe in probes.contestants().values() if "sum" in probe.name and "rows" not in probe.name
    ]
    assert [float(total) for total in sums] == [(1 << 14) / 4]  # type: ignore[arg-type]


def test_measure_roofs_measures_what_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opsmith.measure.roofs.cold_bytes", lambda device: 1 << 16)
    found = measure_roofs(kinds=("read", "matmul int8"))
    assert set(found.by_kind) == {"read", "matmul int8"}
    assert all(r.peak >= r.rate > 0 for r in found.by_kind.values())
    assert found.to_json()["read"]["way"] in found.by_kind["read"].others
