"""Messages that engines, drivers and the operating system are known to print, each raised where it belongs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.engines.sglang.faults import RULES as SGLANG
from bench.engines.vllm_faults import RULES as VLLM
from bench.outcome import Cause
from tests.faults.logs import made_log, read

FIXTURE = Path(__file__).parents[1] / "fixtures" / "logs" / "messages.jsonl"
MESSAGES = [json.loads(line) for line in FIXTURE.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(
    "record", MESSAGES, ids=lambda record: f"{record['engine']}-{record['where']}-{record['message'][:50]}"
)
def test_message_is_named_where_it_is_raised(record: dict) -> None:
    rules = SGLANG if record["engine"] == "sglang" else VLLM
    lines = made_log(record["engine"], record["where"], record["message"])
    verdict, decisive = read(lines, rules)
    assert verdict.cause in record["causes"]
    proof = next(index for index, line in enumerate(lines) if line.endswith(record["message"]))
    if record["message"].strip(" :") == "AssertionError":  # says nothing: the condition is the line above
        proof -= 1
    assert verdict.line_number == proof + 1
    assert decisive is None or decisive.cause == verdict.cause


def test_every_label_has_messages() -> None:
    harness_only = {"none", "unknown", "forecast", "dominated", "cannot_win", "wrong_configuration", "foreign_server"}
    harness_only |= {"garbage_output", "server_errors", "serving_hang", "measurement_void", "operator", "healthy"}
    assert {record["causes"][0] for record in MESSAGES} == {str(cause) for cause in Cause} - harness_only
