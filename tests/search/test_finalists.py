"""The finalists' verdict: what may be called best, and what may not."""

import pytest

from bench.experiment import ObjectiveSpec, SearchSpec
from bench.outcome import Cause, OutcomeKind
from bench.search import finalists
from tests import build


def again(config_of, *values):
    return [
        build.record(100 + turn, value, role="finalist", values=config_of.candidate.values, round_=turn + 1)
        for turn, value in enumerate(values)
    ]


def test_the_best_few_and_the_baseline_are_measured_in_turns():
    experiment = build.experiment(search=SearchSpec(finalists=2, finalist_rounds=2))
    records = [build.record(0, 100, role="baseline", values={})] + [build.record(n, 100 + n) for n in range(1, 5)]
    order = [
        (turn, record.number) for turn, record in finalists.turns(experiment, finalists.choose(experiment, records))
    ]
    assert order == [(1, 0), (1, 4), (1, 3), (2, 0), (2, 4), (2, 3)]


def test_launches_of_finalists_that_were_not_found_become_further_rounds():
    experiment = build.experiment(search=SearchSpec(finalists=2, finalist_rounds=2))
    records = [build.record(0, 100, role="baseline", values={}), build.record(1, 110)]
    order = [turn for turn, _ in finalists.turns(experiment, finalists.choose(experiment, records))]
    assert order == [1, 1, 2, 2, 3, 3]


def test_failed_and_void_trials_never_become_finalists():
    experiment = build.experiment()
    records = [
        build.record(0, 100, role="baseline", values={}),
        build.record(1, None, kind=OutcomeKind.INFEASIBLE, cause=Cause.OOM_GPU_KV_POOL),
        build.record(2, 900, valid=False),
        build.record(3, 50),
    ]
    assert [record.number for record in finalists.choose(experiment, records)] == [0, 3]


def test_a_latency_objective_prefers_the_smaller_value():
    experiment = build.experiment(
        objective=ObjectiveSpec("latency", metric="ttft_s.p95"), search=SearchSpec(finalists=1)
    )
    records = [
        build.record(0, 100, role="baseline", values={}),
        build.record(1, 300, ttft_p95_s=0.9),
        build.record(2, 200, ttft_p95_s=0.1),
    ]
    assert finalists.choose(experiment, records)[-1].number == 2


def test_the_winner_is_taken_from_fresh_values_not_from_the_lucky_one():
    experiment = build.experiment()
    baseline, lucky, steady = (
        build.record(0, 100, role="baseline", values={}),
        build.record(1, 150),
        build.record(2, 140),
    )
    fresh = again(baseline, 100, 101) + again(lucky, 110, 111) + again(steady, 139, 140)
    rows = finalists.standings(experiment, [baseline, lucky, steady], fresh)
    best, _ = finalists.winner(experiment, rows)
    assert best.trial == 2
    assert best.gain.low > 0.3


def test_no_difference_within_the_noise_ships_the_baseline():
    experiment = build.experiment()
    baseline, other = build.record(0, 100, role="baseline", values={}), build.record(1, 120)
    rows = finalists.standings(experiment, [baseline, other], again(baseline, 95, 105) + again(other, 97, 108))
    best, tied = finalists.winner(experiment, rows)
    assert best.baseline
    assert [row.trial for row in tied] == [1]


def test_of_two_that_are_tied_the_one_with_fewer_settings_wins():
    experiment = build.experiment(search=SearchSpec(tie_relative=0.01))
    baseline = build.record(0, 100, role="baseline", values={})
    rich, plain = build.record(1, 201, values={"x": 1, "y": 0.5}), build.record(2, 200, values={"x": 2})
    fresh = again(baseline, 100, 100.2) + again(rich, 201, 200.8) + again(plain, 200, 200.3)
    best, tied = finalists.winner(experiment, finalists.standings(experiment, [baseline, rich, plain], fresh))
    assert best.trial == 2
    assert [row.trial for row in tied] == [1]


def test_what_misses_a_limit_loses_to_what_meets_it_however_fast():
    experiment = build.experiment(objective=ObjectiveSpec("slo", limits={"ttft_s.p95": 0.5}))
    baseline = build.record(0, 100, role="baseline", values={})
    fast = build.record(1, 900, ttft_p95_s=2.0)
    fine = build.record(2, 300)
    fresh = again(baseline, 100, 100) + again(fine, 300, 301)
    fresh += [build.record(200 + n, 900, role="finalist", values={"x": 1}, round_=n, ttft_p95_s=2.0) for n in (1, 2)]
    best, _ = finalists.winner(experiment, finalists.standings(experiment, [baseline, fast, fine], fresh))
    assert best.trial == 2


def test_the_interval_comes_from_the_spread_between_launches():
    experiment = build.experiment()
    baseline, other = build.record(0, 100, role="baseline", values={}), build.record(1, 120)
    rows = finalists.standings(experiment, [baseline, other], again(baseline, 98, 102) + again(other, 118, 122))
    best = rows[0]
    # By hand: relative deviations +-0.02 and +-2/120, two degrees of freedom, t = 4.303.
    spread = ((2 * 0.02**2 + 2 * (2 / 120) ** 2) / 2) ** 0.5
    assert best.value.high - best.value.mean == pytest.approx(4.303 * spread * 120 / 2**0.5, rel=1e-3)
