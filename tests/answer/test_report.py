"""What the report says about simulated runs, and about verifications."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

import pytest

import analysis
from analysis import words
from analysis.compare import main as compare
from analysis.report import write_report
from bench import records
from bench.load.measurement import Interval
from bench.pick import main as pick
from bench.records import RunFolder
from bench.verify import Verdict
from tests.analysis.runs import make_run
from tests.answer.runs import measured_run

FRAMES_PAGE = Path(__file__).parents[2] / "docs" / "frames.md"


def text_of(html: str) -> str:
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", html)))


def part(page: Path, tag: str) -> str:
    found = re.search(rf"<{tag}[^>]*>(.*?)</{tag}>", page.read_text(), re.DOTALL)
    assert found is not None
    return text_of(found[1])


def verdict(number: int, *, holds: bool, measured: float = 1510.0, weak: bool = False) -> Verdict:
    return Verdict(
        file="launch.sh",
        at=1_790_000_000.0 + 3600 * number,
        launch=number,
        trial=1,
        engine="simulator 0.5.15",
        simulated=True,
        metric="output_tok_per_s",
        level=32,
        stated=Interval(1500.0, 1450.0, 1550.0),
        measured=Interval(measured, measured - 20, measured + 20),
        holds=holds,
        reasons=() if holds else ("the two intervals do not meet; it is worse than stated",),
        weak=weak,
    )


def test_title_and_headline_of_a_simulated_run_say_so(run: Path) -> None:
    before = write_report(run)
    assert "simulated" in part(before, "title")
    assert re.search(r"Not finished: .* output tokens/s \(simulated\)", part(before, "h1")), "without best.json"
    assert pick([str(run)]) == 0
    page = write_report(run)
    assert "simulated" in part(page, "title")
    assert "output tokens/s (simulated)" in part(page, "h1")


def test_a_simulated_run_without_a_number_says_so_beside_its_headline(run: Path) -> None:
    RunFolder(run).finalists.unlink()
    lines = [line for line in RunFolder(run).trials.read_text().splitlines() if '"number":0' in line]
    RunFolder(run).trials.write_text(lines[0].replace('"valid":true', '"valid":false') + "\n")
    record = records.read(RunFolder(run).trials)[0]
    RunFolder(run).trials.write_text(lines[0].replace(f'"value":{record.value}', '"value":null') + "\n")
    page = write_report(run)
    assert "simulated" in part(page, "hgroup")
    assert "simulated" in part(page, "title")


def test_a_real_run_is_not_called_simulated(h200: Path) -> None:
    page = write_report(h200)
    assert "simulated" not in part(page, "title")
    assert "(simulated)" not in part(page, "h1")
    assert "simulated engine" not in part(page, "hgroup")


def test_a_comparison_of_simulated_runs_marks_them(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = measured_run(tmp_path / "other")
    assert compare([str(run), str(other), "--regression"]) in (0, 3)
    said = capsys.readouterr().out
    assert "Not real in all of these runs: simulated engine." in said
    assert re.search(r"output tokens/s\s+\(simulated\)", said)
    assert re.search(r"the best changed by .* \(simulated\) at 32 in flight", said)
    compare([str(run), str(other), "--json"])
    assert '"marks": ["simulated engine"' in capsys.readouterr().out


def test_a_comparison_of_real_runs_bears_no_such_mark(h200: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compare([str(h200), str(h200)])
    said = capsys.readouterr().out
    assert "output tokens/s" in said
    assert "simulated engine" not in said
    assert "(simulated)" not in said


def test_an_interval_of_a_throughput_never_reaches_below_zero() -> None:
    wide = Interval(100.0, -30.0, 230.0)
    assert words.interval(wide) == "100 (0 to 230)"
    assert words.interval(Interval(0.5, -1.4, 2.4), relative=True) == "+50.0 % (-100.0 % to +240.0 %)"


def test_few_trials_are_no_ground_to_say_where_configurations_fail(h200: Path) -> None:
    text = text_of(write_report(h200).read_text())
    assert "6 trials, of which 1 failed, by" in text
    assert "too few to say where configurations fail" in text
    assert "of the information" not in text


def test_many_trials_say_how_much_the_parameters_explain_and_on_what_it_rests(tmp_path: Path) -> None:
    text = text_of(write_report(make_run(tmp_path / "toy" / "many", trials=60)).read_text())
    assert re.search(r"\d+ trials, of which \d+ failed, by .* and .*: .* \d+% of the information", text)


def test_verifications_are_shown_the_latest_first(run: Path) -> None:
    assert pick([str(run)]) == 0
    assert "Verified" not in text_of(write_report(run).read_text()), "nothing was verified"
    records.write_json(run / "verify" / "0001" / "verdict.json", verdict(1, holds=False, measured=900.0))
    records.write_json(run / "verify" / "0002" / "verdict.json", verdict(2, holds=True, weak=True))
    page = write_report(run)
    section = page.read_text().partition('<section id="verified">')[2].partition("</section>")[0]
    rows = [text_of(row) for row in re.findall(r"<tr><td.*?</tr>", section, re.DOTALL)]
    assert len(rows) == 2
    assert "launch.sh (trial 1)" in rows[0]
    assert "2026-09-21 16:13 UTC" in rows[0]
    assert "1,500 (1,450 to 1,550) output tokens/s (simulated)" in rows[0]
    assert "1,510 (1,490 to 1,530) (simulated)" in rows[0]
    assert "holds, but the intervals are so wide" in rows[0]
    assert "900 (880 to 920)" in rows[1]
    assert "does not hold: the two intervals do not meet; it is worse than stated" in rows[1]
    assert "was verified on" not in text_of(page.read_text()), "the last verdict holds"


def test_a_file_whose_last_verification_does_not_hold_is_warned_of(run: Path) -> None:
    assert pick([str(run)]) == 0
    records.write_json(run / "verify" / "0001" / "verdict.json", verdict(1, holds=True))
    records.write_json(run / "verify" / "0002" / "verdict.json", verdict(2, holds=False, measured=900.0))
    assert "was verified on 2026-09-21 and does not hold: the two" in text_of(write_report(run).read_text())


def test_verifications_are_a_frame_whose_columns_are_documented(run: Path) -> None:
    records.write_json(run / "verify" / "0001" / "verdict.json", verdict(1, holds=True))
    frame = analysis.load(run).verifications
    assert list(frame["measured_low"]) == [1490.0]
    assert list(frame["holds"]) == [True]
    section = FRAMES_PAGE.read_text().partition("## verifications")[2].partition("\n## ")[0]
    assert set(frame.columns) <= set(re.findall(r"`([a-z_]+)`", section))
