"""A server of a test: a port for it, and waiting for what it answers."""

from __future__ import annotations

import subprocess
import time
import urllib.error
import urllib.request

from bench.launch.ports import reserve

START_S = 240.0  # real SGLang on a busy CPU


def free_port() -> int:
    with reserve() as reservation:
        return reservation.port


def answered(url: str, server: subprocess.Popen[bytes]) -> bytes:
    end = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5) as response:
                found: bytes = response.read()
                return found
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            assert server.poll() is None, f"the server ended with {server.returncode}"
            assert time.monotonic() < end, f"no answer from {url} within {START_S} s"
            time.sleep(0.1)
