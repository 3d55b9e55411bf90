"""Best: the configuration that goes into production, with the evidence for it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from bench.engines.protocol import Command, Engine, Value
from bench.experiment import Experiment
from bench.load.measurement import Interval
from bench.progress import figure, settings
from bench.records import RunFolder, TrialRecord, write_json
from bench.search import finalists, objective
from bench.secrets import REDACTED, redact_argv, redact_env, secret_values

PRODUCTION_PORT = 30000  # SGLang's own default


@dataclass(frozen=True)
class Best:
    """The answer of a sweep.

    Attributes:
        verdict: ``better`` (than the baseline, the interval of the gain lies above zero), ``no_difference`` (the
            baseline is as good), ``not_meeting_limits`` (nothing meets the limits; this is the nearest) or
            ``no_baseline`` (there was nothing to compare with).
        trial: number of the trial that found it.
        flags, env: of the server, fixed ones included.
        level: the load level it is best at.
        value, baseline_value: of the objective, from fresh launches. gain: relative, larger is better.
        tied: keys of configurations that cannot be told from it.
        sentences: the answer in words.
    """

    verdict: str
    trial: int
    key: str
    flags: dict[str, Value]
    env: dict[str, str]
    metric: str
    level: int
    limits: dict[str, float]
    excess: dict[str, float]
    value: Interval
    rounds: int
    baseline_value: Interval | None
    gain: Interval | None
    tied: tuple[str, ...]
    engine: str
    simulated: bool
    acceptance_simulated: bool
    sentences: tuple[str, ...]
    schema_version: int = 1


def decide(experiment: Experiment, search: Sequence[TrialRecord], again: Sequence[TrialRecord]) -> Best | None:
    """Choose among the finalists by their fresh measurements; None when none of them was measured again."""
    chosen = finalists.choose(experiment, search)
    rows = finalists.standings(experiment, chosen, again)
    choice = finalists.winner(experiment, rows)
    if choice is None:
        return None
    row, tied = choice
    baseline = next((item for item in rows if item.baseline), None)
    fresh = [item for item in again if item.config.key == row.config.key and item.value is not None]
    record = fresh[0]
    acceptance_simulated = any(item.acceptance_simulated for item in record.measurements)
    verdict = _verdict(row, baseline)
    return Best(
        verdict=verdict,
        trial=row.trial,
        key=row.config.key,
        flags=dict(row.config.flags),
        env=dict(row.config.env),
        metric=experiment.objective.metric,
        level=objective.level(experiment),
        limits=dict(experiment.objective.limits),
        excess=dict(row.excess),
        value=row.value,
        rounds=len(row.values),
        baseline_value=baseline.value if baseline else None,
        gain=row.gain,
        tied=tuple(item.config.key for item in tied),
        engine=record.engine,
        simulated=record.simulated,
        acceptance_simulated=acceptance_simulated,
        sentences=tuple(_sentences(experiment, verdict, row, baseline, tied, record, acceptance_simulated)),
    )


def _verdict(row: finalists.Standing, baseline: finalists.Standing | None) -> str:
    if not row.meets_limits:
        return "not_meeting_limits"
    if baseline is None:
        return "no_baseline"
    if row.baseline or row.gain is None or row.gain.low <= 0:
        return "no_difference"
    return "better"


def _sentences(
    experiment: Experiment,
    verdict: str,
    row: finalists.Standing,
    baseline: finalists.Standing | None,
    tied: Sequence[finalists.Standing],
    record: TrialRecord,
    acceptance_simulated: bool,
) -> list[str]:
    metric, level = experiment.objective.metric, objective.level(experiment)
    said = [
        f"Best configuration: {settings(row.candidate)} (trial {row.trial}).",
        f"{metric} at {level} concurrent requests: {figure(row.value.mean)} "
        f"[{figure(row.value.low)}, {figure(row.value.high)}] ({row.value.method}).",
    ]
    if baseline is not None and row.gain is not None:
        said.append(
            f"Gain over the baseline ({figure(baseline.value.mean)}): {row.gain.mean:+.1%} "
            f"[{row.gain.low:+.1%}, {row.gain.high:+.1%}]."
        )
    if verdict == "no_difference":
        said.append("No difference: nothing that was measured again is better than the baseline beyond the noise.")
    if verdict == "no_baseline":
        said.append("The baseline was not measured again, so no gain can be stated.")
    if verdict == "not_meeting_limits":
        missed = ", ".join(f"{name} by {amount:.0%}" for name, amount in row.excess if amount > 0)
        said.append(f"No configuration meets the limits; this is the nearest, missing {missed}.")
    if tied:
        said.append(f"Tied with {len(tied)} other finalist(s); the one with the fewest settings was taken.")
    if record.simulated:
        said.append("All of this is simulated: no GPU and no engine was measured.")
    elif acceptance_simulated:
        said.append("The acceptance length was simulated by the engine: real prompts will give another one.")
    return said


def source(best: Best, trials: Sequence[TrialRecord]) -> TrialRecord:
    """The trial of the search that found it."""
    return next(record for record in trials if record.number == best.trial)


def write(best: Best, experiment: Experiment, engine: Engine, folder: RunFolder, record: TrialRecord) -> None:
    """Write best.json (evidence), best.yaml (an override file) and launch.sh."""
    write_json(folder.path / "best.json", best)
    _write_text(folder.path / "best.yaml", _yaml(best, experiment))
    command = engine.command(record.config, port=PRODUCTION_PORT, served_model_name=experiment.model.name)
    script = folder.path / "launch.sh"
    _write_text(script, launch_script(best, experiment, engine, command))
    script.chmod(0o755)


def _yaml(best: Best, experiment: Experiment) -> str:
    head = [f"# {sentence}" for sentence in best.sentences]
    head += [
        f"# Found by the run {experiment.name}/{experiment.run}, trial {best.trial}, {best.engine}.",
        "# Use: copy to <folder>/experiment/best.yaml, then --config-dir <folder> +experiment=[NAME,best]",
    ]
    flags = {name: value for name, value in best.flags.items() if REDACTED not in str(value)}
    env = {name: value for name, value in best.env.items() if REDACTED not in value}
    if left_out := sorted({*best.flags, *best.env} - {*flags, *env}):
        head.append(f"# Secrets are left out; keep giving them yourself: {', '.join(left_out)}")
    body = {"engine": {"flags": flags, "env": env}}
    return "# @package _global_\n" + "\n".join(head) + "\n" + yaml.safe_dump(body, sort_keys=True)


def launch_script(best: Best, experiment: Experiment, engine: Engine, command: Command) -> str:
    """A shell script that starts this server: quoted, host and port as options, the engine's version checked first."""
    lines = ["#!/usr/bin/env bash"]
    lines += [f"# {sentence}" for sentence in best.sentences]
    lines += [
        f"# Found by the run {experiment.name}/{experiment.run} with {best.engine}.",
        f"# Meant for {best.level} concurrent requests.",
        "# HOST and PORT choose where it listens; by default only this machine reaches it.",
        "set -euo pipefail",
        'HOST="${HOST:-127.0.0.1}"',
        f'PORT="${{PORT:-{PRODUCTION_PORT}}}"',
    ]
    lines += _version_check(engine, command)
    shown = redact_env(dict(command.env), secret_values(dict(command.env), command.argv))
    lines += [
        _ask_for(name) + f"; export {name}" if REDACTED in value else f"export {name}={shlex.quote(value)}"
        for name, value in shown.items()
    ]
    words = _words(command)
    asked = re.findall(r'"\$([A-Z0-9_]+)"', " ".join(words))
    lines += [_ask_for(name) for name in asked if name not in ("HOST", "PORT")]
    lines.append("exec " + " \\\n    ".join(words) + ' "$@"')
    return "\n".join(lines) + "\n"


