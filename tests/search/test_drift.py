"""A host that changes while a search runs: what was measured before is not held against what is measured after."""

from dataclasses import replace

from bench.experiment import SearchSpec
from bench.search import drift, finalists
from tests import build

EXPERIMENT = build.experiment(search=SearchSpec(trials=20, finalists=1, finalist_rounds=1))


def baseline(number, value, role="baseline"):
    return build.record(number, value, role=role, values={})


def trials(*values, first=1):
    return [build.record(number, value) for number, value in enumerate(values, first)]


def test_the_baseline_is_launched_again_once_after_a_few_launches():
    records = [baseline(0, 100), *trials(*[100] * (drift.ANCHOR_AFTER - 2))]
    assert not drift.anchor_is_due(EXPERIMENT, records)
    records += trials(100, first=len(records))
    assert drift.anchor_is_due(EXPERIMENT, records)
    records += [baseline(len(records), 101, "anchor"), *trials(*[100] * 10, first=20)]
    assert not drift.anchor_is_due(EXPERIMENT, records)


def test_a_short_search_spends_no_launch_on_it():
    short = build.experiment(search=SearchSpec(trials=drift.LEAST_TRIALS - 1))
    assert not drift.anchor_is_due(short, [baseline(0, 100), *trials(*[100] * 12)])


def test_what_was_measured_before_the_host_changed_is_not_compared_with_what_came_after():
    records = [baseline(0, 691), *trials(725, 904), baseline(3, 912, "anchor"), build.record(4, 880)]
    assert drift.not_comparable(EXPERIMENT, records) == {0, 1, 2}
    assert [record.number for record in finalists.choose(EXPERIMENT, records)] == [0, 4]
    assert "691" in drift.sentence(EXPERIMENT, records)


def test_noise_is_no_drift():
    records = [baseline(0, 100), *trials(120), baseline(2, 103, "anchor")]
    assert drift.not_comparable(EXPERIMENT, records) == frozenset()
    assert drift.sentence(EXPERIMENT, records) is None


def test_a_drift_that_only_the_fresh_baseline_shows_gives_the_other_family_its_chance():
    speculative = build.record(1, 725, values={"speculative_num_steps": 3, "x": 1})
    plain = [build.record(2, 904, values={"x": 2}), build.record(3, 900, values={"x": 3})]
    records = [baseline(0, 691), speculative, *plain]
    turns = []
    again = []
    values = {0: 912, 1: 1400, 2: 905, 3: 900}
    while turn := finalists.next_turn(EXPERIMENT, records, again, frozenset()):
        number, record = turn
        turns.append(record.number)
        fresh = build.record(10 + len(again), values[record.number], role="finalist", values=record.candidate.values)
        again.append(replace(fresh, round=number))
    assert turns == [0, 2, 1]
    best, _ = finalists.winner(
        EXPERIMENT, finalists.standings(EXPERIMENT, finalists.choose(EXPERIMENT, records, again), again)
    )
    assert best.trial == 1


def test_without_a_drift_no_finalist_is_added():
    records = [baseline(0, 100), build.record(1, 90, values={"y": 1.0}), build.record(2, 120, values={"x": 2})]
    fresh = replace(baseline(10, 101, "finalist"), round=1)
    assert [record.number for record in finalists.choose(EXPERIMENT, records, [fresh])] == [0, 2]
