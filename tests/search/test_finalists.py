"""The finalists' verdict: what may be called best, and what may not."""

from dataclasses import replace

import pytest

from bench import best
from bench.engines.protocol import ServerConfig
from bench.experiment import ObjectiveSpec, SearchSpec
from bench.load.measurement import Interval
from bench.outcome import Cause, OutcomeKind
from bench.search import finalists, objective
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


def launches_of_finalists(experiment, records, value_of):
    """Rounds and trial numbers, in order, with the value that each launch is given."""
    fresh, order = [], []
    while turn := finalists.next_turn(experiment, records, fresh, frozenset()):
        number, record = turn
        order.append((number, record.number))
        value = value_of(record.number, number)
        fresh.append(build.record(99, value, role="finalist", values=record.candidate.values, round_=number))
    return order


RECORDS = [build.record(0, 100, role="baseline", values={}), build.record(1, 109), build.record(2, 108)]
PLANNED = [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)]


def test_best_and_baseline_go_on_until_they_are_told_apart():
    experiment = build.experiment(search=SearchSpec(finalists=2, finalist_rounds=2))

    def value(trial, number):  # noise of 4 % in the planned rounds, none after
        noise = {1: 1.04, 2: 0.96}.get(number, 1.0)
        return {0: 100 / noise, 1: 109 * noise, 2: 104 * noise}[trial]

    assert launches_of_finalists(experiment, RECORDS, value) == [*PLANNED, (3, 0), (3, 1), (4, 0), (4, 1)]


@pytest.mark.parametrize(
    ("rounds", "fastest", "noise"),
    [
        pytest.param(2, 120.0, 0.01, id="told apart by the planned rounds"),
        pytest.param(2, 100.5, 0.04, id="within what counts as equal"),
        pytest.param(1, 109.0, 0.04, id="one round was asked for"),
    ],
)
def test_no_launch_is_spent_on_telling_apart_what_needs_none(rounds, fastest, noise):
    experiment = build.experiment(search=SearchSpec(finalists=2, finalist_rounds=rounds))

    def value(trial, number):
        return {0: 100.0, 1: fastest, 2: 99.0}[trial] * (1 + noise * (-1) ** number)

    assert launches_of_finalists(experiment, RECORDS, value) == PLANNED[: 3 * rounds]


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
    first, _ = finalists.winner(experiment, rows)
    assert first.trial == 2
    assert first.gain.low > 0.3


def test_no_difference_within_the_noise_ships_the_baseline():
    experiment = build.experiment()
    baseline, other = build.record(0, 100, role="baseline", values={}), build.record(1, 120)
    rows = finalists.standings(experiment, [baseline, other], again(baseline, 95, 105) + again(other, 97, 108))
    first, tied = finalists.winner(experiment, rows)
    assert first.baseline
    assert [row.trial for row in tied] == [1]


def test_of_two_that_are_tied_the_one_with_fewer_settings_wins():
    experiment = build.experiment(search=SearchSpec(tie_relative=0.01))
    baseline = build.record(0, 100, role="baseline", values={})
    rich, plain = build.record(1, 201, values={"x": 1, "y": 0.5}), build.record(2, 200, values={"x": 2})
    fresh = again(baseline, 100, 100.2) + again(rich, 201, 200.8) + again(plain, 200, 200.3)
    first, tied = finalists.winner(experiment, finalists.standings(experiment, [baseline, rich, plain], fresh))
    assert first.trial == 2
    assert [row.trial for row in tied] == [1]


def test_what_misses_a_limit_loses_to_what_meets_it_however_fast():
    experiment = build.experiment(objective=ObjectiveSpec("slo", limits={"ttft_s.p95": 0.5}))
    baseline = build.record(0, 100, role="baseline", values={})
    fast = build.record(1, 900, ttft_p95_s=2.0)
    fine = build.record(2, 300)
    fresh = again(baseline, 100, 100) + again(fine, 300, 301)
    fresh += [build.record(200 + n, 900, role="finalist", values={"x": 1}, round_=n, ttft_p95_s=2.0) for n in (1, 2)]
    first, _ = finalists.winner(experiment, finalists.standings(experiment, [baseline, fast, fine], fresh))
    assert first.trial == 2


LIMITED = ObjectiveSpec("slo", limits={"ttft_s.p95": 0.5})


