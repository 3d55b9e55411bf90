"""The load generator against real SGLang on the CPU (``SWEEP_SGLANG_PYTHON``; see ``test_sweep.py``)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.launch.ports import reserve

TINY = Path(os.environ.get("SWEEP_TINY_MODEL", Path(__file__).parents[3] / "shared" / "sglang_cpu" / "tiny"))
PYTHON = os.environ.get("SWEEP_SGLANG_PYTHON", "")
START_S = 180.0

pytestmark = [
    pytest.mark.real_engine,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON, reason="SWEEP_SGLANG_PYTHON names no interpreter with SGLang"),
    pytest.mark.skipif(not TINY.is_dir(), reason=f"no tiny model in {TINY}; SWEEP_TINY_MODEL names another folder"),
]


def free_port() -> int:
    with reserve() as reservation:
        return reservation.port


def generated(url: str) -> float:
    """The server's own count of output tokens."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("sglang:generation_tokens_total"))


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    log = tmp_path_factory.mktemp("server") / "log"
    command = [
        *(PYTHON, "-m", "sglang.launch_server", "--model-path", str(TINY), "--device", "cpu", "--port", str(port)),
        *("--attention-backend", "torch_native", "--mem-fraction-static", "0.05", "--max-total-tokens", "20000"),
        *("--max-running-requests", "8", "--disable-overlap-schedule", "--enable-metrics"),
    ]
    with log.open("wb") as file:
        server = subprocess.Popen(
            command,
            stdout=file,
            stderr=file,
            env={**os.environ, "SGLANG_USE_CPU_ENGINE": "1"},
            start_new_session=True,
        )
    address = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + START_S
    try:
        while True:
            assert server.poll() is None, f"the server ended: {log.read_text()[-2000:]}"
            assert time.monotonic() < deadline, f"not ready after {START_S} s: {log.read_text()[-2000:]}"
            try:
                with urllib.request.urlopen(f"{address}/health_generate", timeout=10):
                    break
            except (OSError, urllib.error.URLError):
                time.sleep(0.5)
        yield address
    finally:
        server.terminate()
        try:
            server.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, 9)


@pytest.mark.parametrize("route", ["generate", "completions", "chat"])
def test_a_batch_agrees_with_the_servers_own_count(url: str, route: str, tmp_path: Path) -> None:
    found = tmp_path / "level.json"
    before = generated(url)
    subprocess.run(
        [
            *(sys.executable, "-m", "bench.load", "--url", url, "--route", route, "--requests", "40"),
            *("--concurrency", "4", "--input-tokens", "12", "--output-tokens", "24", "--max-window", "300"),
            *("--json", str(found), "--quiet"),
        ],
        check=False,
    )
    report = json.loads(found.read_text())
    assert report["failure"] is None
    assert report["requests_all"] == {"ok": 40, "failed": 0, "aborted": 0}
    # The counters of the last request may be added after its last byte.
    deadline = time.monotonic() + 10
    while generated(url) - before < 40 * 24 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert generated(url) - before == pytest.approx(40 * 24, rel=0.02)


def test_a_closed_loop_agrees_with_the_servers_own_count(url: str, tmp_path: Path) -> None:
    found = tmp_path / "level.json"
    subprocess.run(
        [
            *(sys.executable, "-m", "bench.load", "--url", url, "--concurrency", "4", "--prompts", "random_ids"),
            *("--vocabulary-size", "1024", "--input-tokens", "16", "--output-tokens", "16"),
            *("--min-window", "15", "--max-window", "15", "--json", str(found), "--quiet"),
        ],
        check=False,
    )
    report = json.loads(found.read_text())
    assert report["failure"] is None
    assert report["requests_failed"] == 0
    # The server counts a request when it ends, so the two differ by what is in flight at the window's two ends.
    edges = 2 * 4 * 16 / report["output_tokens"]
    assert report["server_tok_per_s"] == pytest.approx(report["output_tok_per_s"]["mean"], rel=0.02 + edges)
    assert not any("the server counted" in warning for warning in report["warnings"])
