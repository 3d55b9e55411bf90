"""When a level is called steady, and how good its interval is."""

from __future__ import annotations

import numpy as np
import pytest

from bench.load.window import Timeline, batch_means, bins_for, is_steady, sectioned, shift


def steps(rate_of: object, seconds: float, step_s: float, per_step: int) -> Timeline:
    """Bursts of tokens, one per decode step."""
    timeline, at, arrivals = Timeline(0), 0.0, []
    while at < seconds:
        arrivals.append(at)
        at += step_s * rate_of(at)
    arrival_ns = (np.array(arrivals) * 1e9).astype(np.int64)
    timeline.add(arrival_ns, np.full(len(arrivals), per_step))
    return timeline


def test_bursts_do_not_make_a_steady_rate_look_noisy() -> None:
    # 64 tokens every 30 ms: fixed bins of 100 ms would hold 3 or 4 bursts.
    timeline = steps(lambda _at: 1.0, 10.0, 0.03, 64)
    interval = batch_means(*timeline.rates(1_000_000_000, 9_000_000_000, 40))
    assert interval.mean == pytest.approx(64 / 0.03, rel=1e-3)
    assert interval.relative_half_width < 0.001


def test_tokens_outside_the_window_do_not_count() -> None:
    timeline = steps(lambda at: 1.0 if 2 < at < 8 else 10.0, 10.0, 0.01, 10)
    rates, _ = timeline.rates(3_000_000_000, 7_000_000_000, 20)
    assert rates.mean() == pytest.approx(1000, rel=1e-3)


def test_a_warm_up_that_still_gets_faster_is_not_steady() -> None:
    timeline = steps(lambda at: 3.0 - at / 5, 8.0, 0.01, 8)  # kernels are compiled: the rate keeps growing
    rates, _ = timeline.rates(2_000_000_000, 6_000_000_000, 10)
    assert not is_steady(rates)


def test_a_jump_is_not_steady_and_is_found() -> None:
    noise = np.random.default_rng(1).normal(0, 10, 40)
    rates = np.concatenate([np.full(15, 816.0), np.full(25, 1488.0)]) + noise
    assert not is_steady(rates[10:20])
    assert shift(rates) == 15
    assert shift(rates[15:]) is None


def test_a_noisy_level_without_a_trend_is_steady() -> None:
    rng = np.random.default_rng(2)
    steady = [is_steady(rng.normal(1000, 30, 10)) for _ in range(200)]
    assert np.mean(steady) > 0.7


@pytest.mark.parametrize("correlation", [0.0, 0.4])
def test_intervals_hold_the_truth_as_often_as_they_say(correlation: float) -> None:
    rng = np.random.default_rng(3)
    hits = 0
    for _ in range(1500):
        noise = rng.normal(0, 1, 30)
        for place in range(1, 30):
            noise[place] += correlation * noise[place - 1]
        interval = batch_means(100 + noise, np.ones(30))
        hits += interval.low <= 100 <= interval.high
    assert hits / 1500 > 0.925


def test_sections_hold_the_true_percentile_as_often_as_they_say() -> None:
    rng = np.random.default_rng(4)
    truth = -np.log(0.05)
    intervals = [sectioned(rng.exponential(1, 600), "p95") for _ in range(400)]
    assert np.mean([i.low <= truth <= i.high for i in intervals]) > 0.9
    assert sectioned(rng.exponential(1, 30), "p95") is None


def test_few_samples_give_no_narrow_interval() -> None:
    assert batch_means(np.array([]), np.array([])).relative_half_width == float("inf")
    assert batch_means(np.array([10.0, 11.0]), np.ones(2)).relative_half_width == 1.0


def test_bins_follow_the_step_and_are_twenty_at_least() -> None:
    assert bins_for(5.0, 0.5) == 20
    assert bins_for(5.0, 0.02) == 31
    assert bins_for(60.0, 0.001) == 40
