from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path

import pytest

from analysis.figures import FIGURES
from analysis.report import main, write_report
from bench.outcome import Cause, Outcome, OutcomeKind
from bench.records import RunFolder, TrialRecord, append, read
from tests.analysis.runs import make_run


def text_of(page: Path) -> str:
    body = re.sub(r"<(script|style)>.*?</\1>|<wbr>", "", page.read_text(), flags=re.DOTALL)
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", body)))


def headline(page: Path) -> str:
    found = re.search(r"<h1>(.*?)</h1>", page.read_text(), re.DOTALL)
    assert found is not None
    return unescape(found[1])


def test_a_finished_run_opens_with_its_answer(finished_page: Path) -> None:
    page = finished_page
    finished = page.parents[1]
    best = json.loads((finished / "best.json").read_text())
    assert page == finished / "report" / "index.html"
    assert headline(page).startswith(f"Trial {best['trial']} is best with {best['value']['mean']:,.0f} output tokens/s")
    text = text_of(page)
    assert "than the baseline (95 % interval" in text
    assert "at 32 requests in flight" in text
    assert "over 2 rounds of fresh launches" in text
    assert "a million output tokens cost" in text
    assert "Why, with the baseline's in brackets: a decode step takes" in text


def test_every_figure_is_on_the_page_and_beside_it(finished_page: Path) -> None:
    page = finished_page
    html = page.read_text()
    names = set(re.findall(r'<figure id="([a-z]+)"><h3>[^<]+</h3><svg ', html))
    assert len(names) == len(FIGURES)
    for name in names:
        assert (page.parent / f"{name}.png").stat().st_size > 5000
        assert "<text" in (page.parent / f"{name}.svg").read_text(), "text has to stay text"


def test_the_committed_run_says_that_nothing_was_found_and_that_the_host_drifted(committed: Path) -> None:
    page = write_report(committed)
    assert "nothing beats the baseline's 912 output tokens/s" in headline(page)
    text = text_of(page)
    assert "The baseline read 691 output tokens/s first (trial 0) and 912 output tokens/s when it was measured" in text
    assert "early trials are not comparable with later ones" in text
    assert "NVIDIA H200" in text


def test_figures_say_themselves_what_is_not_real(finished_page: Path) -> None:
    folder = finished_page.parent
    for path in folder.glob("*.svg"):
        assert "SIMULATED ENGINE · DUMMY WEIGHTS" in path.read_text(), path.name
    assert "ACCEPTANCE SIMULATED" in (folder / "throughput.svg").read_text()
    assert "ACCEPTANCE SIMULATED" not in (folder / "memory.svg").read_text(), "memory does not depend on it"


def test_real_numbers_bear_no_stamp(tmp_path: Path) -> None:
    run = make_run(tmp_path / "toy" / "real", trials=1, finalists=False, simulated=False)
    records = RunFolder(run).trials
    records.write_text(records.read_text().replace('["load_format","dummy"]', '["load_format","auto"]'))
    page = write_report(run)
    assert "SIMULATED" not in (page.parent / "throughput.svg").read_text()
    assert '<div class="stamps"></div>' in page.read_text()


def test_the_page_asks_for_nothing_from_elsewhere(finished_page: Path) -> None:
    html = finished_page.read_text()
    assert not re.findall(r'(?:src|href)="(?!#|data:)[^"]*"', html)
    assert not re.search(r"@import|url\((?!#)", html)
    assert "default-src 'none'" in html


def test_failures_show_cause_line_advice_and_command(finished_page: Path) -> None:
    text = text_of(finished_page)
    assert "oom_gpu_graph_capture" in text
    assert "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.19 GiB" in text
    assert "(line 655)" in text
    assert "Advice: lower --mem-fraction-static; lower --max-running-requests" in text
    assert "python -m sglang.launch_server --load-format dummy" in text
    assert "env SGLANG_SIMULATE_ACC_LEN=3.0 python" in text


def test_the_time_that_early_stops_saved_is_told(finished_page: Path) -> None:
    text = text_of(finished_page)
    assert re.search(r"settled without a launch, which saved about \d+", text)
    assert re.search(r"trials stopped early, which saved about .* of measuring", text)


def test_a_run_in_progress_says_what_leads_and_that_it_is_no_answer(running: Path) -> None:
    page = write_report(running)
    assert re.match(r"Not finished: 9 of 30 trials have ended, and trial \d+ leads with", headline(page))
    assert "this is a lead and no answer" in text_of(page)
    assert "its best looks" not in text_of(page)


def test_a_run_without_success_says_why_and_what_to_change(failed: Path) -> None:
    page = write_report(failed)
    assert headline(page) == "No configuration could be measured: none of 12 trials gave a number that counts."
    text = text_of(page)
    assert "times oom_gpu_state_cache in phase kv_alloc" in text
    assert "What the failures ask for: raise --mem-fraction-static above 0.74" in text
    assert "the room between the two is closed" in text
    assert "What mattered: Not computed" in text


def test_one_trial_is_a_report_too(single: Path) -> None:
    page = write_report(single)
    assert headline(page).startswith("Not confirmed: the baseline gave")
    assert "No configuration failed." in text_of(page)


def test_an_experiment_without_any_trial_is_a_report_too(tmp_path: Path) -> None:
    page = write_report(make_run(tmp_path / "toy" / "empty", trials=0))
    assert headline(page) == "No trial has ended yet."


def test_text_of_a_log_cannot_become_part_of_the_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "toy" / "hostile", trials=1, finalists=False)
    hostile = "<script>alert(1)</script> `x` ${x} $headline <img src=x onerror=alert(1)>"
    record = read(RunFolder(run).trials)[0]
    append(
        RunFolder(run).trials,
        TrialRecord(
            **{
                **{
                    name: getattr(record, name) for name in ("candidate", "config", "engine", "simulated", "started_at")
                },
                "number": 1,
                "role": "search",
                "outcome": Outcome(
                    OutcomeKind.CRASHED, Cause.ENGINE_CRASH, detail=hostile, line=hostile, line_number=1
                ),
            }
        ),
    )
    page = write_report(run)
    assert page.read_text().count("<script>") == 1
    assert "<img" not in page.read_text()
    assert hostile in text_of(page).replace("< ", "<")


def test_a_figure_of_an_earlier_report_does_not_stay_behind(tmp_path: Path) -> None:
    run = make_run(tmp_path / "toy" / "stale", trials=1, finalists=False)
    (run / "report").mkdir()
    stale = run / "report" / "failures.png"
    stale.write_bytes(b"old")
    write_report(run)
    assert not stale.exists()


def test_bad_input_ends_with_a_sentence_and_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "nothing")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_a_best_json_that_was_cut_off_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "toy" / "broken", trials=1, finalists=False)
    (run / "best.json").write_text('{"trial": ')
    assert main([str(run)]) == 2
    assert "best.json is not valid JSON" in capsys.readouterr().err


@pytest.mark.slow
def test_five_hundred_trials_stay_small(tmp_path: Path) -> None:
    page = write_report(make_run(tmp_path / "toy" / "big", trials=500))
    assert page.stat().st_size < 5_000_000
    assert text_of(page).count("oom_gpu") > 50
