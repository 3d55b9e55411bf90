"""``python -m benchmarks.load``: how right and how cheap the load generator is, against a server that knows the truth.

Compiles ``stub_server.c`` and ``c_client.c``, pins the server to one core and the client to another, and measures each
point with the C client, with ours and with a well-tuned aiohttp in turns. Medians of the repeats go into the table of
``docs/load.md`` (``--write``). The host has to be idle, so each run waits until it is, and a point at which our client
had to wait for its core is measured again.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import os
import pickle
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
DOCUMENT = HERE.parent / "docs" / "load.md"
BEGIN, END = "<!-- python -m benchmarks.load -->", "<!-- end -->"
STREAMS, FIRST_US, SECONDS, TOKENS = 512, 50_000, 10.0, 256
CLIENTS = ("ours", "aiohttp")
IDLE_SHARE, IDLE_TIMEOUT_S = 0.9, 7200.0
MAX_QUEUED_PERCENT, MAX_TRIES = 1.0, 5


@dataclass(frozen=True)
class Point:
    """A load: chunks per second over all streams, tokens in each chunk, all streams at once or each in its own time."""

    chunks_per_s: int
    tokens_per_chunk: int
    burst: bool

    @property
    def gap_us(self) -> int:
        return round(STREAMS / self.chunks_per_s * 1e6)

    @property
    def name(self) -> str:
        return f"{self.chunks_per_s // 1000}k × {self.tokens_per_chunk}" + (" burst" if self.burst else "")


POINTS = (
    Point(20_000, 1, burst=False),
    Point(40_000, 1, burst=False),
    Point(80_000, 1, burst=False),
    Point(100_000, 1, burst=False),
    Point(20_000, 4, burst=False),
    Point(100_000, 4, burst=False),
    Point(20_000, 1, burst=True),
    Point(40_000, 1, burst=True),
    Point(20_000, 4, burst=True),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--points", help="only these, by name, e.g. '20k × 1,20k × 1 burst'")
    parser.add_argument("--write", action="store_true", help="put the table into docs/load.md")
    parser.add_argument("--client", nargs=4, metavar=("NAME", "PORT", "TOKENS", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        name, port, tokens, file = options.client
        {"ours": _ours, "aiohttp": _aiohttp}[name](int(port), int(tokens), Path(file))
        return
    points = [point for point in POINTS if not options.points or point.name in options.points.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        found: dict[Point, list[dict[str, float]]] = {point: [] for point in points}
        for repeat in range(options.repeats):
            for point in points:
                row = bench.measure_undisturbed(point)
                found[point].append(row)
                print(f"{repeat + 1}/{options.repeats} {point.name}: " + _line(row), file=sys.stderr, flush=True)
    text = _table(found, options.repeats)
    print(text)
    if options.write:
        document = DOCUMENT.read_text()
        before, _, rest = document.partition(BEGIN)
        _, _, after = rest.partition(END)
        DOCUMENT.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


class Bench:
    """The two C programs, and one point measured by all clients."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("stub_server", "c_client"):
            subprocess.run(["cc", "-O2", "-o", folder / name, HERE / f"{name}.c"], check=True)
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < 2:
            raise SystemExit("two cores are needed, one for the server and one for the client")
        self.server_core, self.client_core = cores[0], cores[1]

    def measure_undisturbed(self, point: Point) -> dict[str, float]:
        """Measure until nothing else wanted our client's core, a few times at most; the least disturbed of them."""
        rows: list[dict[str, float]] = []
        while len(rows) < MAX_TRIES and all(row["ours_queued_percent"] > MAX_QUEUED_PERCENT for row in rows):
            rows.append(self.measure(point))
        return min(rows, key=lambda row: row["ours_queued_percent"])

    def measure(self, point: Point) -> dict[str, float]:
        row: dict[str, float] = {}
        with self._server(point) as (port, _):
            command = [self.folder / "c_client", port, STREAMS, TOKENS, SECONDS + 2]
            output = self._client(command).split()
            row["c_us"] = float(output[2]) / float(output[0])
            row["c_chunks_per_s"] = float(output[0]) / float(output[3])
        for name in CLIENTS:
            result = self.folder / f"{name}.pickle"
            with self._server(point) as (port, truth):
                own = [sys.executable, "-m", "benchmarks.load", "--client", name, port, TOKENS, result]
                self._client(own)
            seen = pickle.loads(result.read_bytes())
            row |= {f"{name}_{key}": value for key, value in _compare(seen, np.fromfile(truth, np.int64)).items()}
        return row

    @contextmanager
    def _server(self, point: Point) -> Iterator[tuple[int, Path]]:
        _wait_until_idle()
        truth = self.folder / "truth.bin"
        arguments = [point.tokens_per_chunk, FIRST_US, point.gap_us, int(point.burst), truth]
        server = subprocess.Popen(
            [str(self.folder / "stub_server"), *map(str, arguments)], stdout=subprocess.PIPE, text=True
        )
        os.sched_setaffinity(server.pid, {self.server_core})
        assert server.stdout is not None
        try:
            yield int(server.stdout.readline()), truth
        finally:
            server.terminate()
            server.wait(timeout=30)

    def _client(self, command: list[Any]) -> str:
        pinned = ["taskset", "-c", str(self.client_core), *map(str, command)]
        return subprocess.run(pinned, check=True, capture_output=True, text=True, cwd=HERE.parent).stdout


