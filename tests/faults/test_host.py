"""What the host does to a sweep: ports, GPUs, disks and other commands. None of it is told to the search."""

from __future__ import annotations

import contextlib
import fcntl
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from bench import breaker, sweep, trial
from bench.launch import server
from bench.launch.gpus import Gpus
from bench.launch.server import Server
from bench.load.level import LevelResult
from bench.load.target import Target
from bench.outcome import Cause, OutcomeKind, Phase
from bench.records import SCHEMA_VERSION
from tests.faults.sweeps import Sweep, assert_intact, assert_nothing_left, cleaned_up
from tests.launch.conftest import LISTENS, stranger
from tests.launch.test_gpus import GIB, FakeNvml

ONE, TWO = "search.trials=1", "search.trials=2"


@pytest.fixture
def swept(tmp_path: Path) -> Iterator[Sweep]:
    with cleaned_up(Sweep(tmp_path / "results")) as made:
        yield made
        assert_nothing_left(made)
        if made.folder.path.exists():
            assert_intact(made)


def test_a_port_taken_between_reservation_and_bind_is_the_hosts_failure_and_tried_again(
    swept: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[subprocess.Popen[str]] = []
    spawn = server._spawn

    def steal_once(argv: tuple[str, ...], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        if not taken:
            taken.append(stranger(LISTENS, argv[argv.index("--port") + 1]))
        return spawn(argv, environment, log)

    monkeypatch.setattr(server, "_spawn", steal_once)
    try:
        swept.here(ONE)
        assert taken[0].poll() is None, "a process that is not ours was ended"
    finally:
        for process in taken:
            process.kill()
            process.communicate()
    first, second = swept.trials
    assert first.outcome.kind is OutcomeKind.INFRASTRUCTURE
    assert first.outcome.cause in (Cause.PORT_IN_USE, Cause.FOREIGN_SERVER)
    assert f"pid {taken[0].pid}" in first.outcome.detail
    assert not first.measurements
    assert second.outcome.kind is OutcomeKind.COMPLETE
    assert second.role == "baseline"


class BusyGpu(FakeNvml):
    """Somebody computes on the only GPU, for as long as ``busy`` says so."""

    def __init__(self, busy: Any) -> None:
        super().__init__([0])
        self.busy = busy

    def nvmlDeviceGetMemoryInfo(self, device: int, version: int = 1) -> SimpleNamespace:
        return SimpleNamespace(total=96 * GIB, used=30 * GIB if self.busy() else 0)

    def nvmlDeviceGetComputeRunningProcesses(self, device: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=1, usedGpuMemory=30 * GIB)] if self.busy() else []


def test_a_gpu_that_was_busy_before_the_sweep_is_waited_for_and_the_other_process_named(
    swept: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", BusyGpu(lambda: not swept.folder.trials.exists()))
    monkeypatch.setattr(trial, "GPU_WAIT_S", 0.3)
    swept.here(ONE)
    first, second = swept.trials
    assert (first.outcome.kind, first.outcome.cause) == (OutcomeKind.INFRASTRUCTURE, Cause.GPU_BUSY)
    assert "pid 1 " in first.outcome.detail
    assert not first.command, "it must not be launched beside somebody else"
    assert second.outcome.kind is OutcomeKind.COMPLETE


def test_a_trial_that_somebody_disturbed_on_the_gpu_is_not_believed(
    swept: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that a stranger took must not become an out-of-memory of the configuration, nor its load a slow one."""
    launched, recorded = swept.folder.trial(0) / "server_info.json", swept.folder.trials
    monkeypatch.setitem(sys.modules, "pynvml", BusyGpu(lambda: launched.exists() and not recorded.exists()))
    monkeypatch.setitem(Server.stop.__kwdefaults__, "deadline_s", 0.3)
    swept.here(ONE)
    first, second = swept.trials
    assert (first.outcome.kind, first.outcome.cause) == (OutcomeKind.INFRASTRUCTURE, Cause.GPU_BUSY)
    assert first.value is None
    assert second.outcome.kind is OutcomeKind.COMPLETE


def test_a_variable_of_the_shell_that_would_steer_every_server_unrecorded_is_refused(
    swept: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "3")
    swept.here(ONE)
    assert swept.code == 2
    assert "SGLANG_SIMULATE_ACC_LEN" in swept.output
    assert not swept.folder.trials.exists()
    swept.here(ONE, "+engine.env.SGLANG_SIMULATE_ACC_LEN=3")
    assert swept.trials[0].outcome.kind is OutcomeKind.COMPLETE


def test_the_gpus_that_the_server_is_given_are_the_ones_that_are_watched(
    swept: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched: list[str | None] = []
    monkeypatch.setattr(sweep, "Gpus", lambda visible: watched.append(visible) or Gpus(visible))
    swept.here(ONE, "+engine.env.CUDA_VISIBLE_DEVICES=1")
    assert watched == ["1"]


def test_a_configuration_that_cannot_be_measured_does_not_end_the_sweep(
    swept: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = trial.measure_level

    async def void_for_one(target: Target, *rest: Any, **more: Any) -> LevelResult:
        result = await measure(target, *rest, **more)
        if re.match("trial-[123]-", target.model or "") is None or result.measurement is None:
            return result
        return replace(result, measurement=replace(result.measurement, valid=False, warnings=("nobody knows why",)))

    monkeypatch.setattr(trial, "measure_level", void_for_one)
    swept.here("search.trials=3")
    first, *spoilt, last = swept.trials
    assert len({record.config.key for record in spoilt}) == 1
    assert [record.outcome.kind for record in spoilt] == [*[OutcomeKind.INFRASTRUCTURE] * 2, OutcomeKind.UNHEALTHY]
    assert "3 times in a row: nobody knows why" in spoilt[-1].outcome.detail
    assert first.outcome.kind is last.outcome.kind is OutcomeKind.COMPLETE


def test_a_server_that_fails_some_of_the_requests_is_not_the_hosts_failure(swept: Sweep) -> None:
    swept.here(ONE, "engine.faults=[errors_under_load:0.15]")
    (only,) = swept.trials
    assert (only.outcome.kind, only.outcome.cause) == (OutcomeKind.UNHEALTHY, Cause.SERVER_ERRORS)
    assert "requests failed" in only.outcome.detail


@pytest.mark.parametrize("status", [200, 500])
def test_a_server_that_does_not_say_who_it_is_is_not_measured(
    swept: Sweep, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    get = aiohttp.ClientSession.get

    def stand_in(session: aiohttp.ClientSession, url: str, **more: Any) -> Any:
        return Refusing(status) if url == "/server_info" else get(session, url, **more)

    monkeypatch.setattr(aiohttp.ClientSession, "get", stand_in)
    swept.here(ONE)
    (only,) = swept.trials
    assert (only.outcome.kind, only.outcome.phase) == (OutcomeKind.UNHEALTHY, Phase.IDENTITY)
    assert not only.measurements
    assert "served_model_name" in only.outcome.detail


@dataclass
class Refusing:
    """An answer with an error in it."""

    status: int

    async def __aenter__(self) -> Refusing:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def read(self) -> bytes:
        return b'{"error": "not now"}'


def test_an_error_of_the_harness_itself_is_kept_and_blames_nobody(
    swept: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = trial.measure_level
    failed: list[bool] = []

    async def once_broken(*arguments: Any, **options: Any) -> Any:
        if not failed:
            failed.append(True)
            raise ZeroDivisionError("division by zero")
        return await measure(*arguments, **options)

    monkeypatch.setattr(trial, "measure_level", once_broken)
    swept.here(ONE)
    first, second = swept.trials
    assert first.outcome.kind is OutcomeKind.INFRASTRUCTURE
    assert "ZeroDivisionError" in first.outcome.detail
    assert "once_broken" in (swept.folder.trial(0) / "harness_error.txt").read_text()
    assert second.outcome.kind is OutcomeKind.COMPLETE


def test_a_host_that_keeps_failing_stops_the_sweep_and_the_next_command_tries_again(
    swept: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "pynvml", BusyGpu(lambda: True))
        patch.setattr(trial, "GPU_WAIT_S", 0.05)
        swept.here(ONE)
    assert swept.code == 3
    assert "stopped: gpu_busy: " in swept.output
    assert f"run={swept.run}" in swept.output.partition("go on with: ")[2]
    assert len(swept.trials) == breaker.MAX_INFRASTRUCTURE_RETRIES + 1
    swept.here(ONE)
    assert swept.trials[-1].outcome.kind is OutcomeKind.COMPLETE


@contextlib.contextmanager
def mounted(folder: Path, options: str) -> Iterator[None]:
    """A file system in memory, of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    mount = subprocess.run(command, capture_output=True, check=False)
    if mount.returncode:
        pytest.skip(f"needs to mount a file system: {mount.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize(
    "size", ["128k", pytest.param("16k", marks=pytest.mark.slow), pytest.param("300k", marks=pytest.mark.slow)]
)
def test_a_full_disk_is_said_and_costs_no_finished_trial(tmp_path: Path, size: str) -> None:
    swept = Sweep(tmp_path / "results")
    with mounted(swept.results, f"size={size}"), cleaned_up(swept):
        swept.here("search.trials=6")
        assert swept.code == 2, swept.output
        assert "No space left on device" in swept.output
        assert "Traceback" not in swept.output
        kept = swept.trials
        assert_nothing_left(swept)
        subprocess.run(["mount", "-o", "remount,size=64m", str(swept.results)], check=True)
        swept.here(f"search.trials={len(kept) + 1}")
        assert swept.code in (0, 3), swept.output
        assert swept.trials[: len(kept)] == kept
        assert len(swept.trials) == len(kept) + 1
        assert_nothing_left(swept)
        assert_intact(swept)


def test_a_results_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    swept = Sweep(tmp_path / "results")
    with mounted(swept.results, "ro"):
        swept.here(ONE)
    assert swept.code == 2
    assert f"cannot write in {swept.folder.path}" in swept.output
    assert "results_dir=" in swept.output
    assert "Traceback" not in swept.output


@pytest.mark.slow
def test_a_truncated_last_line_costs_its_trial_alone_which_is_run_again(swept: Sweep) -> None:
    swept.here(TWO)
    before = swept.trials
    whole = swept.folder.trials.read_bytes()
    swept.folder.trials.write_bytes(whole[:-40])
    swept.here(TWO)
    after = swept.trials
    assert after[0] == before[0]
    assert after[1].candidate == before[1].candidate, "the trial whose record was lost comes first"
    assert len(after) == 2


def test_a_run_of_a_newer_version_is_refused_and_left_alone(swept: Sweep) -> None:
    swept.folder.path.mkdir(parents=True)
    line = json.dumps({"schema_version": SCHEMA_VERSION + 1, "number": 0}) + "\n"
    swept.folder.trials.write_text(line)
    swept.here(ONE)
    assert swept.code == 2
    assert f"schema {SCHEMA_VERSION + 1} is newer" in swept.output
    assert swept.folder.trials.read_text() == line
    swept.folder.trials.unlink()


def test_a_run_that_another_command_works_on_is_refused(swept: Sweep) -> None:
    swept.folder.path.mkdir(parents=True)
    with (swept.folder.path / ".lock").open("w") as lock:
        lock.write("4711\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        swept.here(ONE)
    assert swept.code == 2
    assert "process 4711 is working on" in swept.output


def test_a_run_goes_on_with_another_budget_but_not_with_another_question(swept: Sweep) -> None:
    swept.here(ONE)
    swept.here(ONE, "workload.output_tokens=16")
    assert swept.code == 2
    assert "workload.output_tokens was 32, is 16" in swept.output
    swept.here(ONE, "engine.start_timeout_s=99")
    assert swept.code == 3  # nothing was asked to be measured again


@pytest.mark.slow
def test_a_finished_run_goes_on_with_more_trials_and_more_rounds(swept: Sweep) -> None:
    swept.here(TWO, "search.finalists=1", "search.finalist_rounds=1")
    assert swept.code == 0, swept.output
    assert [record.round for record in swept.finalists] == [1, 1]
    swept.here("search.trials=3", "search.finalists=1", "search.finalist_rounds=2")
    assert swept.code == 0, swept.output
    assert len(swept.trials) == 3
    assert {record.round for record in swept.finalists} == {1, 2}
    assert not list(swept.folder.path.rglob("*interrupted*")), "a finished trial's evidence was moved"


def test_a_run_does_not_go_on_with_another_engine_version(swept: Sweep) -> None:
    swept.here(ONE)
    swept.here(TWO, "engine.version=0.5.16")
    assert swept.code == 2
    assert "0.5.16" in swept.output
    assert len(swept.trials) == 1


def test_a_report_that_cannot_be_made_does_not_cost_the_answer(tmp_path: Path) -> None:
    from analysis import report

    swept = Sweep(tmp_path / "results")

    def broken(_folder: Path) -> Path:
        raise RuntimeError("no font")

    with pytest.MonkeyPatch.context() as patch:
        said: list[str] = []
        patch.setattr(report, "write_report", broken)
        made = SimpleNamespace(
            _folder=swept.folder, _console=SimpleNamespace(print=lambda text, **_: said.append(text))
        )
        from bench.sweep import Sweep as Command

        Command._report(made)  # type: ignore[arg-type]
    assert "the report could not be written (RuntimeError: no font)" in said[0]
