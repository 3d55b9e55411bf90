"""Client: streams requests over kept connections and stamps every chunk when it arrives.

Why not aiohttp, the house library: it hides the kernel's receive time, and tuned aiohttp spends 2.2 times a C client's
CPU per chunk and smears a decode step's burst of 512 chunks by 4.7 ms at p99 (docs/load.md has our own figures). Here
the hot path is one ``recvmsg`` per readable socket: bytes, the kernel's stamp (SO_TIMESTAMPNS, Linux) and the time of
handling are put on a list, and are decoded later, in slices (:meth:`Client.decode`).

All sockets hang on one epoll that the event loop watches as a single reader, so a burst is one callback. While chunks
come more often than every millisecond, waking up for each of them would cost more than reading it; then the sockets are
looked at every millisecond, which the kernel's stamps allow, until there is nothing to read. Responses that are still
awaited hang on another epoll as well and go first, since a first chunk that waits until the second arrives gets the
second's stamp. Times are CLOCK_REALTIME nanoseconds, the clock that the kernel stamps with.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import selectors
import socket
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bench.load.decoding import NO_STAMP, Decoder, Reads
from bench.load.stream import Stream
from bench.load.target import Target

__all__ = ["Client", "Connection", "Target"]

_SO_TIMESTAMPNS = getattr(socket, "SO_TIMESTAMPNS", 35)  # asm-generic/socket.h; Python names it from 3.14 on
_ANCILLARY_BYTES = socket.CMSG_SPACE(16) if hasattr(socket, "CMSG_SPACE") else 0  # of a timespec
_READ_BYTES = 65_536
_LAST_CHUNK = b"\r\n0\r\n\r\n"
_READABLE = select.EPOLLIN if hasattr(select, "epoll") else selectors.EVENT_READ
_WRITABLE = select.EPOLLOUT if hasattr(select, "epoll") else selectors.EVENT_WRITE
_CONNECTS_AT_ONCE = 64  # below every server's listen backlog
_TICK_S = 0.001
_TURN = 64  # chunks that are read before the next look for first ones, about half a millisecond
_DECODE = 512  # reads are decoded together: few enough for the processor's cache, and for a millisecond or two


Receive = Callable[[int, int], tuple[bytes, list[tuple[int, int, bytes]], int, Any]]


@dataclass(eq=False, slots=True)
class Connection:
    """One kept connection; ``stream`` is the request it serves now."""

    sock: socket.socket
    fd: int
    receive: Receive
    stream: Stream | None = None
    unsent: memoryview | None = None
    served: int = 0  # requests before this one


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
    in_flight: int = 0
    kernel_stamps: bool = False

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._connections: dict[int, Connection] = {}
        self._chunked: dict[int, tuple[Receive, int]] = {}  # of connections that are in the middle of such a body
        self._reads = Reads()
        self._ended: list[Stream] = []
        self._decoder = Decoder(self.chunks)
        self._poller = _Poller()
        self._awaited = _Awaited()
        self._loop.add_reader(self._poller.fileno(), self._on_ready)
        self._next_tick: asyncio.TimerHandle | None = None
        self._address: tuple[int, tuple[object, ...]] | None = None

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
        connection = Connection(sock, sock.fileno(), sock.recvmsg)
        self._connections[connection.fd] = connection
        self._poller.watch(connection.fd)
        self._awaited.watch(connection.fd)
        return connection

    def send(self, connection: Connection, stream: Stream) -> None:
        """Write a request; ``stream.sent_ns`` is the time just before the write that took its last byte."""
        connection.stream = stream
        self.in_flight += 1
        if self.in_flight == 1:
            self.last_read_ns = time.time_ns()  # silence counts from here: nothing was to be read before
        self._awaited.once(connection.fd)
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
        before_ns = self.last_read_ns
        self._read()
        if self.kernel_stamps and self.last_read_ns - before_ns < _TICK_S * 1e9:
            self._loop.remove_reader(self._poller.fileno())
            self._next_tick = self._loop.call_later(_TICK_S, self._tick)

    def _tick(self) -> None:
        began_s = self._loop.time()
        if self._read():
            self._next_tick = self._loop.call_at(began_s + _TICK_S, self._tick)
        else:
            self._next_tick = None
            self._loop.add_reader(self._poller.fileno(), self._on_ready)

    def _read(self) -> bool:
        """Read what can be read, and say whether there was anything."""
        ready = self._poller.ready()
        for place in range(0, len(ready), _TURN):
            if place:
                for fd, mask in self._awaited.ready():
                    self._attend(fd, mask)
            self._read_chunks(ready[place : place + _TURN])
        reads = self._reads
        if reads.handled_ns:
            self.last_read_ns = reads.handled_ns[-1]
        if len(reads.slots) >= _DECODE:
            self.decode()
        return bool(ready)

    def _read_chunks(self, ready: list[tuple[int, int]]) -> None:
        """This runs for every chunk, so it does only what has to be done at once."""
        chunked, now_ns, readable = self._chunked, time.time_ns, _READABLE
        reads = self._reads
        collected, stamps = reads.data, reads.stamps
        add_slot, add_length, add_time = reads.slots.append, reads.lengths.append, reads.handled_ns.append
        for fd, mask in ready:
            if mask != readable or fd not in chunked:
                self._attend(fd, mask)
                continue
            receive, slot = chunked[fd]
            try:
                data, ancillary, _, _ = receive(_READ_BYTES, _ANCILLARY_BYTES)
            except OSError as error:
                self._interrupted(fd, error)
                continue
            if not data:
                self._closed(self._connections[fd])
                continue
            collected += data
            add_slot(slot)
            add_length(len(data))
            stamps += ancillary[0][2] if ancillary else NO_STAMP
            add_time(now_ns())
            if len(data) < len(_LAST_CHUNK) or data.endswith(_LAST_CHUNK):
                self._ending(fd, data)

    def _ending(self, fd: int, data: bytes) -> None:
        """The end of a chunked body, or too few bytes to tell."""
        connection = self._connections[fd]
        stream = connection.stream
        assert stream is not None
        self.last_read_ns = self._reads.handled_ns[-1]
        if len(data) < len(_LAST_CHUNK):
            self.decode()
        else:
            self._finished(connection, stream)

    def _attend(self, fd: int, mask: int) -> None:
        """All that is not a chunk of a body: writing, the head of a response, a body of another kind, a lost server."""
        connection = self._connections.get(fd)
        if connection is None:  # closed by an earlier event of this round
            return
        if mask & _WRITABLE and connection.unsent is not None:
            self._write(connection, connection.unsent)
        if not mask & ~_WRITABLE or fd not in self._connections:
            return
        try:
            data, ancillary, _, _ = connection.receive(_READ_BYTES, _ANCILLARY_BYTES)
        except OSError as error:
            self._interrupted(fd, error)
            return
        self.last_read_ns = handled_ns = time.time_ns()
        self.kernel_stamps = bool(ancillary)
        stream = connection.stream
        if not data or stream is None:
            self._closed(connection)
            return
        body = data if stream.status is not None else self._head(connection, stream, data)
        if body is None:
            return
        if body:
            self._reads.add(stream.slot, body, ancillary[0][2] if ancillary else NO_STAMP, handled_ns)
        stream.body_bytes += len(body)
        if stream.chunked:
            self._chunked[fd] = connection.receive, stream.slot
            if body.endswith(_LAST_CHUNK[2:]):
                self.decode()
        elif stream.content_length is not None and stream.body_bytes >= stream.content_length:
            self._finished(connection, stream)

    def _head(self, connection: Connection, stream: Stream, data: bytes) -> bytes | None:
        """Take bytes of a response's head; what follows it, None while it is incomplete or if it is none."""
        try:
            body = stream.read_head(data)
        except ValueError as error:
            self._lost(connection, str(error))
            return None
        if body is not None:
            self._decoder.open(stream)
        if not body:
            self._awaited.once(connection.fd)
        return body

    def _interrupted(self, fd: int, error: OSError) -> None:
        if not isinstance(error, BlockingIOError):
            self._lost(self._connections[fd], f"connection lost: {error.strerror or error}")

    def _finished(self, connection: Connection, stream: Stream) -> None:
        stream.ended = True
        stream.ended_ns = self.last_read_ns
        self._ended.append(stream)
        self._chunked.pop(connection.fd, None)
        connection.stream = None
        self.in_flight -= 1
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
            self.in_flight -= 1
            stream.error = error
            stream.unanswered = connection.served > 0 and stream.status is None
            stream.ended, stream.ended_ns = True, time.time_ns()
            self._ended.append(stream)
            self.on_end(stream, None)

    def _drop(self, connection: Connection) -> None:
        self._chunked.pop(connection.fd, None)
        if self._connections.pop(connection.fd, None) is not None:
            self._poller.forget(connection.fd)
            self._awaited.forget(connection.fd)
            connection.sock.close()
        if connection in self.idle:
            self.idle.remove(connection)

    def decode(self) -> None:
        """Decode what has arrived so far into ``chunks``."""
        ended = self._ended[:]
        self._ended.clear()
        complete = self._decoder.take(self._reads)
        self._reads.clear()
        for stream in ended:
            if stream.ended:  # else it is sent once more
                self._decoder.close(stream)
        for stream in complete:
            if not stream.ended:  # its end was cut in two, or had trailers, and so was not seen as it came
                self._finished(next(c for c in self._connections.values() if c.stream is stream), stream)

    def close(self) -> None:
        """Close every connection, which aborts what still runs."""
        self._decoder.flush()
        for connection in list(self._connections.values()):
            connection.stream = None
            self._drop(connection)
        if self._next_tick is None:
            self._loop.remove_reader(self._poller.fileno())
        else:
            self._next_tick.cancel()
        self._poller.close()
        self._awaited.close()


