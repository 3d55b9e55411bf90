"""Client: streams requests over kept connections and stamps every chunk when it arrives.

Why not aiohttp, the house library: it hides the kernel's receive time, and tuned aiohttp spends 2.2 times a C client's
CPU per chunk and smears a decode step's burst of 512 chunks by 4.7 ms at p99 (docs/load.md has our own figures). Here
the hot path is one ``recvmsg`` per readable socket: bytes, the kernel's stamp (SO_TIMESTAMPNS, Linux) and the time of
handling are put on a list, and are decoded later, in slices (:meth:`Client.decode`).

All sockets hang on one epoll that the event loop watches as a single reader, so a burst is one callback. Times are
CLOCK_REALTIME nanoseconds, the clock that the kernel stamps with.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import selectors
import socket
import struct
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from bench.load.stream import Stream
from bench.load.target import Target

__all__ = ["Client", "Connection", "Target"]

_SO_TIMESTAMPNS = getattr(socket, "SO_TIMESTAMPNS", 35)  # asm-generic/socket.h; Python names it from 3.14 on
_TIMESPEC = struct.Struct("@ll")
_ANCILLARY_BYTES = socket.CMSG_SPACE(_TIMESPEC.size) if hasattr(socket, "CMSG_SPACE") else 0
_READ_BYTES = 65_536
_LAST_CHUNK = b"\r\n0\r\n\r\n"
_CONNECTS_AT_ONCE = 64  # below every server's listen backlog
_SLICE_NS = 500_000  # decoding holds the loop for at most about this long, so that arrivals are not merged


@dataclass(eq=False, slots=True)
class Connection:
    """One kept connection; ``stream`` is the request it serves now."""

    sock: socket.socket
    fd: int
    stream: Stream | None = None
    unsent: memoryview | None = None
    served: int = 0  # requests before this one
    tail: bytes = b""  # the last bytes of the body, where a read was too short to hold the closing chunk


@dataclass(eq=False)
class Client:
    """Connections to one server.

    Args:
        target: the server.
        on_end: called in the hot path with every stream as soon as its last byte has arrived or it has failed, and
            with its connection, or None where that is gone.
        chunks: rows of :data:`bench.load.stream.COLUMNS`, one per decoded chunk.
    """

    target: Target
    on_end: Callable[[Stream, Connection | None], None]
    chunks: array[int] = field(default_factory=lambda: array("q"))
    idle: list[Connection] = field(default_factory=list)
    last_read_ns: int = 0
    kernel_stamps: bool = False

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._connections: dict[int, Connection] = {}
        self._undecoded: list[Stream] = []
        self._poller = _Poller()
        self._loop.add_reader(self._poller.fileno(), self._on_ready)
        self._address: tuple[int, tuple[object, ...]] | None = None

    @property
    def in_flight(self) -> int:
        return sum(connection.stream is not None for connection in self._connections.values())

    async def connect(self, count: int) -> None:
        """Open connections and put them on ``idle``.

        Raises:
            OSError: when one cannot be opened.
        """
        for start in range(0, count, _CONNECTS_AT_ONCE):
            group = min(_CONNECTS_AT_ONCE, count - start)
            self.idle += await asyncio.gather(*(self.open() for _ in range(group)))

    async def open(self) -> Connection:
        """Open one connection.

        Raises:
            OSError: when the server does not accept it.
        """
        if self._address is None:
            host, port = self.target.address
            found = await self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            self._address = found[0][0], found[0][4]
        family, address = self._address
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with contextlib.suppress(OSError):  # other platforms: the time of handling is used
                sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
            await self._loop.sock_connect(sock, address)
        except BaseException:
            sock.close()
            raise
        connection = Connection(sock, sock.fileno())
        self._connections[connection.fd] = connection
        self._poller.watch(connection.fd, write=False)
        return connection

    def send(self, connection: Connection, stream: Stream) -> None:
        """Write a request; ``stream.sent_ns`` is the time just before the write that took its last byte."""
        connection.stream = stream
        connection.tail = b""
        self._undecoded.append(stream)
        self._write(connection, memoryview(stream.request))

    def _write(self, connection: Connection, data: memoryview) -> None:
        stream = connection.stream
        assert stream is not None
        try:
            stream.sent_ns = time.time_ns()
            count = connection.sock.send(data)
        except BlockingIOError:
            count = 0
        except OSError as error:
            self._lost(connection, f"could not send: {error.strerror or error}")
            return
        unsent = data[count:] if count < len(data) else None
        if (unsent is None) != (connection.unsent is None):
            self._poller.change(connection.fd, write=unsent is not None)
        connection.unsent = unsent

    def _on_ready(self) -> None:
        connections = self._connections
        for fd, readable, writable in self._poller.ready():
            connection = connections.get(fd)
            if connection is None:  # closed by an earlier event of this round
                continue
            if writable and connection.unsent is not None:
                self._write(connection, connection.unsent)
            if readable and fd in connections:
                self._read(connection)

    def _read(self, connection: Connection) -> None:
        try:
            data, ancillary, _, _ = connection.sock.recvmsg(_READ_BYTES, _ANCILLARY_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._lost(connection, f"connection lost: {error.strerror or error}")
            return
        self.last_read_ns = now = time.time_ns()
        stream = connection.stream
        if not data or stream is None:
            self._closed(connection)
            return
        if ancillary:
            seconds, nanoseconds = _TIMESPEC.unpack(ancillary[0][2])
            stream.reads.append((data, seconds * 1_000_000_000 + nanoseconds, now))
            self.kernel_stamps = True
        else:
            stream.reads.append((data, now, now))
        if stream.chunked:
            if data.endswith(_LAST_CHUNK):
                self._finished(connection, stream)
            elif len(data) < len(_LAST_CHUNK):
                connection.tail = (connection.tail + data)[-len(_LAST_CHUNK) :]
                if connection.tail == _LAST_CHUNK:
                    self._finished(connection, stream)
            else:
                connection.tail = data[-len(_LAST_CHUNK) :]
            return
        self._read_slowly(connection, stream)

    def _read_slowly(self, connection: Connection, stream: Stream) -> None:
        """The head of a response, or a body that is not chunked."""
        if stream.status is None:
            try:
                stream.read_head()
            except ValueError as error:
                self._lost(connection, str(error))
                return
            if stream.status is None:
                return
            body = stream.reads[0][0] if stream.reads else b""
            if stream.chunked:
                connection.tail = body[-len(_LAST_CHUNK) :]
                if body.endswith(_LAST_CHUNK) or body == _LAST_CHUNK[2:]:
                    self._finished(connection, stream)
                elif not body:
                    connection.tail = b"\r\n"
                return
            stream.body_bytes = len(body)
        else:
            stream.body_bytes += len(stream.reads[-1][0])
        if stream.content_length is not None and stream.body_bytes >= stream.content_length:
            self._finished(connection, stream)

    def _finished(self, connection: Connection, stream: Stream) -> None:
        stream.ended = True
        stream.ended_ns = self.last_read_ns
        connection.stream = None
        connection.served += 1
        if stream.keep_alive:
            self.on_end(stream, connection)
        else:
            self._drop(connection)
            self.on_end(stream, None)

    def _closed(self, connection: Connection) -> None:
        """The server closed, or spoke without being asked."""
        stream = connection.stream
        if stream is not None and stream.status is not None and not stream.chunked and stream.content_length is None:
            self._finished(connection, stream)  # a body that ends with its connection
            return
        self._lost(connection, "the server closed the connection mid-stream")

    def _lost(self, connection: Connection, error: str) -> None:
        stream, connection.stream = connection.stream, None
        self._drop(connection)
        if stream is not None:
            stream.error = error
            stream.unanswered = connection.served > 0 and stream.status is None and not stream.reads
            stream.ended = True
            stream.ended_ns = time.time_ns()
            self.on_end(stream, None)

    def _drop(self, connection: Connection) -> None:
        if self._connections.pop(connection.fd, None) is not None:
            self._poller.forget(connection.fd)
            connection.sock.close()
        if connection in self.idle:
            self.idle.remove(connection)

    async def decode(self) -> None:
        """Decode what has arrived so far into ``chunks``, giving way to arrivals every half millisecond."""
        streams, self._undecoded = self._undecoded, []
        began = time.perf_counter_ns()
        for stream in streams:
            ended = stream.ended  # before decoding: what arrives while this waits is for the next round
            if stream.reads:
                stream.decode(self.chunks)
            if stream.complete and not stream.ended:  # its end was not recognised in the hot path: it has trailers
                self._finished(self._connection_of(stream), stream)
            if ended:
                stream.close()
            else:
                self._undecoded.append(stream)
            if time.perf_counter_ns() - began > _SLICE_NS:
                await asyncio.sleep(0)
                began = time.perf_counter_ns()

    def _connection_of(self, stream: Stream) -> Connection:
        return next(connection for connection in self._connections.values() if connection.stream is stream)

    def close(self) -> None:
        """Close every connection, which aborts what still runs."""
        for connection in list(self._connections.values()):
            connection.stream = None
            self._drop(connection)
        self._loop.remove_reader(self._poller.fileno())
        self._poller.close()


class _Poller:
    """epoll where there is one (half the cost per event of ``selectors``), else what the platform has."""

    def __init__(self) -> None:
        self._epoll = select.epoll() if hasattr(select, "epoll") else None
        self._selector = None if self._epoll else selectors.DefaultSelector()

    def fileno(self) -> int:
        poller = self._epoll or self._selector
        return poller.fileno()  # type: ignore[union-attr]

    def watch(self, fd: int, *, write: bool) -> None:
        if self._epoll:
            self._epoll.register(fd, select.EPOLLIN | (select.EPOLLOUT if write else 0))
        elif self._selector:
            self._selector.register(fd, selectors.EVENT_READ | (selectors.EVENT_WRITE if write else 0))

    def change(self, fd: int, *, write: bool) -> None:
        if self._epoll:
            self._epoll.modify(fd, select.EPOLLIN | (select.EPOLLOUT if write else 0))
        elif self._selector:
            self._selector.modify(fd, selectors.EVENT_READ | (selectors.EVENT_WRITE if write else 0))

    def forget(self, fd: int) -> None:
        poller = self._epoll or self._selector
        poller.unregister(fd)  # type: ignore[union-attr]

    def ready(self) -> list[tuple[int, int, int]]:
        """(descriptor, readable, writable) of what is ready now."""
        if self._epoll:
            return [(fd, mask & ~select.EPOLLOUT, mask & select.EPOLLOUT) for fd, mask in self._epoll.poll(0)]
        assert self._selector
        return [(key.fd, m & selectors.EVENT_READ, m & selectors.EVENT_WRITE) for key, m in self._selector.select(0)]

    def close(self) -> None:
        poller = self._epoll or self._selector
        poller.close()  # type: ignore[union-attr]
