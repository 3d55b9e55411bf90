"""Faults: how well the reader names what went wrong in labelled logs; writes docs/faults.md.

    python -m benchmarks.faults

The logs of our own runs are in tests/fixtures/logs; the public ones are read from ../shared/logs/public where that
exists, and are named by number only.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from bench.explain import decoded, explain
from bench.outcome import Cause, Fault

_REPOSITORY = Path(__file__).parents[1]
OWN = _REPOSITORY / "tests" / "fixtures" / "logs"
PUBLIC = _REPOSITORY.parent / "shared" / "logs" / "public"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# By the labels' own notes: a slow start that was taken for a hang, and garbage output that the log alone cannot show.
_WITHOUT_ROOT_LINE = ("009", "307")


@dataclass(frozen=True)
class LabelledLog:
    """A log that somebody read and labelled.

    Attributes:
        name: file name of our own, number of a public one.
        label: the cause that the log was labelled with.
        also_acceptable: causes that are right as well.
        phase: where, as labelled.
        root_line: the line that proves it (long ones cut), None where no line does.
    """

    name: str
    path: Path
    label: str
    also_acceptable: tuple[str, ...]
    phase: str
    root_line: str | None

    def text(self) -> str:
        return decoded(self.path.read_bytes())

    def cause_is_right(self, fault: Fault) -> bool:
        return fault.cause in (self.label, *self.also_acceptable)

    def line_is_right(self, fault: Fault) -> bool:
        return _plain(fault.line).startswith(_plain(self.root_line))


def own_logs() -> list[LabelledLog]:
    """The logs of our own runs."""
    return [_labelled(record, record["file"], OWN / record["file"]) for record in _index(OWN)]


def public_logs() -> list[LabelledLog]:
    """Logs that others published; empty where they are not at hand."""
    if not (PUBLIC / "index.jsonl").exists():
        return []
    return [_labelled(record, record["id"], PUBLIC / f"{record['id']}.log") for record in _index(PUBLIC)]


def _index(folder: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / "index.jsonl").read_text(encoding="utf-8").splitlines()]


def _labelled(record: dict[str, str], name: str, path: Path) -> LabelledLog:
    has_root_line = record["label"] != Cause.HEALTHY and name not in _WITHOUT_ROOT_LINE
    return LabelledLog(
        name=name,
        path=path,
        label=record["label"],
        also_acceptable=tuple(record.get("also_acceptable", ())),
        phase=record["phase"],
        root_line=record["root_line"] if has_root_line else None,
    )


def _plain(line: str | None) -> str:
    return _COLOUR.sub("", line or "").strip()


@dataclass(frozen=True)
class _Result:
    log: LabelledLog
    fault: Fault

    @property
    def cause_right(self) -> bool:
        return self.log.cause_is_right(self.fault)

    @property
    def line_right(self) -> bool:
        return self.log.root_line is not None and self.log.line_is_right(self.fault)


def report(own: Iterable[LabelledLog], public: Iterable[LabelledLog]) -> str:
    """The page: totals, a table per label, and what was named otherwise than it was labelled."""
    own_results = [_Result(log, explain(log.text())) for log in own]
    public_results = [_Result(log, explain(log.text())) for log in public]
    results = own_results + public_results
    sources = f"{len(own_results)} logs of our own runs (tests/fixtures/logs)"
    sources += (
        f" and {len(public_results)} public ones (../shared/logs/public, by number)"
        if public_results
        else "; the public ones were not at hand (../shared/logs is absent)"
    )
    return "\n".join(
        [
            "# What killed the server: how well logs are read",
            "",
            f"Written by `python -m benchmarks.faults`: {sources}.",
            "",
            "A cause is right when it is the label or one of the labels that are also acceptable. A root line counts",
            "where a log has one that shows the fault; lines are compared without terminal colours, as far as the",
            "label's text goes. The engine is told from the log itself, as `python -m bench.explain` does. The rules",
            "were written with these logs at hand: on logs never seen, expect less.",
            "",
            *_totals(results),
            "",
            "| label | logs | cause right | with a root line | root line right |",
            "|---|--:|--:|--:|--:|",
            *(_row(label, results) for label in sorted({result.log.label for result in results})),
            "",
            "## Named otherwise than labelled",
            "",
            *_confusion(results),
            "",
        ]
    )


def _totals(results: list[_Result]) -> list[str]:
    with_line = [result for result in results if result.log.root_line is not None]
    healthy = [result for result in results if result.log.label == Cause.HEALTHY]
    called_failures = sum(result.fault.cause != Cause.HEALTHY for result in healthy)
    return [
        f"- cause right: {sum(result.cause_right for result in results)} of {len(results)}",
        f"- root line right: {sum(result.line_right for result in with_line)} of {len(with_line)}",
        f"- healthy starts called a failure: {called_failures} of {len(healthy)}",
        f"- phase as labelled: {sum(result.fault.phase == result.log.phase for result in results)} of {len(results)}",
    ]


def _row(label: str, results: list[_Result]) -> str:
    mine = [result for result in results if result.log.label == label]
    with_line = [result for result in mine if result.log.root_line is not None]
    right, lines_right = sum(result.cause_right for result in mine), sum(result.line_right for result in with_line)
    return f"| {label} | {len(mine)} | {right} | {len(with_line)} | {lines_right} |"


def _confusion(results: list[_Result]) -> list[str]:
    rows = [
        f"| {result.log.name} | {result.log.label} | {', '.join(result.log.also_acceptable) or '-'} "
        f"| {result.fault.cause} | {'yes' if result.cause_right else 'NO'} "
        f"| {'-' if result.log.root_line is None else 'yes' if result.line_right else 'NO'} |"
        for result in results
        if result.fault.cause != result.log.label or (result.log.root_line is not None and not result.line_right)
    ]
    if not rows:
        return ["None."]
    return [
        "| log | label | also acceptable | named | cause right | root line right |",
        "|---|---|---|---|---|---|",
        *rows,
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--to", type=Path, default=_REPOSITORY / "docs" / "faults.md", help="page to write")
    options = parser.parse_args(arguments)
    page = report(own_logs(), public_logs())
    options.to.parent.mkdir(parents=True, exist_ok=True)
    options.to.write_text(page, encoding="utf-8")
    print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
