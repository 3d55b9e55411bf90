"""A server of a test: a port for it, and waiting for what it answers."""

from __future__ import annotations

import socket
import subprocess
import time
import urllib.error
import urllib.request

START_S = 240.0  # real SGLang on a busy CPU


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


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
