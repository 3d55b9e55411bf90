"""``python -m bench.load``: exit codes, files, thresholds."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pyarrow.parquet
import pytest

from bench.load import __main__ as cli
from bench.load.report import wilson
from bench.load.thresholds import parse
from tests.load.stub import Behaviour, serving

QUICK = ("--output-tokens", "12", "--min-window", "0.2", "--max-window", "0.4", "--max-warmup", "2")


async def run(*arguments: str, behaviour: Behaviour | None = None) -> int:
    """Run the command against a stub, in another thread as it has an event loop of its own."""
    async with serving(behaviour or Behaviour()) as stub:
        return await asyncio.to_thread(cli.main, ["--url", stub.url, *QUICK, *arguments])


async def test_a_measured_level_leaves_every_metric_under_its_name(tmp_path: Path) -> None:
    found, rows = tmp_path / "level.json", tmp_path / "requests.parquet"
    behaviour = Behaviour(tokens_per_chunk=lambda _chunk: 2, verify_steps=True)
    code = await run("--concurrency", "4", "--json", str(found), "--parquet", str(rows), behaviour=behaviour)
    report = json.loads(found.read_text())
    assert code in (0, 1)  # the stub shares our interpreter: the client may well say that it was slowed
    for name in ("ttft_s", "ttfat_s", "icl_s", "itl_s", "tpot_s", "e2e_s"):
        assert report[name]["count"] > 0
    assert report["ttft_sched_s"] is None
    assert report["output_tok_per_s"]["low"] <= report["output_tok_per_s"]["mean"]
    assert report["accept_length"] == pytest.approx(report["accept_length"])
    for name in ("server_tok_per_s", "goodput_request_per_s", "goodput_tok_per_s", "slo_attainment", "input_tok_per_s"):
        assert name in report
    assert report["pattern"]["concurrency"] == 4
    assert report["sent"]["requests"] == sum(report["requests_all"].values())
    assert pyarrow.parquet.read_table(rows).num_rows == report["sent"]["requests"]


async def test_a_threshold_that_is_missed_has_an_exit_code_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.load.doubts.VOID_LAG_SHARE", 1e9)
    monkeypatch.setattr("bench.load.doubts.VOID_BUSY_SHARE", 1e9)
    level = ("--concurrency", "2")
    assert await run(*level, "--threshold", "p95(ttft)<60s", "--threshold", "output_tok_per_s>1") == 0
    assert await run(*level, "--threshold", "p95(ttft)<60s", "--threshold", "mean(tpot)<1us") == cli.THRESHOLD_MISSED


async def test_goodput_counts_what_met_every_objective(tmp_path: Path) -> None:
    found = tmp_path / "level.json"
    await run("--concurrency", "2", "--slo", "ttft<60s", "--slo", "e2e<1us", "--json", str(found))
    report = json.loads(found.read_text())
    assert report["goodput_request_per_s"] == 0
    assert report["slo_attainment"]["high"] < 1
    await run("--concurrency", "2", "--slo", "ttft<60s", "--json", str(found))
    report = json.loads(found.read_text())
    assert report["goodput_request_per_s"] == pytest.approx(report["request_per_s"], rel=0.2)


async def test_an_open_loop_reports_what_it_really_sent(tmp_path: Path) -> None:
    found = tmp_path / "level.json"
    await run("--rate", "80", "--pattern", "constant", "--json", str(found))
    report = json.loads(found.read_text())
    assert report["sent"]["request_per_s"] == pytest.approx(80, rel=0.2)
    assert report["ttft_sched_s"]["count"] > 0


async def test_a_trace_is_sent_as_it_was_recorded(tmp_path: Path) -> None:
    trace, found = tmp_path / "trace.jsonl", tmp_path / "level.json"
    rows = [{"timestamp": 40 * number, "input_length": 9, "output_length": 2 + number % 3} for number in range(12)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    table = tmp_path / "requests.parquet"
    await run("--trace", str(trace), "--json", str(found), "--parquet", str(table), "--max-window", "9")
    report = json.loads(found.read_text())
    assert report["requests_all"] == {"ok": 12, "failed": 0, "aborted": 0}
    assert report["ttft_sched_s"]["count"] == 12
    sent = pyarrow.parquet.read_table(table).to_pylist()
    assert [row["output_tokens"] for row in sent] == [2 + number % 3 for number in range(12)]
    due = [row["scheduled_s"] - sent[0]["scheduled_s"] for row in sent]
    assert due == pytest.approx([0.04 * number for number in range(12)], abs=1e-6)


def test_a_server_that_is_not_there_is_a_failed_level(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--url", "http://127.0.0.1:9", "--concurrency", "1"]) == 1
    assert "could not connect" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "needs a concurrency"),
        (["--concurrency", "0"], "concurrency of 1"),
        (["--rate", "-3"], "rate above 0"),
        (["--rate", "3", "--concurrency", "4"], "no limit"),
        (["--concurrency", "2", "--requests", "5", "--pattern", "closed"], "--requests goes with batch"),
        (["--concurrency", "2", "--processes", "3"], "more than the concurrency"),
        (["--trace", "/nowhere"], "No such file"),
        (["--trace", "/nowhere", "--rate", "3"], "do not go with --trace"),
        (["--concurrency", "2", "--output-tokens", "0"], "--output-tokens 0"),
        (["--concurrency", "2", "--prompts", "random_ids"], "vocabulary_size"),
        (["--concurrency", "2", "--prompts", "jsonl", "--path", "/nowhere"], "No such file"),
        (["--concurrency", "2", "--prompts", "random_ids", "--vocabulary-size", "99", "--route", "chat"], "token ids"),
        (["--concurrency", "2", "--json", "/nowhere/at/all.json"], "no folder"),
        (["--concurrency", "2", "--header", "nonsense"], "expected 'Name: value'"),
        (["--concurrency", "2", "--threshold", "p95(tfft)<1s"], "closest: ttft"),
        (["--concurrency", "2", "--threshold", "p42(ttft)<1s"], "no statistic"),
        (["--concurrency", "2", "--threshold", "ttft<1s"], "needs a statistic"),
        (["--concurrency", "2", "--threshold", "p95(ttft)<1"], "needs a unit"),
        (["--concurrency", "2", "--slo", "itl<1s"], "expected one of ttft, tpot, e2e below a time"),
        (["--concurency", "2"], "unrecognized arguments: --concurency 2; closest: --concurrency"),
        (["--concurrency", "2", "--min-window", "9", "--max-window", "5"], "--min-window 9 is longer than --max"),
    ],
)
def test_bad_arguments_say_what_is_wrong(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--url", "http://127.0.0.1:9", *arguments])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_an_address_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--url", "https://example.org", "--concurrency", "1"])
    assert "expected http://host:port" in capsys.readouterr().err


def test_thresholds_are_read_in_their_units() -> None:
    assert parse("p95(ttft) < 500ms").limit == 0.5
    assert parse("max(itl)<=250us").limit == pytest.approx(250e-6)
    assert parse("failed<1%").limit == 0.01
    assert parse("output_tok_per_s>1e3").limit == 1000


def test_shares_have_wilsons_interval() -> None:
    low, high = wilson(95, 100)
    assert (low, high) == (pytest.approx(0.8882, abs=1e-3), pytest.approx(0.9785, abs=1e-3))
    assert wilson(0, 0) == (0.0, 1.0)
