"""Whole sweeps on the simulator, in this process or as the command that a user types, and what must be true of a run
whatever happened to it."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import optuna
import orjson
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from bench import config, records, sweep
from bench.records import RunFolder, TrialRecord
from bench.search.space import Space
from tests.faults.command import adjust

CONF = Path(__file__).parent / "conf"
REPOSITORY = Path(__file__).parents[2]
MARK = "TEST_SWEEP_ID"  # inherited by harness, guards, servers and all their children
T = TypeVar("T")


@dataclass
class Sweep:
    """One run that a test sweeps, in one command or several.

    Attributes:
        output: of all commands so far; code: of the last.
    """

    results: Path
    run: str = "one"
    experiment: str = "injected"
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    output: str = ""
    code: int = -1

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.results / self.experiment / self.run)

    @property
    def trials(self) -> list[TrialRecord]:
        return records.read(self.folder.trials)

    @property
    def finalists(self) -> list[TrialRecord]:
        return records.read(self.folder.finalists)

    def words(self, *overrides: str) -> list[str]:
        fixed = [f"results_dir={self.results}", f"run={self.run}"]
        return ["--config-dir", str(CONF), f"+experiment={self.experiment}", *fixed, *overrides]

    def here(self, *overrides: str) -> Sweep:
        """Sweep in this process: no start-up to pay for, and a test can put things in its way."""
        said = io.StringIO()
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(said),
            contextlib.redirect_stderr(said),
        ):
            patch.setenv(MARK, self.mark)
            adjust(patch)
            self.code = sweep.main(self.words(*overrides))
        self.output += said.getvalue()
        return self

    def command(self, *overrides: str, **options: Any) -> subprocess.Popen[str]:
        """The command, begun."""
        module = "tests.faults.command" if self.experiment in ("injected", "gallery") else "bench.sweep"
        return subprocess.Popen(
            [sys.executable, "-m", module, *self.words(*overrides)],
            cwd=REPOSITORY,
            env={**os.environ, MARK: self.mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **options,
        )

    def finish(self, process: subprocess.Popen[str], timeout_s: float = 300) -> Sweep:
        said, _ = process.communicate(timeout=timeout_s)
        self.output += said
        self.code = process.returncode
        return self

    def log_of(self, number: int) -> str:
        path = self.folder.trial(number) / "server.log"
        return path.read_text(errors="replace") if path.exists() else ""


def until(condition: Callable[[], T | None], what: str, deadline_s: float = 60) -> T:
    """Wait for a condition."""
    end_s = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < end_s, f"waited {deadline_s} s for {what}"
        time.sleep(0.03)
    return value


def listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def running(mark: str) -> dict[int, str]:
    """Every process that was begun by a sweep with this mark, by pid, with its command line."""
    found = {}
    wanted = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if wanted in (entry / "environ").read_bytes():
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def assert_nothing_left(swept: Sweep, *, after_kill: bool = False) -> None:
    """No process of the sweep runs: at once after a good end, soon where a guard has to see to it."""
    until(lambda: not running(swept.mark), f"the end of {running(swept.mark)}", 30 if after_kill else 5)
    if not after_kill:
        assert not list(swept.results.rglob("launch.json"))


def assert_intact(swept: Sweep) -> None:
    """Every finished record is whole, stands once, and holds the parameters of the server that it was measured at."""
    all_records = [*swept.trials, *swept.finalists]
    numbers = [record.number for record in all_records]
    assert len(set(numbers)) == len(numbers), numbers
    # An anchor is the baseline once more, and after a drift what was measured before it may be launched again.
    once = [record for record in swept.trials if record.outcome.counts and record.role != "anchor"]
    if len(once) < len(swept.trials):
        once = [record for record in once if record.value is None]
    counted = [record.config.key for record in once]
    assert len(set(counted)) == len(counted), "a configuration was counted twice"
    turns = [(record.round, record.config.key) for record in swept.finalists if record.outcome.counts]
    assert len(set(turns)) == len(turns), "a finalist's round was counted twice"
    for record in all_records:
        assert record.value is None or record.outcome.kind == "complete"
        if record.command:
            _assert_is_what_ran(record, swept.folder.trial(record.number))
    _assert_study_agrees(swept)


def _assert_is_what_ran(record: TrialRecord, folder: Path) -> None:
    begun = orjson.loads((folder / "candidate.json").read_bytes())
    assert begun == {"role": record.role, "values": dict(record.candidate.values)}
    assert orjson.loads((folder / "outcome.json").read_bytes()) == records.to_plain(record.outcome)
    script = shlex.split((folder / "command.sh").read_text().partition("\nexec ")[2].replace("\\\n", " "))
    words = script[script.index(record.command[0]) :]
    assert tuple(words) == record.command, "the record's command is not the one that ran"
    environment = dict(word.split("=", 1) for word in script[1 : script.index(record.command[0])])
    info = folder / "server_info.json"
    reported = orjson.loads(info.read_bytes()) if info.exists() else {}
    for name, value in record.config.flags:
        flag = f"--{name.replace('_', '-')}"
        assert flag in words, f"{flag} was not passed"
        if isinstance(value, (int, float, str)) and not isinstance(value, bool):
            assert words[words.index(flag) + 1] == str(value)
            if record.measurements and name != "speculative_algorithm":  # reported by another name
                assert str(reported[name]) == str(value)
    for name, value in record.config.env:
        assert environment[name] == value
    if record.measurements:
        assert reported["served_model_name"] == words[words.index("--served-model-name") + 1]


def _assert_study_agrees(swept: Sweep) -> None:
    """What Optuna holds is what was measured with just these parameters, and nothing that did not count."""
    if not swept.folder.journal.exists():
        return
    backend = JournalFileBackend(str(swept.folder.journal))
    study = optuna.load_study(study_name=swept.experiment, storage=JournalStorage(backend))
    by_number = {record.number: record for record in swept.trials}
    forgotten = any(record.role == "anchor" for record in swept.trials)  # what was measured before a drift
    space = Space(config.load_run(swept.folder.path).space)
    for told in study.trials:
        if "record" in told.user_attrs:
            record = by_number[told.user_attrs["record"]]
            assert record.outcome.counts
            assert told.params == space.parameters_of(record.candidate)
            value = told.value if told.state is TrialState.COMPLETE else None
            assert value == record.value or (value is None and forgotten)


@contextlib.contextmanager
def cleaned_up(swept: Sweep) -> Iterator[Sweep]:
    """Whatever a failed test leaves is ended, by the mark that only its processes carry."""
    try:
        yield swept
    finally:
        for pid in running(swept.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
