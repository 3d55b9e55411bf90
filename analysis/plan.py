"""Plan: how long a job takes with the configurations of a run, and what it costs.

python -m analysis.plan results/EXPERIMENT/RUN --completions 902087 --mean-output-tokens 2073 --gpus 8
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.table import Table
from scipy import stats

from analysis import words
from analysis.figures.style import origins
from analysis.frames import AnalysisError, Run, load
from analysis.standing import Standing, by_load, gpus, measured, standings
from bench.load.measurement import Interval
from bench.records import TrialRecord

# A measurement with outputs this much shorter or longer than the job's says little about the job: the context that
# each step has to read grows with them.
LENGTH_TOLERANCE = 0.25


@dataclass(frozen=True)
class Job:
    """What has to be generated.

    Attributes:
        output_tokens_variation: standard deviation of the output lengths over their mean; 0 is all alike.
        prompt_tokens: mean, None where it is not known.
        level: requests in flight at each server, None for the fastest that was measured.
        price_per_hour: of one GPU; None leaves cost out.
    """

    completions: int
    output_tokens: float
    output_tokens_variation: float = 1.0
    prompt_tokens: float | None = None
    gpus: int = 1
    level: int | None = None
    price_per_hour: float | None = None
    currency: str = "USD"


@dataclass(frozen=True)
class Estimate:
    """A job with one configuration.

    Attributes:
        level: requests in flight at each of ``servers``.
        wall_s, gpu_hours, cost: with the interval that the throughput's interval gives.
        startup_s, ramp_s, tail_s: parts of ``wall_s``: until the server is ready, until the first wave of requests
            writes, and from the last request sent to the last one finished.
    """

    label: str
    level: int
    servers: int
    output_tok_per_s: Interval
    wall_s: Interval
    gpu_hours: Interval
    cost: Interval | None
    startup_s: float
    ramp_s: float
    tail_s: float


def estimate(run: Run, job: Job) -> list[Estimate]:
    """The job with the best configuration, the baseline and each finalist, as far as they were measured.

    Raises:
        AnalysisError: nothing was measured, the level was not, or the GPUs do not hold one server.
    """
    shown = standings(run)
    speeds = by_load(shown, "output_tok_per_s")
    if not speeds:
        raise AnalysisError(f"{run.name} has no valid measurement to plan with; its report says why")
    levels = sorted({level for _, level in speeds})
    if job.level is not None and job.level not in levels:
        raise AnalysisError(f"--level {job.level} was not measured; measured were {', '.join(map(str, levels))}")
    found = []
    for standing in shown:
        curve = {level: value for (key, level), value in speeds.items() if key == standing.record.config.key}
        if curve and (job.level is None or job.level in curve):
            found.append(_with(standing, curve, job))
    return found


def _with(standing: Standing, curve: Mapping[int, Interval], job: Job) -> Estimate:
    each = gpus(standing.record)
    servers = job.gpus // each
    if servers < 1:
        raise AnalysisError(f"{standing.label} takes {each} GPUs for one server; --gpus {job.gpus} is too few")
    level = job.level or max(curve, key=lambda item: curve[item].mean)
    startup_s = statistics.median(launch.times.startup_s for launch in standing.launches)
    waits = [item.ttft_s.max for item in measured(standing) if item.concurrency == level and item.ttft_s is not None]
    ramp_s = statistics.fmean(waits) if waits else 0.0
    fixed_s = startup_s + ramp_s
    share = math.ceil(job.completions / servers)
    left = residual_lengths if share > level else whole_lengths
    residual = left(min(level, share), job.output_tokens, job.output_tokens_variation)

    def busy(speed: float) -> tuple[float, float]:
        """Seconds of the steady phase and of the tail, if the whole curve is as fast as ``speed`` at the level."""
        scale = speed / curve[level].mean
        tail_s = tail_seconds(residual, {at: value.mean * scale for at, value in curve.items()})
        steady_tokens = max(0.0, share * job.output_tokens - float(residual.sum())) if share > level else 0.0
        return steady_tokens / speed, tail_s

    speed = curve[level]
    mean, low, high = (
        fixed_s + sum(busy(value)) if value > 0 else math.inf for value in (speed.mean, speed.high, speed.low)
    )
    wall_s = Interval(mean, low, high, "from the interval of the throughput")
    used = servers * each
    gpu_hours = _times(wall_s, used / 3600)
    return Estimate(
        label=standing.label,
        level=level,
        servers=servers,
        output_tok_per_s=speed,
        wall_s=wall_s,
        gpu_hours=gpu_hours,
        cost=None if job.price_per_hour is None else _times(gpu_hours, job.price_per_hour),
        startup_s=startup_s,
        ramp_s=ramp_s,
        tail_s=busy(speed.mean)[1],
    )


def residual_lengths(count: int, mean: float, variation: float) -> NDArray[np.float64]:
    """What ``count`` requests in flight still have to write at a random moment, in tokens, sorted.

    Lengths are taken as lognormal. What is left of a request in flight has the density ``(1 - F(x)) / mean`` (renewal
    theory: a long request is met more often, at any point of it); its quantiles at (i - 1/2) / count stand for a draw.
    """
    quantiles = (np.arange(count) + 0.5) / count
    if variation <= 0:
        return quantiles * mean
    mu, sigma = _lognormal(mean, variation)
    lengths = np.geomspace(mean * 1e-4, mean * math.exp(8 * sigma), 4000)
    logs = (np.log(lengths) - mu) / sigma
    reached = (lengths * stats.norm.sf(logs) + mean * stats.norm.cdf(logs - sigma)) / mean
    return np.interp(quantiles, reached, lengths)


def whole_lengths(count: int, mean: float, variation: float) -> NDArray[np.float64]:
    """Lengths of ``count`` requests that all begin together, in tokens, sorted; quantiles as above."""
    mu, sigma = _lognormal(mean, variation)
    found: NDArray[np.float64] = np.exp(mu + sigma * stats.norm.ppf((np.arange(count) + 0.5) / count))
    return found


def _lognormal(mean: float, variation: float) -> tuple[float, float]:
    """Mean and standard deviation of the logarithm, from mean and variation of the lengths."""
    sigma = math.sqrt(math.log1p(variation**2))
    return math.log(mean) - sigma**2 / 2, sigma


def tail_seconds(residual: NDArray[np.float64], curve: Mapping[int, float]) -> float:
    """From the last request sent until the longest is done, with ever fewer in flight.

    Args:
        residual: tokens left of each request in flight, sorted.
        curve: output tokens per second by requests in flight; in between it is taken as straight, from 0 at 0 on.
    """
    in_flight = np.arange(len(residual), 0, -1)
    levels = sorted(curve)
    speed = np.interp(in_flight, [0, *levels], [0.0, *(curve[level] for level in levels)])
    steps = np.diff(residual, prepend=0.0)
    return float((steps * in_flight / speed).sum())


def doubts(run: Run, job: Job) -> list[str]:
    """Why the plan may be wrong, one sentence each."""
    shown = standings(run)
    found = [
        f"Not everything behind these numbers is real: {', '.join(marks)}."
        for marks in [origins(_launches(shown))]
        if marks
    ]
    items = [item for standing in shown for item in measured(standing) if item.requests_ok]
    for noun, wanted, seen, setting in (
        ("output", job.output_tokens, [m.output_tokens / m.requests_ok for m in items], "workload.output_tokens"),
        (
            "prompt",
            job.prompt_tokens,
            [m.prompt_tokens / m.requests_ok for m in items],
            "workload.prompts.input_tokens",
        ),
    ):
        mean = statistics.fmean(seen) if seen else 0.0
        if wanted and mean and abs(mean / wanted - 1) > LENGTH_TOLERANCE:
            found.append(
                f"Measured with {mean:.0f} {noun} tokens a request, the job has {wanted:.0f}: context length and the "
                f"share of prefill differ, so run the sweep again with {setting}={wanted:.0f} before relying on this."
            )
    if not all(standing.again for standing in shown):
        found.append("Nothing was measured again, so the best configuration probably looks faster than it is.")
    return found + _room(shown, job) + _rising(shown, job)


def _room(shown: Sequence[Standing], job: Job) -> list[str]:
    """Whether the KV cache holds the job's requests at the level."""
    found = []
    for standing in shown[:1]:
        facts = standing.launches[0].facts
        level = job.level or max((m.concurrency or 0 for m in measured(standing)), default=0)
        # Half of the output is written on average while a request is in flight.
        need = level * ((job.prompt_tokens or 0) + job.output_tokens / 2)
        if facts is not None and facts.kv_tokens and need > facts.kv_tokens:
            found.append(
                f"The {standing.label} holds {facts.kv_tokens:,} tokens of KV cache and {level} such requests need "
                f"about {need:,.0f}: requests would be thrown back, and the job would take longer."
            )
    return found


