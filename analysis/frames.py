"""Frames: a run folder as tidy pandas frames, units in the column names."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from bench.engines.protocol import Candidate, ServerConfig
from bench.load.measurement import Interval, Measurement, Summary
from bench.outcome import Cause, FlagAdvice, Outcome, OutcomeKind
from bench.records import RecordError, RunFolder, TrialRecord, read

LATENCIES = ("ttft_s", "ttft_scheduled_s", "tpot_s", "itl_s", "icl_s", "e2e_s")
LARGER_IS_BETTER = ("output_tok_per_s", "request_per_s", "acceptance_length")
NOT_LAUNCHED = (Cause.FORECAST, Cause.DOMINATED)
_BLANK = TrialRecord(0, "", Candidate(), ServerConfig(()), Outcome(OutcomeKind.COMPLETE), "", False, 0.0)


class AnalysisError(Exception):
    """A run cannot be read or used; the message says what was seen, what was expected and what to do."""


@dataclass(frozen=True)
class Objective:
    """What the run calls best.

    Attributes:
        metric: as in the experiment, e.g. ``output_tok_per_s`` or ``ttft_s.p95``.
        level: concurrency that decides; None where nothing was measured and the experiment does not say.
        limits: by metric, in its unit.
    """

    metric: str = "output_tok_per_s"
    level: int | None = None
    limits: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def larger_is_better(self) -> bool:
        return self.metric in LARGER_IS_BETTER


@dataclass(frozen=True)
class Run:
    """One run folder.

    Attributes:
        experiment: the resolved configuration, ``{}`` where the file is missing.
        environment: GPU, driver, engine, host, ``{}`` where the file is missing.
        best: ``best.json``, None before the finalists were measured.
        records, finalist_records: the lines of trials.jsonl and finalists.jsonl.
        verdicts: every ``verify/NNNN/verdict.json``, in their order.
        trials, finalists: one row per launch (``docs/frames.md`` lists the columns).
        measurements: one row per launch and load level, of both files.
        parameters: one row per trial and parameter.
        verifications: one row per verdict of ``bench.verify``.
    """

    path: Path
    experiment: Mapping[str, Any]
    environment: Mapping[str, Any]
    best: Mapping[str, Any] | None
    objective: Objective
    records: tuple[TrialRecord, ...]
    finalist_records: tuple[TrialRecord, ...]
    verdicts: tuple[Mapping[str, Any], ...]
    trials: pd.DataFrame
    finalists: pd.DataFrame
    measurements: pd.DataFrame
    parameters: pd.DataFrame
    verifications: pd.DataFrame

    @property
    def name(self) -> str:
        return f"{self.path.parent.name}/{self.path.name}"

    @property
    def journal(self) -> Path:
        return RunFolder(self.path).journal

    @property
    def all_records(self) -> tuple[TrialRecord, ...]:
        return self.records + self.finalist_records

    def setting(self, *keys: str) -> Any:
        """A value of the experiment by its path, None where it is absent."""
        value: Any = self.experiment
        for key in keys:
            if not isinstance(value, Mapping):
                return None
            value = value.get(key)
        return value


def load(run: Path | str) -> Run:
    """Read a run folder, finished or not.

    Raises:
        AnalysisError: it is no run folder, or was written by a newer version.
    """
    path = Path(run).resolve()
    folder = RunFolder(path)
    if not folder.experiment.exists() and not folder.trials.exists():
        raise AnalysisError(_no_run(path))
    try:
        records = tuple(read(folder.trials))
        finalist_records = tuple(read(folder.finalists))
    except RecordError as error:
        raise AnalysisError(str(error)) from error
    written = _yaml(folder.experiment)
    experiment = written["resolved"] if isinstance(written.get("resolved"), dict) else written
    objective = _objective(experiment, records)
    everything = records + finalist_records
    read_verdicts = (_json(file) for file in sorted(path.glob("verify/*/verdict.json")))
    verdicts = tuple(verdict for verdict in read_verdicts if verdict is not None)
    return Run(
        path=path,
        experiment={**written, **experiment},
        environment=_json(folder.environment) or {},
        best=_json(path / "best.json"),
        objective=objective,
        records=records,
        finalist_records=finalist_records,
        verdicts=verdicts,
        trials=trial_frame(records, objective),
        finalists=trial_frame(finalist_records, objective),
        measurements=measurement_frame(everything),
        parameters=parameter_frame(records, _searched(experiment, records)),
        verifications=verification_frame(verdicts),
    )


def column(metric: str) -> str:
    """Column of a metric of the experiment: ``ttft_s.p95`` is ``ttft_p95_s``."""
    name, _, part = metric.partition(".")
    return f"{name.removesuffix('_s')}_{part}_s" if part else name


def trial_frame(records: Iterable[TrialRecord], objective: Objective) -> pd.DataFrame:
    """One row per launch."""
    rows = [_trial_row(record, objective) for record in records]
    frame = _typed(pd.DataFrame(rows, columns=list(_trial_columns())))
    frame["started_at"] = pd.to_datetime(frame["started_at"], unit="s", utc=True)
    return frame


def measurement_frame(records: Iterable[TrialRecord]) -> pd.DataFrame:
    """One row per launch and load level."""
    rows = [_measurement_row(record, item) for record in records for item in record.measurements]
    return _typed(pd.DataFrame(rows, columns=list(_measurement_columns())))


def parameter_frame(records: Iterable[TrialRecord], searched: frozenset[str]) -> pd.DataFrame:
    """One row per trial and parameter: what was asked and what the engine really ran; None is the engine's default."""
    rows = []
    for record in records:
        asked = dict(record.candidate.values)
        runs = {**dict(record.config.flags), **dict(record.config.env)}
        for name in sorted(asked.keys() | runs.keys() | searched):
            rows.append((record.number, name, name in searched, asked.get(name), runs.get(name)))  # noqa: PERF401
    frame = pd.DataFrame(rows, columns=["trial", "parameter", "searched", "asked", "effective"])
    return frame.astype({"asked": object, "effective": object})


