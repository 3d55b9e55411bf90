"""Numbers of a simulator say so wherever a person or a program reads them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from bench.load.__main__ import main as load
from tests.engines.simulated import ATTENTION, server
from tests.engines.simulated import serving as simulating
from tests.load.stub import Behaviour, serving

QUICK = ("--output-tokens", "12", "--min-window", "0.2", "--max-window", "0.4", "--max-warmup", "2", "--quiet")


async def test_a_level_of_a_simulator_is_marked_on_the_screen_and_in_the_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = tmp_path / "level.json"
    async with simulating(server("--mem-fraction-static", "0.8", *ATTENTION, time_scale=300)) as session:
        words = ["--url", str(session._base_url), "--concurrency", "2", *QUICK, "--json", str(found)]
        await asyncio.to_thread(load, words)
    said = capsys.readouterr().out
    assert "SIMULATED: the server is a simulator" in said
    assert "output tok/s (simulated)" in said
    assert json.loads(found.read_text())["simulated"] is True


async def test_a_level_of_a_server_that_does_not_say_that_it_is_simulated_bears_no_mark(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = tmp_path / "level.json"
    async with serving(Behaviour()) as stub:
        await asyncio.to_thread(load, ["--url", stub.url, "--concurrency", "2", *QUICK, "--json", str(found)])
    said = capsys.readouterr().out
    assert "output tok/s" in said
    assert "simulated" not in said.lower()
    assert json.loads(found.read_text())["simulated"] is False
