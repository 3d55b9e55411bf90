"""Verify: ``python -m bench.verify FILE`` launches what a launch.sh, best.yaml or best.json says, measures it, and
tells whether the number that it states holds.

The fresh launch has an interval of its own (of its window), the stated number another (between launches, where there
were several). The number holds when the two meet, and every limit that was kept is kept again.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson
import yaml

from bench import best, config, deployment, engines, records
from bench.best import Best
from bench.breaker import MAX_INFRASTRUCTURE_RETRIES
from bench.engines.protocol import Engine, EngineError
from bench.experiment import Experiment
from bench.launch.gpus import Gpus
from bench.launch.interrupts import InterruptedByOperatorError, run_interruptible
from bench.launch.server import kill_live_servers
from bench.load.measurement import Interval
from bench.progress import figure
from bench.records import RecordError, RunFolder, TrialRecord
from bench.search import objective
from bench.search.study import Proposal
from bench.secrets import REDACTED, redact_argv, redact_env, secret_values
from bench.trial import Host, run_trial
from bench.words import Parser

# Together wider than this, the intervals would meet for a number that is wrong by a third.
WEAK_RELATIVE = 1 / 3
HOLDS, DOES_NOT_HOLD, REFUSED = 0, 1, 2


class RefusedFileError(Exception):
    """The file cannot be verified; the message says what was seen and what was expected."""


@dataclass(frozen=True)
class Case:
    """What is to be verified: a stated answer, the trial that found it, and how to launch it again."""

    stated: Best
    found: TrialRecord
    experiment: Experiment
    engine: Engine


@dataclass(frozen=True)
class Verdict:
    """What a verification found; ``RUN/verify/NNNN/verdict.json`` holds it, for the report.

    Attributes:
        file: what was verified, relative to the run where it lies in it.
        at: when, in seconds since 1970.
        launch: number of its launch, NNNN. trial: of the search, that found the configuration.
        stated: the number of the file. measured: of the fresh launch; None where it gave none.
        holds: whether the number and every limit that was kept hold.
        reasons: why not, one sentence each.
        weak: the intervals are so wide that holding says little.
    """

    file: str
    at: float
    launch: int
    trial: int
    engine: str
    simulated: bool
    metric: str
    level: int
    stated: Interval
    measured: Interval | None
    holds: bool
    reasons: tuple[str, ...]
    weak: bool
    schema_version: int = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Verify; 0 where the number holds, 1 where it does not, 2 where the file is refused or nothing was measured."""
    parser = Parser(prog="python -m bench.verify", description="Measure what a file says again.")
    parser.add_argument("file", type=Path, metavar="FILE", help="launch.sh, best.yaml or best.json of a run")
    parser.add_argument("--run", type=Path, help="folder of the run, where the file is no longer in it")
    options = parser.parse_args(arguments)
    try:
        folder = _run_folder(options.file, options.run)
        case = read(options.file, folder)
        return asyncio.run(
            run_interruptible(_verify(case, folder, options.file), kill_now=kill_live_servers, say=_tell)
        )
    except (config.ConfigError, RecordError, EngineError, RefusedFileError, OSError) as error:
        print(f"refused: {error}", file=sys.stderr)
        return REFUSED
    except InterruptedByOperatorError as interrupted:
        print(interrupted, file=sys.stderr)
        return interrupted.exit_code


def read(file: Path, folder: RunFolder) -> Case:
    """What a file of a run asks to launch.

    Raises:
        RefusedFileError: it is not what was measured; every difference is named.
    """
    stated = _stated(file, folder)
    experiment = _with_secrets(config.load_run(folder.path))
    engines.see_that_the_shell_is_neutral(experiment, os.environ)
    engine = engines.create(experiment)
    here = f"{engine.name} {engine.version}"
    if here != stated.engine:
        raise RefusedFileError(f"{file} was measured with {stated.engine}, and {here} is here")
    found = next((item for item in records.read(folder.trials) if item.number == stated.trial), None)
    if found is None:
        raise RefusedFileError(f"{folder.trials} has no trial {stated.trial}, which {file} names")
    different = _against_trial(stated, found) or _against_stated(file, stated, found, experiment, engine)
    if different:
        raise RefusedFileError(f"{file} is not what was measured:\n  " + "\n  ".join(different))
    asked = best.asked_otherwise(experiment, level=stated.level, limits=stated.limits)
    return Case(stated, found, replace(asked, workload=replace(asked.workload, levels=(stated.level,))), engine)


