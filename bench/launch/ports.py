"""Ports: holds a port for a server until the server owns it, and tells who listens on one (Linux)."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from bench.launch.processes import describe

LOOPBACK = "127.0.0.1"

# SGLang 0.5.15 puts a gRPC server at its port + 10,000 and ends where that is no port (server_args.py, `grpc_port`).
HIGHEST_PORT = 55_535
_TRIES = 200  # a fifth of the ports that Linux gives by default lie above

_LISTEN = "0A"  # TCP_LISTEN in /proc/net/tcp
# Local addresses at which a listener takes connections to 127.0.0.1, as /proc/net/tcp and tcp6 write them on
# little-endian machines: 127.0.0.1, 0.0.0.0, ::, ::ffff:127.0.0.1, ::ffff:0.0.0.0.
_REACHED_BY_LOOPBACK = frozenset(
    {"0100007F", "0" * 8, "0" * 32, "0" * 16 + "FFFF0000" + "0100007F", "0" * 16 + "FFFF0000" + "0" * 8}
)


@dataclass(frozen=True)
class Listener:
    """One listening socket and who holds it.

    Attributes:
        pids: of all processes that have it open; empty if they belong to another user, or ended just now.
    """

    port: int
    pids: frozenset[int]

    def describe(self) -> str:
        if not self.pids:
            return "a process that this user cannot see"
        return " and ".join(describe(pid) for pid in sorted(self.pids))


class PortReservation:
    """A port of the loopback address that nobody else is given.

    The socket is bound with SO_REUSEADDR and does not listen. Linux then gives the port to nobody who asks for any
    free one, refuses it to those who bind without that option, and still lets a server that binds with it (uvicorn,
    asyncio, uvloop, aiohttp all do) listen while we go on holding ours. Connections are refused until it does. Hold it
    until the server has ended: what takes the port in its place is then not there by chance.
    """

    def __init__(self, port: int = 0) -> None:
        """Reserve this port, or any free one.

        Raises:
            OSError: somebody listens on it, or has it bound without SO_REUSEADDR.
        """
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((LOOPBACK, port))
        except OSError:
            self._socket.close()
            raise
        self.port: int = self._socket.getsockname()[1]

    def release(self) -> None:
        self._socket.close()

    def __enter__(self) -> PortReservation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def reserve() -> PortReservation:
    """Reserve a free port, of those that every server can use; to be used as a context manager.

    Raises:
        OSError: the system gives none.
    """
    for _ in range(_TRIES):
        reservation = PortReservation()
        if reservation.port <= HIGHEST_PORT:
            return reservation
        reservation.release()
    raise OSError(
        f"of {_TRIES} free ports that the system gave none was {HIGHEST_PORT} or lower, as SGLang needs, which adds "
        "10,000 to its port: let net.ipv4.ip_local_port_range begin lower"
    )


def listeners(port: int, family: Collection[int] = ()) -> list[Listener]:
    """Who takes connections to this port of the loopback address.

    Args:
        family: pids to look at first; all processes are searched only for sockets that none of these holds.
    """
    if _can_be_bound(port):
        return []
    inodes = set(_listening_inodes(port))
    holders = _holders(inodes, family)
    if missing := inodes - holders.keys():
        holders |= _holders(missing, [int(name) for name in os.listdir("/proc") if name.isdigit()])  # noqa: PTH208
    return [Listener(port, frozenset(holders.get(inode, ()))) for inode in sorted(inodes)]


def foreign(found: Collection[Listener], pids: Collection[int]) -> list[Listener]:
    """Those listeners that none of these processes holds.

    All sockets count: with SO_REUSEPORT a stranger's gets a share of the connections.
    """
    return [listener for listener in found if listener.pids.isdisjoint(pids)]


def _can_be_bound(port: int) -> bool:
    """Nobody listens. Microseconds, where the kernel's table of all connections takes milliseconds to read."""
    try:
        PortReservation(port).release()
    except OSError:
        return False
    return True


def _listening_inodes(port: int) -> Iterator[str]:
    suffix = f":{port:04X}"
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        path = Path(table)
        if not path.exists():  # a host without IPv6
            continue
        for line in path.read_text().splitlines()[1:]:
            if suffix not in line:  # most lines, on a host with many connections
                continue
            fields = line.split()
            local, state, inode = fields[1], fields[3], fields[9]
            if state == _LISTEN and local.endswith(suffix) and local[: -len(suffix)] in _REACHED_BY_LOOPBACK:
                yield inode


def _holders(inodes: set[str], pids: Collection[int]) -> dict[str, set[int]]:
    names = {f"socket:[{inode}]": inode for inode in inodes}
    holders: dict[str, set[int]] = {}
    for pid in pids:
        for target in _open_files(pid):
            if target in names:
                holders.setdefault(names[target], set()).add(pid)
    return holders


def _open_files(pid: int) -> Iterator[str]:
    folder = f"/proc/{pid}/fd"
    try:
        for descriptor in os.listdir(folder):  # noqa: PTH208
            try:
                yield os.readlink(f"{folder}/{descriptor}")  # noqa: PTH115
            except OSError:
                continue  # closed meanwhile
    except OSError:
        return  # ended, or another user's
