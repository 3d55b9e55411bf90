"""Small servers that misbehave, and what launches them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest

from bench.engines.protocol import Command
from bench.launch.gpus import Gpus
from bench.launch.ports import PortReservation, reserve
from bench.launch.processes import Family
from bench.launch.server import Server
from bench.outcome import Cause, Fault, Phase

REPOSITORY = Path(__file__).parents[2]

# Plain HTTP over asyncio, as a server binds that uses uvicorn; {begin} runs before it, {before_bind} in the loop.
SERVER = """
import asyncio, os, signal, subprocess, sys, time
port = int(sys.argv[1])
async def answer(reader, writer):
    await reader.readline()
    writer.write(b"HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\n\\r\\nok")
    await writer.drain()
    writer.close()
async def serve():
    server = await asyncio.start_server(answer, "127.0.0.1", port)
    print("fired up and ready", flush=True)
    await server.serve_forever()
{begin}
asyncio.run(serve())
"""
T = TypeVar("T")
WAIT = "time.sleep(600)"


@dataclass
class FakeReader:
    """Stands for the log reader: ``FATAL cause`` is decisive, ``PHASE name`` begins a phase."""

    phase: Phase = Phase.ARGS
    fault: Fault | None = None
    lines: list[str] = field(default_factory=list)

    def feed(self, line: str) -> Fault | None:
        self.lines.append(line)
        word, _, rest = line.partition(" ")
        if word == "PHASE":
            self.phase = Phase(rest)
        if word == "FATAL" and self.fault is None:
            self.fault = Fault(Cause(rest.split()[0]), self.phase, line, len(self.lines))
        return self.fault

    def verdict(self) -> Fault:
        return self.fault or Fault(Cause.UNKNOWN, self.phase, self.lines[-1] if self.lines else None)


@dataclass
class Launchpad:
    """Launches fake servers in this test's folder."""

    folder: Path
    port: PortReservation
    launch_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    async def start(
        self,
        begin: str = "",
        *,
        program: str = SERVER,
        env: dict[str, str] | None = None,
        arguments: tuple[str, ...] = (),
        gpus: Gpus | None = None,
    ) -> Server:
        code = program.replace("{begin}", begin)
        return await Server.start(
            Command((sys.executable, "-c", code, str(self.port.port), *arguments), tuple((env or {}).items())),
            folder=self.folder,
            port=self.port,
            launch_id=self.launch_id,
            environment=dict(os.environ),
            gpus=gpus or Gpus(visible=""),
        )

    def family(self) -> Family:
        """Who is left, by this launch's marks alone."""
        return Family(self.launch_id, self.folder / "server.log", not_before=0)

    async def log_has(self, text: str, deadline_s: float = 20.0) -> str:
        """Wait for a line in the log, and give its text after ``text``."""
        path = self.folder / "server.log"

        def line() -> str | None:
            found = [line for line in path.read_text().split("\n")[:-1] if line.startswith(text)]
            return found[0].removeprefix(text).strip() if found else None

        return await until(line, deadline_s, f"{text!r} in {path}")

    async def healthy(self) -> bool:
        return await answers(self.port.port)


def stranger(code: str, *arguments: str) -> subprocess.Popen[str]:
    """A process that has nothing to do with a launch: runs ``code``, says ``up`` and ends when it is given a line."""
    program = f"import socket, sys\n{code}\nprint('up', flush=True)\ninput()\n"
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


LISTENS = "s = socket.create_server(('0.0.0.0', int(sys.argv[1])))"


async def answers(port: int) -> bool:
    """One request to the server."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\n\r\n")
        status = await reader.readline()
        writer.close()
    except OSError:
        return False
    return status.startswith(b"HTTP/1.1 200")


async def until(condition: Callable[[], T | None], deadline_s: float, what: str) -> T:
    """Wait for a condition."""
    end = asyncio.get_running_loop().time() + deadline_s
    while (value := condition()) is None or value is False:
        assert asyncio.get_running_loop().time() < end, f"waited {deadline_s} s for {what}"
        await asyncio.sleep(0.02)
    return value


@pytest.fixture
def pad(tmp_path: Path) -> Iterator[Launchpad]:
    """A launchpad; whatever is left of its launch after the test is ended."""
    with reserve() as port:
        launchpad = Launchpad(tmp_path / "0007", port)
        yield launchpad
        launchpad.family().end(leader=None, grace_s=0, deadline_s=5)