def decided(measured):
    """The winner of finalists, the baseline first, given as (tok/s, time to first token at p95)."""
    experiment = build.experiment(objective=LIMITED)
    chosen, fresh = [], []
    for number, (value, ttft_p95_s) in enumerate(measured):
        role, values = ("search", {"x": number}) if number else ("baseline", {})
        chosen.append(build.record(number, value, role=role, values=values, ttft_p95_s=ttft_p95_s))
        fresh += [
            build.record(200, value, role="finalist", values=values, round_=turn, ttft_p95_s=ttft_p95_s)
            for turn in (1, 2)
        ]
    return best.decide(experiment, chosen, fresh)


def test_where_nothing_meets_the_limits_the_nearest_is_named_however_slow():
    answer = decided([(1200, 3.0), (1000, 0.52), (1100, 2.0)])
    assert (answer.verdict, answer.trial, answer.tied) == ("not_meeting_limits", 1, ())
    assert "the nearest one has ttft_s.p95 0.52 (limit 0.5)" in answer.sentences[0]


def test_a_faster_baseline_that_misses_the_limits_is_no_alternative():
    answer = decided([(1005, 2.0), (800, 0.3)])
    assert (answer.verdict, answer.trial) == ("baseline_misses_limits", 1)
    assert any("baseline is no alternative: it has ttft_s.p95 2 (limit 0.5)" in said for said in answer.sentences)


def test_no_further_round_is_spent_where_the_limits_decide():
    experiment = build.experiment(objective=LIMITED, search=SearchSpec(finalists=1, finalist_rounds=2))
    records = [build.record(0, 100, role="baseline", values={}, ttft_p95_s=2.0), build.record(1, 103)]
    fresh = [
        build.record(9, value + turn, role="finalist", values=values, round_=turn, ttft_p95_s=ttft_p95_s)
        for turn in (1, 2)
        for value, values, ttft_p95_s in ((100, {}, 2.0), (103, {"x": 1}, 0.2))
    ]
    assert finalists.next_turn(experiment, records, fresh, frozenset()) is None


def test_what_is_as_the_baseline_has_it_counts_as_no_setting():
    experiment = build.experiment()
    baseline = build.record(0, 100, role="baseline", values={"x": 1})
    # One flag is on, the others are named and off: the server is the baseline's with one flag more.
    plain = build.record(1, 200, values={"y": 2, "a": False, "b": False, "c": False})
    plain = replace(plain, config=ServerConfig((("x", 1), ("y", 2))))
    rich = build.record(2, 200.5, values={"x": 3, "y": 2, "z": 1})
    fresh = again(baseline, 100, 100.2) + again(rich, 200.5, 200.3)
    fresh += [replace(item, config=plain.config) for item in again(plain, 200, 200.1)]
    rows = finalists.standings(experiment, [baseline, plain, rich], fresh)
    assert {row.trial: row.settings for row in rows} == {0: 0, 1: 1, 2: 3}
    assert finalists.winner(experiment, rows)[0].trial == 1


def test_a_window_in_which_nothing_ended_has_no_value():
    experiment = build.experiment(objective=ObjectiveSpec("requests", metric="request_per_s"))
    idle = replace(build.measurement(100.0), request_per_s=0.0)
    assert objective.score(experiment, [idle]) is None


def test_one_round_of_a_latency_has_the_interval_of_its_window():
    experiment = build.experiment(objective=ObjectiveSpec("latency", metric="ttft_s.p95"))
    measured = Interval(0.2, 0.19, 0.21, "sections")
    records = []
    for number, role in ((0, "baseline"), (1, "search")):
        record = build.record(number, 0.2, role=role, values={"x": number})
        told = replace(record.measurements[0], intervals=(("ttft_s.p95", measured),))
        records.append(replace(record, measurements=(told,)))
    fresh = [replace(record, role="finalist", round=1) for record in records]
    row = finalists.standings(experiment, records, fresh)[0]
    assert (row.value.low, row.value.high) == (0.19, 0.21)


def test_the_interval_comes_from_the_spread_between_launches():
    experiment = build.experiment()
    baseline, other = build.record(0, 100, role="baseline", values={}), build.record(1, 120)
    rows = finalists.standings(experiment, [baseline, other], again(baseline, 98, 102) + again(other, 118, 122))
    first = rows[0]
    # By hand: relative deviations +-0.02 and +-2/120, two degrees of freedom, t = 4.303.
    spread = ((2 * 0.02**2 + 2 * (2 / 120) ** 2) / 2) ** 0.5
    assert first.value.high - first.value.mean == pytest.approx(4.303 * spread * 120 / 2**0.5, rel=1e-3)
