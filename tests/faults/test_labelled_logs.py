"""The fault reader against labelled logs: our own, and the public ones where they lie beside the repository."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from bench.explain import explain, rules_for
from bench.outcome import Cause, Fault
from benchmarks.faults import PUBLIC, LabelledLog, own_logs, public_logs, report
from tests.faults.logs import read

OWN = own_logs()
PUBLIC_LOGS = public_logs()
LOGS = OWN + PUBLIC_LOGS
FAILED = [log for log in LOGS if log.label not in (Cause.HEALTHY, Cause.OTHER)]
HEALTHY = [log for log in LOGS if log.label == Cause.HEALTHY]


def named(log: LabelledLog) -> str:
    return log.name


@cache
def explained(log: LabelledLog) -> Fault:
    return explain(log.text())


WRAPPERS: dict[str, Callable[[str], str]] = {
    "compose": lambda line: f"sglang-1  | {line}",
    "kubernetes": lambda line: f"2026-01-02T03:04:05.123456789Z stderr F {line}",
    "kubernetes and compose": lambda line: f"2026-01-02T03:04:05.123456789Z stderr F server_1 | {line}",
    "pod": lambda line: f"[pod/sglang-0/main] {line}",
    "journal": lambda line: f"Jan  2 03:04:05 node-1 sglang[4711]: {line}",
    "journal with ISO time": lambda line: f"2026-01-02T03:04:05+0000 node-1 sglang[4711]: {line}",
    "ray": lambda line: f"\x1b[36m(Server pid=123, ip=10.0.0.1)\x1b[0m {line}",
    "torchrun": lambda line: f"[rank0]: {line}",
    "slurm": lambda line: f"0: {line}",
    "another program's logger": lambda line: f"2026-01-02 03:04:05,123 - runner - INFO - {line}",
    "quoted": lambda line: f"> {line}",
    "indented": lambda line: f"    {line}",
    "without indentation": str.strip,
    "Windows line ends": lambda line: f"{line}\r",
}


@pytest.mark.parametrize("log", OWN, ids=named)
def test_own_log_is_named_with_its_proving_line(log: LabelledLog) -> None:
    fault = explained(log)
    assert log.cause_is_right(fault)
    assert log.root_line is None or log.line_is_right(fault)


@pytest.mark.skipif(not PUBLIC_LOGS, reason=f"the public logs are not at {PUBLIC}")
def test_public_logs_reach_the_promised_shares() -> None:
    faults = [(log, explained(log)) for log in LOGS]
    with_line = [(log, fault) for log, fault in faults if log.root_line is not None]
    assert sum(log.cause_is_right(fault) for log, fault in faults) >= 0.95 * len(faults)
    assert sum(log.line_is_right(fault) for log, fault in with_line) >= 0.90 * len(with_line)


@pytest.mark.parametrize("log", HEALTHY, ids=named)
def test_no_prefix_of_a_healthy_log_is_decisive(log: LabelledLog) -> None:
    text = log.text()
    verdict, decisive = read(text.split("\n"), rules_for(text))
    assert decisive is None
    assert verdict.cause == Cause.HEALTHY


@pytest.mark.parametrize("log", FAILED, ids=named)
def test_a_growing_log_gives_the_same_cause_as_the_whole(log: LabelledLog) -> None:
    text = log.text()
    verdict, decisive = read(text.split("\n"), rules_for(text))
    assert decisive is None or decisive.cause == verdict.cause


@pytest.mark.parametrize("log", [log for log in OWN if log in FAILED], ids=named)
def test_own_failure_is_decisive_within_its_proving_line_and_not_before(log: LabelledLog) -> None:
    lines = log.text().split("\n")
    fault = explained(log)
    assert fault.line_number is not None
    _, before = read(lines[: fault.line_number - 1])
    _, within = read(lines[: fault.line_number])
    assert before is None
    # Nothing follows a main process's own exception, and what an exception means may stand in the one it leads to.
    assert within is not None or len(lines) - fault.line_number <= 2


def check_that_wrapping_changes_nothing(log: LabelledLog, wrapper: str) -> None:
    def told(fault: Fault) -> tuple[Cause, int | None]:
        return fault.cause, fault.line_number

    text = log.text()
    wrapped = [WRAPPERS[wrapper](line) for line in text.split("\n")]
    assert told(read(wrapped, rules_for(text))[0]) == told(explained(log)), log.name


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrapped_logs_are_read_as_the_bare_ones(wrapper: str) -> None:
    for log in LOGS:
        if len(log.text().split("\n")) < 50:
            check_that_wrapping_changes_nothing(log, wrapper)


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_long_wrapped_logs_are_read_as_the_bare_ones(wrapper: str) -> None:
    for log in LOGS:
        check_that_wrapping_changes_nothing(log, wrapper)


def test_the_page_says_what_it_was_made_of() -> None:
    page = report(OWN[:3], [])
    assert "3 logs of our own runs" in page
    assert "../shared/logs is absent" in page
    assert "| unknown_argument | 1 | 1 | 1 | 1 |" in page
