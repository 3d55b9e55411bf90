"""Builders of records and experiments, with everything that a test does not care about filled in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from bench.engines.protocol import Candidate, ServerConfig, Value
from bench.experiment import (
    EngineSpec,
    Experiment,
    HardwareSpec,
    ModelSpec,
    ObjectiveSpec,
    Parameter,
    PromptSpec,
    SearchSpec,
    SpaceSpec,
    WorkloadSpec,
)
from bench.load.measurement import Interval, Measurement, Summary
from bench.outcome import Cause, FlagAdvice, Outcome, OutcomeKind, Phase
from bench.records import TrialRecord


def measurement(tok_per_s: float, *, concurrency: int = 16, ttft_p95_s: float = 0.2, valid: bool = True) -> Measurement:
    latency = Summary(100, ttft_p95_s / 2, ttft_p95_s / 2, ttft_p95_s, ttft_p95_s, ttft_p95_s, ttft_p95_s)
    return Measurement(
        pattern="closed",
        valid=valid,
        window_s=10.0,
        warmup_s=2.0,
        duration_s=12.5,
        output_tok_per_s=Interval(tok_per_s, tok_per_s * 0.99, tok_per_s * 1.01, "batch means"),
        request_per_s=tok_per_s / 128,
        ttft_s=latency,
        tpot_s=latency,
        itl_s=latency,
        icl_s=latency,
        e2e_s=latency,
        in_flight_mean=float(concurrency),
        requests_ok=100,
        requests_failed=0,
        prompt_tokens=12800,
        output_tokens=12800,
        cached_tokens=0,
        retractions=0,
        prompts_hash="0123456789ab",
        seed=0,
        concurrency=concurrency,
    )


def record(
    number: int,
    value: float | None = None,
    *,
    role: str = "search",
    kind: OutcomeKind | None = None,
    cause: Cause = Cause.NONE,
    phase: Phase | None = None,
    flags: tuple[FlagAdvice, ...] = (),
    values: Mapping[str, Value] | None = None,
    round_: int = 0,
    **measured: float,
) -> TrialRecord:
    outcome_kind = kind or (OutcomeKind.CRASHED if value is None else OutcomeKind.COMPLETE)
    chosen = dict(values if values is not None else {"x": number})
    return TrialRecord(
        number=number,
        role=role,
        candidate=Candidate(chosen),
        config=ServerConfig(tuple(sorted(chosen.items()))),
        outcome=Outcome(outcome_kind, cause, phase, flags=flags),
        engine="sglang 0.5.15",
        simulated=False,
        started_at=0.0,
        round=round_,
        optuna_number=None if role == "finalist" else number,
        measurements=() if value is None else (measurement(value, **measured),),  # type: ignore[arg-type]
        value=value,
    )


def experiment(folder: Path = Path("run"), **parts: object) -> Experiment:
    defaults: dict[str, object] = {
        "name": "test",
        "run": "one",
        "folder": folder,
        "engine": EngineSpec("simulator"),
        "model": ModelSpec("tiny", "tiny"),
        "hardware": HardwareSpec("card", 96e9, 1.8e12, 5e14, 1e15, "sm120"),
        "workload": WorkloadSpec("chat", PromptSpec("text"), (16,), 128),
        "space": SpaceSpec("space", (Parameter("x", "int", 0, 9), Parameter("y", "float", 0.0, 1.0, 0.1))),
        "objective": ObjectiveSpec("throughput"),
        "search": SearchSpec(),
    }
    return Experiment(**{**defaults, **parts})  # type: ignore[arg-type]
