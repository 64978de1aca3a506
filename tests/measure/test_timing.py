"""The rules of timing, on a clock that only the contestants move."""

import gc
import json
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from opsmith.measure import CacheFlush, ImpossibleTime, Pool, Probe, RoofProbes, WrongResult, compare, quick
from opsmith.measure.timing import by_events


class Clock:
    """Time passes when a contestant says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def __call__(self) -> float:
        return self.now

    def contestant(self, name: str, *seconds: float) -> Callable[..., None]:
        """Takes these seconds in turn, over and over."""
        turn = self.repeat(seconds)

        def call(*_: object) -> None:
            self.calls.append(name)
            self.now += next(turn)

        return call

    @staticmethod
    def repeat(seconds: tuple[float, ...]) -> Iterator[float]:
        while True:
            yield from seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_every_round_runs_everyone_once_in_random_order(clock: Clock) -> None:
    names = ["a", "b", "c"]
    result = compare({n: clock.contestant(n, 1.0) for n in names}, rounds=30, warmup=0, clock=clock)
    rounds = [clock.calls[i : i + 3] for i in range(0, len(clock.calls), 3)]
    assert rounds == result.orders
    assert all(sorted(order) == names for order in rounds)
    assert len({tuple(order) for order in rounds}) == 6
    assert {n: len(s) for n, s in result.samples.items()} == dict.fromkeys(names, 30)


def test_the_order_follows_from_the_seed() -> None:
    def orders(seed: int) -> object:
        clock = Clock()
        return compare(
            {n: clock.contestant(n, 1.0) for n in "abcd"}, rounds=10, seed=seed, clock=clock
        ).orders

    assert orders(1) == orders(1) != orders(2)


def test_everyone_is_warmed_up_before_anything_is_timed(clock: Clock) -> None:
    # The first three calls are slow, as those that compile and allocate are.
    slow_start = [9.0, 9.0, 9.0] + [1.0] * 100
    result = compare({"a": clock.contestant("a", *slow_start)}, rounds=5, warmup=3, clock=clock)
    assert list(result.samples["a"]) == [1.0] * 5


def test_short_calls_are_repeated_until_a_sample_is_long_enough(clock: Clock) -> None:
    calls = {"short": clock.contestant("short", 2**-20), "long": clock.contestant("long", 2**-6)}
    result = compare(calls, rounds=3, min_time=200e-6, clock=clock)
    assert result.inner["long"] == 1
    assert 200e-6 <= result.inner["short"] * 2**-20 < 400e-6
    assert result.median("short") == pytest.approx(2**-20)
    assert result.ratio("short", "long").median == pytest.approx(2**-14)


def test_a_call_that_takes_no_time_does_not_hang(clock: Clock) -> None:
    result = compare({"free": clock.contestant("free", 0.0)}, rounds=1, warmup=0, clock=clock)
    assert result.inner["free"] == 1 << 14


def test_drift_cancels_in_the_ratio_and_is_warned_of(clock: Clock) -> None:
    drift = [1.0, 1.2, 1.5, 1.9, 2.4, 3.0]
    calls = {
        "ours": clock.contestant("ours", 0.5, *(0.5 * d for d in drift)),
        "eager": clock.contestant("eager", 1.0, *drift),
    }
    result = compare(calls, rounds=6, warmup=0, clock=clock)
    ratio = result.ratio("ours", "eager")
    assert (ratio.median, ratio.verdict) == (pytest.approx(0.5), "faster")
    assert result.spread("eager") > 0.25
    assert any("eager" in line and "concludes nothing" in line for line in result.messages)


def test_a_budget_ends_the_rounds_but_not_before_the_fewest(clock: Clock) -> None:
    def rounds(budget: float) -> int:
        call = clock.contestant("a", 1.0)
        return len(
            compare({"a": call}, rounds=50, min_rounds=4, warmup=1, budget_s=budget, clock=clock).orders
        )

    assert rounds(12.0) == 11  # and one call to warm up
    assert rounds(0.1) == 4
    assert rounds(1e9) == 50


def test_quick_drops_the_hopeless_and_keeps_their_samples(clock: Clock) -> None:
    calls = {
        "good": clock.contestant("good", 0.010),
        "near": clock.contestant("near", 0.011),
        "bad": clock.contestant("bad", 0.100),
    }
    result = quick(calls, budget_s=0.5, clock=clock)
    assert result.dropped == ["bad"]
    assert list(result.samples["bad"]) == [pytest.approx(0.1)] * 2
    assert len(result.samples["good"]) == len(result.samples["near"]) > 3
    assert clock.now <= 0.5
    assert result.best() == "good"
    assert result.best(prefer="near") == "good"
    assert result.best(prefer="bad") == "good"
    assert result.ratio("good", "bad").verdict == "inconclusive"


def test_the_dropped_return_for_the_last_rounds_and_are_paired_with_them(clock: Clock) -> None:
    good, bad = (
        [0.01] * 3 + [0.02] * 99,
        [0.1] * 3 + [0.2] * 9,
    )  # the machine slows down before the last rounds
    calls = {"good": clock.contestant("good", *good), "bad": clock.contestant("bad", *bad)}
    calls["near"] = clock.contestant("near", 0.011)
    result = compare(calls, budget_s=0.5, drop=5, drop_rounds=5, warmup=1, clock=clock)
    assert result.dropped == ["bad"]
    assert len(result.samples["bad"]) == 5 < len(result.samples["good"])
    assert set(result.orders[-3]) == {"good", "near", "bad"}
    ratio = result.ratio("bad", "good")
    assert (ratio.pairs, ratio.verdict) == (5, "slower")
    assert ratio.hi == pytest.approx(10)


def test_quick_ends_where_one_is_left(clock: Clock) -> None:
    calls = {"good": clock.contestant("good", 0.010), "bad": clock.contestant("bad", 0.100)}
    result = quick(calls, budget_s=0.5, clock=clock)
    assert result.dropped == ["bad"]
    assert len(result.samples["good"]) == len(result.samples["bad"]) == 2
    assert result.best() == "good"


def test_one_slow_accident_does_not_drop_a_contestant(clock: Clock) -> None:
    # Slow in the second round only: the first one was good.
    calls = {"a": clock.contestant("a", 0.01), "b": clock.contestant("b", 0.009, 0.009, 0.1, *[0.009] * 99)}
    result = quick(calls, budget_s=0.4, clock=clock)
    assert result.dropped == []
    assert len(result.samples["b"]) > 5


def test_nobody_is_dropped_while_the_budget_holds_all_rounds(clock: Clock) -> None:
    calls = {"good": clock.contestant("good", 0.001), "bad": clock.contestant("bad", 0.01)}
    assert quick(calls, budget_s=10.0, clock=clock).dropped == []


def test_the_preferred_stays_unless_another_is_shown_to_be_faster(clock: Clock) -> None:
    calls = {
        "a": clock.contestant("a", 1.00, 0.98, 1.02, 0.97, 1.01, 0.99, 0.99),
        "b": clock.contestant("b", 1.0),
    }
    result = compare(calls, rounds=13, warmup=0, clock=clock)
    assert result.median("a") < result.median("b")
    assert result.best() == "a"
    assert result.best(prefer="b") == "b"


def test_rounds_that_all_agree_decide_a_choice_despite_the_spread(clock: Clock) -> None:
    calls = {
        "ours": clock.contestant("ours", 0.2, 0.4, 0.3, 0.6, 0.5),
        "eager": clock.contestant("eager", 1.0),
    }
    result = compare(calls, rounds=10, warmup=0, clock=clock)
    assert result.ratio("ours", "eager").verdict == "inconclusive"
    assert result.best(prefer="eager") == "ours"


def test_a_wrong_result_is_never_timed(clock: Clock) -> None:
    x = torch.randn(32)
    timed = clock.contestant("wrong", 1.0)

    def wrong() -> torch.Tensor:
        timed()
        return x.exp() + 1e-3

    with pytest.raises(WrongResult, match="wrong: ") as caught:
        compare({"right": x.exp, "wrong": wrong}, check=x.double().exp(), clock=clock)
    assert caught.value.contestant == "wrong"
    assert caught.value.error == pytest.approx(1e-3, rel=1e-2)
    assert clock.calls == ["wrong"]


@pytest.mark.parametrize(
    ("said", "passes"), [(None, True), (True, True), (False, False), ("too large", False)]
)
def test_a_check_may_be_a_function(said: object, passes: bool, clock: Clock) -> None:
    pool = Pool(lambda i: (torch.full((4,), float(i)),), total_bytes=64)
    seen = []

    def check(output: object, x: torch.Tensor) -> object:
        seen.append((output, float(x[0])))
        return said

    def call(x: torch.Tensor) -> str:
        clock.now += 1.0
        return "output"

    if passes:
        assert compare({"a": call}, pool=pool, check=check, rounds=1, clock=clock).checked
    else:
        with pytest.raises(WrongResult, match=r"too large|said no"):
            compare({"a": call}, pool=pool, check=check, rounds=1, clock=clock)
    assert seen == [("output", 0.0)]


def test_cold_rotates_over_all_contestants_and_warm_does_not(clock: Clock) -> None:
    pool = Pool(lambda i: (torch.full((4,), float(i)),), total_bytes=16 * 6)
    used: list[int] = []

    def call(x: torch.Tensor) -> None:
        used.append(int(x[0]))
        clock.now += 1.0

    cold_and_warm = [
        compare({"a": call, "b": call}, pool=pool, warm=warm, rounds=4, warmup=0, clock=clock)
        for warm in (False, True)
    ]
    cold, warm = used[:8], used[8:]
    # No set comes back before all the others were used, whoever uses it.
    assert cold == [i % len(pool) for i in range(8)]
    assert set(warm) == {0}
    assert [found.column for found in cold_and_warm] == ["cold", "warm"]


def test_a_pool_too_small_for_the_caches_is_said_to_be(clock: Clock) -> None:
    pool = Pool(lambda i: (torch.zeros(16),), total_bytes=1 << 20, max_bytes=256)
    result = compare({"a": clock.contestant("a", 1.0)}, pool=pool, rounds=1, clock=clock)
    assert any("not cold" in line for line in result.messages)


def test_a_flush_precedes_every_single_call(clock: Clock) -> None:
    class Flush(CacheFlush):
        def __call__(self) -> None:
            clock.calls.append("flush")
            clock.now += 1.0

    flush = Flush(total_bytes=64)
    result = compare({"a": clock.contestant("a", 1e-6)}, flush=flush, rounds=3, warmup=0, clock=clock)
    assert clock.calls == ["flush", "a"] * 3
    assert result.column == "cold, flushed"
    assert result.median("a") == pytest.approx(1e-6)  # the flush is not part of the time


def test_roofs_run_in_the_same_rounds_and_judge(clock: Clock) -> None:
    probes = RoofProbes(("copy",), block_bytes=1 << 14)
    probes._probes = [
        Probe("roof: slow way", "copy", 1e9, clock.contestant("roof: slow way", 2.0)),
        Probe("roof: fast way", "copy", 1e9, clock.contestant("roof: fast way", 1.0)),
    ]
    pool = Pool(lambda i: (torch.zeros(4),), total_bytes=64)
    result = compare({"a": clock.contestant("a", 4.0)}, pool=pool, roofs=probes, rounds=5, clock=clock)
    assert all(sorted(order) == ["a", "roof: fast way", "roof: slow way"] for order in result.orders)
    assert result.names == ("a",)
    assert result.roofs is not None
    assert result.roofs.by_kind["copy"].way == "fast way"
    assert result.roofs.fraction(result.median("a"), flops=0, bytes=2e9, memory="copy") == 0.5
    with pytest.raises(ImpossibleTime, match="125%"):
        result.roofs.fraction(result.median("a"), flops=0, bytes=5e9, memory="copy", cold=result.cold)


def test_what_follows_a_probe_is_off_the_clock(clock: Clock) -> None:
    probes = RoofProbes(("copy",), block_bytes=1 << 14)
    assert all(probe.after is not None for probe in probes.contestants().values())
    after = clock.contestant("after", 8.0)
    probes._probes = [Probe("roof: way", "copy", 1e9, clock.contestant("roof: way", 1.0), after)]
    result = compare({"a": clock.contestant("a", 4.0)}, roofs=probes, rounds=5, warmup=0, clock=clock)
    assert result.samples["roof: way"] == [1.0] * 5
    ran = [name for order in result.orders for name in order]
    assert clock.calls == [call for name in ran for call in (["a"] if name == "a" else [name, "after"])]


def test_json_keeps_everything(clock: Clock) -> None:
    calls = {"a": clock.contestant("a", 1.0, 2.0), "b": clock.contestant("b", 3.0)}
    result = compare(calls, rounds=7, clock=clock, notes={"outputs": "reused"})
    back = json.loads(json.dumps(result.to_json()))
    assert back["contestants"]["a"]["samples"] == list(result.samples["a"])
    assert len(back["orders"]) == 7
    assert back["machine"]["threads"] == torch.get_num_threads()
    assert back["machine"]["torch"] == torch.__version__
    assert back["notes"] == {"outputs": "reused"}
    assert back["checked"] is False
    assert back["messages"] == list(result.messages) != []


def test_the_garbage_collector_waits_and_comes_back(clock: Clock) -> None:
    enabled = []

    def call() -> None:
        enabled.append(gc.isenabled())
        clock.now += 1.0

    compare({"a": call}, rounds=2, clock=clock)
    assert not any(enabled)
    assert gc.isenabled()


def test_a_contestant_that_changes_the_threads_is_reported(clock: Clock) -> None:
    def call() -> None:
        torch.set_num_threads(1)
        clock.now += 1.0

    torch.set_num_threads(2)
    assert any("number of threads" in line for line in compare({"a": call}, rounds=1, clock=clock).messages)


def test_a_thread_that_hardly_ran_is_reported() -> None:
    result = compare({"asleep": lambda: time.sleep(2e-3)}, rounds=3)
    assert result.disturbed
    assert result.share < 0.5
    assert any("the calling thread ran" in line for line in result.messages)
    assert result.to_json()["share"] == result.share


def test_a_given_clock_says_nothing_of_other_work(clock: Clock) -> None:
    result = compare({"a": clock.contestant("a", 1.0)}, rounds=3, clock=clock)
    assert result.share == 1.0
    assert not result.disturbed


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"contestants": {}}, "at least one contestant"),
        ({"rounds": 0}, "rounds >= 1"),
        ({"warm": True}, "from a pool"),
        ({"warm": True, "flush": CacheFlush(64)}, "contradict"),
        ({"contestants": {"roof: mine": print}}, "probes' own"),
    ],
)
def test_contradictions_are_refused(options: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        compare(**{"contestants": {"a": lambda: None}, **options})  # type: ignore[arg-type]


def test_an_unknown_name_is_refused(clock: Clock) -> None:
    result = compare({"a": clock.contestant("a", 1.0)}, rounds=1, clock=clock)
    with pytest.raises(ValueError, match="got 'b'"):
        result.median("b")
    assert result.roofs is None


def test_device_events_surround_the_calls_and_are_waited_for() -> None:
    log: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            log.append("event")

        def record(self) -> None:
            log.append("record")

        def elapsed_time(self, end: "Event") -> float:
            log.append("elapsed")
            return 8.0

    cuda = SimpleNamespace(Event=Event, synchronize=lambda: log.append("synchronize"))
    assert by_events([lambda: log.append("call")] * 2, cuda) == pytest.approx(0.008)
    assert log == [
        *["event", "event", "synchronize", "record", "call", "call", "record", "synchronize", "elapsed"]
    ]
