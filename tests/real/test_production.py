"""What a sweep of real SGLang hands over, run as its owner would; ``conftest.py`` says what it needs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from tests.answer.serving import answered, free_port
from tests.real.conftest import PYTHON, TINY

pytestmark = [
    pytest.mark.real_engine,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not PYTHON, reason="SWEEP_SGLANG_PYTHON names no interpreter with SGLang"),
    pytest.mark.skipif(not TINY.is_dir(), reason=f"no tiny model in {TINY}; SWEEP_TINY_MODEL names another folder"),
]


def verify(file: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "bench.verify", file], capture_output=True, text=True, check=False)


def test_the_number_of_the_launch_script_is_confirmed(run: tuple[Path, str]) -> None:
    done = verify(run[0] / "launch.sh")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "sglang 0.5.15" in done.stdout
    assert "holds: the two intervals meet" in done.stdout


def test_an_altered_launch_script_is_refused_with_the_difference(run: tuple[Path, str]) -> None:
    file = run[0] / "launch.sh"
    before = file.read_text()
    file.write_text(
        before.replace("--enable-metrics", "--disable-radix-cache --chunked-prefill-size 77 --enable-metrics")
    )
    try:
        done = verify(file)
    finally:
        file.write_text(before)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "--chunked-prefill-size: the file has 77" in done.stderr


def test_the_script_starts_the_server_that_was_measured(run: tuple[Path, str], tmp_path: Path) -> None:
    port = free_port()
    best = orjson.loads((run[0] / "best.json").read_bytes())
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(
            [run[0] / "launch.sh"],
            env={**os.environ, "PORT": str(port)},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            answered(f"http://127.0.0.1:{port}/health_generate", server)
            info = orjson.loads(answered(f"http://127.0.0.1:{port}/server_info", server))
        finally:
            server.terminate()
            try:
                server.wait(30)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(server.pid, signal.SIGKILL)  # its workers, should one be left
    reported = {name: info[name] for name in best["flags"] if name in info}
    assert reported
    assert reported == {name: best["flags"][name] for name in reported}
