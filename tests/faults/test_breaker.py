"""A sweep that cannot succeed stops early, with the cause in its first line; one that only meets failures goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import breaker
from bench.experiment import SearchSpec
from bench.outcome import Cause, OutcomeKind
from bench.records import TrialRecord
from tests import build
from tests.faults.sweeps import Sweep, assert_intact, assert_nothing_left, cleaned_up

SEARCH = SearchSpec(max_same_failures=3)
BASELINE = build.record(0, 100.0, role="baseline")


def failed(number: int, cause: Cause = Cause.ENGINE_CRASH, kind: OutcomeKind = OutcomeKind.CRASHED) -> TrialRecord:
    return build.record(number, kind=kind, cause=cause)


def host_failed(number: int) -> TrialRecord:
    return failed(number, Cause.GPU_BUSY, OutcomeKind.INFRASTRUCTURE)


def test_a_baseline_that_fails_stops_the_sweep() -> None:
    records = [build.record(0, role="baseline", cause=Cause.HUB_ACCESS)]
    reason = breaker.reason_to_stop(SEARCH, records)
    assert reason is not None
    assert reason.startswith("hub_access")
    assert breaker.reason_to_stop(SearchSpec(require_baseline=False), records) is None


def test_the_same_cause_in_a_row_stops_the_sweep() -> None:
    records = [BASELINE, failed(1), failed(2)]
    assert breaker.reason_to_stop(SEARCH, records) is None
    reason = breaker.reason_to_stop(SEARCH, [*records, failed(3)])
    assert reason is not None
    assert reason.startswith("engine_crash")


def test_another_cause_or_a_success_begins_the_count_anew() -> None:
    for between in (failed(3, Cause.OOM_GPU_KV_POOL), build.record(3, 90.0)):
        records = [BASELINE, failed(1), failed(2), between, failed(4), failed(5)]
        assert breaker.reason_to_stop(SEARCH, records) is None


def test_failures_of_the_host_between_do_not_hide_a_row() -> None:
    records = [BASELINE, failed(1), host_failed(2), failed(3), host_failed(4), failed(5)]
    assert (breaker.reason_to_stop(SEARCH, records) or "").startswith("engine_crash")


def test_a_space_in_which_nothing_runs_stops_the_sweep_whatever_the_causes() -> None:
    causes = [Cause.ENGINE_CRASH, Cause.OOM_GPU_WEIGHTS, Cause.STARTUP_HANG]
    records = [BASELINE, *(failed(number, causes[number % 3]) for number in range(1, breaker.HOPELESS_LAUNCHES + 1))]
    assert breaker.reason_to_stop(SEARCH, records[:-1]) is None
    assert "None of 10 launches succeeded" in (breaker.reason_to_stop(SEARCH, records) or "")


def test_the_host_is_forgiven_twice_in_a_row() -> None:
    records = [BASELINE, host_failed(1), host_failed(2)]
    assert breaker.reason_to_stop(SEARCH, records) is None
    reason = breaker.reason_to_stop(SEARCH, [*records, host_failed(3)])
    assert reason is not None
    assert reason.startswith("gpu_busy")
    assert "no configuration was blamed" in reason


@pytest.mark.parametrize(
    ("fault", "more", "cause", "said"),
    [
        ("start_hang", "engine.stall_timeout_s=1", "startup_hang", "made no progress for"),
        ("never_healthy", "engine.start_timeout_s=2", "startup_hang", "in phase"),
    ],
)
def test_a_baseline_that_never_serves_is_known_by_its_timeout_and_stops_the_sweep(
    tmp_path: Path, fault: str, more: str, cause: str, said: str
) -> None:
    with cleaned_up(Sweep(tmp_path / "results")) as swept:
        swept.here(f"engine.faults=[{fault}]", more)
        assert swept.code == 3
        stopped = next(line for line in swept.output.splitlines() if line.startswith("stopped: "))
        assert stopped.startswith(f"stopped: {cause}: ")
        outcome = swept.trials[0].outcome
        assert (outcome.kind, outcome.cause) == (OutcomeKind.HUNG, cause)
        assert said in outcome.detail
        assert len(swept.trials) == 1
        assert_nothing_left(swept)
        assert_intact(swept)


def test_a_space_of_which_nothing_fits_by_the_forecast_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However large it is; a rival went on to thousands of failed trials."""
    monkeypatch.setattr(breaker, "MAX_SKIPPED", 5)
    with cleaned_up(Sweep(tmp_path / "results")) as swept:
        small_card = ("hardware.memory_bytes=45e9", "hardware.available_bytes=44e9")
        swept.here(*small_card, "search.forecast=prune", "search.require_baseline=false", "search.sampler=random")
        assert swept.code == 3
        assert "5 configurations in a row cannot run by the forecast" in swept.output
        assert len(swept.trials) == 6
        assert_nothing_left(swept)