def holds(stated: Interval, fresh: Interval) -> bool:
    """Whether a fresh value lies in the stated interval, widened by the fresh one's own."""
    return fresh.low <= stated.high and fresh.high >= stated.low


async def _verify(case: Case, folder: RunFolder, file: Path) -> int:
    record = await _measured(case, folder)
    for _ in range(MAX_INFRASTRUCTURE_RETRIES):
        if record.outcome.counts:
            break
        print(f"once more, since the host failed: {record.outcome.cause}: {record.outcome.detail}", file=sys.stderr)
        record = await _measured(case, folder)
    if not record.outcome.counts:
        raise RefusedFileError(f"nothing was measured: {record.outcome.cause}: {record.outcome.detail}")
    verdict = judge(case, record, _name(file, folder))
    records.write_json(_launch_folder(folder, record.number) / "verdict.json", verdict)
    _say(verdict)
    return HOLDS if verdict.holds else DOES_NOT_HOLD


async def _measured(case: Case, folder: RunFolder) -> TrialRecord:
    number = _free_number(folder)
    found = case.found
    proposal = Proposal(number, "verification", found.candidate, found.config, found.forecast)
    with Gpus(case.experiment.engine.visible_gpus(os.environ)) as gpus:
        host = Host(gpus, gpus.idle_bytes())
        where = _launch_folder(folder, number)
        record = await run_trial(case.experiment, case.engine, proposal, host, folder=where, on_phase=_tell)
    records.append(folder.path / "verifications.jsonl", record)
    return record


def judge(case: Case, record: TrialRecord, file: str = "best.json") -> Verdict:
    """Hold what a fresh launch gave against what was stated."""
    stated, outcome = case.stated, record.outcome
    measured = (item for item in record.measurements if item.valid and item.concurrency == stated.level)
    measurement = next(measured, None)
    score = objective.score(case.experiment, record.measurements)
    fresh = None
    if record.value is None or measurement is None or score is None:
        reasons = [f"the server ended as {outcome.kind} ({outcome.cause}) {outcome.line or outcome.detail}"]
    else:
        fresh = objective.interval(measurement, stated.metric) or Interval(
            record.value, record.value, record.value, "no interval of its own"
        )
        reasons = [
            f"{name} is {amount:.1%} over its limit of {stated.limits[name]:g}, which was kept when it was picked"
            for name, amount in score.excess
            if amount > 0 and (stated.excess.get(name) or 0.0) <= 0
        ]
        if not holds(stated.value, fresh):
            better = objective.better(case.experiment.objective, record.value, stated.value.mean)
            reasons.append(f"the two intervals do not meet; it is {'better' if better else 'worse'} than stated")
    weak = fresh is not None and stated.value.relative_half_width + fresh.relative_half_width > WEAK_RELATIVE
    return Verdict(
        file=file,
        at=time.time(),
        launch=record.number,
        trial=stated.trial,
        engine=stated.engine,
        simulated=record.simulated,
        metric=stated.metric,
        level=stated.level,
        stated=stated.value,
        measured=fresh,
        holds=not reasons,
        reasons=tuple(reasons),
        weak=weak,
    )


def _say(verdict: Verdict) -> None:
    if verdict.measured is not None:
        mark = ", simulated: no GPU and no engine is measured" if verdict.simulated else ""
        print(f"{verdict.metric} at {best.requests(verdict.level)}, {verdict.engine}{mark}")
        print(f"stated:       {_shown(verdict.stated)}")
        print(f"measured now: {_shown(verdict.measured)}, {verdict.measured.mean / verdict.stated.mean - 1:+.1%}")
    for text in verdict.reasons:
        print(f"does not hold: {text}")
    if verdict.holds:
        print("holds: the two intervals meet")
    if verdict.holds and verdict.weak:
        print("but they are so wide that this says little; more search.finalist_rounds, or a quieter host, narrow them")


def _name(file: Path, folder: RunFolder) -> str:
    path, run = file.resolve(), folder.path.resolve()
    return str(path.relative_to(run) if path.is_relative_to(run) else path)


def _launch_folder(folder: RunFolder, number: int) -> Path:
    return folder.path / "verify" / f"{number:04d}"


