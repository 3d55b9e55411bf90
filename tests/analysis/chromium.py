"""A headless Chromium, driven over its DevTools protocol: what a reader would see, and what the page asks for."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

BINARIES = ("chromium", "chromium-browser", "google-chrome")
START_DEADLINE_S = 60.0


def binary() -> str | None:
    return next((found for name in BINARIES if (found := shutil.which(name))), None)


@dataclass
class Page:
    """One page. ``requests`` are the addresses it asked for, ``errors`` what its console complained about."""

    socket: aiohttp.ClientWebSocketResponse
    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    _number: int = 0
    _loaded: bool = False

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command and take events until its reply comes."""
        self._number += 1
        await self.socket.send_json({"id": self._number, "method": method, "params": parameters})
        while True:
            message = await self.socket.receive_json(timeout=START_DEADLINE_S)
            if message.get("id") == self._number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            self._take(message)

    def _take(self, message: dict[str, Any]) -> None:
        method, parameters = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(parameters["exceptionDetails"])[:500])
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.errors.append(parameters["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.errors.append(str(parameters["args"]))
        elif method == "Page.loadEventFired":
            self._loaded = True

    async def open(self, address: str, *, width: int, height: int, dark: bool = False) -> None:
        for domain in ("Page", "Network", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if width < 600 else 1,
            mobile=width < 600,
        )
        scheme = "dark" if dark else "light"
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._loaded = False
        await self.call("Page.navigate", url=address)
        while not self._loaded:
            self._take(await self.socket.receive_json(timeout=START_DEADLINE_S))

    async def evaluate(self, expression: str) -> Any:
        reply = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in reply, reply
        return reply["result"].get("value")

    async def screenshot(self, path: Path, *, whole: bool = True) -> None:
        reply = await self.call(
            "Page.captureScreenshot", format="png", captureBeyondViewport=whole, **await self._clip(whole)
        )
        path.write_bytes(base64.b64decode(reply["data"]))  # noqa: ASYNC240

    async def pdf(self, path: Path) -> None:
        reply = await self.call("Page.printToPDF", printBackground=True)
        path.write_bytes(base64.b64decode(reply["data"]))  # noqa: ASYNC240

    async def _clip(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        size = (await self.call("Page.getLayoutMetrics"))["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 12000), "scale": 1}}


@asynccontextmanager
async def browser() -> AsyncIterator[aiohttp.ClientSession]:
    """A browser of our own with a profile of its own; the session's base address is its DevTools port."""
    program = binary()
    assert program is not None
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            program,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--no-first-run",
            "--hide-scrollbars",
            "--remote-debugging-port=0",
            f"--user-data-dir={profile}",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            port = await _port(Path(profile) / "DevToolsActivePort", process)
            async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
                yield session
        finally:
            process.terminate()
            await process.wait()


async def _port(file: Path, process: asyncio.subprocess.Process) -> int:
    async with asyncio.timeout(START_DEADLINE_S):
        while not file.exists() or not file.read_text().strip():  # noqa: ASYNC240
            assert process.returncode is None, f"Chromium ended with {process.returncode} before it opened its port"
            await asyncio.sleep(0.05)
    return int(file.read_text().splitlines()[0])  # noqa: ASYNC240


@asynccontextmanager
async def page(session: aiohttp.ClientSession) -> AsyncIterator[Page]:
    async with session.put("/json/new?about:blank") as reply:
        target = await reply.json(content_type=None)
    async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
        yield Page(socket)
