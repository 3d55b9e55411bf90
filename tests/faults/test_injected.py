"""Every way in which a server fails, in one sweep between servers that run: each is named, none ends the sweep, none
wins, and nothing is left."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from bench.outcome import Cause, OutcomeKind, Phase
from bench.records import TrialRecord
from tests.faults.sweeps import Sweep, assert_intact, assert_nothing_left, cleaned_up

CRASHED, HUNG, UNHEALTHY, MISMATCHED = (
    OutcomeKind.CRASHED,
    OutcomeKind.HUNG,
    OutcomeKind.UNHEALTHY,
    OutcomeKind.MISMATCHED,
)
# Fault, then kind, cause, phase, and what the record says.
FAILURES = [
    ("crash_args", CRASHED, Cause.ENGINE_CRASH, Phase.ARGS, "simulated failure of the command line"),
    ("crash_load", CRASHED, Cause.ENGINE_CRASH, Phase.LOAD, "simulated engine failure (load)"),
    ("crash_kv_alloc", CRASHED, Cause.ENGINE_CRASH, Phase.KV_ALLOC, "simulated engine failure (kv_alloc)"),
    ("crash_graph_capture", CRASHED, Cause.ENGINE_CRASH, Phase.GRAPH_CAPTURE, "engine failure (graph_capture)"),
    ("oom_kv_pool", OutcomeKind.INFEASIBLE, Cause.OOM_GPU_KV_POOL, Phase.KV_ALLOC, "--mem-fraction-static"),
    ("oom_kernel", OutcomeKind.INFEASIBLE, Cause.OOM_HOST, Phase.LOAD, "OOM killer"),
    ("crash_under_load:8", CRASHED, Cause.ENGINE_CRASH, Phase.SERVING, "simulated engine failure (serving)"),
    ("oom_runtime:8", OutcomeKind.INFEASIBLE, Cause.OOM_GPU_RUNTIME, Phase.SERVING, "CUDA out of memory"),
    ("watchdog:8", HUNG, Cause.WATCHDOG_TIMEOUT, Phase.SERVING, "watchdog timeout"),
    ("hang_under_load:8", HUNG, Cause.SERVING_HANG, Phase.MEASURE, "no "),
    ("lying_health", HUNG, Cause.SERVING_HANG, Phase.MEASURE, "no "),
    ("errors_under_load:1", UNHEALTHY, Cause.SERVER_ERRORS, Phase.MEASURE, "HTTP 500"),
    ("reset_under_load:1", UNHEALTHY, Cause.SERVER_ERRORS, Phase.MEASURE, "closed the connection"),
    ("wrong_configuration", MISMATCHED, Cause.WRONG_CONFIGURATION, Phase.IDENTITY, "max_running_requests: asked 8"),
    ("wrong_name", MISMATCHED, Cause.FOREIGN_SERVER, Phase.IDENTITY, "served_model_name"),
    ("garbage_empty", UNHEALTHY, Cause.GARBAGE_OUTPUT, Phase.MEASURE, "text is empty"),
    ("garbage_repeated", UNHEALTHY, Cause.GARBAGE_OUTPUT, Phase.MEASURE, "text is repetitive"),
    ("garbage_bytes", UNHEALTHY, Cause.GARBAGE_OUTPUT, Phase.MEASURE, "text is undecodable"),
    ("garbage_count", UNHEALTHY, Cause.GARBAGE_OUTPUT, Phase.MEASURE, "another count than was asked for"),
]


def of(gallery: Sweep, fault: str) -> TrialRecord:
    found = [record for record in gallery.trials if record.candidate.values.get("BENCH_SIMULATOR_FAULTS") == fault]
    assert found, f"{fault} was not launched: {gallery.output}"
    return found[-1]


def test_the_sweep_outlives_all_of_them_and_ends_with_a_server_that_works(gallery: Sweep) -> None:
    assert gallery.code == 0, gallery.output
    best = orjson.loads((gallery.folder.path / "best.json").read_bytes())
    assert best["env"].get("BENCH_SIMULATOR_FAULTS") in (None, "orphan", "ignore_sigterm")
    assert "the space is exhausted" in gallery.output


@pytest.mark.parametrize(("fault", "kind", "cause", "phase", "said"), FAILURES, ids=[row[0] for row in FAILURES])
def test_failure_is_named(gallery: Sweep, fault: str, kind: OutcomeKind, cause: Cause, phase: Phase, said: str) -> None:
    record = of(gallery, fault)
    outcome = record.outcome
    assert (outcome.kind, outcome.cause, outcome.phase) == (kind, cause, phase), outcome
    assert said in f"{outcome.detail}\n{outcome.line}", outcome
    assert record.value is None
    if phase is Phase.SERVING or phase is Phase.MEASURE:
        assert "at 4 concurrent requests" in outcome.detail


@pytest.mark.parametrize("fault", ["orphan", "ignore_sigterm"])
def test_a_server_that_is_hard_to_end_is_measured_all_the_same(gallery: Sweep, fault: str) -> None:
    assert of(gallery, fault).outcome.kind is OutcomeKind.COMPLETE


def test_a_crash_at_the_full_batch_names_level_limit_and_line_and_keeps_the_lower_level(tmp_path: Path) -> None:
    """As SGLang 0.5.15 does with an MTP layer: it serves well until max_running_requests requests run."""
    mtp = "{speculative_algorithm: NEXTN, speculative_num_steps: 3, speculative_eagle_topk: 1, max_running_requests: 4}"
    with cleaned_up(Sweep(tmp_path / "results")) as swept:
        swept.here(f"engine.flags={mtp}", "engine.version=0.5.15")
        assert swept.code == 3
        record = swept.trials[0]
        outcome = record.outcome
        assert (outcome.kind, outcome.cause) == (OutcomeKind.CRASHED, Cause.ENGINE_CRASH)
        assert "at 4 concurrent requests (the server's limit is 4 running)" in outcome.detail
        assert outcome.line is not None
        assert outcome.line in swept.log_of(0)
        assert [item.concurrency for item in record.measurements if item.valid] == [2]
        assert record.value is None, "a trial that died must not count as complete"
        assert not swept.finalists
        assert_nothing_left(swept)
        assert_intact(swept)


def test_nothing_is_left_and_every_record_is_intact(gallery: Sweep) -> None:
    assert_nothing_left(gallery)
    assert_intact(gallery)