def _run_folder(file: Path, given: Path | None) -> RunFolder:
    """The run that a file belongs to: given, else the nearest folder above it that holds an experiment."""
    if not file.is_file():
        raise RefusedFileError(f"there is no file {file}")
    above = [given] if given is not None else list(file.resolve().parents)
    for folder in above:
        if (folder / "experiment.yaml").is_file():
            return RunFolder(folder)
    raise RefusedFileError(f"no experiment.yaml in {above[0]}{'' if given else ' or above'}: name its run with --run")


def _stated(file: Path, folder: RunFolder) -> Best:
    """The answer with its number: best.json itself, or the one beside the file, else the run's."""
    beside = file.with_name("best.json")
    path = file if file.suffix == ".json" else beside if beside.is_file() else folder.path / "best.json"
    try:
        stated = records.from_plain(Best, orjson.loads(path.read_bytes()))
        bounds = (stated.value.low, stated.value.high)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise RefusedFileError(f"cannot read {path}, which holds the number to verify: {error}") from error
    if not all(isinstance(bound, (int, float)) and math.isfinite(bound) for bound in bounds):
        raise RefusedFileError(f"{path} states no interval, so no measurement could contradict it")
    return stated


def _against_trial(stated: Best, found: TrialRecord) -> list[str]:
    """Where best.json is not the trial that it names."""
    pairs = ((stated.flags, dict(found.config.flags)), (stated.env, dict(found.config.env)))
    return [text for mine, other in pairs for text in _different(mine, other, f"trial {found.number}")]


def _against_stated(file: Path, stated: Best, found: TrialRecord, experiment: Experiment, engine: Engine) -> list[str]:
    """Where a launch.sh or best.yaml is not what would be launched."""
    if file.suffix == ".json":
        return []
    text = file.read_text()
    if file.suffix in (".yaml", ".yml"):
        return _against_yaml(text, stated)
    command = engine.command(found.config, port=deployment.DEFAULT_PORT, served_model_name=experiment.model.name)
    secrets = secret_values(dict(command.env), command.argv)
    launched = replace(
        found,
        command=redact_argv(command.argv, secrets),
        env=tuple(redact_env(dict(command.env), secrets).items()),
    )
    expected = deployment.read_script(deployment.launch_script(stated, experiment, launched))
    try:
        return deployment.differences(deployment.read_script(text), expected)
    except ValueError as error:
        raise RefusedFileError(f"{file} is not written as a launch.sh is: {error}") from error


def _against_yaml(text: str, stated: Best) -> list[str]:
    try:
        written = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RefusedFileError(f"it is no YAML: {error}") from error
    expected, _ = deployment.without_secrets(stated)
    if not isinstance(written, dict) or not isinstance(written.get("engine"), dict):
        return ["it has no section engine"]
    found = [f"a key that does not belong there: {key}" for key in written if key != "engine"]
    for part in dict.fromkeys([*expected, *written["engine"]]):
        seen = written["engine"].get(part) or {}
        found += _different(seen if isinstance(seen, dict) else {part: seen}, expected.get(part, {}), "best.json")
    return found


def _different(mine: Mapping[str, Any], other: Mapping[str, Any], owner: str) -> list[str]:
    return [
        f"{name}: the file has {mine.get(name, 'none')}, {owner} {other.get(name, 'none')}"
        for name in dict.fromkeys([*other, *mine])
        if mine.get(name) != other.get(name)
    ]


def _with_secrets(experiment: Experiment) -> Experiment:
    """The experiment with the secrets that its record leaves out, from this process's environment."""
    spec = experiment.engine
    missing = {name: name for name, value in spec.env.items() if REDACTED in value}
    flags = {name: name.upper() for name, value in spec.flags.items() if REDACTED in str(value)}
    absent = sorted(variable for variable in [*missing.values(), *flags.values()] if variable not in os.environ)
    if absent:
        raise RefusedFileError(f"it needs secrets that are not kept; set {', '.join(absent)} first")
    env = {**spec.env, **{name: os.environ[name] for name in missing}}
    given = {**spec.flags, **{name: os.environ[variable] for name, variable in flags.items()}}
    return replace(experiment, engine=replace(spec, env=env, flags=given))


def _shown(value: Interval) -> str:
    # No metric is negative, though an interval may reach so far.
    return f"{figure(value.mean)} [{figure(max(0.0, value.low))}, {figure(value.high)}] ({value.method})"


def _free_number(folder: RunFolder) -> int:
    number = 1
    while _launch_folder(folder, number).exists():
        number += 1
    return number


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
