"""Shards: drivers in processes of their own, for loads that one process cannot measure honestly.

Requests are dealt out beforehand (every n-th to the n-th process), never through a queue, and what comes back are the
chunks themselves: percentiles are taken over all of them, never averaged.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import pickle
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from bench.load.driver import Driver, Harvest, Job, collector_off
from bench.load.stream import Stream

_JOIN_S = 5.0


class RemoteDriver:
    """A driver in a child process, with the methods of :class:`bench.load.driver.Driver`."""

    def __init__(self, job: Job) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, child = context.Pipe()
        self._process = context.Process(target=_serve, args=(child, job), daemon=True)
        self._process.start()
        child.close()

    async def connect(self) -> None:
        """Open the connections that the start needs, and build the first requests.

        Raises:
            OSError: when one cannot be opened.
        """
        await self._ask("connect")

    async def start(self) -> None:
        await self._ask("start")

    async def pause(self) -> None:
        await self._ask("pause")

    async def collect(self) -> Harvest:
        harvest: Harvest = await self._ask("collect")
        return harvest

    async def stop(self) -> list[Stream]:
        streams: list[Stream] = []
        if self._process.is_alive():
            streams = await self._ask("stop")
        self._pipe.close()
        await asyncio.get_running_loop().run_in_executor(None, self._process.join, _JOIN_S)
        if self._process.is_alive():
            self._process.kill()
        return streams

    async def _ask(self, what: str) -> Any:
        loop = asyncio.get_running_loop()
        readable: asyncio.Future[None] = loop.create_future()
        self._pipe.send(what)
        loop.add_reader(self._pipe.fileno(), _set, readable)
        try:
            await readable
        finally:
            loop.remove_reader(self._pipe.fileno())
        try:
            error, answer = pickle.loads(self._pipe.recv_bytes())
        except EOFError:
            raise OSError("a process of the load generator ended early") from None
        if error is not None:
            raise error
        return answer


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _serve(pipe: Connection, job: Job) -> None:
    with collector_off():
        asyncio.run(_answer(pipe, job))


async def _answer(pipe: Connection, job: Job) -> None:
    loop = asyncio.get_running_loop()
    asked: asyncio.Queue[str] = asyncio.Queue()

    def take() -> None:
        try:
            asked.put_nowait(pipe.recv())
        except EOFError:  # the parent is gone
            loop.remove_reader(pipe.fileno())
            asked.put_nowait("stop")

    loop.add_reader(pipe.fileno(), take)
    driver = Driver(job)
    while True:
        what = await asked.get()
        error: Exception | None = None
        answer: object = None
        try:
            if what == "connect":
                await driver.connect()
            elif what == "start":
                await driver.start()
            elif what == "pause":
                await driver.pause()
            elif what == "collect":
                answer = await driver.collect()
            else:
                answer = [replace(stream, request=b"") for stream in await driver.stop()]
        except (OSError, ValueError) as failed:
            error = failed
        try:
            pipe.send_bytes(pickle.dumps((error, answer)))
        except OSError:
            return
        if what == "stop":
            return
