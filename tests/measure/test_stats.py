"""What samples allow to say, on samples chosen by hand."""

import numpy as np
import pytest

from opsmith.measure import paired_ratio, spread


def test_spread_is_the_interquartile_range_over_the_median() -> None:
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2 / 3)
    assert spread([7.0]) == 0.0
    # One accident among many samples is no spread.
    assert spread([1.0] * 20 + [50.0]) == 0.0


def test_pairing_cancels_what_both_saw() -> None:
    drift = np.linspace(1.0, 2.0, 15)
    ratio = paired_ratio("ours", "eager", (0.5 * drift).tolist(), drift.tolist())
    assert (ratio.median, ratio.lo, ratio.hi) == (0.5, 0.5, 0.5)
    assert ratio.speedup == 2.0
    assert ratio.verdict == "faster"
    assert ratio.unanimous


def test_the_other_way_around_it_is_slower() -> None:
    assert paired_ratio("eager", "ours", [2.0, 2.1, 2.0, 2.05], [1.0, 1.0, 1.0, 1.0]).verdict == "slower"


def test_an_interval_that_holds_one_is_no_difference() -> None:
    ratio = paired_ratio("a", "b", [0.98, 1.02, 0.99, 1.01, 1.0, 1.03, 0.97, 1.0], [1.0] * 8)
    assert ratio.lo <= 1.0 <= ratio.hi
    assert ratio.verdict == "no difference"
    assert not ratio.unanimous


def test_spread_above_a_quarter_concludes_nothing() -> None:
    ratio = paired_ratio("a", "b", [0.2, 0.3, 0.5, 0.6, 0.2, 0.3, 0.5, 0.6], [1.0] * 8)
    assert ratio.hi < 1.0
    assert ratio.spread > 0.25
    assert ratio.verdict == "inconclusive"


def test_two_rounds_conclude_nothing() -> None:
    assert paired_ratio("a", "b", [0.1, 0.1], [1.0, 1.0]).verdict == "inconclusive"


def test_few_rounds_take_the_whole_range_as_interval() -> None:
    ratio = paired_ratio("a", "b", [0.8, 0.85, 0.9], [1.0, 1.0, 1.0])
    assert (ratio.lo, ratio.hi) == (0.8, 0.9)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(3)
    covered = 0
    for trial in range(200):
        samples = generator.lognormal(mean=0.0, sigma=0.05, size=15)
        ratio = paired_ratio("a", "b", samples.tolist(), [1.0] * 15, seed=trial)
        covered += ratio.lo <= 1.0 <= ratio.hi
    assert 0.90 <= covered / 200 <= 0.99


def test_the_same_seed_gives_the_same_interval() -> None:
    times = np.random.default_rng(0).lognormal(0.0, 0.1, 12).tolist()
    one, two = (paired_ratio("a", "b", times, [1.0] * 12, seed=5) for _ in range(2))
    assert one == two
    assert one.lo < one.median < one.hi


@pytest.mark.parametrize(("a", "b"), [([1.0], [1.0, 2.0]), ([], [])])
def test_series_of_different_rounds_are_refused(a: list[float], b: list[float]) -> None:
    with pytest.raises(ValueError, match="same rounds"):
        paired_ratio("a", "b", a, b)


def test_json_holds_the_speedup_interval_the_right_way_around() -> None:
    found = paired_ratio("a", "b", [0.4, 0.5, 0.45], [1.0, 1.0, 1.0]).to_json()
    assert found["speedup_lo"] == 2.0 < found["speedup"] < found["speedup_hi"] == 2.5
