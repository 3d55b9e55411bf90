"""Records survive kills, full disks and other versions."""

import dataclasses
import json
from pathlib import Path

import pytest

from bench import records
from bench.engines.protocol import Forecast, LaunchFacts
from bench.outcome import Cause, FlagAdvice, OutcomeKind, Phase
from bench.records import RecordError
from tests import build


def full(number):
    return build.record(
        number,
        123.4,
        kind=OutcomeKind.COMPLETE,
        cause=Cause.NONE,
        phase=Phase.SERVING,
        flags=(FlagAdvice("--mem-fraction-static", "lower", 0.8),),
        values={"x": 1, "name": "a", "on": True, "sizes": [1, 2, 4]},
    )


def test_a_record_comes_back_as_it_was_written(tmp_path):
    record = dataclasses.replace(
        full(3),
        forecast=Forecast("fits", ("why",), 1e9, 1000, 10, 5, None, (("weights", 5e10),)),
        facts=LaunchFacts(kv_tokens=5, warnings=("w",), retractions=2),
        command=("python", "-m", "x"),
        env=(("A", "b c"),),
    )
    records.append(tmp_path / "trials.jsonl", record)
    assert records.read(tmp_path / "trials.jsonl") == [record]
    assert records.read(tmp_path / "trials.jsonl")[0].config.key == record.config.key


def test_a_line_cut_off_by_a_kill_costs_only_itself(tmp_path):
    path = tmp_path / "trials.jsonl"
    for number in range(3):
        records.append(path, full(number))
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    for cut in range(1, len(lines[2]), 97):
        path.write_bytes(lines[0] + lines[1] + lines[2][:cut])
        assert [record.number for record in records.read(path)] == [0, 1]
        records.append(path, full(7))
        assert [record.number for record in records.read(path)] == [0, 1, 7]


def test_a_file_of_a_newer_version_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "trials.jsonl"
    records.append(path, full(0))
    line = json.loads(path.read_text())
    line["schema_version"] = records.SCHEMA_VERSION + 1
    path.write_text(json.dumps(line) + "\n")
    before = path.read_bytes()
    with pytest.raises(RecordError, match="newer"):
        records.read(path)
    assert path.read_bytes() == before


def test_a_full_disk_is_an_error_that_says_so():
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    with pytest.raises(RecordError, match="No space left"):
        records.append(Path("/dev/full"), full(0))


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "best.json"
    records.write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        records.write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}


def test_a_line_that_is_no_record_is_named_and_left_alone(tmp_path):
    path = tmp_path / "trials.jsonl"
    records.append(path, full(0))
    line = json.loads(path.read_text())
    line["outcome"]["cause"] = "moon_phase"
    path.write_text(json.dumps(line) + "\n")
    with pytest.raises(RecordError, match=r"line 1: not a record of this version.*moon_phase"):
        records.read(path)
