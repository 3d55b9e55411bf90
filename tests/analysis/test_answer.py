from __future__ import annotations

import json
import re
from pathlib import Path

import analysis
from analysis.answer import Answer, answer
from analysis.doubts import doubts
from bench.records import RunFolder, read
from tests.analysis.runs import make_run


def answer_of(folder: Path, **changes: object) -> Answer:
    """The answer after the picker had written something else."""
    path = folder / "best.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return answer(analysis.load(folder))


def test_no_difference_is_said(tmp_path: Path) -> None:
    run = make_run(tmp_path / "toy" / "equal", trials=12)
    said = answer_of(run, verdict="no_difference", gain={"mean": 0.004, "low": -0.01, "high": 0.018, "method": ""})
    assert "it cannot be told from the baseline" in said.headline
    assert any("+0.4 % (-1.0 % to +1.8 %), may be nothing" in text for text in said.sentences)


def test_a_baseline_that_wins_is_kept(tmp_path: Path) -> None:
    run = make_run(tmp_path / "toy" / "kept", trials=12)
    first = read(RunFolder(run).trials)[0]
    said = answer_of(run, verdict="no_difference", trial=0, key=first.config.key, gain=None)
    assert re.match(r"Keep the baseline with [\d,]+ output tokens/s: nothing", said.headline)


def test_limits_that_nothing_keeps_are_named_with_the_nearest(tmp_path: Path) -> None:
    run = make_run(tmp_path / "toy" / "late", trials=12, limits={"ttft_s.p95": 0.01})
    said = answer_of(run, verdict="not_meeting_limits", excess={"ttft_s.p95": 9.8})
    assert "No configuration keeps the limits" in said.headline
    assert "time to first token (p95) is over its limit by 980.0 %" in said.headline


def test_before_the_finalists_too_the_nearest_to_a_limit_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "toy" / "late", trials=12, finalists=False, limits={"ttft_s.p95": 0.01})
    assert any(
        re.search(r"No configuration keeps the limits; of the nearest, .* is \d+ ms, \d+\.\d % over", text)
        for text in answer(analysis.load(run)).sentences
    )


def test_an_interval_that_is_open_is_not_shown_as_one(tmp_path: Path) -> None:
    run = make_run(tmp_path / "toy" / "open", trials=12)
    said = answer_of(run, gain={"mean": 0.2, "low": None, "high": None, "method": "one launch, no interval"})
    assert said.headline.endswith("20.0 % more than the baseline.")


def test_equals_of_the_best_are_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "toy" / "tied", trials=12)
    other = read(RunFolder(run).trials)[1]
    assert any("cannot be told from trial 1;" in text for text in answer_of(run, tied=[other.config.key]).sentences)


def test_doubts_are_told_in_words(finished: Path) -> None:
    text = "\n".join(doubts(analysis.load(finished)))
    assert "requests at once: at 32 in flight the rest waits in its queue" in text
    assert "The client used 74 % of its core" in text
    assert "failed for reasons of the machine" in text


def test_a_machine_that_drifted_is_noticed_by_the_baseline(tmp_path: Path) -> None:
    run = make_run(tmp_path / "toy" / "drifted", trials=12)
    rounds = RunFolder(run).finalists
    lines = [json.loads(line) for line in rounds.read_text().splitlines()]
    for line in lines:
        line["value"] *= 0.8
    rounds.write_text("".join(json.dumps(line) + "\n" for line in lines))
    said = "\n".join(doubts(analysis.load(run)))
    assert re.search(
        r"The baseline read [\d,]+ output tokens/s first \(trial 0\) and [\d,]+ output tokens/s when it was measured "
        r"again, .+ later \(-\d+\.\d %\): .* early trials are not comparable",
        said,
    )


def test_a_lead_of_the_search_that_fresh_launches_did_not_confirm_is_none(tmp_path: Path) -> None:
    run = make_run(tmp_path / "toy" / "cut", trials=12, best=False)
    rounds = RunFolder(run).finalists
    lines = [json.loads(line) for line in rounds.read_text().splitlines()]
    baseline = next(line for line in lines if not line["candidate"]["values"])
    for line in lines:  # as fast as the baseline, all of them
        line["value"], line["measurements"] = baseline["value"], baseline["measurements"]
    rounds.write_text("".join(json.dumps(line) + "\n" for line in lines[:3]))
    said = answer(analysis.load(run))
    assert said.headline.startswith("Not finished: after 3 fresh launches of the finalists nothing beats the baseline")
    assert any(
        re.search(r"finalist \(trial \d+\) gave .* against the baseline: no difference", text)
        for text in said.sentences
    )
    assert not any("Nothing has been measured again" in text for text in said.sentences)


def test_a_best_value_at_the_edge_of_its_range_is_pointed_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "toy" / "edge", trials=12)
    found = analysis.load(run)
    best = max((record for record in found.records if record.value), key=lambda record: record.value or 0.0)
    value = best.candidate.values["mem_fraction_static"]
    file = run / "experiment.yaml"
    file.write_text(file.read_text().replace("high: 0.96", f"high: {value}"))
    said = doubts(analysis.load(run))
    assert any(f"mem_fraction_static = {value}, the highest that the space allows" in text for text in said)
