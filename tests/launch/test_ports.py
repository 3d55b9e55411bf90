"""A port is ours from the reservation on, and who listens on one is known."""

import asyncio
import os
import socket
import subprocess
import sys

import pytest
import uvloop

from bench.launch.ports import LOOPBACK, foreign, listeners, reserve


def test_nobody_else_can_bind_a_reserved_port() -> None:
    with reserve() as reservation, socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((LOOPBACK, reservation.port))


def test_a_reserved_port_is_never_given_out_as_a_free_one() -> None:
    with reserve() as reservation:
        given = set()
        for reuse in (0, 1):
            for _ in range(4000):
                with socket.socket() as other:
                    other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
                    other.bind((LOOPBACK, 0))
                    given.add(other.getsockname()[1])
        assert len(given) > 1000
        assert reservation.port not in given


def test_connections_to_a_reserved_port_are_refused_until_its_server_listens() -> None:
    with reserve() as reservation, socket.socket() as client:
        assert client.connect_ex((LOOPBACK, reservation.port)) != 0
        assert listeners(reservation.port) == []


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_server_can_listen_on_a_port_that_we_still_hold(run) -> None:
    async def serve_and_ask(port: int) -> bytes:
        async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"here")
            writer.close()

        async with await asyncio.start_server(answer, LOOPBACK, port):
            reader, writer = await asyncio.open_connection(LOOPBACK, port)
            assert [set(listener.pids) for listener in listeners(port)] == [{os.getpid()}]
            text = await reader.read()
            writer.close()
            return text

    with reserve() as reservation:
        assert run(serve_and_ask(reservation.port)) == b"here"


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::", "::ffff:127.0.0.1"])
def test_a_stranger_that_listens_is_named_with_pid_and_command(address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    code = (
        f"import socket; s = socket.socket({int(family)}); s.bind(({address!r}, 0)); s.listen(); "
        "print(s.getsockname()[1], flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        port = int(other.stdout.readline())
        found = listeners(port)
        assert [set(listener.pids) for listener in found] == [{other.pid}]
        assert foreign(found, {os.getpid()}) == found
        assert f"pid {other.pid} ({sys.executable} -c import socket" in found[0].describe()
        assert foreign(found, {other.pid}) == []
        other.communicate("\n")
    assert listeners(port) == []


def test_a_stranger_that_shares_the_port_is_found() -> None:
    """With SO_REUSEPORT both listen, and the kernel deals the connections out."""
    code = (
        "import socket, sys; s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1); "
        "s.bind(('127.0.0.1', int(sys.argv[1]))); s.listen(); print('up', flush=True); input()"
    )
    with socket.socket() as ours:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        ours.bind((LOOPBACK, 0))
        ours.listen()
        port = ours.getsockname()[1]
        assert foreign(listeners(port), {os.getpid()}) == []
        arguments = [sys.executable, "-c", code, str(port)]
        with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout is not None
            other.stdout.readline()
            found = listeners(port, {os.getpid()})
            assert [set(listener.pids) for listener in foreign(found, {os.getpid()})] == [{other.pid}]
            other.communicate("\n")


def test_a_reserved_port_leaves_room_for_the_ports_that_a_server_derives_from_it() -> None:
    held = [reserve() for _ in range(200)]
    try:
        assert max(reservation.port for reservation in held) + 10_000 <= 65_535
    finally:
        for reservation in held:
            reservation.release()
