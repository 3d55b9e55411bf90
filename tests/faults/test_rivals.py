"""What was measured of other harnesses, and that this one does not do it; numbered as those facts are."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from bench import config, engines
from bench.engines.protocol import Candidate
from bench.experiment import Experiment
from bench.launch import server
from bench.outcome import Cause, Outcome, OutcomeKind
from bench.records import RunFolder, TrialRecord
from bench.search.space import Space
from bench.search.study import Proposal, Study
from tests import build
from tests.faults.sweeps import REPOSITORY, Sweep, assert_intact, assert_nothing_left, cleaned_up, listens, until

FAILED = Outcome(OutcomeKind.CRASHED, Cause.ENGINE_CRASH)


def experiment(folder: Path, *overrides: str) -> Experiment:
    return config.load(Sweep(folder).words(*overrides), command="bench.sweep")


def study_of(asked: Experiment, folder: Path, records: list[TrialRecord]) -> Study:
    folder.mkdir(parents=True, exist_ok=True)
    return Study(asked, engines.create(asked), Space(asked.space), RunFolder(folder), records)


def record_of(proposal: Proposal, value: float | None) -> TrialRecord:
    """As if it had been launched: with this value, or crashed without one."""
    made = build.record(proposal.number, value, role=proposal.role, concurrency=4, ttft_p95_s=value or 1.0)
    number = proposal.trial.number if proposal.trial else None
    outcome = made.outcome if value is not None else FAILED
    return dataclasses.replace(
        made, candidate=proposal.candidate, config=proposal.config, outcome=outcome, optuna_number=number
    )


def searched(study: Study, values: list[float | None]) -> list[TrialRecord]:
    records = []
    for value in values:
        proposal = study.ask()
        assert proposal is not None
        records.append(record_of(proposal, value))
        study.tell(proposal, records[-1])
    return records


def told(folder: Path, name: str = "injected") -> optuna.Study:
    storage = JournalStorage(JournalFileBackend(str(RunFolder(folder).journal)))
    return optuna.load_study(study_name=name, storage=storage)


def test_fact_1_a_launch_without_memory_ends_neither_the_sweep_nor_the_answer_and_says_why(gallery: Sweep) -> None:
    failed = [record for record in gallery.trials if record.outcome.kind is OutcomeKind.INFEASIBLE]
    assert failed
    for record in failed:
        assert record.outcome.line in gallery.log_of(record.number)  # all of its output, not an exit code
    assert gallery.trials[-1].number > failed[-1].number
    assert (gallery.folder.path / "best.json").exists()


def test_fact_2_a_stale_server_on_the_port_is_never_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A healthy server of an earlier run takes the very port between its reservation and our server's bind."""
    stale: list[subprocess.Popen[bytes]] = []
    spawn = server._spawn

    def second(argv: Any, environment: Any, log: Path) -> subprocess.Popen[bytes]:
        if not stale:
            port = int(argv[argv.index("--port") + 1])
            stale.append(stale_server(port))
            until(lambda: listens(port), "the stale server")
        return spawn(argv, environment, log)

    monkeypatch.setattr(server, "_spawn", second)
    with cleaned_up(Sweep(tmp_path / "results")) as swept:
        try:
            swept.here("search.trials=1")
            assert stale[0].poll() is None, "a process that is not ours was ended"
        finally:
            for process in stale:
                process.kill()
                process.communicate()
        first, again = swept.trials
        assert first.outcome.kind is OutcomeKind.INFRASTRUCTURE
        assert first.outcome.cause in (Cause.PORT_IN_USE, Cause.FOREIGN_SERVER)
        assert f"pid {stale[0].pid}" in first.outcome.detail
        assert not first.measurements
        assert again.outcome.kind is OutcomeKind.COMPLETE
        assert_nothing_left(swept)
        assert_intact(swept)


def stale_server(port: int) -> subprocess.Popen[bytes]:
    model = json.loads((REPOSITORY / "tests/fixtures/models/qwen27b.json").read_text())
    env = {**os.environ, "BENCH_SIMULATOR_MODEL_CONFIG": json.dumps(model), "BENCH_SIMULATOR_TIME_SCALE": "500"}
    env = {name: value for name, value in env.items() if name != "TEST_SWEEP_ID"}
    command = [sys.executable, "-m", "bench.simulator", "--model-path", "old", "--port", str(port)]
    return subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def test_fact_3_kill_9_leaves_neither_the_server_nor_a_child_that_left_its_session(tmp_path: Path) -> None:
    with cleaned_up(Sweep(tmp_path / "results")) as swept:
        process = swept.command("engine.faults=[orphan]")
        until(lambda: "POST /generate" in swept.log_of(0), "load")
        process.send_signal(signal.SIGKILL)
        swept.finish(process)
        assert_nothing_left(swept, after_kill=True)


