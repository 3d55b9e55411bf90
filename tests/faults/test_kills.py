"""kill -9 of the harness at any instant, then the same command: nothing lost, nothing twice, nothing left running."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from bench.launch import reaping
from tests.faults.sweeps import Sweep, assert_intact, assert_nothing_left, cleaned_up

TRIALS = 2
BUDGET = (f"search.trials={TRIALS}", "search.finalists=1", "search.finalist_rounds=1")
# Until a launch has its first record, about; a kill within this time of the command's start finds imports and set-up.
LONGEST_S = 6.0
SEED = 20260


def kill_at(swept: Sweep, after_s: float) -> bool:
    """Run the command and kill it after this time; False if it was done before."""
    process = swept.command(*BUDGET)
    time.sleep(after_s)  # the instant is what is drawn: there is nothing to wait for
    done = process.poll() is not None
    process.send_signal(signal.SIGKILL)
    swept.finish(process)
    return not done


def survives(results: Path, instants_s: list[float]) -> int:
    """Kill one sweep at each instant, going on with the same command, then let it finish; how many kills met it."""
    met = 0
    with cleaned_up(Sweep(results)) as swept:
        for after_s in instants_s:
            before, again = swept.trials, swept.finalists
            met += kill_at(swept, after_s)
            assert_nothing_left(swept, after_kill=True)
            assert swept.trials[: len(before)] == before, "a finished trial was lost or changed"
            assert swept.finalists[: len(again)] == again, "a finalist's round was lost or changed"
        begun = {path.parent.name for path in (swept.folder.path / "trials").glob("*/candidate.json")}
        before = swept.trials
        swept.finish(swept.command(*BUDGET))
        assert swept.code == 0, swept.output
        assert swept.trials[: len(before)] == before
        counted = [record for record in swept.trials if record.outcome.counts]
        assert len(counted) == TRIALS, "the budget is that of one undisturbed sweep"
        recorded = {f"{record.number:04d}" for record in [*swept.trials, *swept.finalists]}
        assert {name.partition(".")[0] for name in begun} <= recorded, "an interrupted trial was not run again"
        rounds = [record for record in swept.finalists if record.outcome.counts]
        assert len(rounds) == 2, "the baseline and one finalist, once each"
        assert "Best configuration" in swept.output
        assert not reaping.reap(results)
        assert_nothing_left(swept)
        assert_intact(swept)
    return met


@pytest.mark.timeout(300)
def test_kill_9_at_three_instants_then_the_same_command(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    survives(tmp_path / "results", [rng.uniform(1.0, 3.5) for _ in range(3)])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kill_9_at_fifty_instants_then_the_same_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_SWEEP_REPORT", "1")
    rng = random.Random(SEED + 1)
    met = number = 0
    while met < 50:
        met += survives(tmp_path / f"results-{number}", [rng.uniform(0.0, LONGEST_S) for _ in range(5)])
        number += 1
