"""Report: one screen for a person, and one JSON object for a program, of a measured level."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from rich.console import Console
from rich.table import Table

from bench.load.driver import Job
from bench.load.level import LevelResult
from bench.load.measurement import Interval, Measurement, Summary
from bench.load.thresholds import Threshold
from bench.records import to_plain

LAW_NAMES = {
    "ttft_s": "ttft_s",
    "ttft_sched_s": "ttft_scheduled_s",
    "ttfat_s": "ttfat_s",
    "icl_s": "icl_s",
    "itl_s": "itl_s",
    "tpot_s": "tpot_s",
    "e2e_s": "e2e_s",
    "e2e_sched_s": "e2e_scheduled_s",
}


_PLAIN: dict[str, Any] = {"highlight": False, "soft_wrap": True}


def wilson(good: int, count: int) -> tuple[float, float]:
    """95 % interval of a share (Wilson 1927)."""
    if not count:
        return 0.0, 1.0
    z, share = 1.959964, good / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return middle - half, middle + half


def goodput(result: LevelResult, slos: Sequence[Threshold]) -> dict[str, Any]:
    """Requests and tokens per second of those that met every objective. Failed and unfinished requests met none.

    Args:
        slos: on single requests: ``ttft``, ``tpot``, ``e2e``, with their upper limits.
    """
    measurement = result.measurement
    assert measurement is not None
    rows = [row for row in result.requests.to_pylist() if _concerned(row, measurement.window_s)]
    good = [row for row in rows if row["status"] == "ok" and all(_meets(row, slo) for slo in slos)]
    low, high = wilson(len(good), len(rows))
    return {
        "slos": [slo.text for slo in slos],
        "goodput_request_per_s": len(good) / measurement.window_s,
        "goodput_tok_per_s": sum(row["output_tokens"] for row in good) / measurement.window_s,
        "slo_attainment": {
            "share": len(good) / len(rows) if rows else None,
            "low": low,
            "high": high,
            "requests": len(rows),
            "method": "Wilson",
        },
    }


def _concerned(row: dict[str, Any], window_s: float) -> bool:
    """Due in the window (open loop), or ended in it; an aborted request of a closed loop ended after it."""
    if row["scheduled_s"] is not None:
        return 0 < float(row["scheduled_s"]) <= window_s
    if row["status"] == "failed":
        return 0 < float(row["ended_s"] or 0.0) <= window_s
    return bool(row["finished_in_window"])


def _meets(row: dict[str, Any], slo: Threshold) -> bool:
    begin_s = row["sent_s"] if row["scheduled_s"] is None else row["scheduled_s"]
    if slo.name == "tpot":
        more = row["output_tokens"] - row["first_chunk_tokens"]
        if more <= 0:
            return True  # a reply of one chunk has no time per token, so none that is too long
        value = (row["last_token_s"] - row["first_token_s"]) / more
    elif slo.name == "ttft":
        value = (row["first_token_s"] if row["first_token_s"] is not None else math.inf) - begin_s
    else:
        value = row["last_token_s"] - begin_s
    return bool(value < slo.limit)


def plain(
    job: Job,
    result: LevelResult,
    slos: Sequence[Threshold],
    thresholds: Sequence[Threshold],
    *,
    simulated: bool = False,
) -> dict[str, Any]:
    """All figures, units in their names, and what was really done to get them.

    Args:
        simulated: the server was a simulator.
    """
    got = result.measurement
    report: dict[str, Any] = {
        "schema_version": 1,
        "simulated": simulated,
        "target": {"base_url": job.target.base_url, "route": job.target.route, "model": job.target.model},
        "pattern": {**to_plain(job.pattern), "trace": len(job.pattern.trace)},
        "workload": to_plain(job.workload),
        "processes": job.shards,
        "failure": to_plain(result.failure),
        "requests_all": _statuses(result.requests),
    }
    if got is None:
        return report
    seconds = got.window_s
    report |= {law: to_plain(getattr(got, name)) for law, name in LAW_NAMES.items()}
    report |= {
        "output_tok_per_s": _interval(got.output_tok_per_s),
        "server_tok_per_s": got.server_output_tok_per_s,
        "accept_length": got.acceptance_length,
        "accept_length_simulated": got.acceptance_simulated,
        "accepted_drafts_histogram": list(got.accepted_histogram),
        "request_per_s": got.request_per_s,
        "input_tok_per_s": {
            "uncached": (got.prompt_tokens - got.cached_tokens) / seconds,
            "cached": got.cached_tokens / seconds,
        },
        "intervals": {name: _interval(interval) for name, interval in got.intervals},
        **goodput(result, slos),
    }
    shown = {"pattern", "output_tok_per_s", "request_per_s", "intervals", "accepted_histogram", *LAW_NAMES.values()}
    report |= {name: value for name, value in to_plain(got).items() if name not in shown}
    report["sent"] = _sent(result.requests, got)
    report["thresholds"] = [
        {"threshold": item.text, "value": item.value(got), "holds": item.holds(got)} for item in thresholds
    ]
    return report


def _statuses(requests: pa.Table) -> dict[str, int]:
    counts = {"ok": 0, "failed": 0, "aborted": 0}
    for status in requests["status"].to_pylist():
        counts[status] += 1
    return counts


def _sent(requests: pa.Table, got: Measurement) -> dict[str, float | None]:
    """What was really sent, from the recorded times: of the whole level, warm-up included."""
    sent = sorted(time for time in requests["sent_s"].to_pylist() if time is not None)
    late = [
        sent_s - due_s
        for sent_s, due_s in zip(requests["sent_s"].to_pylist(), requests["scheduled_s"].to_pylist(), strict=True)
        if sent_s is not None and due_s is not None
    ]
    span_s = sent[-1] - sent[0] if len(sent) > 1 else 0.0
    return {
        "requests": len(sent),
        "request_per_s": (len(sent) - 1) / span_s if span_s else None,
        "in_flight_mean": got.in_flight_mean,
        "late_mean_s": sum(late) / len(late) if late else None,
        "late_max_s": max(late) if late else None,
    }


def _interval(interval: Interval) -> dict[str, Any]:
    return {**to_plain(interval), "relative_half_width": interval.relative_half_width}


def show(
    console: Console,
    result: LevelResult,
    slos: Sequence[Threshold],
    thresholds: Sequence[Threshold],
    *,
    simulated: bool = False,
) -> None:
    """Print one screen; ``simulated``: the server was a simulator."""
    got = result.measurement
    if simulated:
        console.print("[bold red]SIMULATED[/]: the server is a simulator; no GPU and no engine is measured", **_PLAIN)
    if result.failure is not None:
        console.print(f"[red]failed[/]: {result.failure.cause}: {result.failure.detail}", **_PLAIN)
    if got is None:
        return
    rate, asked = got.output_tok_per_s, got.request_rate_per_s
    load = f"{asked:g} requests/s" if asked is not None else f"{got.concurrency or got.in_flight_mean:.4g} in flight"
    console.print(
        f"[bold]{got.pattern}[/], {load}: window {got.window_s:.1f} s after {got.warmup_s:.1f} s of warm-up, "
        f"seed {got.seed}, prompts {got.prompts_hash}",
        **_PLAIN,
    )
    console.print(
        f"[bold]{rate.mean:,.1f} output tok/s{' (simulated)' if simulated else ''}[/] "
        f"± {100 * rate.relative_half_width:.1f} % (95 %; {rate.method})",
        **_PLAIN,
    )
    facts = [f"{got.request_per_s:.2f} requests/s", f"{got.in_flight_mean:.1f} in flight"]
    if got.server_output_tok_per_s is not None:
        facts.append(f"server counts {got.server_output_tok_per_s:,.1f} tok/s")
    if got.acceptance_length is not None:
        mark = " (simulated)" if got.acceptance_simulated else ""
        facts.append(f"acceptance length {got.acceptance_length:.3f}{mark}")
    if got.step_time_s is not None:
        facts.append(f"step {got.step_time_s * 1e3:.2f} ms")
    console.print(" · ".join(facts), **_PLAIN)
    console.print(_latencies(got))
    console.print(
        f"requests: {got.requests_ok} ok, {got.requests_failed} failed · tokens: {got.output_tokens:,} out, "
        f"{got.prompt_tokens:,} in, {got.cached_tokens:,} of them cached · {got.retractions} retractions",
        **_PLAIN,
    )
    if slos:
        good = goodput(result, slos)
        share = good["slo_attainment"]
        console.print(
            f"goodput: {good['goodput_request_per_s']:.2f} requests/s, {good['goodput_tok_per_s']:,.1f} tok/s; "
            f"{100 * (share['share'] or 0):.1f} % ({100 * share['low']:.1f} to {100 * share['high']:.1f}) of "
            f"{share['requests']} met {', '.join(good['slos'])}",
            **_PLAIN,
        )
    if not got.valid:
        console.print("[red]void: these numbers must not be used[/]")
    for warning in got.warnings:
        console.print(f"[yellow]![/] {warning}", **_PLAIN)
    for item in thresholds:
        value = item.value(got)
        seen = "not measured" if value is None else f"{value:.6g}"
        mark = "[green]✓[/]" if item.holds(got) else "[red]✗[/]"
        console.print(f"{mark} {item.text} (measured: {seen})", **_PLAIN)


def _latencies(got: Measurement) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("ms")
    for name in ("mean", "p50", "p90", "p95", "p99", "max", "samples"):
        table.add_column(name, justify="right")
    for law, name in LAW_NAMES.items():
        summary: Summary | None = getattr(got, name)
        if summary is None:
            continue
        values = (summary.mean, summary.p50, summary.p90, summary.p95, summary.p99, summary.max)
        table.add_row(law.removesuffix("_s"), *(f"{value * 1e3:,.2f}" for value in values), f"{summary.count:,}")
    return table
