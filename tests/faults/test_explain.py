"""The command that says what killed a server."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.explain import main
from bench.outcome import Cause
from benchmarks.faults import OWN

WEIGHTS_LEAVE_NOTHING = OWN / "cpu_0515_weights_leave_no_memory.log"


class Pipe:
    """Standard input that comes through a pipe."""

    def __init__(self, content: bytes) -> None:
        self.buffer = io.BytesIO(content)


def explained(capfdbinary: pytest.CaptureFixture[bytes], *arguments: str) -> dict:
    assert main([*arguments, "--json"]) == 0
    sys.stdout.flush()
    return json.loads(capfdbinary.readouterr().out)


def test_json_has_exactly_the_promised_fields(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    told = explained(capfdbinary, str(WEIGHTS_LEAVE_NOTHING))
    assert list(told) == ["cause", "phase", "line", "line_number", "flags", "advice"]
    assert (told["cause"], told["phase"], told["line_number"]) == ("oom_gpu_kv_pool", "kv_alloc", 73)
    assert told["flags"] == [{"flag": "--mem-fraction-static", "direction": "raise", "bound": 0.004}]


def test_words_name_cause_phase_line_and_move(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert main([str(WEIGHTS_LEAVE_NOTHING)]) == 0
    sys.stdout.flush()
    words = capfdbinary.readouterr().out.decode()
    assert "oom_gpu_kv_pool in phase kv_alloc" in words
    assert "line 73: ValueError: Loaded weights leave no GPU memory" in words
    assert "raise --mem-fraction-static above 0.004" in words


def test_a_dash_reads_standard_input(
    capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", Pipe(WEIGHTS_LEAVE_NOTHING.read_bytes()))
    assert explained(capfdbinary, "-")["line_number"] == 73


@pytest.mark.parametrize(
    "content",
    [b"", b"\n\n", bytes(range(256)) * 50, b"\x00" * 4096, b"{" * 5000, b'{"log": 1}\n[]\n{}', b"lorem ipsum\n" * 9],
    ids=["empty", "blank", "binary", "zeros", "braces", "json", "prose"],
)
def test_nonsense_is_unknown(content: bytes, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    log = tmp_path / "server.log"
    log.write_bytes(content)
    assert explained(capfdbinary, str(log))["cause"] == Cause.UNKNOWN


def test_a_log_in_utf_16_is_read(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    log = tmp_path / "server.log"
    log.write_text(WEIGHTS_LEAVE_NOTHING.read_text(), encoding="utf-16")
    assert explained(capfdbinary, str(log))["cause"] == Cause.OOM_GPU_KV_POOL


@pytest.mark.parametrize("path", ["no/such.log", ".", "a\0b"])
def test_a_file_that_cannot_be_read_is_named_without_a_traceback(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([path]) == 2
    error = capsys.readouterr().err
    assert error.startswith("cannot read ")
    assert "Traceback" not in error


def test_it_runs_without_the_heavy_libraries() -> None:
    code = (
        "import sys, bench.explain; heavy = {'pandas', 'hydra', 'optuna', 'numpy', 'aiohttp'} & set(sys.modules); "
        "sys.exit(str(heavy) if heavy else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