def _wait_until_idle() -> None:
    """Wait until the host has been nine tenths idle for half a second."""
    deadline = time.monotonic() + IDLE_TIMEOUT_S
    while True:
        before = _processor_times()
        time.sleep(0.5)
        busy, idle = (after - earlier for after, earlier in zip(_processor_times(), before, strict=True))
        if idle >= IDLE_SHARE * (busy + idle):
            return
        if time.monotonic() > deadline:
            raise SystemExit(f"the host was not idle for {IDLE_TIMEOUT_S:g} s: {100 * busy / (busy + idle):.0f} % busy")


def _processor_times() -> tuple[int, int]:
    """Busy and idle ticks of all cores since the start."""
    values = [int(value) for value in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    idle = values[3] + values[4]
    return sum(values) - idle, idle


# --- clients, each in a process of its own ------------------------------------------------------------------------


def _ours(port: int, tokens: int, file: Path) -> None:
    """A level as it is always measured; the evidence is kept for the comparison."""
    import uvloop

    from bench.experiment import PromptSpec, WorkloadSpec
    from bench.load import level
    from bench.load.evidence import Evidence
    from bench.load.measurement import Measurement
    from bench.load.target import Target

    kept: list[Evidence] = []
    evaluate = level.evaluate

    def keep(seen: Evidence) -> Measurement:
        kept.append(seen)
        return evaluate(seen)

    level.evaluate = keep
    workload = WorkloadSpec(
        "benchmark", PromptSpec("text", 64), (STREAMS,), tokens, chat=True, min_window_s=SECONDS, max_window_s=SECONDS
    )
    target = Target(f"http://127.0.0.1:{port}", "chat")
    result = uvloop.run(level.measure_level(target, workload, STREAMS, seed=1))
    seen, got = kept[0], result.measurement
    assert got is not None
    prompts = seen.job.prompts()
    inside = (seen.chunks[:, 1] > seen.start_ns) & (seen.chunks[:, 1] <= seen.end_ns)
    _keep(
        file,
        start_ns=seen.start_ns,
        end_ns=seen.end_ns,
        chunks=[(row[0], row[1], row[3]) for row in seen.chunks.tolist()],
        requests={
            s.index: (_note(prompts[s.index].text or ""), s.sent_ns, s.first_ns, s.last_ns, s.tokens, s.ok)
            for s in seen.streams
        },
        queued_percent=100 * (seen.queued_share or 0),
        us=(seen.cpu_share or 0) * got.window_s / inside.sum() * 1e6,
        user_lag_p99_ms=(got.client_lag_p99_s or 0) * 1e3,
        output_tok_per_s=got.output_tok_per_s.mean,
        ttft=(got.ttft_s.mean, got.ttft_s.p99) if got.ttft_s else (0, 0),
        itl=got.itl_s.mean if got.itl_s else float("nan"),
        tpot=got.tpot_s.mean if got.tpot_s else float("nan"),
        acceptance=got.acceptance_length or float("nan"),
        failed=got.requests_failed,
        valid=got.valid,
    )


def _aiohttp(port: int, tokens: int, file: Path) -> None:
    """aiohttp as well as it can be set up: one session without limits, a large buffer, uvloop, orjson, connections
    opened before the clock, no garbage collection, a stamp per read.
    """
    import aiohttp
    import orjson
    import uvloop

    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    chunks: list[tuple[int, int, int]] = []
    requests: dict[int, tuple[int, int, int, int, int, bool]] = {}

    async def ask(session: aiohttp.ClientSession, number: int, limit: int) -> None:
        note = 200_000_000 + number
        body = {"max_tokens": limit, "stream": True, "messages": [{"role": "user", "content": f"Note {note}."}]}
        sent_ns, first_ns, last_ns, seen, rest = time.time_ns(), 0, 0, 0, b""
        async with session.post(url, data=orjson.dumps(body)) as response:
            async for data in response.content.iter_any():
                now_ns = time.time_ns()
                *events, rest = (rest + data).split(b"\n\n")
                for event in events:
                    if event == b"data: [DONE]":
                        continue
                    count = orjson.loads(event[6:])["usage"]["completion_tokens"]
                    if count > seen:
                        chunks.append((number, now_ns, count - seen))
                        seen, first_ns, last_ns = count, first_ns or now_ns, now_ns
        requests[number] = (note, sent_ns, first_ns, last_ns, seen, True)

    async def run() -> tuple[int, int, float]:
        numbers = iter(range(10**9))
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, read_bufsize=2**22) as session:
            await asyncio.gather(*(ask(session, next(numbers), 1) for _ in range(STREAMS)))

            async def worker(place: int) -> None:
                limit = 1 + int((place + 0.5) * tokens / STREAMS)
                while True:
                    await ask(session, next(numbers), limit)
                    limit = tokens

            gc.freeze()
            gc.disable()
            workers = [asyncio.create_task(worker(place)) for place in range(STREAMS)]
            await asyncio.sleep(2)
            start_ns, cpu_s = time.time_ns(), time.process_time()
            await asyncio.sleep(SECONDS)
            end_ns, cpu_s = time.time_ns(), time.process_time() - cpu_s
            for task in workers:
                task.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            return start_ns, end_ns, cpu_s

    start_ns, end_ns, cpu_s = uvloop.run(run())
    inside = [chunk for chunk in chunks if start_ns < chunk[1] <= end_ns]
    first = np.array([r[2] - r[1] for r in requests.values() if start_ns < r[2] <= end_ns]) * 1e-9
    _keep(
        file,
        start_ns=start_ns,
        end_ns=end_ns,
        chunks=chunks,
        requests=requests,
        us=cpu_s / len(inside) * 1e6,
        output_tok_per_s=sum(chunk[2] for chunk in inside) / ((end_ns - start_ns) * 1e-9),
        ttft=(first.mean(), np.quantile(first, 0.99)) if len(first) else (0, 0),
    )


