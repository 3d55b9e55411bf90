"""Helpers of the simulator's tests: a server in this process, without its exits."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from bench.engines.sglang.model_shape import ModelShape
from bench.engines.simulator.arguments import parse
from bench.engines.simulator.http import Connection
from bench.engines.simulator.options import H200, Disturbance, Options
from bench.engines.simulator.process import Process
from bench.engines.simulator.server import Server
from bench.experiment import HardwareSpec

MODELS = Path(__file__).parents[1] / "fixtures" / "models"
MTP = ("--speculative-algorithm", "NEXTN", "--speculative-num-steps", "3", "--speculative-eagle-topk", "1")
MTP += ("--speculative-num-draft-tokens", "4")
ATTENTION = ("--attention-backend", "triton")


def config(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((MODELS / f"{name}.json").read_text())
    return loaded


def shape(name: str = "qwen27b") -> ModelShape:
    return ModelShape.from_config(config(name))


class EndedError(Exception):
    """The process would have ended, with this exit code."""

    def __init__(self, code: int) -> None:
        self.code = code
        super().__init__(f"exit code {code}")


@pytest.fixture
def no_exits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends of the process raise ``EndedError``."""

    def kill(process: Process) -> None:
        raise EndedError(-9)

    def end(process: Process, code: int) -> None:
        raise EndedError(code)

    monkeypatch.setattr(Process, "kill", kill)
    monkeypatch.setattr(Process, "end", end)


def server(
    *arguments: str,
    version: str = "0.5.15",
    model: str = "qwen27b",
    faults: tuple[str, ...] = (),
    hardware: HardwareSpec = H200,
    env: dict[str, str] | None = None,
    time_scale: float = 1e5,
    seed: int = 0,
    disturbance: Disturbance = Disturbance(),  # noqa: B008 - frozen
) -> Server:
    options = Options(
        version=version,
        hardware=hardware,
        model_config=config(model),
        time_scale=time_scale,
        faults=faults,
        seed=seed,
        disturbance=disturbance,
    )
    parsed = parse(["--model-path", "/models/q", "--enable-metrics", *arguments], version)
    return Server(options, parsed, shape(model), env or {})


@contextlib.asynccontextmanager
async def serving(simulated: Server) -> AsyncIterator[aiohttp.ClientSession]:
    """A started server, and a session with it."""
    await simulated.startup().run()
    loop = asyncio.get_running_loop()
    listener = await loop.create_server(lambda: Connection(simulated.handle, simulated.tasks), "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    await simulated.come_up()
    task = asyncio.ensure_future(simulated.schedule())
    connector = aiohttp.TCPConnector(limit=0)
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", connector=connector) as session:
            yield session
    finally:
        listener.close()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, EndedError):
            await task


async def events(response: aiohttp.ClientResponse) -> list[Any]:
    """The events of a stream, decoded; ``[DONE]`` must be the last."""
    text = await response.text()
    parts = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
    assert parts.pop() == "[DONE]"
    return [json.loads(part) for part in parts]
