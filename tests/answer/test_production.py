"""From a sweep of the simulator to a server that runs, and to its number measured again."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from analysis import words
from analysis.report import write_report
from bench import records
from bench.load.measurement import Interval
from bench.records import from_plain
from tests.answer.serving import answered, free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    results = tmp_path_factory.mktemp("results")
    done = module(
        "bench.sweep",
        *("+experiment=quickstart", "run=first", f"results_dir={results}", "workload.levels=[8]"),
        *("search.trials=2", "search.finalists=1", "search.finalist_rounds=2", "workload.max_window_s=20"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return results / "quickstart" / "first"


def module(name: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", name, *words], capture_output=True, text=True, check=False)


def test_the_script_starts_the_server_that_was_measured(swept: Path, tmp_path: Path) -> None:
    port = free_port()
    best = orjson.loads((swept / "best.json").read_bytes())
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(
            [swept / "launch.sh"], env={**os.environ, "PORT": str(port)}, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            info = orjson.loads(answered(f"http://127.0.0.1:{port}/server_info", server))
        finally:
            server.terminate()
            server.wait(20)
    assert info["served_model_name"] == "qwen3_6_27b"
    assert {name: info[name] for name in ("mem_fraction_static", "mamba_ssm_dtype") if name in best["flags"]} == {
        name: best["flags"][name] for name in ("mem_fraction_static", "mamba_ssm_dtype") if name in best["flags"]
    }


def test_the_stated_number_is_confirmed(swept: Path) -> None:
    done = module("bench.verify", swept / "launch.sh")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "holds: the two intervals meet" in done.stdout
    assert re.search(r"measured now: .* \[.*\] \(batch means", done.stdout)
    record = records.read(swept / "verifications.jsonl")[-1]
    assert record.outcome.kind == "complete"
    folder = swept / "verify" / "0001"
    assert (folder / "server_info.json").exists()
    verdict = orjson.loads((folder / "verdict.json").read_bytes())
    assert (verdict["file"], verdict["holds"], verdict["level"]) == ("launch.sh", True, 8)
    assert verdict["measured"]["mean"] == pytest.approx(record.value)
    page = write_report(swept).read_text()
    assert "launch.sh (trial " in page
    assert f"{words.interval(from_plain(Interval, verdict['measured']))} (simulated)" in page


def test_a_number_that_is_too_good_is_contradicted(swept: Path) -> None:
    file = swept / "best.json"
    before = file.read_bytes()
    best = orjson.loads(before)
    best["value"] = {**best["value"], **{name: 2 * best["value"][name] for name in ("mean", "low", "high")}}
    file.write_bytes(orjson.dumps(best))
    try:
        done = module("bench.verify", file)
    finally:
        file.write_bytes(before)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "does not hold: the two intervals do not meet; it is worse than stated" in done.stdout


def test_optuna_dashboard_opens_the_journal_of_the_run(swept: Path) -> None:
    program = Path(sys.executable).parent / "optuna-dashboard"
    if not program.exists():
        pytest.skip("no optuna-dashboard here (pip install optuna-dashboard)")
    port = free_port()
    dashboard = subprocess.Popen(
        [program, swept / "study.journal", "--host", "127.0.0.1", "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        studies = orjson.loads(answered(f"http://127.0.0.1:{port}/api/studies", dashboard))["study_summaries"]
        assert [item["study_name"] for item in studies] == ["quickstart"]
        study = orjson.loads(answered(f"http://127.0.0.1:{port}/api/studies/{studies[0]['study_id']}", dashboard))
    finally:
        dashboard.terminate()
        dashboard.wait(20)
    shown = {trial["number"]: trial["values"] for trial in study["trials"] if trial["state"] == "Complete"}
    told = [
        record for record in records.read(swept / "trials.jsonl") if record.value and record.optuna_number is not None
    ]
    assert told
    for record in told:
        assert shown[record.optuna_number] == [pytest.approx(record.value)]
