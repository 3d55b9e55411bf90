"""The simulated start: its log is read as SGLang's, its facts are the forecast's, and it dies in SGLang's words."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bench.engines.protocol import Calibration, ServerConfig
from bench.engines.sglang.faults import RULES
from bench.engines.sglang.log_facts import read_facts
from bench.engines.sglang.memory import forecast
from bench.engines.simulator.options import H200
from bench.engines.simulator.virtual import SimulatedHost
from bench.experiment import HardwareSpec
from bench.faults import LogReader
from bench.outcome import Cause, Phase
from tests.engines.simulated import ATTENTION, MTP, EndedError, config, no_exits, server, serving, shape

__all__ = ["no_exits"]
GIB, MIB = 1 << 30, 1 << 20
VERSIONS = ("0.5.10", "0.5.12", "0.5.13", "0.5.14", "0.5.15", "0.5.17", "0.5.20", "0.5.23")
SMALL = HardwareSpec("rtx_4090", 24_564 * MIB, 1.01e12, 165e12, 330e12, "sm89")


def verdict(log: str) -> tuple[Cause, Phase, str | None]:
    reader = LogReader(RULES)
    for line in log.splitlines():
        reader.feed(line)
    fault = reader.verdict()
    return fault.cause, fault.phase, fault.line


def strategy(version: str) -> tuple[str, ...]:
    old = version in ("0.5.10", "0.5.11", "0.5.12", "0.5.13")
    return ("--mamba-scheduler-strategy" if old else "--mamba-radix-cache-strategy", "extra_buffer")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "mtp"])
async def test_a_start_reads_as_healthy_and_its_facts_are_the_forecast(
    version: str, speculative: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--mem-fraction-static", "0.85", "--max-running-requests", "16", *ATTENTION, *strategy(version))
    simulated = server(*arguments, *(MTP if speculative else ()), version=version)
    async with serving(simulated) as session:
        assert (await session.get("/health")).status == 200
    log = capsys.readouterr().err
    assert verdict(log)[0] is Cause.HEALTHY
    facts = read_facts(log.splitlines())
    flags = {name: value for name, value in simulated.given.items() if value is not False}
    told = forecast(flags, version=version, shape=shape(), hardware=H200, calibration=Calibration())
    assert facts.kv_tokens == told.kv_tokens
    assert facts.state_slots == told.state_slots
    assert facts.max_running_requests == told.max_running_requests
    split = dict(told.split_bytes)
    assert facts.weight_bytes == pytest.approx(split["weights"], abs=0.01 * GIB)
    assert facts.graph_bytes == pytest.approx(split["graphs"], abs=0.02 * GIB)
    assert (facts.draft_weight_bytes is not None) == speculative


async def test_the_virtual_host_tells_the_same_facts_as_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    simulated = server("--mem-fraction-static", "0.8", *MTP, *ATTENTION)
    await simulated.startup().run()
    read = read_facts(capsys.readouterr().err.splitlines())
    flags = {name: value for name, value in simulated.given.items() if value is not False}
    told = SimulatedHost(shape(), H200, version="0.5.15").launch(ServerConfig(tuple(sorted(flags.items())))).facts
    for name in told.__dataclass_fields__:
        if name != "warnings":
            assert getattr(told, name) == pytest.approx(getattr(read, name), rel=1e-3, abs=1.1e7), name


@pytest.mark.usefixtures("no_exits")
class TestDeaths:
    """Each failure, by its plan or on demand: SGLang's message, at its place, with its exit code."""

    async def start(
        self, capsys: pytest.CaptureFixture[str], *arguments: str, code: int = -9, **options: object
    ) -> tuple[Cause, Phase, str | None]:
        simulated = server(*arguments, **options)  # type: ignore[arg-type]
        with pytest.raises(EndedError) as ended:
            await simulated.startup().run()
        assert ended.value.code == code
        return verdict(capsys.readouterr().err)

    @pytest.mark.parametrize(
        ("fault", "cause", "phase"),
        [
            ("crash_load", Cause.ENGINE_CRASH, Phase.LOAD),
            ("crash_kv_alloc", Cause.ENGINE_CRASH, Phase.KV_ALLOC),
            ("crash_graph_capture", Cause.ENGINE_CRASH, Phase.GRAPH_CAPTURE),
            ("oom_weights", Cause.OOM_GPU_WEIGHTS, Phase.LOAD),
            ("oom_kv_pool", Cause.OOM_GPU_KV_POOL, Phase.KV_ALLOC),
            ("oom_state_cache", Cause.OOM_GPU_STATE_CACHE, Phase.KV_ALLOC),
            ("oom_graph_capture", Cause.OOM_GPU_GRAPH_CAPTURE, Phase.GRAPH_CAPTURE),
            ("oom_kernel", Cause.OOM_HOST, Phase.LOAD),
        ],
    )
    async def test_on_demand(self, fault: str, cause: Cause, phase: Phase, capsys: pytest.CaptureFixture[str]) -> None:
        assert (await self.start(capsys, faults=(fault,)))[:2] == (cause, phase)

    async def test_at_the_command_line(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert (await self.start(capsys, faults=("crash_args",), code=1))[1] is Phase.ARGS

    async def test_state_cache_that_does_not_fit(self, capsys: pytest.CaptureFixture[str]) -> None:
        cause, phase, line = await self.start(capsys, "--mem-fraction-static", "0.4", *MTP)
        assert (cause, phase) == (Cause.OOM_GPU_STATE_CACHE, Phase.KV_ALLOC)
        assert line is not None
        assert line.startswith("RuntimeError: Not enough GPU memory for hybrid (mamba/linear-attention) state cache.")
        assert "mamba_cache_per_req=146.81 MB" in line

    async def test_draft_pool_that_does_not_fit(self, capsys: pytest.CaptureFixture[str]) -> None:
        cause, phase, line = await self.start(capsys, "--mem-fraction-static", "0.99", *MTP)
        assert (cause, phase) == (Cause.OOM_GPU_KV_POOL, Phase.KV_ALLOC)
        assert line is not None
        assert "GPU 0 has a total capacity of 139.80 GiB" in line

    async def test_weights_that_leave_nothing(self, capsys: pytest.CaptureFixture[str]) -> None:
        cause, _, line = await self.start(
            capsys,
            "--mem-fraction-static",
            "0.05",
            model="tiny",
            version="0.5.14",
            hardware=HardwareSpec(
                "cpu", 20 * MIB, 4e10, 5e11, 5e11, "cpu", available_bytes=20 * MIB, host_memory_bytes=2e10
            ),
        )
        assert cause in (Cause.OOM_GPU_KV_POOL, Cause.OOM_GPU_WEIGHTS)
        assert line is not None

    async def test_weights_larger_than_the_card(self, capsys: pytest.CaptureFixture[str]) -> None:
        cause, phase, _ = await self.start(capsys, hardware=SMALL)
        assert (cause, phase) == (Cause.OOM_GPU_WEIGHTS, Phase.LOAD)

    async def test_host_memory(self, capsys: pytest.CaptureFixture[str]) -> None:
        arguments = ("--enable-hierarchical-cache", "--hicache-ratio", "4", "--mem-fraction-static", "0.8")
        cause, _, line = await self.start(capsys, *arguments)
        assert cause is Cause.OOM_HOST
        assert line is not None
        assert "Please reduce the size of the hierarchical cache" in line

    async def test_the_story_s_first_launch(self, capsys: pytest.CaptureFixture[str]) -> None:
        card = HardwareSpec("rtx", 97_887 * MIB, 1.79e12, 5e14, 1e15, "sm120", available_bytes=94.3 * GIB)
        arguments = ("--mem-fraction-static", "0.8", "--mamba-scheduler-strategy", "extra_buffer", *MTP)
        cause, _, line = await self.start(capsys, *arguments, version="0.5.12", model="qwen3.6-27b", hardware=card)
        assert cause is Cause.OOM_GPU_KV_POOL
        assert line == "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."

    async def test_the_story_s_second_launch(self, capsys: pytest.CaptureFixture[str]) -> None:
        arguments = ("--mamba-scheduler-strategy", "no_buffer", *MTP)
        cause, phase, line = await self.start(capsys, *arguments, version="0.5.13", code=1)
        assert (cause, phase) == (Cause.CONFIG_INCOMPATIBLE, Phase.ARGS)
        assert line is not None
        assert "--mamba-scheduler-strategy no_buffer.To use radix cache" in line

    @pytest.mark.parametrize(
        ("version", "arguments", "words"),
        [
            ("0.5.15", ("--mamba-radix-cache-strategy", "no_buffer"), "no_buffer do not support overlap schedule"),
            ("0.5.13", ("--mamba-scheduler-strategy", "extra_buffer", "--disable-radix-cache"), "not compatible with"),
            ("0.5.23", ("--speculative-algorithm", "EAGLE9"), "Unknown speculative algorithm name: EAGLE9"),
            ("0.5.23", ("--chunked-prefill-size", "100", "--page-size", "16"), "must be divisible by page_size"),
            ("0.5.23", ("--enable-hierarchical-cache", "--disable-radix-cache"), "mutually exclusive"),
            ("0.5.23", ("--speculative-algorithm", "EAGLE3"), "--speculative-draft-model-path"),
        ],
    )
    async def test_refusals(
        self, version: str, arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        cause, phase, line = await self.start(capsys, *arguments, version=version, code=1)
        assert cause in (Cause.CONFIG_INCOMPATIBLE, Cause.UNKNOWN_ARGUMENT)
        assert phase is Phase.ARGS
        assert line is not None
        assert words in line

    async def test_a_hang_says_nothing_more(self, capsys: pytest.CaptureFixture[str]) -> None:
        simulated = server(faults=("start_hang",))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(simulated.startup().run(), 0.2)
        assert "Load weight end" not in capsys.readouterr().err


def run(*arguments: str, **options: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("BENCH_SIMULATOR_")}
    env |= {f"BENCH_SIMULATOR_{name}": value for name, value in options.items()}
    command = [sys.executable, "-m", "bench.simulator", *arguments]
    root = Path(__file__).parents[2]
    return subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, timeout=60, check=False)


def test_an_unknown_flag_ends_as_argparse_does() -> None:
    ended = run("--model-path", "/models/q", "--no-such-flag", "3")
    assert ended.returncode == 2
    assert ended.stderr.endswith("sglang serve: error: unrecognized arguments: --no-such-flag 3\n")


def test_a_model_that_is_not_there_is_taken_for_a_hub_name() -> None:
    ended = run("--model-path", "/models/nope")
    assert ended.returncode == 1
    assert "Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/models/nope'" in ended.stderr


def test_a_bad_option_is_named() -> None:
    ended = run("--model-path", "/models/q", FAULTS="no_such_failure")
    assert ended.returncode != 0
    assert "Traceback" not in ended.stderr


def test_a_dead_scheduler_takes_the_process_with_it() -> None:
    import json

    ended = run("--model-path", "q", MODEL_CONFIG=json.dumps(config("qwentiny")), FAULTS="crash_load", TIME_SCALE="1e4")
    assert ended.returncode == -signal.SIGKILL
    assert "Received sigquit from a child process." in ended.stderr