def verification_frame(verdicts: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """One row per verdict that ``bench.verify`` left."""
    rows = []
    for verdict in verdicts:
        row = {name: verdict.get(name) for name in VERDICT_COLUMNS}
        for name in ("stated", "measured"):
            value = interval_of(verdict.get(name))
            row |= {name: None, f"{name}_low": None, f"{name}_high": None}
            if value is not None:
                row |= {name: value.mean, f"{name}_low": value.low, f"{name}_high": value.high}
        rows.append({**row, "reasons": "\n".join(verdict.get("reasons") or ())})
    columns = [*VERDICT_COLUMNS, *(f"{name}{end}" for name in ("stated", "measured") for end in ("", "_low", "_high"))]
    frame = _typed(pd.DataFrame(rows, columns=[*columns, "reasons"]))
    frame["at"] = pd.to_datetime(frame["at"], unit="s", utc=True)
    return frame


def measurement_at(record: TrialRecord, level: int | None) -> Measurement | None:
    """The valid measurement of a launch at a concurrency."""
    for item in record.measurements:
        if item.concurrency == level and item.valid:
            return item
    return None


def metric_interval(measurement: Measurement, metric: str) -> Interval | None:
    """A metric by name; one without an interval of its own gets an open one, so that it proves nothing by itself."""
    name, _, part = metric.partition(".")
    value = getattr(measurement, name, None)
    if isinstance(value, Summary):
        value = getattr(value, part or "mean", None)
    if isinstance(value, Interval):
        return interval_of(dataclasses.asdict(value))
    if isinstance(value, (int, float)):
        return Interval(float(value), -math.inf, math.inf, "one window, no interval")
    return None


def interval_of(data: Mapping[str, Any] | None) -> Interval | None:
    """An interval as it stands in a JSON file, where an open end is null."""
    if not data or data.get("mean") is None:
        return None
    low, high = data.get("low"), data.get("high")
    return Interval(
        float(data["mean"]),
        -math.inf if low is None else float(low),
        math.inf if high is None else float(high),
        str(data.get("method") or ""),
    )


def excess(record: TrialRecord, objective: Objective) -> dict[str, float] | None:
    """By limit, how far it is exceeded relative to itself at the deciding level; None where that was not measured."""
    measurement = measurement_at(record, objective.level)
    if measurement is None:
        return None
    seen = {name: metric_interval(measurement, name) for name in objective.limits}
    return {
        name: math.inf if value is None else value.mean / objective.limits[name] - 1 for name, value in seen.items()
    }


def meets_limits(record: TrialRecord, objective: Objective) -> bool | None:
    """Whether a launch kept every limit at the deciding level; None where it was not measured there."""
    over = excess(record, objective)
    return None if over is None else all(amount <= 0 for amount in over.values())


def advice_text(advice: FlagAdvice) -> str:
    """``raise --mem-fraction-static above 0.74``"""
    preposition = {"raise": "above", "lower": "below"}.get(advice.direction, "to")
    bound = "" if advice.bound is None else f" {preposition} {advice.bound:g}"
    return f"{advice.direction} {advice.flag}{bound}"


def command_text(record: TrialRecord) -> str:
    """The command as one line that a shell takes, with what was added to the environment."""
    return shlex.join(["env", *(f"{name}={value}" for name, value in record.env), *record.command][not record.env :])


def dummy_weights(record: TrialRecord) -> bool:
    return dict(record.config.flags).get("load_format") == "dummy"


def launched(record: TrialRecord) -> bool:
    """Whether a process was started at all."""
    return record.outcome.cause not in NOT_LAUNCHED and record.times.startup_s > 0


def _typed(frame: pd.DataFrame) -> pd.DataFrame:
    """The same types whatever the run holds: what is missing everywhere is no reason for a column of objects."""
    kinds = {name: "string" for name in TEXTS if name in frame} | {
        name: "boolean" for name in BOOLEANS if name in frame
    }
    rest = frame.columns.difference(list(kinds))
    return frame.astype(kinds | {name: "float64" for name in rest if frame[name].dtype == object})


def _trial_row(record: TrialRecord, objective: Objective) -> dict[str, Any]:
    outcome, times, forecast, facts = record.outcome, record.times, record.forecast, record.facts
    row: dict[str, Any] = {
        "trial": record.number,
        "role": record.role,
        "round": record.round,
        "key": record.config.key,
        "kind": str(outcome.kind),
        "cause": str(outcome.cause),
        "phase": None if outcome.phase is None else str(outcome.phase),
        "detail": outcome.detail,
        "evidence": outcome.line,
        "evidence_line_number": outcome.line_number,
        "advice": "; ".join(advice_text(item) for item in outcome.flags),
        "launched": launched(record),
        "engine": record.engine,
        "simulated": record.simulated,
        "dummy_weights": dummy_weights(record),
        "optuna_trial": record.optuna_number,
        "value": record.value,
        "objective_level": record.objective_level,
        "meets_limits": meets_limits(record, objective),
        "started_at": record.started_at,
    }
    for name in ("startup_s", "identity_s", "warmup_s", "measure_s", "teardown_s", "harness_s", "total_s"):
        row[name] = getattr(times, name)
    for name in FORECAST_COLUMNS:
        row[f"forecast_{name}"] = getattr(forecast, name, None)
    for name in FACT_COLUMNS:
        row[name] = getattr(facts, name, None)
    row["command"] = command_text(record)
    return row


FORECAST_COLUMNS = ("verdict", "margin_bytes", "kv_tokens", "state_slots", "max_running_requests", "host_bytes")
FACT_COLUMNS = (
    "available_bytes",
    "weight_bytes",
    "draft_weight_bytes",
    "kv_tokens",
    "kv_bytes",
    "draft_kv_bytes",
    "state_slots",
    "state_bytes",
    "max_running_requests",
    "graph_bytes",
    "available_after_pools_bytes",
    "available_after_start_bytes",
    "retractions",
)
VERDICT_COLUMNS = ("launch", "at", "file", "trial", "engine", "simulated", "metric", "level", "holds", "weak")
MEASUREMENT_COLUMNS = (
    "request_per_s",
    "in_flight_mean",
    "requests_ok",
    "requests_failed",
    "prompt_tokens",
    "output_tokens",
    "cached_tokens",
    "retractions",
    "acceptance_length",
    "acceptance_simulated",
    "verify_steps",
    "step_time_s",
    "server_output_tok_per_s",
    "client_lag_p99_s",
    "client_cpu_share",
    "window_s",
    "warmup_s",
    "duration_s",
    "seed",
    "prompts_hash",
)
TEXTS = (
    *("role", "key", "kind", "cause", "phase", "detail", "evidence", "advice", "engine", "forecast_verdict", "command"),
    *("pattern", "prompts_hash", "warnings", "file", "metric", "reasons"),
)
BOOLEANS = ("launched", "simulated", "dummy_weights", "meets_limits", "valid", "acceptance_simulated", "holds", "weak")
SUMMARY_PARTS = ("mean", "p50", "p90", "p95", "p99", "max")


def _trial_columns() -> Iterable[str]:
    return _trial_row(_BLANK, Objective()).keys()


def _measurement_row(record: TrialRecord, item: Measurement) -> dict[str, Any]:
    speed = item.output_tok_per_s
    row: dict[str, Any] = {
        "trial": record.number,
        "role": record.role,
        "round": record.round,
        "key": record.config.key,
        "simulated": record.simulated,
        "pattern": item.pattern,
        "concurrency": item.concurrency,
        "request_rate_per_s": item.request_rate_per_s,
        "valid": item.valid,
        "output_tok_per_s": speed.mean,
        "output_tok_per_s_low": speed.low,
        "output_tok_per_s_high": speed.high,
    }
    for name in LATENCIES:
        summary: Summary | None = getattr(item, name)
        for part in SUMMARY_PARTS:
            row[column(f"{name}.{part}")] = None if summary is None else getattr(summary, part)
    for name in MEASUREMENT_COLUMNS:
        row[name] = getattr(item, name)
    row["warnings"] = "\n".join(item.warnings)
    return row


def _measurement_columns() -> Iterable[str]:
    none = Interval(0.0, 0.0, 0.0)
    item = Measurement("closed", True, *[0.0] * 3, none, 0.0, *[None] * 5, 0.0, *[0] * 6, "", 0)  # type: ignore[arg-type, call-arg]
    return _measurement_row(_BLANK, item).keys()


def _objective(experiment: Mapping[str, Any], records: Sequence[TrialRecord]) -> Objective:
    asked = experiment.get("objective")
    asked = asked if isinstance(asked, Mapping) else {}
    level = asked.get("level")
    if level is None:
        told = [record.objective_level for record in records if record.objective_level is not None]
        workload = experiment.get("workload")
        levels = workload.get("levels") if isinstance(workload, Mapping) else None
        level = told[0] if told else max(levels) if levels else None
    limits = asked.get("limits") or {}
    return Objective(
        str(asked.get("metric") or "output_tok_per_s"), level, {str(k): float(v) for k, v in limits.items()}
    )


def _searched(experiment: Mapping[str, Any], records: Sequence[TrialRecord]) -> frozenset[str]:
    space = experiment.get("space")
    named = space.get("parameters") if isinstance(space, Mapping) else None
    if isinstance(named, Mapping) and named:
        return frozenset(str(name) for name, item in named.items() if item is not None)
    if isinstance(named, Sequence) and named:
        return frozenset(str(item["name"]) for item in named)
    return frozenset(name for record in records for name in record.candidate.values)


def _no_run(path: Path) -> str:
    if not path.exists():
        return f"{path} does not exist; give the folder of a run, results/<experiment>/<run>"
    below = sorted(str(found.parent) for found in path.glob("**/trials.jsonl"))
    hint = "; runs below it: " + ", ".join(below[:5]) if below else ""
    return f"{path} is no run folder: neither experiment.yaml nor trials.jsonl is in it{hint}"


def _yaml(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        data = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise AnalysisError(f"{path} is not valid YAML: {error}") from error
    return data if isinstance(data, dict) else {}


def _json(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        data = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise AnalysisError(f"{path} is not valid JSON: {error}") from error
    return data if isinstance(data, dict) else None
