from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bench import records
from bench.load.measurement import Interval
from bench.outcome import Cause, Outcome, OutcomeKind
from bench.pick import main as pick
from bench.records import RunFolder
from bench.verify import RefusedFileError, holds, judge, main, read
from tests.answer.runs import measured_run
from tests.build import measurement


def replaced(old: str, new: str) -> Callable[[str], str]:
    def change(text: str) -> str:
        assert re.search(old, text), text
        return re.sub(old, new, text, count=1)

    return change


def test_what_was_written_is_what_would_be_launched(run: Path) -> None:
    assert pick([str(run), "--host", "0.0.0.0"]) == 0
    for name in ("launch.sh", "best.yaml", "best.json"):
        case = read(run / name, RunFolder(run))
        assert case.found.number == 1
        assert case.experiment.workload.levels == (32,)


def test_the_level_of_the_file_is_measured(run: Path) -> None:
    assert pick([str(run), "--level", "4"]) == 0
    case = read(run / "picked" / "level-4" / "launch.sh", RunFolder(run))
    assert (case.found.number, case.experiment.workload.levels) == (2, (4,))


@pytest.mark.parametrize(
    ("name", "change", "difference"),
    [
        ("launch.sh", replaced(r"static 0\.8", "static 0.9"), "--mem-fraction-static: the file has 0.9, 0.8 was"),
        ("launch.sh", replaced(r" +--mamba-ssm-dtype .*\n", ""), "--mamba-ssm-dtype: the file has none, bfloat16 was"),
        ("launch.sh", replaced("--enable-metrics", "--tp-size 2 --enable-metrics"), "--tp-size: the file has 2, none"),
        ("launch.sh", replaced("VERSION=0.5.15", "VERSION=0.5.14"), "VERSION: the file has 0.5.14, 0.5.15 was"),
        ("launch.sh", replaced("exec ", "export MORE=1\nexec "), "MORE: the file has 1, none was measured"),
        ("launch.sh", replaced("exec ", "numactl --show\nexec "), "a line that does not belong there: numactl --show"),
        ("launch.sh", replaced("set -euo pipefail\n", ""), "a line is missing: set -euo pipefail"),
        ("launch.sh", replaced("exec ", "run "), "no line that begins with exec"),
        ("best.yaml", replaced(r"static: 0\.8", "static: 0.7"), "mem_fraction_static: the file has 0.7, best.json 0.8"),
        ("best.yaml", replaced("engine:", "model: {path: other}\nengine:"), "a key that does not belong there: model"),
        ("best.json", replaced(r"0\.8\b", "0.7"), "mem_fraction_static: the file has 0.7, trial 1 0.8"),
        ("best.json", replaced('"low": [0-9.]+', '"low": null'), "states no interval"),
        ("best.json", replaced("simulator 0.5.15", "simulator 0.5.14"), "was measured with simulator 0.5.14"),
        ("best.json", replaced("{", ""), "cannot read"),
    ],
)
def test_an_altered_file_is_refused_with_the_difference(
    name: str, change: Callable[[str], str], difference: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pick([str(run)]) == 0
    file = run / name
    file.write_text(change(file.read_text()))
    assert main([str(file)]) == 2
    assert difference in capsys.readouterr().err
    assert not (run / "verify").exists(), "it was launched"


def test_a_file_that_was_copied_away_needs_its_run(
    run: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pick([str(run)]) == 0
    copy = tmp_path_factory.mktemp("elsewhere") / "launch.sh"
    copy.write_text((run / "launch.sh").read_text().replace("static 0.8", "static 0.9"))
    assert main([str(copy)]) == 2
    assert "name its run with --run" in capsys.readouterr().err
    assert main([str(copy), "--run", str(run)]) == 2
    assert "--mem-fraction-static" in capsys.readouterr().err


def test_secrets_have_to_be_given_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = "hf_AbCdEfGh1234567890abcdefghij"
    run = measured_run(tmp_path, "+engine.env.HF_TOKEN=" + token)
    assert pick([str(run)]) == 0
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(RefusedFileError, match="set HF_TOKEN first"):
        read(run / "launch.sh", RunFolder(run))
    monkeypatch.setenv("HF_TOKEN", token)
    case = read(run / "launch.sh", RunFolder(run))
    command = case.engine.command(case.found.config, port=1, served_model_name="x")
    assert dict(command.env)["HF_TOKEN"] == token


def test_a_number_holds_where_the_intervals_meet() -> None:
    stated = Interval(100.0, 95.0, 105.0)
    assert holds(stated, Interval(108.0, 104.0, 112.0))
    assert holds(stated, Interval(92.0, 88.0, 96.0))
    assert not holds(stated, Interval(90.0, 86.0, 94.0))
    assert not holds(stated, Interval(110.0, 106.0, 114.0))


def test_intervals_that_would_let_anything_hold_are_named(run: Path) -> None:
    assert pick([str(run)]) == 0
    file = run / "best.json"
    case = read(file, RunFolder(run))
    again = records.read(run / "finalists.jsonl")[-1]
    found = judge(case, again)
    assert (found.holds, found.weak) == (True, False)
    wide = replace(case, stated=replace(case.stated, value=replace(case.stated.value, low=-100.0, high=3118.0)))
    found = judge(wide, again)
    assert (found.holds, found.weak) == (True, True)
    slow = replace(case, stated=replace(case.stated, value=Interval(2000.0, 1900.0, 2100.0)))
    found = judge(slow, again)
    assert not found.holds
    assert found.reasons == ("the two intervals do not meet; it is worse than stated",)


def test_a_limit_that_was_kept_has_to_be_kept_again(run: Path) -> None:
    assert pick([str(run), "--limit", "ttft_s.p95<1"]) == 0
    case = read(run / "picked" / "ttft_s.p95-1" / "best.json", RunFolder(run))
    again = records.read(run / "finalists.jsonl")[-1]
    assert judge(case, again).holds
    late = replace(again, measurements=(measurement(again.value or 0.0, concurrency=32, ttft_p95_s=1.2),))
    assert judge(case, late).reasons == ("ttft_s.p95 is 20.0% over its limit of 1, which was kept when it was picked",)


def test_a_server_that_died_does_not_hold_and_has_no_number(run: Path) -> None:
    assert pick([str(run)]) == 0
    case = read(run / "best.json", RunFolder(run))
    died = Outcome(OutcomeKind.CRASHED, Cause.ENGINE_CRASH, line="RuntimeError: it died")
    found = judge(case, replace(records.read(run / "finalists.jsonl")[-1], outcome=died, value=None, measurements=()))
    assert (found.holds, found.measured) == (False, None)
    assert found.reasons == ("the server ended as crashed (engine_crash) RuntimeError: it died",)
