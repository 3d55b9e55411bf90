"""HTTP: as much of a server as the simulator needs, and no more than a microsecond per chunk of it.

A bare asyncio protocol, because one write per request and step is what a simulated GPU costs: with aiohttp's response
objects it would be several times that.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 500: "Internal Server Error", 503: "Service Unavailable"}
MAX_HEAD_BYTES = 64 * 1024


@dataclass
class Exchange:
    """A request and the way to answer it."""

    method: str
    path: str
    body: bytes
    transport: asyncio.Transport
    keep_alive: bool
    peer: str
    status: int = 0
    gone: Callable[[], None] | None = field(default=None, repr=False)

    def json(self) -> Any:
        """The body.

        Raises:
            ValueError: it is not JSON.
        """
        return json.loads(self.body or b"{}")

    def reply(self, status: int, body: bytes = b"", content_type: str = "application/json") -> None:
        """Answer at once."""
        self.status = status
        head = (
            f"HTTP/1.1 {status} {REASONS.get(status, 'Unknown')}\r\ncontent-type: {content_type}\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        self.transport.write(head.encode() + body)

    def reply_json(self, status: int, value: Any) -> None:
        self.reply(status, json.dumps(value).encode())

    def begin_stream(self) -> None:
        """Answer with a stream of events."""
        self.status = 200
        self.transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        )

    def event(self, data: bytes) -> None:
        """One event of the stream, as one HTTP chunk."""
        self.transport.write(b"%x\r\ndata: %b\n\n\r\n" % (len(data) + 8, data))

    def end_stream(self) -> None:
        self.transport.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    def abort(self) -> None:
        """Close the connection in the middle."""
        self.transport.abort()


Handler = Callable[[Exchange], Awaitable[None] | None]


class Connection(asyncio.Protocol):
    """One connection; requests on it are answered one after the other."""

    def __init__(self, handler: Handler, tasks: set[asyncio.Task[None]]) -> None:
        self._handler = handler
        self._tasks = tasks
        self._buffer = b""
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (exchange := self._take()) is not None:
            self._exchange = exchange
            answer = self._handler(exchange)
            if answer is not None:
                task = asyncio.ensure_future(answer)
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def connection_lost(self, error: Exception | None) -> None:
        if self._exchange is not None and self._exchange.gone is not None:
            self._exchange.gone()

    def _take(self) -> Exchange | None:
        """The next whole request of the buffer."""
        head, separator, rest = self._buffer.partition(b"\r\n\r\n")
        if not separator or self._transport is None:
            if len(self._buffer) > MAX_HEAD_BYTES and self._transport is not None:
                self._transport.close()
            return None
        lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        length = int(headers.get("content-length") or 0)
        if len(rest) < length:
            return None
        self._buffer = rest[length:]
        words = lines[0].split(" ")
        method, target = (words[0], words[1]) if len(words) >= 2 else ("GET", "/")
        name = self._transport.get_extra_info("peername")
        return Exchange(
            method=method,
            path=urlsplit(target).path,
            body=rest[:length],
            transport=self._transport,
            keep_alive=headers.get("connection", "").lower() != "close",
            peer=f"{name[0]}:{name[1]}" if name else "127.0.0.1:0",
        )