def _version_check(engine: Engine, command: Command) -> list[str]:
    """Refuse another version than the measured one: flags and their effects change between releases."""
    if engine.simulated or "-m" not in command.argv:
        return []
    python = shlex.quote(command.argv[0])
    probe = shlex.quote(f"import importlib.metadata as m; print(m.version({engine.name!r}))")
    return [
        f"seen=$({python} -c {probe})",
        f'if [ "$seen" != {shlex.quote(engine.version)} ]; then',
        f'    echo "{engine.name} $seen is installed, but these flags were measured with {engine.version};'
        ' set ANY_VERSION=1 to start all the same" >&2',
        '    [ "${ANY_VERSION:-0}" = 1 ] || exit 1',
        "fi",
    ]


def _ask_for(name: str) -> str:
    return f': "${{{name}:?set it first: it is a secret, and is not kept here}}"'


def _words(command: Command) -> list[str]:
    """The argument list quoted, one flag a line, with host, port and secrets taken from the environment."""
    variable = {"--host": '"$HOST"', "--port": '"$PORT"'}
    words: list[str] = []
    previous = ""
    for word in redact_argv(command.argv, secret_values(dict(command.env), command.argv)):
        shown = variable.get(previous, shlex.quote(word))
        if REDACTED in word and previous.startswith("--"):
            shown = f'"${previous.lstrip("-").replace("-", "_").upper()}"'
        if word.startswith("--") or not words:
            words.append(shown)
        else:
            words[-1] += " " + shown
        previous = word
    return words


def _write_text(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(text)
    temporary.replace(path)
