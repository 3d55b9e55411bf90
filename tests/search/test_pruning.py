"""When a trial is stopped early, and when it must not be."""

import pytest

from bench.experiment import ObjectiveSpec, PromptSpec, SearchSpec, WorkloadSpec
from bench.load.measurement import Interval
from bench.search.pruning import Pruning, ordered_levels
from tests import build

WORKLOAD = WorkloadSpec("chat", PromptSpec("text"), (1, 8, 32), 128, min_window_s=10)
EXPERIMENT = build.experiment(workload=WORKLOAD, search=SearchSpec(tie_relative=0.01))


def test_the_busiest_level_comes_first():
    assert ordered_levels(EXPERIMENT, None) == [32, 8, 1]
    assert ordered_levels(EXPERIMENT, 64) == [32, 8, 1]


def test_levels_that_fill_the_server_come_last_since_servers_died_of_them():
    assert ordered_levels(EXPERIMENT, 32) == [8, 1, 32]
    assert ordered_levels(EXPERIMENT, 8) == [1, 8, 32]


def test_where_the_deciding_level_can_spare_the_others_it_comes_first():
    assert Pruning(EXPERIMENT, "search", 1000).levels(32) == [32, 8, 1]
    assert Pruning(EXPERIMENT, "finalist", 1000).levels(32) == [8, 1, 32]
    assert Pruning(EXPERIMENT, "anchor", None).levels(64) == [32]


def test_what_surely_cannot_win_is_stopped_and_says_why():
    judge = Pruning(EXPERIMENT, "search", 1000)
    assert judge.should_stop(6.0, Interval(800, 780, 820))
    assert "830" in judge.reason
    assert "1000" in judge.reason


def test_what_is_far_below_is_stopped_early_in_the_window():
    judge = Pruning(EXPERIMENT, "search", 1000)
    assert judge.should_stop(1.0, Interval(500, 480, 520))
    assert judge.should_stop(3.0, Interval(800, 780, 820))


def test_what_is_far_below_is_stopped_in_its_warm_up():
    judge = Pruning(EXPERIMENT, "search", 1000)
    assert judge.should_stop(0.0, Interval(500, 480, 520))
    assert judge.reason == "in its warm-up at most 530 tok/s, a finalist needs 1000"


@pytest.mark.parametrize(
    ("role", "bar", "elapsed_s", "interim"),
    [
        ("search", 1000, 6.0, Interval(950, 920, 980)),  # its upper bound reaches the best
        ("search", 1000, 1.0, Interval(800, 780, 820)),  # seen for too short a time to trust the interval
        ("search", 1000, 0.9, Interval(100, 90, 110)),  # hardly seen at all
        ("search", 1000, 0.0, Interval(760, 750, 770)),  # warming up: kernels may still be compiled
        ("search", 1000, 0.0, None),
        ("search", 1000, 6.0, None),
        ("search", None, 6.0, Interval(1, 1, 1)),
        ("baseline", 1000, 6.0, Interval(800, 780, 820)),
        ("anchor", 1000, 6.0, Interval(800, 780, 820)),
        ("finalist", 1000, 6.0, Interval(800, 780, 820)),
    ],
)
def test_what_may_still_win_or_is_needed_whole_goes_on(role, bar, elapsed_s, interim):
    assert not Pruning(EXPERIMENT, role, bar).should_stop(elapsed_s, interim)


def test_a_latency_objective_is_not_judged_by_its_throughput():
    latency = build.experiment(workload=WORKLOAD, objective=ObjectiveSpec("latency", metric="tpot_s.p50", level=1))
    assert not Pruning(latency, "search", 0.01).should_stop(6.0, Interval(1, 1, 1))


def test_other_levels_are_left_out_once_the_deciding_one_cannot_win():
    judge = Pruning(EXPERIMENT, "search", 1000)
    assert judge.is_over([build.measurement(500, concurrency=32)])
    assert judge.is_over([build.measurement(995, concurrency=32)])
    assert not judge.is_over([build.measurement(1000, concurrency=32)])
    assert not judge.is_over([build.measurement(10, concurrency=1)])
