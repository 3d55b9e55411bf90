"""Sweep: ``python -m bench.sweep +experiment=NAME`` searches, and ends with a configuration for production."""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import os
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import yaml
from rich.console import Console

from bench import best, breaker, config, deployment, engines, environment, records
from bench.engines.protocol import Candidate, Engine, EngineError
from bench.experiment import Experiment
from bench.launch import reaping
from bench.launch.gpus import Gpus
from bench.launch.interrupts import InterruptedByOperatorError, run_interruptible
from bench.launch.server import kill_live_servers
from bench.outcome import Cause, Outcome, OutcomeKind
from bench.progress import Progress
from bench.records import RecordError, RunFolder, TrialRecord
from bench.search import drift, finalists
from bench.search.space import Space
from bench.search.study import Proposal, Study
from bench.secrets import redact_text, redact_tree, secret_values
from bench.trial import PROBE_FILE_NAME, Host, run_trial

# What must stay the same for the trials of one run to be comparable; budgets and the search itself may change.
FIXED_SECTIONS = ("engine", "model", "hardware", "workload", "space", "objective")
# Except these, which decide when to give up, and which a message may have advised to change.
FREE_SETTINGS = frozenset({"engine.start_timeout_s", "engine.stall_timeout_s", "engine.stop_timeout_s"})

EXIT_NO_ANSWER = 3