def _rising(shown: Sequence[Standing], job: Job) -> list[str]:
    speeds = by_load(shown[:1], "output_tok_per_s")
    curve = sorted((level, value.mean) for (_, level), value in speeds.items())
    if job.level is None and len(curve) > 1 and curve[-1][1] > curve[-2][1] * 1.05:
        return [
            f"Throughput still rises at the busiest level that was measured, {curve[-1][0]} in flight: a higher one in "
            "workload.levels may be faster."
        ]
    return []


def _launches(shown: Sequence[Standing]) -> list[TrialRecord]:
    return [launch for standing in shown for launch in standing.launches]


def _times(value: Interval, factor: float) -> Interval:
    return Interval(value.mean * factor, value.low * factor, value.high * factor, value.method)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        run = load(options.run)
        job = _job(options, run)
        found = estimate(run, job)
    except AnalysisError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(
            json.dumps({"job": asdict(job), "estimates": [asdict(item) for item in found], "doubts": doubts(run, job)})
        )
    else:
        _show(run, job, found)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m analysis.plan", description="Plan a job with a run's results.")
    parser.add_argument("run", type=Path, help="folder of the run, results/EXPERIMENT/RUN")
    parser.add_argument("--completions", type=int, required=True, help="requests of the job")
    parser.add_argument("--mean-output-tokens", type=float, required=True, help="tokens written per request, mean")
    parser.add_argument("--mean-prompt-tokens", type=float, help="tokens read per request, mean; only to warn")
    parser.add_argument(
        "--output-tokens-variation",
        type=float,
        default=1.0,
        help="standard deviation of the output lengths over their mean, for the tail (default 1, as thinking traces "
        "spread widely; 0: all alike)",
    )
    parser.add_argument("--gpus", type=int, default=1, help="GPUs at work at the same time (default 1)")
    parser.add_argument("--level", type=int, help="requests in flight at each server (default: the fastest measured)")
    parser.add_argument("--price", type=float, help="of one GPU and hour (default: the experiment's)")
    parser.add_argument("--currency", help="of the price (default: the experiment's)")
    parser.add_argument("--json", action="store_true", help="print JSON with units in the keys")
    return parser