def _note(text: str) -> int:
    return int(text.removeprefix("Note ").partition(".")[0])


def _keep(file: Path, **values: Any) -> None:
    file.write_bytes(pickle.dumps(values))


# --- comparison ---------------------------------------------------------------------------------------------------


def _compare(seen: dict[str, Any], truth: np.ndarray) -> dict[str, float]:
    """What a client saw less what the server did, over the client's window and its requests."""
    records = truth.reshape(-1, 3)
    asked = {int(note): int(read_ns) for kind, note, read_ns in records if kind == -1}
    written: dict[int, list[tuple[int, int]]] = {}
    for note, sent_ns, tokens in records[records[:, 0] != -1].tolist():
        written.setdefault(note, []).append((sent_ns, tokens))
    start_ns, end_ns = seen["start_ns"], seen["end_ns"]
    arrived: dict[int, list[tuple[int, int]]] = {}
    for index, arrival_ns, tokens in seen["chunks"]:
        arrived.setdefault(index, []).append((arrival_ns, tokens))
    notes = [request[0] for request in seen["requests"].values()]
    twice = {note for note in notes if notes.count(note) > 1} if len(set(notes)) < len(notes) else set()
    delays, gaps, gap_tokens, first, tpot = [], [], [], [], []
    accepted = steps = wrong = 0
    for index, (note, _, first_ns, last_ns, tokens, ok) in seen["requests"].items():
        if note in twice or note not in written:
            continue
        sent = written[note]
        for (arrival_ns, _), (sent_ns, _) in zip(arrived.get(index, ()), sent, strict=False):
            if start_ns < arrival_ns <= end_ns:
                delays.append(arrival_ns - sent_ns)
        for (before_ns, before), (after_ns, after) in itertools.pairwise(sent):
            if start_ns < after_ns <= end_ns:
                gaps.append(after_ns - before_ns)
                gap_tokens.append(after - before)
        if start_ns < first_ns <= end_ns:
            first.append(sent[0][0] - asked[note])
        if ok and start_ns < last_ns <= end_ns:
            wrong += tokens != sent[-1][1]
            accepted += tokens - 1
            steps += len(sent) - 1
            if len(sent) > 1:
                tpot.append((sent[-1][0] - sent[0][0]) / (sent[-1][1] - sent[0][1]))
    true_first = np.array(first) * 1e-9
    inside = records[(records[:, 0] != -1) & (records[:, 1] > start_ns) & (records[:, 1] <= end_ns)]
    counts = np.array([b - a for chunks in written.values() for a, b in _pairs([c for _, c in chunks])])
    times = np.array([t for chunks in written.values() for t, _ in chunks])
    true_rate = counts[(times > start_ns) & (times <= end_ns)].sum() / ((end_ns - start_ns) * 1e-9)
    found = {
        "us": seen["us"],
        "chunks_per_s": len(inside) / ((end_ns - start_ns) * 1e-9),
        "busy_percent": seen["us"] * len(delays) / ((end_ns - start_ns) * 1e-9) / 1e4,
        "delay_p50_ms": float(np.quantile(delays, 0.5)) * 1e-6,
        "delay_p99_ms": float(np.quantile(delays, 0.99)) * 1e-6,
        "ttft_mean_error_ms": (seen["ttft"][0] - true_first.mean()) * 1e3,
        "ttft_p99_error_ms": (seen["ttft"][1] - np.quantile(true_first, 0.99)) * 1e3,
        "tok_per_s_error_percent": 100 * (seen["output_tok_per_s"] / true_rate - 1),
        "miscounted": wrong,
    }
    if "tpot" in seen:
        found |= {
            "itl_error_percent": 100 * (seen["itl"] / (sum(gaps) / sum(gap_tokens) * 1e-9) - 1),
            "tpot_error_percent": 100 * (seen["tpot"] / (np.mean(tpot) * 1e-9) - 1),
            "acceptance_error": seen["acceptance"] - accepted / steps,
            "user_lag_p99_ms": seen["user_lag_p99_ms"],
            "queued_percent": seen["queued_percent"],
            "failed": seen["failed"],
            "valid": float(seen["valid"]),
        }
    return found


