"""Synthetic run folders of every kind: a toy engine with a memory limit decides how each trial ends."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import yaml
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from bench import records
from bench.engines.protocol import Candidate, Forecast, LaunchFacts, ServerConfig
from bench.load.measurement import Interval, Measurement, Summary
from bench.outcome import Cause, FlagAdvice, Outcome, OutcomeKind, Phase
from bench.records import RunFolder, Times, TrialRecord, append

GIB = 2.0**30
LEVELS = (1, 4, 16, 32)
STARTED_AT = 1_790_000_000.0
TOTAL, WEIGHTS, DRAFT, SLOT = 94 * GIB, 51 * GIB, 5.5 * GIB, 0.147 * GIB
SPACE: dict[str, Any] = {
    "mem_fraction_static": {"kind": "float", "low": 0.6, "high": 0.96},
    "speculative_num_steps": {"kind": "categorical", "choices": [None, 1, 2, 3, 5]},
    "mamba_ssm_dtype": {"kind": "categorical", "choices": [None, "bfloat16"]},
    "chunked_prefill_size": {"kind": "int", "low": 1024, "high": 16384, "log": True},
    "disable_radix_cache": {"kind": "flag"},
}
# One of each way to fail that the toy engine does not come to by itself.
INJECTED: tuple[tuple[OutcomeKind, Cause, Phase, str, str], ...] = (
    (
        OutcomeKind.CRASHED,
        Cause.ENGINE_CRASH,
        Phase.SERVING,
        "The scheduler died after 41 s of load.",
        "RuntimeError: The expanded size of the tensor (20971520) must match the existing size (20971840)",
    ),
    (OutcomeKind.HUNG, Cause.STARTUP_HANG, Phase.GRAPH_CAPTURE, "No log line for 300 s during graph capture.", ""),
    (OutcomeKind.UNHEALTHY, Cause.GARBAGE_OUTPUT, Phase.WARMUP, "12 of 16 replies were one token repeated.", ""),
    (
        OutcomeKind.MISMATCHED,
        Cause.WRONG_CONFIGURATION,
        Phase.IDENTITY,
        "chunked_prefill_size: asked 4096, the server reports 8192.",
        "",
    ),
    (OutcomeKind.INTERRUPTED, Cause.OPERATOR, Phase.MEASURE, "Ctrl-C.", ""),
    (
        OutcomeKind.INFRASTRUCTURE,
        Cause.GPU_BUSY,
        Phase.LOAD,
        "Another process holds 40 GiB of the GPU.",
        "The memory capacity is unbalanced. Some GPUs may be occupied by other processes.",
    ),
)


def make_run(
    folder: Path,
    *,
    trials: int = 24,
    finalists: bool = True,
    best: bool = True,
    seed: int = 1,
    journal: bool = False,
    always_fail: bool = False,
    limits: dict[str, float] | None = None,
    speed: float = 1.0,
    simulated: bool = True,
    settings: dict[str, Any] | None = None,
    planned: int | None = None,
) -> Path:
    """Write a run folder; ``speed`` multiplies the throughput of every configuration."""
    folder.mkdir(parents=True)
    rng = random.Random(seed)
    experiment: dict[str, Any] = {
        "engine": {"name": "simulator" if simulated else "sglang", "version": "0.5.15"},
        "model": {"name": "qwen27b", "path": "models/qwen27b"},
        "hardware": {"name": "rtx_pro_6000", "price_per_hour": 1.8, "currency": "USD", "gpu_count": 1},
        "workload": {"name": "synthetic", "levels": list(LEVELS), "output_tokens": 512, "prompts": {"kind": "text"}},
        "space": {"name": "toy", "parameters": SPACE},
        "objective": {"name": "throughput", "metric": "output_tok_per_s", "level": None, "limits": limits or {}},
        "search": {"trials": planned or trials, "finalists": 2},
        "overrides": ["+experiment=toy"],
    }
    for name, section in (settings or {}).items():
        experiment[name] = {**experiment[name], **section}
    (folder / "experiment.yaml").write_text(yaml.safe_dump(experiment, sort_keys=False))
    (folder / "environment.json").write_text(
        json.dumps(
            {
                "engine": "sglang 0.5.15",
                "host": "node-1",
                "gpus": ["NVIDIA RTX PRO 6000, 97887 MiB, driver 590.1"],
                "memory_bytes": 128 * GIB,
                "packages": [["optuna", "5.0.0"]],
            }
        )
    )
    toy = Toy(rng, speed, simulated, always_fail)
    done = [toy.trial(number) for number in range(trials)]
    for record in done:
        append(RunFolder(folder).trials, record)
    if journal:
        _write_journal(folder, done)
    good = sorted((r for r in done if r.value is not None), key=lambda r: -(r.value or 0.0))
    if finalists and good:
        chosen = [done[0], *[r for r in good if r.config.key != done[0].config.key][:2]]
        again = [
            replace(toy.measure(record, trials + index), role="finalist", round=index // len(chosen) + 1)
            for index, record in enumerate(chosen * 2)
        ]
        for record in again:
            append(RunFolder(folder).finalists, record)
        if best:
            _write_best(folder, chosen[1] if len(chosen) > 1 else chosen[0], chosen[0], again)
    return folder


class Toy:
    """An engine of arithmetic: memory decides what runs, steps and batch decide how fast."""

    def __init__(self, rng: random.Random, speed: float, simulated: bool, always_fail: bool) -> None:
        self._rng = rng
        self._speed = speed
        self._simulated = simulated
        self._always_fail = always_fail

    def trial(self, number: int) -> TrialRecord:
        candidate = Candidate({} if number == 0 else self._draw())
        flags = {"load_format": "dummy", **candidate.values}
        record = TrialRecord(
            number=number,
            role="baseline" if number == 0 else "search",
            candidate=candidate,
            config=ServerConfig(tuple(sorted(flags.items()))),
            outcome=Outcome(OutcomeKind.COMPLETE),
            engine="sglang 0.5.15",
            simulated=self._simulated,
            started_at=STARTED_AT + 150.0 * number,
            optuna_number=number,
            command=("python", "-m", "sglang.launch_server", *_arguments(flags)),
            env=(("SGLANG_SIMULATE_ACC_LEN", "3.0"),) if candidate.values.get("speculative_num_steps") else (),
        )
        record = replace(record, forecast=self._forecast(record))
        failed = self._failure(record)
        if failed is not None:
            skipped = failed.cause is Cause.FORECAST
            times = Times() if skipped else _times(self._rng.uniform(30, 60), 0, 0)
            return replace(record, outcome=failed, times=times, command=() if skipped else record.command)
        injected = (number - 3) % 40 if number < 200 else len(INJECTED)
        if number >= 3 and number % 3 == 0 and injected // 3 < len(INJECTED):
            kind, cause, phase, detail, line = INJECTED[injected // 3]
            outcome = Outcome(kind, cause, phase, detail, line or None, 812 if line else None)
            return replace(record, outcome=outcome, times=_times(70.0, 20.0, 0.0))
        record = self.measure(record, number)
        if number % 7 == 5:
            outcome = Outcome(
                OutcomeKind.PRUNED, Cause.CANNOT_WIN, Phase.MEASURE, "Its bound lies below trial 0's value."
            )
            return replace(
                record, outcome=outcome, value=None, measurements=record.measurements[-1:], times=_times(66, 9, 4)
            )
        return record

    def measure(self, record: TrialRecord, number: int) -> TrialRecord:
        """Another launch of the same configuration."""
        measurements = tuple(self._level(record, level) for level in LEVELS)
        split = dict(record.forecast.split_bytes) if record.forecast else {}
        slots = self._slots(record)
        facts = LaunchFacts(
            available_bytes=TOTAL,
            weight_bytes=WEIGHTS,
            draft_weight_bytes=DRAFT if _steps(record) else None,
            kv_tokens=int(split["kv_pool"] / 65536),
            kv_bytes=split["kv_pool"] * 1.004,
            state_slots=slots,
            state_bytes=slots * SLOT,
            max_running_requests=max(1, slots // 4),
            graph_bytes=0.4 * GIB,
            available_after_start_bytes=split["slack"] * 0.7,
        )
        return replace(
            record,
            number=number,
            started_at=STARTED_AT + 150.0 * number,
            facts=facts,
            measurements=measurements,
            value=measurements[-1].output_tok_per_s.mean,
            objective_level=LEVELS[-1],
            times=_times(self._rng.uniform(55, 80), 18.0, 32.0),
        )

    def _draw(self) -> dict[str, Any]:
        values: dict[str, Any] = {
            "mem_fraction_static": round(self._rng.uniform(0.6, 0.96), 3),
            "chunked_prefill_size": self._rng.choice([1024, 2048, 4096, 8192, 16384]),
        }
        for name in ("speculative_num_steps", "mamba_ssm_dtype"):
            value = self._rng.choice(SPACE[name]["choices"])
            if value is not None:
                values[name] = value
        if self._rng.random() < 0.4:
            values["disable_radix_cache"] = True
        return values

    def _pool(self, record: TrialRecord) -> float:
        fraction = record.candidate.values.get("mem_fraction_static", 0.8)
        assert isinstance(fraction, float)
        return TOTAL * fraction - WEIGHTS - (DRAFT if _steps(record) else 0.0)

    def _slots(self, record: TrialRecord) -> int:
        half = 0.5 if record.candidate.values.get("mamba_ssm_dtype") == "bfloat16" else 1.0
        return max(0, int(self._pool(record) / 2 / (SLOT * half * (1 + 0.3 * _steps(record)))))

    def _forecast(self, record: TrialRecord) -> Forecast:
        pool, slack = self._pool(record), TOTAL - TOTAL * float(record.candidate.values.get("mem_fraction_static", 0.8))  # type: ignore[arg-type]
        slots = self._slots(record)
        split = {
            "weights": WEIGHTS,
            "draft_weights": DRAFT if _steps(record) else 0.0,
            "kv_pool": max(0.0, pool / 2),
            "state_cache": max(0.0, pool / 2),
            "graphs": 0.5 * GIB,
            "activations": 1.2 * GIB,
            "slack": max(0.0, slack - 1.7 * GIB),
        }
        fits = pool > 2 * GIB
        return Forecast(
            "fits" if fits else "does_not_fit",
            () if fits else (f"mem_fraction_static leaves {pool / GIB:.1f} GiB for the pools.",),
            pool,
            int(max(0.0, pool / 2) / 65536 * self._rng.uniform(0.99, 1.01)),
            slots,
            max(1, slots // 4),
            split_bytes=tuple(split.items()),
        )

    def _failure(self, record: TrialRecord) -> Outcome | None:
        values = record.candidate.values
        fraction = float(values.get("mem_fraction_static", 0.8))  # type: ignore[arg-type]
        raise_flag = (FlagAdvice("--mem-fraction-static", "raise", 0.74),)
        lower_flag = (FlagAdvice("--mem-fraction-static", "lower"), FlagAdvice("--max-running-requests", "lower"))
        if self._pool(record) < 4 * GIB and self._rng.random() < 0.5:
            return Outcome(
                OutcomeKind.INFEASIBLE, Cause.FORECAST, Phase.FORECAST, "The state cache cannot hold a request."
            )
        if (self._always_fail and fraction < 0.85) or self._pool(record) < 6 * GIB:
            return Outcome(
                OutcomeKind.INFEASIBLE,
                Cause.OOM_GPU_STATE_CACHE,
                Phase.KV_ALLOC,
                "The state cache does not fit into what mem_fraction_static leaves.",
                "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. <rest=0.26>",
                431,
                raise_flag,
            )
        if self._always_fail or fraction > 0.92:
            return Outcome(
                OutcomeKind.INFEASIBLE,
                Cause.OOM_GPU_GRAPH_CAPTURE,
                Phase.GRAPH_CAPTURE,
                "The GPU ran out of memory while graphs were captured.",
                "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.19 GiB. GPU 0 has 0.41 GiB free",
                655,
                lower_flag,
            )
        if values.get("disable_radix_cache") and values.get("speculative_num_steps") == 5:
            return Outcome(
                OutcomeKind.REJECTED,
                Cause.CONFIG_INCOMPATIBLE,
                Phase.ARGS,
                "The engine refuses this pair of flags.",
                "ValueError: no_buffer is not supported with speculative decoding & <overlap>",
                17,
                (FlagAdvice("--mamba-scheduler-strategy", "set"),),
            )
        return None

    def _level(self, record: TrialRecord, level: int) -> Measurement:
        steps = _steps(record)
        acceptance = 1 + 0.75 * steps * 0.9**steps if steps else None
        running = min(level, max(1, self._slots(record) // 4))
        step_s = (0.015 + 0.0003 * running + 0.0016 * steps + 0.00008 * steps * running) / self._speed
        speed = running * (acceptance or 1.0) / step_s * self._rng.gauss(1, 0.012)
        half = speed * 0.012
        wait = 0.08 + 0.4 * max(0, level - running)
        tpot = step_s / (acceptance or 1.0)
        warned = ("The client used 74 % of its core: more than 70 % can distort latencies; give it a core of its own.",)
        return Measurement(
            pattern="closed",
            valid=not (record.number % 11 == 8 and level == 1),
            window_s=24.0,
            warmup_s=4.0,
            duration_s=31.0,
            output_tok_per_s=Interval(speed, speed - half, speed + half, "batch means, 20 bins of 1.2 s, t"),
            request_per_s=speed / 512,
            ttft_s=_summary(wait, 200),
            tpot_s=_summary(tpot, 200),
            itl_s=_summary(tpot, 9000),
            icl_s=_summary(step_s, 3000),
            e2e_s=_summary(wait + 512 * tpot, 200),
            in_flight_mean=running * 0.995,
            requests_ok=200,
            requests_failed=0,
            prompt_tokens=51200,
            output_tokens=102400,
            cached_tokens=0,
            retractions=3 if record.number % 13 == 4 and level == 32 else 0,
            prompts_hash=f"{level:08x}",
            seed=level,
            concurrency=level,
            acceptance_length=acceptance,
            verify_steps=int(102400 / acceptance) if acceptance else None,
            acceptance_simulated=bool(steps),
            step_time_s=step_s,
            server_output_tok_per_s=speed * 1.003,
            client_lag_p99_s=0.0004,
            client_cpu_share=0.74 if record.number % 11 == 8 else 0.3,
            warnings=warned if record.number % 11 == 8 else (),
        )


def _steps(record: TrialRecord) -> int:
    value = record.candidate.values.get("speculative_num_steps", 0)
    assert isinstance(value, int)
    return value


def _summary(mean: float, count: int) -> Summary:
    return Summary(count, mean, mean * 0.97, mean * 1.2, mean * 1.35, mean * 1.8, mean * 2.5)


def _times(startup_s: float, warmup_s: float, measure_s: float) -> Times:
    return Times(startup_s, 0.2, warmup_s, measure_s, 3.1, startup_s + warmup_s + measure_s + 3.5)


def _arguments(flags: dict[str, Any]) -> list[str]:
    words = []
    for name, value in flags.items():
        words.append("--" + name.replace("_", "-"))
        if value is not True:
            words.append(str(value))
    return words


def _write_best(folder: Path, winner: TrialRecord, baseline: TrialRecord, again: list[TrialRecord]) -> None:
    def value(key: str) -> dict[str, Any]:
        seen = [r.value or 0.0 for r in again if r.config.key == key]
        mean = sum(seen) / len(seen)
        return {"mean": mean, "low": mean * 0.98, "high": mean * 1.02, "method": "t over 2 launches, pooled, 3 df"}

    mine, other = value(winner.config.key), value(baseline.config.key)
    gain = mine["mean"] / other["mean"] - 1
    same = winner.config.key == baseline.config.key
    records.write_json(
        folder / "best.json",
        {
            "verdict": "no_difference" if same or gain < 0.028 else "better",
            "trial": winner.number,
            "key": winner.config.key,
            "flags": dict(winner.config.flags),
            "env": {},
            "metric": "output_tok_per_s",
            "level": LEVELS[-1],
            "limits": {},
            "excess": {},
            "value": mine,
            "rounds": 2,
            "baseline_value": other,
            "gain": None if same else {"mean": gain, "low": gain - 0.028, "high": gain + 0.028, "method": ""},
            "tied": [],
            "engine": winner.engine,
            "simulated": winner.simulated,
            "acceptance_simulated": True,
            "sentences": ["Written by the picker."],
            "schema_version": 1,
        },
    )


def _write_journal(folder: Path, done: list[TrialRecord]) -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = JournalStorage(JournalFileBackend(str(RunFolder(folder).journal)))
    study = optuna.create_study(study_name="toy", storage=storage, direction="maximize")
    distributions: dict[str, Any] = {
        "mem_fraction_static": optuna.distributions.FloatDistribution(0.6, 0.96),
        "chunked_prefill_size": optuna.distributions.IntDistribution(1024, 16384, log=True),
        "speculative_num_steps": optuna.distributions.CategoricalDistribution((0, 1, 2, 3, 5)),
        "mamba_ssm_dtype": optuna.distributions.CategoricalDistribution(("default", "bfloat16")),
        "disable_radix_cache": optuna.distributions.CategoricalDistribution((False, True)),
    }
    defaults = {"mem_fraction_static": 0.8, "chunked_prefill_size": 8192, "speculative_num_steps": 0}
    for record in done:
        values = {**defaults, "mamba_ssm_dtype": "default", "disable_radix_cache": False, **record.candidate.values}
        state = optuna.trial.TrialState.FAIL if record.value is None else optuna.trial.TrialState.COMPLETE
        study.add_trial(
            optuna.trial.create_trial(state=state, params=values, distributions=distributions, value=record.value)
        )
