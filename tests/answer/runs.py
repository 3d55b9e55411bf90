"""A run folder as a sweep leaves it, its measurements written by hand and everything else by the harness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import yaml

from bench import config, engines, records
from bench.engines.protocol import Candidate, Value
from bench.outcome import Outcome, OutcomeKind
from bench.records import RunFolder, TrialRecord
from bench.secrets import redact_argv, redact_env, secret_values
from tests.build import measurement

# Output tok/s by load level, and p95 of the time to first token, of three configurations.
Speeds = Mapping[int, tuple[float, float]]
BASELINE: Speeds = {4: (200.0, 0.1), 32: (1000.0, 0.4)}
FAST: Speeds = {4: (210.0, 0.1), 32: (1500.0, 0.9)}
LATENT: Speeds = {4: (400.0, 0.05), 32: (1200.0, 0.2)}


def measured_run(folder: Path, *overrides: str) -> Path:
    """Three trials, of which the baseline and the fastest at 32 were measured again twice."""
    experiment = config.load(
        ["+experiment=quickstart", f"results_dir={folder}", "run=one", *overrides], command="bench.sweep"
    )
    engine = engines.create(experiment)
    path = experiment.folder
    path.mkdir(parents=True)
    plain = records.to_plain(experiment.resolved)
    plain["engine"]["env"] = redact_env(plain["engine"].get("env") or {})
    (path / "experiment.yaml").write_text(yaml.safe_dump({**plain, "overrides": list(overrides)}, sort_keys=False))

    def launched(number: int, values: Mapping[str, Value], speeds: Speeds, role: str, round_: int = 0) -> TrialRecord:
        server = engine.canonical(Candidate(values))
        command = engine.command(server, port=31000 + number, served_model_name=f"trial-{number}")
        secrets = secret_values(dict(command.env), command.argv)
        return TrialRecord(
            number=number,
            role=role,
            candidate=Candidate(values),
            config=server,
            outcome=Outcome(OutcomeKind.COMPLETE),
            engine=f"{engine.name} {engine.version}",
            simulated=engine.simulated,
            started_at=1000.0 + number,
            round=round_,
            measurements=tuple(
                measurement(speed * (1 + 0.004 * round_), concurrency=level, ttft_p95_s=ttft)
                for level, (speed, ttft) in speeds.items()
            ),
            value=speeds[32][0] * (1 + 0.004 * round_),
            objective_level=32,
            command=redact_argv(command.argv, secrets),
            env=tuple(redact_env(dict(command.env), secrets).items()),
        )

    fast = {"mem_fraction_static": 0.8, "mamba_ssm_dtype": "bfloat16"}
    latent = {"max_running_requests": 32, "mem_fraction_static": 0.85}
    _write(RunFolder(path).trials, [launched(0, {}, BASELINE, "baseline"), launched(1, fast, FAST, "search")])
    _write(RunFolder(path).trials, [launched(2, latent, LATENT, "search")])
    again = [
        launched(3 + 2 * round_ + index, values, speeds, "finalist", round_ + 1)
        for round_ in range(2)
        for index, (values, speeds) in enumerate((({}, BASELINE), (fast, FAST)))
    ]
    _write(RunFolder(path).finalists, again)
    return path


def as_fast_as_the_baseline(path: Path, relative: float) -> None:
    """Let the fastest finalist be only this much faster than the baseline."""
    file = RunFolder(path).finalists
    changed = [
        item
        if not item.candidate.values
        else replace(
            item, measurements=(measurement(1000.0 * (1 + relative) * (1 + 0.004 * item.round), concurrency=32),)
        )
        for item in records.read(file)
    ]
    file.unlink()
    _write(file, changed)


def noisy(path: Path, relative: float) -> None:
    """Let launches of one finalist differ by this much."""
    file = RunFolder(path).finalists
    changed = []
    for item in records.read(file):
        speeds = FAST if item.candidate.values else BASELINE
        measured = [
            measurement(speed * (1 + relative * (item.round - 1.5)), concurrency=level, ttft_p95_s=ttft)
            for level, (speed, ttft) in speeds.items()
        ]
        changed.append(replace(item, measurements=tuple(measured)))
    file.unlink()
    _write(file, changed)


def _write(path: Path, lines: Sequence[TrialRecord]) -> None:
    for line in lines:
        records.append(path, line)