def test_fact_3_a_child_that_left_its_session_does_not_outlive_its_trial(gallery: Sweep) -> None:
    assert any(record.candidate.values.get("BENCH_SIMULATOR_FAULTS") == "orphan" for record in gallery.trials)
    assert_nothing_left(gallery)


def test_fact_4_every_second_of_a_trial_is_accounted_for(gallery: Sweep) -> None:
    for record in gallery.trials:
        times = record.times
        parts = (times.startup_s, times.identity_s, times.warmup_s, times.measure_s, times.teardown_s)
        assert min(*parts, times.harness_s) >= 0
        assert sum(parts) + times.harness_s == pytest.approx(times.total_s)


def test_fact_5_a_score_stands_beside_the_parameters_it_was_measured_with_also_after_a_resume(tmp_path: Path) -> None:
    asked = experiment(tmp_path)
    records = searched(study_of(asked, tmp_path, []), [100.0, 120.0, None, 90.0, 130.0])
    resumed = study_of(asked, tmp_path, records)
    records += searched(resumed, [140.0, None, 95.0])
    space = Space(asked.space)
    by_number = {record.number: record for record in records}
    seen = set()
    for trial in told(tmp_path).trials:
        if "record" not in trial.user_attrs:
            continue
        record = by_number[trial.user_attrs["record"]]
        seen.add(record.number)
        assert trial.params == space.parameters_of(record.candidate)
        assert (trial.value if trial.state is TrialState.COMPLETE else None) == record.value
    assert seen == {record.number for record in records if record.optuna_number is not None}
    assert len({record.config.key for record in records}) == len(records)


@pytest.mark.parametrize("metric", ["output_tok_per_s", "ttft_s.p95"])
def test_facts_5_and_6_a_failed_trial_is_never_the_best_whichever_way_the_metric_goes(
    tmp_path: Path, metric: str
) -> None:
    asked = experiment(tmp_path, f"objective.metric={metric}")
    study = study_of(asked, tmp_path, [])
    records = searched(study, [0.5, None, 0.4, None, 0.6])
    failed = {record.number for record in records if record.outcome == FAILED}
    best = told(tmp_path).best_trial
    assert best.user_attrs["record"] not in failed
    expected = max if metric == "output_tok_per_s" else min
    assert best.value == expected(record.value for record in records if record.value is not None)
    assert study.bar in [record.value for record in records if record.value is not None]


def test_fact_7_settings_that_the_engine_makes_the_same_server_are_launched_once(tmp_path: Path) -> None:
    """With topk 1 SGLang sets the draft tokens to the steps and one more, whatever was asked for."""
    asked = experiment(
        tmp_path,
        "~space.parameters.max_running_requests",
        "~space.parameters.chunked_prefill_size",
        "~space.parameters.disable_radix_cache",
        "+space.parameters.speculative_algorithm={choices: [null, NEXTN]}",
        "+space.parameters.speculative_num_steps={kind: int, low: 1, high: 3, when: {speculative_algorithm: NEXTN}}",
        "+space.parameters.speculative_eagle_topk={choices: [1], when: {speculative_algorithm: NEXTN}}",
        "+space.parameters.speculative_num_draft_tokens="
        "{kind: int, low: 2, high: 8, when: {speculative_algorithm: NEXTN}}",
    )
    engine = engines.create(asked)
    combinations = itertools.product(range(1, 4), range(2, 9))
    keys = {
        engine.canonical(
            Candidate(
                {
                    "speculative_algorithm": "NEXTN",
                    "speculative_num_steps": steps,
                    "speculative_eagle_topk": 1,
                    "speculative_num_draft_tokens": tokens,
                }
            )
        ).key
        for steps, tokens in combinations
    }
    assert len(keys) == 3
    study = study_of(asked, tmp_path, [])
    launched = []
    while (proposal := study.ask()) is not None:
        launched.append(proposal.config.key)
        study.tell(proposal, record_of(proposal, 100.0 + len(launched)))
    assert len(launched) == len(set(launched)) == 4, "the baseline and three numbers of steps"