def _pairs(counts: list[int]) -> list[tuple[int, int]]:
    return list(zip([0, *counts], counts, strict=False))


def _line(row: dict[str, float]) -> str:
    return ", ".join(f"{key} {value:.4g}" for key, value in row.items())


COLUMNS: tuple[tuple[str, Callable[[dict[str, float]], float], str], ...] = (
    ("sent, k chunks/s", lambda row: row["ours_chunks_per_s"] / 1e3, ".1f"),
    ("C client, µs/chunk", lambda row: row["c_us"], ".1f"),
    ("ours, µs/chunk", lambda row: row["ours_us"], ".1f"),
    ("ours / C", lambda row: row["ours_us"] / row["c_us"], ".2f"),
    ("aiohttp / C", lambda row: row["aiohttp_us"] / row["c_us"], ".2f"),
    ("ours, core busy %", lambda row: row["ours_busy_percent"], ".0f"),
    ("TTFT mean error, ms", lambda row: row["ours_ttft_mean_error_ms"], ".3f"),
    ("TTFT p99 error, ms", lambda row: row["ours_ttft_p99_error_ms"], ".3f"),
    ("ITL error, %", lambda row: row["ours_itl_error_percent"], ".3f"),
    ("TPOT error, %", lambda row: row["ours_tpot_error_percent"], ".3f"),
    ("tok/s error, %", lambda row: row["ours_tok_per_s_error_percent"], ".3f"),
    ("arrival error p99, ms", lambda row: row["ours_delay_p99_ms"], ".4f"),
    ("of aiohttp", lambda row: row["aiohttp_delay_p99_ms"], ".2f"),
    ("acceptance error", lambda row: row["ours_acceptance_error"], ".5f"),
    ("miscounted", lambda row: row["ours_miscounted"], ".0f"),
)


def _table(found: dict[Point, list[dict[str, float]]], repeats: int) -> str:
    names = [name for name, _, _ in COLUMNS]
    lines = ["| chunks/s × tokens | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for point, rows in found.items():
        cells = [format(float(np.median([take(row) for row in rows])), form) for _, take, form in COLUMNS]
        lines.append(f"| {point.name} | " + " | ".join(cells) + " |")
    queued = [row["ours_queued_percent"] for rows in found.values() for row in rows]
    processor = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    lines += [
        "",
        f"Medians of {repeats} runs of {SECONDS:g} s, {STREAMS} streams of {TOKENS} tokens; "
        f"{processor[1] if processor else platform.processor()}, {os.cpu_count()} cores, Linux {platform.release()}, "
        f"Python {platform.python_version()}; our client waited for its core "
        f"{min(queued):.1f} to {max(queued):.1f} % of the time.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