class RunError(Exception):
    """The run cannot be started or continued; the message says why and what to do."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a sweep; 0 with an answer, 2 on bad input, 3 without an answer, 128 and the signal's number
    when interrupted."""
    console = Console()
    try:
        words = sys.argv[1:] if arguments is None else arguments
        experiment = config.load(words, command="bench.sweep")
        again = _resume_command(experiment, words)
        with _locked(experiment.folder):
            work = Sweep(experiment, console, again).run()
            return asyncio.run(run_interruptible(work, kill_now=lambda: _leave_now(again), say=console.print))
    except config.ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except (RunError, RecordError, EngineError) as error:
        print(f"bench.sweep: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # the disk filled up or went away where no message of our own says so
        print(f"bench.sweep: {error}; what was finished is kept, and the same command goes on", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before anything was begun
        return 128 + signal.SIGINT
    except InterruptedByOperatorError as interrupted:
        console.print(f"{interrupted}; go on with: {again}", markup=False, soft_wrap=True)
        return interrupted.exit_code


def _leave_now(again: str) -> None:
    """What a second Ctrl-C does; not by the console, in whose middle the signal may have come."""
    kill_live_servers()
    os.write(sys.stdout.fileno(), f"ended at once; go on with: {again}\n".encode())


class Sweep:
    """One process's share of a run. ``again`` is the command that goes on with it."""

    def __init__(
        self, experiment: Experiment, console: Console, again: str, clock: Callable[[], float] = time.time
    ) -> None:
        self._experiment = experiment
        self._resume_command = again
        self._console = console
        self._clock = clock
        self._folder = RunFolder(experiment.folder)
        self._engine = engines.create(experiment)
        self._trials = records.read(self._folder.trials)
        self._again = records.read(self._folder.finalists)
        self._number = 1 + max((record.number for record in [*self._trials, *self._again]), default=-1)
        baselines = [record.number for record in self._trials if record.role == "baseline"]
        self._baseline_folder = self._folder.trial(baselines[-1]) if baselines else None
        self._spent_s = sum(record.times.total_s for record in [*self._trials, *self._again])

    async def run(self) -> int:
        if self._engine.missing is not None:
            raise RunError(
                f"{self._engine.missing}; give engine.python=INTERPRETER, one that has it, or engine.command=[...]. "
                "Without it there is engine=simulator"
            )
        engines.see_that_the_shell_is_neutral(self._experiment, os.environ)
        _open_run(self._experiment, self._folder)
        self._see_same_engine()
        self._say_what_runs()
        for reaped in reaping.reap(self._experiment.folder.parent.parent):
            self._console.print(f"an earlier run was killed; {reaped.describe()}", markup=False, soft_wrap=True)
        with Gpus(self._experiment.engine.visible_gpus(os.environ)) as gpus:
            return await self._run(Host(gpus, gpus.idle_bytes()))

    async def _run(self, host: Host) -> int:
        described = tuple(
            f"{gpu.name}, {gpu.total_bytes / 2**30:.1f} GiB, driver {gpu.driver}" for gpu in host.gpus.facts()
        )
        records.write_json(
            self._folder.environment, environment.observe(f"{self._engine.name} {self._engine.version}", described)
        )
        study = Study(
            self._experiment,
            self._engine,
            Space(self._experiment.space),
            self._folder,
            self._trials,
            list(self._unfinished()),
        )
        cpu = self._engine.simulated or self._experiment.hardware.architecture == "cpu"
        if not len(host.gpus) and not cpu:
            self._console.print(
                f"no GPU can be watched ({host.gpus.why_none}): others on it will not be noticed, nor what stays",
                markup=False,
                soft_wrap=True,
            )
        with Progress(self._experiment, self._console, self._experiment.search.trials) as progress:
            for record in self._trials:
                progress.resumed(record)
            stopped = await self._search(study, host, progress)
            if stopped is None:
                await self._measure_finalists(study, host, progress)
        return self._finish(stopped)

    async def _search(self, study: Study, host: Host, progress: Progress) -> str | None:
        """Spend the budget; the reason why it had to stop, else None."""
        search = self._experiment.search
        skipped = 0
        while study.launches < search.trials and not self._out_of_time():
            proposal = study.ask()
            if proposal is None:
                progress.say("the space is exhausted: every configuration in it was tried")
                break
            proposal = replace(proposal, number=self._number)
            record = await self._trial(proposal, host, progress, study.bar)
            record = _told_apart(record, study.records, self._folder.trial(record.number))
            records.append(self._folder.trials, record)
            study.tell(proposal, record)
            progress.end(record, launched=record.launched)
            if record.role == "anchor" and (changed := drift.sentence(self._experiment, study.records)):
                progress.say(changed)
            skipped = 0 if record.launched else skipped + 1
            if skipped == breaker.MAX_SKIPPED:
                progress.say(f"{skipped} configurations in a row cannot run by the forecast: nothing else is tried")
                break
            stopped = breaker.reason_to_stop(search, study.records)
            if stopped is not None:
                return stopped
            if record.outcome.kind is OutcomeKind.INFRASTRUCTURE:
                study.retry(proposal)
        return None

    async def _trial(self, proposal: Proposal, host: Host, progress: Progress, bar: float | None = None) -> TrialRecord:
        started = self._clock()
        self._number += 1
        if proposal.skip is not None:
            return _skipped(proposal, self._engine, started, proposal.skip)
        progress.begin(proposal.number, proposal.role, proposal.candidate)
        folder = self._folder.trial(proposal.number)
        _clear(folder)
        records.write_json(folder / "candidate.json", {"role": proposal.role, "values": proposal.candidate.values})
        record = await run_trial(
            self._experiment,
            self._engine,
            proposal,
            host,
            folder=folder,
            on_phase=progress.phase,
            bar=bar,
            text_is_sane=proposal.role != "baseline" and self._baseline_is_sane(),
        )
        if record.role == "baseline":
            self._baseline_folder = folder
        self._spent_s += record.times.total_s
        return record

    def _baseline_is_sane(self) -> bool:
        """Whether the baseline's text made sense; random weights make none."""
        path = self._baseline_folder / PROBE_FILE_NAME if self._baseline_folder else None
        if path is None or not path.exists():
            return False
        reply = orjson.loads(path.read_bytes())
        return not reply["broken"] and not reply["odd"]

    async def _measure_finalists(self, study: Study, host: Host, progress: Progress) -> None:
        tried: Counter[tuple[int, str]] = Counter()
        while self._experiment.search.finalists:
            given_up = frozenset(turn for turn, times in tried.items() if times > breaker.MAX_INFRASTRUCTURE_RETRIES)
            turn = finalists.next_turn(self._experiment, study.records, self._again, given_up)
            if turn is None:
                return
            number, record = turn
            tried[number, record.config.key] += 1
            proposal = Proposal(self._number, "finalist", record.candidate, record.config, record.forecast)
            again = replace(await self._trial(proposal, host, progress), round=number)
            records.append(self._folder.finalists, again)
            self._again.append(again)
            progress.end(again, launched=True)

    def _out_of_time(self) -> bool:
        hours = self._experiment.search.hours
        return hours is not None and self._spent_s >= hours * 3600

    def _finish(self, stopped: str | None) -> int:
        trials = records.read(self._folder.trials)
        answer = None if stopped else best.decide(self._experiment, trials, self._again)
        if answer is not None:
            deployment.write(answer, self._experiment, self._folder.path, best.source(answer, trials))
        say = self._console.print
        if stopped:
            say(f"stopped: {stopped}", markup=False, soft_wrap=True)
            say(f"go on with: {self._resume_command}", markup=False, soft_wrap=True)
        elif answer is None and not self._experiment.search.finalists:
            say("search.finalists=0: nothing was measured again, so nothing is called best", markup=False)
        elif answer is None:
            say("no configuration was measured successfully; the report says why", markup=False)
        else:
            for sentence in answer.sentences:
                say(sentence, markup=False, highlight=False, soft_wrap=True)
            if answer.verdict != "not_meeting_limits":
                say(f"for production: {self._folder.path / 'launch.sh'}", markup=False, soft_wrap=True)
        self._report()
        return 0 if answer is not None and answer.verdict != "not_meeting_limits" else EXIT_NO_ANSWER

    def _say_what_runs(self) -> None:
        search = self._experiment.search
        done = f", {len(self._trials)} trials done before" if self._trials else ""
        mark = "; SIMULATED: no GPU and no engine is measured" if self._engine.simulated else ""
        self._console.print(
            f"{self._experiment.name}/{self._experiment.run} on {self._engine.name} {self._engine.version}: "
            f"{search.trials} launches{done}{mark}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )

    def _report(self) -> None:
        """Write the report; the answer stands without it."""
        from analysis.report import write_report  # a second of imports that a sweep needs at its end only

        try:
            said = f"report: {write_report(self._folder.path)}"
        except Exception as error:
            said = f"the report could not be written ({type(error).__name__}: {error}); try: python -m analysis.report"
        self._console.print(said, markup=False, soft_wrap=True)

    def _see_same_engine(self) -> None:
        """Trials of two engine versions would not be comparable."""
        here = f"{self._engine.name} {self._engine.version}"
        earlier = next((record.engine for record in self._trials if record.engine != here), None)
        if earlier is not None:
            raise RunError(
                f"the run {self._folder.path} was measured with {earlier}, and {here} is here now; "
                "take another run= name, or the earlier engine"
            )

    def _unfinished(self) -> Iterator[tuple[str, Candidate]]:
        """What to ask for first: a trial that was begun and has no record, because the process was killed while it
        ran, and a last one that the host had spoilt.
        """
        path = self._folder.trial(self._number) / "candidate.json"
        if path.exists():
            begun = orjson.loads(path.read_bytes())
            if begun["role"] != "finalist":
                yield begun["role"], Candidate(begun["values"])
        if self._trials and not self._trials[-1].outcome.counts:
            yield self._trials[-1].role, self._trials[-1].candidate


def _told_apart(record: TrialRecord, earlier: Sequence[TrialRecord], folder: Path) -> TrialRecord:
    """A configuration whose measurement is void each time is told as such, so that the search goes on without it."""
    if record.outcome.cause is not Cause.MEASUREMENT_VOID or record.role == "baseline":
        return record
    before = itertools.takewhile(
        lambda other: other.outcome.cause is Cause.MEASUREMENT_VOID and other.config.key == record.config.key,
        reversed(earlier),
    )
    times = 1 + sum(1 for _ in before)
    if times <= breaker.MAX_INFRASTRUCTURE_RETRIES:
        return record
    detail = f"the measurement was void {times} times in a row: {record.outcome.detail}"
    outcome = replace(record.outcome, kind=OutcomeKind.UNHEALTHY, detail=detail)
    records.write_json(folder / "outcome.json", outcome)
    return replace(record, outcome=outcome)


def _skipped(proposal: Proposal, engine: Engine, started: float, skip: Outcome) -> TrialRecord:
    return TrialRecord(
        number=proposal.number,
        role=proposal.role,
        candidate=proposal.candidate,
        config=proposal.config,
        outcome=skip,
        engine=f"{engine.name} {engine.version}",
        simulated=engine.simulated,
        started_at=started,
        optuna_number=proposal.trial.number if proposal.trial else None,
        forecast=proposal.forecast,
    )


def _open_run(experiment: Experiment, folder: RunFolder) -> None:
    """Record the experiment, or see that a run that is continued still asks the same."""
    for directory in (folder.path, folder.path / "trials"):
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"cannot make {directory}: {error}; choose another results_dir=") from error
    secrets = _secrets(experiment)
    resolved = redact_tree(_plain(experiment.resolved), secrets)
    if folder.experiment.exists() and records.read(folder.trials):
        earlier = yaml.safe_load(folder.experiment.read_text()) or {}
        changed = [text for name in FIXED_SECTIONS for text in _changes(name, earlier.get(name), resolved.get(name))]
        if changed:
            raise RunError(
                f"the run {folder.path} was begun with other settings, and its trials would not be comparable: "
                f"{'; '.join(changed)}. Take another run= name, or the earlier settings (experiment.yaml there)"
            )
    overrides = [redact_text(word, secrets) for word in experiment.overrides]
    text = yaml.safe_dump({**resolved, "overrides": overrides}, sort_keys=False)
    temporary = folder.experiment.with_suffix(".new")
    try:
        temporary.write_text(text)
        temporary.replace(folder.experiment)
    except OSError as error:
        raise RunError(f"cannot write {folder.experiment}: {error}; choose another results_dir=") from error


def _changes(name: str, before: object, now: object) -> Iterator[str]:
    """What is not as it was, one short text each."""
    if name in FREE_SETTINGS or before == now:
        return
    if isinstance(before, dict) and isinstance(now, dict):
        for key in dict.fromkeys([*before, *now]):
            yield from _changes(f"{name}.{key}", before.get(key), now.get(key))
    else:
        yield f"{name} was {before}, is {now}"


def _secrets(experiment: Experiment) -> frozenset[str]:
    """Secrets of the experiment and of this process, to be looked for in what is written."""
    given = {**experiment.engine.env, **experiment.engine.flags}
    return secret_values({**os.environ, **{name: str(value) for name, value in given.items()}})


def _plain(value: object) -> Any:
    return orjson.loads(records.to_json(value))


def _clear(folder: Path) -> None:
    """Keep what an interrupted launch left (its log may be wanted) beside the new attempt."""
    if not folder.exists():
        return
    number = 1
    while (kept := folder.with_name(f"{folder.name}.interrupted-{number}")).exists():
        number += 1
    folder.rename(kept)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process per run; the kernel drops the lock when its holder dies, however it dies."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise RunError(f"cannot write in {folder}: {error}; choose another results_dir=") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
            raise RunError(
                f"process {holder} is working on {folder} already; wait for it, or take another run="
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _resume_command(experiment: Experiment, words: Sequence[str]) -> str:
    kept = [word for word in words if not word.startswith("run=")]
    command = shlex.join(["python", "-m", "bench.sweep", *kept, f"run={experiment.run}"])
    return redact_text(command, _secrets(experiment))


if __name__ == "__main__":
    sys.exit(main())
