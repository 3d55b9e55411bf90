"""``python -m bench.load --url http://host:port``: measure a running server.

Exit codes: 0 measured; 1 the level failed or its numbers are void; 2 bad arguments; 99 a threshold was not met (as
k6 has it); 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pyarrow.parquet
from rich.console import Console

from bench.engines.protocol import ServerCounters
from bench.experiment import PromptSpec, WorkloadSpec
from bench.load import prompts, report, thresholds, traces
from bench.load.driver import Job
from bench.load.level import LevelResult, Progress, measure_pattern
from bench.load.patterns import BATCH, CLOSED, RATED, TRACE, Pattern
from bench.load.target import ROUTES, Target
from bench.words import Parser

THRESHOLD_MISSED = 99
_MIN_WINDOW_S = 10.0
_GENERATED = re.compile(r"^\w+:generation_tokens_total(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
_PROGRESS_EVERY_S = 0.5
_SERVER_INFO_S = 5.0  # SGLang answers in milliseconds; a server that does not is measured all the same


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        job = _job(options)
        slos = [thresholds.parse_slo(text) for text in options.slo]
        limits = [thresholds.parse(text) for text in options.threshold]
        job.prompts()[0]
        job.target.address  # noqa: B018 - raises for what is no address
        for path in (options.json, options.parquet):
            if path is not None and not path.absolute().parent.is_dir():
                raise ValueError(f"{path}: there is no folder {path.absolute().parent}")
    except ValueError as error:
        parser.error(str(error))
    try:
        job, result, simulated = _run(_measure(job, options))
    except ValueError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        return 130
    report.show(Console(), result, slos, limits, simulated=simulated)
    if options.json is not None:
        found = report.plain(job, result, slos, limits, simulated=simulated)
        options.json.write_bytes(orjson.dumps(found, option=orjson.OPT_INDENT_2))
    if options.parquet is not None:
        pyarrow.parquet.write_table(result.requests, options.parquet)
    if result.failure is not None or result.measurement is None or not result.measurement.valid:
        return 1
    return 0 if all(item.holds(result.measurement) for item in limits) else THRESHOLD_MISSED


def _run(work: Coroutine[Any, Any, tuple[Job, LevelResult, bool]]) -> tuple[Job, LevelResult, bool]:
    try:
        import uvloop  # not on every platform
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m bench.load",
        usage="python -m bench.load --url URL [--concurrency N | --rate R | --requests N | --trace FILE] [options]",
        description="Measure a running server: SGLang, or any other with the OpenAI routes.",
        epilog="Exit codes: 0 measured, 1 failed or void, 2 bad arguments, 99 a threshold was not met.",
    )
    add = parser.add_argument
    add("--url", required=True, help="http://host:port")
    add("--route", choices=ROUTES, default="generate", help="SGLang's own (default), or one of OpenAI's")
    add("--model", help="name for the OpenAI routes (default: the first that the server lists)")
    add("--header", action="append", default=[], metavar="NAME: VALUE", help="more request headers")
    load = parser.add_argument_group("load")
    add = load.add_argument
    add(
        "--pattern", choices=(CLOSED, *RATED, BATCH), help="default: closed; poisson with --rate; batch with --requests"
    )
    add("--concurrency", type=int, help="requests in flight (closed, batch)")
    add("--rate", type=float, help="requests per second, whatever the server does (poisson, gamma, constant)")
    add("--burstiness", type=float, default=1.0, help="of gamma: 1 is Poisson, less is burstier")
    add("--trace", metavar="FILE", help="send what was recorded: Mooncake's JSON lines or BurstGPT's CSV")
    add("--trace-speed", type=float, default=1.0, help="2 sends it twice as fast")
    add("--ramp", type=float, default=0.0, metavar="SECONDS", help="the rate grows from zero for so long")
    add("--requests", type=int, help="of a batch; of a trace, the first so many")
    add("--processes", type=int, default=1, help="that send (one does 100,000 chunks/s)")
    add("--seed", type=int, default=0)
    prompt = parser.add_argument_group("prompts")
    add = prompt.add_argument
    add("--prompts", choices=prompts.KINDS, default="text", help="default: the text that is shipped")
    add("--path", help="of jsonl or sharegpt prompts")
    add("--input-tokens", type=int, default=256)
    add("--input-spread", type=float, default=0.0, help="relative half-width of the lengths")
    add("--prefix-share", type=float, default=0.5, help="of shared_prefix")
    add("--vocabulary-size", type=int, help="of random_ids")
    add("--output-tokens", type=int, default=256)
    add("--output-spread", type=float, default=0.0)
    add("--stop-at-eos", action="store_true", help="let replies end where the model ends them")
    add("--temperature", type=float, default=0.0)
    window = parser.add_argument_group("window")
    add = window.add_argument
    add("--min-window", type=float, metavar="SECONDS", help="default: 10, or --max-window if that is less")
    add("--max-window", type=float, default=60.0, metavar="SECONDS")
    add("--max-warmup", type=float, default=120.0, metavar="SECONDS")
    add("--precision", type=float, default=0.01, help="stop once tok/s is known to this relative half-width")
    add("--stall-timeout", type=float, default=120.0, metavar="SECONDS")
    add("--time-scale", type=float, default=1.0, help="of a simulated server's clock")
    output = parser.add_argument_group("output")
    add = output.add_argument
    add("--json", type=Path, metavar="FILE", help="every metric, units in the names")
    add("--parquet", type=Path, metavar="FILE", help="one row per request")
    add("--threshold", action="append", default=[], metavar="'p95(ttft)<500ms'", help="exit with 99 if not met")
    add("--slo", action="append", default=[], metavar="'ttft<500ms'", help="of each request, for the goodput")
    add("--quiet", action="store_true", help="no progress")
    return parser


def _job(options: argparse.Namespace) -> Job:
    if options.min_window is None:
        options.min_window = min(_MIN_WINDOW_S, options.max_window)
    if options.min_window > options.max_window:
        raise ValueError(f"--min-window {options.min_window:g} is longer than --max-window {options.max_window:g}")
    if options.processes < 1:
        raise ValueError(f"--processes {options.processes}: expected 1 or more")
    for name in ("input_tokens", "output_tokens", "min_window", "max_window", "max_warmup", "precision", "time_scale"):
        if getattr(options, name) <= 0:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(options, name)}: expected more than 0")
    for name in ("input_spread", "output_spread", "prefix_share"):
        if not 0 <= getattr(options, name) <= 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(options, name)}: expected 0 to 1")
    pattern = _pattern(options)
    if pattern.concurrency is not None and pattern.concurrency < options.processes:
        raise ValueError(f"--processes {options.processes}: more than the concurrency of {pattern.concurrency}")
    headers = []
    for header in options.header:
        name, separator, value = header.partition(":")
        if not separator or "\n" in header or "\r" in header:
            raise ValueError(f"--header {name!r}: expected 'Name: value'")
        headers.append((name.strip(), value.strip()))
    spec = PromptSpec(
        options.prompts,
        options.input_tokens,
        options.input_spread,
        options.path,
        options.prefix_share if options.prompts == "shared_prefix" else 0.0,
        options.vocabulary_size,
    )
    workload = WorkloadSpec(
        name="command line",
        prompts=spec,
        levels=(pattern.concurrency,) if pattern.concurrency else (),
        output_tokens=options.output_tokens,
        output_tokens_spread=options.output_spread,
        ignore_eos=not options.stop_at_eos,
        temperature=options.temperature,
        chat=options.route == "chat",
        seed=options.seed,
        min_window_s=options.min_window,
        max_window_s=options.max_window,
        max_warmup_s=options.max_warmup,
        target_relative_half_width=options.precision,
    )
    target = Target(options.url, options.route, options.model, tuple(headers))
    return Job(target, workload, pattern, options.seed, scale=options.time_scale, shards=options.processes)


def _pattern(options: argparse.Namespace) -> Pattern:
    kind = options.pattern
    if kind is None:
        kind = "poisson" if options.rate is not None else BATCH if options.requests is not None else CLOSED
    concurrency = options.concurrency
    if options.trace is not None:
        if options.rate is not None or concurrency is not None or options.pattern is not None:
            raise ValueError(
                "--pattern, --rate and --concurrency do not go with --trace, which says when requests are sent"
            )
        if options.trace_speed <= 0:
            raise ValueError(f"--trace-speed {options.trace_speed}: expected more than 0")
        trace = traces.read(options.trace, speed=options.trace_speed, limit=options.requests)
        return Pattern(TRACE, trace=trace)
    if kind in RATED and concurrency is not None:
        raise ValueError("--concurrency goes with closed and batch; an open loop has a --rate and no limit")
    if kind not in RATED and options.rate is not None:
        raise ValueError(f"--rate goes with {', '.join(RATED)}, not with {kind}")
    if kind != BATCH and options.requests is not None:
        raise ValueError(f"--requests goes with batch, not with {kind}")
    if kind == BATCH and concurrency is None and options.requests:
        concurrency = min(options.requests, 4096)
    return Pattern(kind, concurrency, options.rate, options.burstiness, options.requests, options.ramp)


async def _measure(job: Job, options: argparse.Namespace) -> tuple[Job, LevelResult, bool]:
    """What was done, what came of it, and whether the server was a simulator."""
    base = job.target.base_url.rstrip("/").removesuffix("/v1") + "/"
    async with aiohttp.ClientSession(base, headers=dict(job.target.headers)) as session:
        target = job.target
        if target.route != "generate" and target.model is None:
            target = Target(target.base_url, target.route, await _model(session), target.headers)
        simulated = await _is_simulated(session)
        shown = sys.stderr.isatty() and not options.quiet
        result = await measure_pattern(
            target,
            job.workload,
            job.pattern,
            seed=job.seed,
            clock_scale=job.scale,
            processes=job.shards,
            read_counters=lambda: _counters(session),
            stall_timeout_s=options.stall_timeout,
            on_progress=_Meter() if shown else None,
        )
        if shown:
            print(end="\r\x1b[K", file=sys.stderr)
        job = Job(target, job.workload, job.pattern, job.seed, scale=job.scale, shards=job.shards)
        return job, result, simulated


async def _model(session: aiohttp.ClientSession) -> str | None:
    try:
        async with session.get("v1/models") as response:
            return str((await response.json())["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError, KeyError, IndexError, TypeError, ValueError):
        return None  # the first request will say what is wrong


async def _is_simulated(session: aiohttp.ClientSession) -> bool:
    """Whether the server says that it is a simulator, as this project's does; False where it says nothing."""
    try:
        async with session.get("server_info", timeout=aiohttp.ClientTimeout(total=_SERVER_INFO_S)) as response:
            info = await response.json() if response.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return False
    return isinstance(info, dict) and info.get("simulated") is True


async def _counters(session: aiohttp.ClientSession) -> ServerCounters:
    """Generated tokens of all workers, as SGLang and vLLM both name them; nothing where there is no such page."""
    async with session.get("metrics") as response:
        found = _GENERATED.findall(await response.text()) if response.status == 200 else []
    return ServerCounters(generated_tokens=sum(map(float, found)) if found else None)


class _Meter:
    """One line that says how the level stands, rewritten twice a second."""

    def __init__(self) -> None:
        self._shown_s = 0.0

    def __call__(self, progress: Progress) -> None:
        if time.monotonic() - self._shown_s < _PROGRESS_EVERY_S:
            return
        self._shown_s = time.monotonic()
        line = f"{progress.phase} {progress.elapsed_s:.1f} s · {progress.in_flight} in flight · "
        line += f"{progress.requests_finished} finished"
        interval = progress.output_tok_per_s
        if interval is not None:
            line += f" · {interval.mean:,.0f} tok/s ± {100 * interval.relative_half_width:.1f} %"
        print(end=f"\r\x1b[K{line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