class _Poller:
    """epoll where there is one (half the cost per event of ``selectors``), else what the platform has."""

    def __init__(self) -> None:
        self._epoll = select.epoll() if hasattr(select, "epoll") else None
        self._selector = selectors.DefaultSelector() if self._epoll is None else None

    def fileno(self) -> int:
        if self._epoll is not None:
            return self._epoll.fileno()
        return int(self._selector.fileno())  # type: ignore[union-attr]

    def ready(self) -> list[tuple[int, int]]:
        """Descriptor and mask of what is ready now."""
        if self._epoll is not None:
            return self._epoll.poll(0)
        assert self._selector is not None
        return [(key.fd, mask) for key, mask in self._selector.select(0)]

    def watch(self, fd: int) -> None:
        if self._epoll is not None:
            self._epoll.register(fd, _READABLE)
        elif self._selector is not None:
            self._selector.register(fd, _READABLE)

    def change(self, fd: int, *, write: bool) -> None:
        mask = _READABLE | (_WRITABLE if write else 0)
        if self._epoll is not None:
            self._epoll.modify(fd, mask)
        elif self._selector is not None:
            self._selector.modify(fd, mask)

    def forget(self, fd: int) -> None:
        if self._epoll is not None:
            self._epoll.unregister(fd)
        elif self._selector is not None:
            self._selector.unregister(fd)

    def close(self) -> None:
        if self._epoll is not None:
            self._epoll.close()
        elif self._selector is not None:
            self._selector.close()


class _Awaited:
    """Tells once that something can be read; nothing where there is no epoll."""

    def __init__(self) -> None:
        self._epoll = select.epoll() if hasattr(select, "epoll") else None

    def watch(self, fd: int) -> None:
        if self._epoll is not None:
            self._epoll.register(fd, 0)

    def once(self, fd: int) -> None:
        if self._epoll is not None:
            self._epoll.modify(fd, select.EPOLLIN | select.EPOLLONESHOT)

    def ready(self) -> list[tuple[int, int]]:
        return self._epoll.poll(0) if self._epoll is not None else []

    def forget(self, fd: int) -> None:
        if self._epoll is not None:
            self._epoll.unregister(fd)

    def close(self) -> None:
        if self._epoll is not None:
            self._epoll.close()
