"""Sweep: ``python -m bench.sweep +experiment=NAME`` searches, and ends with a configuration for production."""

from __future__ import annotations

import asyncio
import fcntl
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import yaml
from rich.console import Console

from analysis.report import write_report
from bench import best, breaker, config, engines, environment, records
from bench.engines.protocol import Candidate, Engine
from bench.experiment import Experiment
from bench.launch import reaping
from bench.launch.gpus import Gpus
from bench.launch.interrupts import InterruptedByOperatorError, run_interruptible
from bench.launch.server import kill_live_servers
from bench.outcome import Outcome, OutcomeKind
from bench.progress import Progress
from bench.records import RecordError, RunFolder, TrialRecord
from bench.search import finalists
from bench.search.space import Space
from bench.search.study import Proposal, Study, launched
from bench.trial import Host, run_trial

# What must stay the same for the trials of one run to be comparable; budgets and the search itself may change.
FIXED_SECTIONS = ("engine", "model", "hardware", "workload", "space", "objective")

EXIT_NO_ANSWER = 3


class RunError(Exception):
    """The run cannot be started or continued; the message says why and what to do."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a sweep; 0 with an answer, 2 on bad input, 3 without an answer, 128 and the signal's number
    when interrupted."""
    console = Console()
    try:
        experiment = config.load(sys.argv[1:] if arguments is None else arguments, command="bench.sweep")
        with _locked(experiment.folder):
            return asyncio.run(
                run_interruptible(Sweep(experiment, console).run(), kill_now=kill_live_servers, say=console.print)
            )
    except config.ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except (RunError, RecordError) as error:
        print(f"bench.sweep: {error}", file=sys.stderr)
        return 2
    except InterruptedByOperatorError as interrupted:
        console.print(f"{interrupted}; go on with: {_resume_command(experiment)}", markup=False, soft_wrap=True)
        return interrupted.exit_code


class Sweep:
    """One process's share of a run."""

    def __init__(self, experiment: Experiment, console: Console, clock: Callable[[], float] = time.time) -> None:
        self._experiment = experiment
        self._console = console
        self._clock = clock
        self._folder = RunFolder(experiment.folder)
        self._engine = engines.create(experiment)
        self._trials = records.read(self._folder.trials)
        self._again = records.read(self._folder.finalists)
        self._spent_s = sum(record.times.total_s for record in [*self._trials, *self._again])

    async def run(self) -> int:
        _open_run(self._experiment, self._folder)
        for reaped in reaping.reap(self._experiment.folder.parent.parent):
            self._console.print(f"an earlier run was killed; {reaped.describe()}", markup=False, soft_wrap=True)
        with Gpus(os.environ.get("CUDA_VISIBLE_DEVICES")) as gpus:
            return await self._run(Host(gpus, gpus.used_bytes()))

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
            list(_interrupted(self._folder, len(self._trials))),
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
        while study.launches < search.trials and not self._out_of_time():
            proposal = study.ask()
            if proposal is None:
                progress.say("the space is exhausted: every configuration in it was tried")
                break
            record = await self._trial(proposal, host, progress, study.incumbent)
            records.append(self._folder.trials, record)
            study.tell(proposal, record)
            progress.end(record, launched=launched(record))
            stopped = breaker.reason_to_stop(search, study.records)
            if stopped is not None:
                return stopped
            if record.outcome.kind is OutcomeKind.INFRASTRUCTURE:
                study.retry(proposal)
        return None

    async def _trial(
        self, proposal: Proposal, host: Host, progress: Progress, incumbent: float | None = None
    ) -> TrialRecord:
        started = self._clock()
        if proposal.skip is not None:
            return _skipped(proposal, self._engine, started, proposal.skip)
        progress.begin(proposal.number, proposal.role, proposal.candidate)
        folder = self._folder.trial(proposal.number)
        _clear(folder)
        records.write_json(folder / "candidate.json", {"role": proposal.role, "values": proposal.candidate.values})
        record = await run_trial(
            self._experiment, self._engine, proposal, host, folder=folder, on_phase=progress.phase, incumbent=incumbent
        )
        self._spent_s += record.times.total_s
        return record

    async def _measure_finalists(self, study: Study, host: Host, progress: Progress) -> None:
        chosen = finalists.choose(self._experiment, study.records)
        if not chosen:
            return
        done = {(record.round, record.config.key) for record in self._again if record.outcome.counts}
        for number, record in finalists.turns(self._experiment, chosen):
            if (number, record.config.key) in done:
                continue
            for _ in range(breaker.MAX_INFRASTRUCTURE_RETRIES + 1):
                proposal = Proposal(
                    len(study.records) + len(self._again), "finalist", record.candidate, record.config, record.forecast
                )
                again = replace(await self._trial(proposal, host, progress), round=number)
                records.append(self._folder.finalists, again)
                self._again.append(again)
                progress.end(again, launched=True)
                if again.outcome.counts:
                    break

    def _out_of_time(self) -> bool:
        hours = self._experiment.search.hours
        return hours is not None and self._spent_s >= hours * 3600

    def _finish(self, stopped: str | None) -> int:
        trials = records.read(self._folder.trials)
        answer = None if stopped else best.decide(self._experiment, trials, self._again)
        if answer is not None:
            best.write(answer, self._experiment, self._engine, self._folder, best.source(answer, trials))
        page = write_report(self._folder.path)
        say = self._console.print
        if stopped:
            say(f"stopped: {stopped}", markup=False, soft_wrap=True)
        elif answer is None:
            say("no configuration was measured successfully; the report says why", markup=False)
        else:
            for sentence in answer.sentences:
                say(sentence, markup=False, highlight=False, soft_wrap=True)
            say(f"for production: {self._folder.path / 'launch.sh'}", markup=False, soft_wrap=True)
        say(f"report: {page}", markup=False, soft_wrap=True)
        return 0 if answer is not None else EXIT_NO_ANSWER


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
    resolved = dict(experiment.resolved)
    if folder.experiment.exists():
        earlier = yaml.safe_load(folder.experiment.read_text()) or {}
        changed = [name for name in FIXED_SECTIONS if earlier.get(name) != _plain(resolved.get(name))]
        if changed and records.read(folder.trials):
            raise RunError(
                f"the run {folder.path} was begun with another {' and another '.join(changed)}; its trials would not "
                "be comparable. Take another run= name, or the earlier settings (they are in experiment.yaml there)"
            )
    text = yaml.safe_dump({**_plain(resolved), "overrides": list(experiment.overrides)}, sort_keys=False)
    temporary = folder.experiment.with_suffix(".new")
    try:
        temporary.write_text(text)
        temporary.replace(folder.experiment)
    except OSError as error:
        raise RunError(f"cannot write {folder.experiment}: {error}; choose another results_dir=") from error


def _plain(value: object) -> Any:
    return orjson.loads(records.to_json(value))


def _interrupted(folder: RunFolder, finished: int) -> Iterator[tuple[str, Candidate]]:
    """Trials of the search that were begun and have no record: the process was killed while they ran."""
    path = folder.trial(finished) / "candidate.json"
    if path.exists():
        begun = orjson.loads(path.read_bytes())
        if begun["role"] != "finalist":
            yield begun["role"], Candidate(begun["values"])


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


def _resume_command(experiment: Experiment) -> str:
    overrides = [word for word in experiment.overrides if not word.startswith("run=")]
    return " ".join(["python -m bench.sweep", *overrides, f"run={experiment.run}"])


if __name__ == "__main__":
    sys.exit(main())
