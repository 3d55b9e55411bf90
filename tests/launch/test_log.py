"""A growing log is read line by line, whatever the server does to it."""

from pathlib import Path

import pytest

from bench.launch.log import LogFollower


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "server.log"


def write(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_a_log_that_is_not_there_yet_has_no_lines(path: Path) -> None:
    assert LogFollower(path).new_lines() == []
    assert LogFollower(path).tail(3) == []


def test_lines_come_once_each_and_only_when_complete(path: Path) -> None:
    log = LogFollower(path)
    write(path, b"one\ntw")
    assert log.new_lines() == ["one"]
    assert log.new_lines() == []
    write(path, b"o\nthree\n")
    assert log.new_lines() == ["two", "three"]


def test_the_last_words_of_a_dead_server_count_without_a_line_end(path: Path) -> None:
    log = LogFollower(path)
    write(path, b"one\nKilled")
    assert log.new_lines(final=True) == ["one", "Killed"]
    assert log.new_lines(final=True) == []


def test_a_progress_bar_is_one_line_and_shows_its_last_state(path: Path) -> None:
    log = LogFollower(path)
    write(path, b"\rloading 10%\rloading 55%")
    assert log.new_lines() == []
    moved = log.size_bytes
    write(path, b"\rloading 100%\r\nserving\n")
    assert log.new_lines() == ["\rloading 10%\rloading 55%\rloading 100%\r", "serving"]
    assert log.size_bytes > moved > 0
    assert log.tail(2) == ["loading 100%", "serving"]


def test_a_character_that_is_written_in_two_parts_is_read_as_one(path: Path) -> None:
    log = LogFollower(path)
    write(path, "größe".encode()[:3])
    assert log.new_lines() == []
    write(path, "größe\n".encode()[3:] + b"\xff\xfe broken\n")
    assert log.new_lines() == ["größe", "\ufffd\ufffd broken"]


def test_a_flood_is_read_in_steps_and_no_line_is_lost(path: Path) -> None:
    log = LogFollower(path)
    lines = [f"line {number} " + "x" * 90 for number in range(30_000)]
    write(path, "\n".join(lines).encode() + b"\n")
    read: list[str] = []
    steps = 0
    while new := log.new_lines():
        read += new
        steps += 1
    assert read == lines
    assert steps > 1


def test_the_tail_leaves_out_blank_lines(path: Path) -> None:
    write(path, b"one\n\ntwo\nthree\n\n")
    assert LogFollower(path).tail(2) == ["two", "three"]