def _job(options: argparse.Namespace, run: Run) -> Job:
    for name in ("completions", "mean_output_tokens", "gpus"):
        if getattr(options, name) <= 0:
            raise AnalysisError(f"--{name.replace('_', '-')} is {getattr(options, name)}; it has to be above 0")
    if options.output_tokens_variation < 0:
        raise AnalysisError(f"--output-tokens-variation is {options.output_tokens_variation}; it has to be 0 or more")
    price = options.price if options.price is not None else run.setting("hardware", "price_per_hour")
    return Job(
        completions=options.completions,
        output_tokens=options.mean_output_tokens,
        output_tokens_variation=options.output_tokens_variation,
        prompt_tokens=options.mean_prompt_tokens,
        gpus=options.gpus,
        level=options.level,
        price_per_hour=price if isinstance(price, (int, float)) else None,
        currency=options.currency or str(run.setting("hardware", "currency") or "USD"),
    )


def _show(run: Run, job: Job, found: Sequence[Estimate]) -> None:
    console = words.console()
    tokens = job.completions * job.output_tokens
    console.print(
        f"{job.completions:,} completions of {job.output_tokens:,.0f} tokens, {tokens / 1e9:.3g} billion tokens, on "
        f"{words.counted(job.gpus, 'GPU')}; 95 % intervals",
        highlight=False,
    )
    table = Table(box=None, pad_edge=False)
    for name in (
        "configuration",
        "in flight",
        "output tokens/s",
        "wall time (h)",
        "GPU-hours",
        f"cost ({job.currency})",
    ):
        table.add_column(name)
    for item in found:
        table.add_row(
            item.label,
            f"{item.servers} x {item.level}",
            words.interval(item.output_tok_per_s),
            words.interval(_times(item.wall_s, 1 / 3600)),
            words.interval(item.gpu_hours),
            "no price given" if item.cost is None else words.interval(item.cost),
        )
    console.print(table)
    first = found[0]
    console.print(
        f"Of the {first.label}'s time {words.duration(first.startup_s)} are start-up, {words.seconds(first.ramp_s)} "
        f"the first wave and {words.duration(first.tail_s)} the tail, in which the last requests finish (lengths "
        f"lognormal, deviation {job.output_tokens_variation:g} times the mean).",
        highlight=False,
    )
    for text in doubts(run, job):
        console.print(f"! {text}", markup=False, highlight=False)


if __name__ == "__main__":
    sys.exit(main())
