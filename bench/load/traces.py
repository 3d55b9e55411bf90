"""Traces: recorded arrivals with their lengths, to be sent again."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson


@dataclass(frozen=True)
class Arrival:
    """One request of a trace.

    Attributes:
        due_s: since the trace's first.
        blocks: names of the prompt's blocks of 512 tokens; requests with equal first blocks share a prefix (Mooncake's
            ``hash_ids``).
    """

    due_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


def read(path: str, *, speed: float = 1.0, limit: int | None = None) -> tuple[Arrival, ...]:
    """Read a trace: JSON lines with ``timestamp`` (milliseconds), ``input_length`` and ``output_length`` as Mooncake
    has them, or CSV with ``Timestamp`` (seconds), ``Request tokens`` and ``Response tokens`` as BurstGPT has them.

    Args:
        speed: 2 sends it twice as fast.
        limit: only so many requests.

    Raises:
        ValueError: for a file that is neither.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"trace {path}: {error}") from None
    rows = text.splitlines()
    if not rows:
        raise ValueError(f"trace {path}: empty")
    try:
        if rows[0].lstrip().startswith("{"):
            found = [_mooncake(orjson.loads(row)) for row in rows[:limit] if row.strip()]
        else:
            found = [_burstgpt(row) for row in _first(csv.DictReader(rows), limit)]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"trace {path}: expected timestamp, input_length, output_length (JSON lines) or Timestamp, Request tokens, "
            f"Response tokens (CSV); {error!r}"
        ) from None
    found = [arrival for arrival in found if arrival.output_tokens > 0]  # BurstGPT has failures, with none
    if not found:
        raise ValueError(f"trace {path}: no request with output tokens")
    found.sort(key=lambda arrival: arrival.due_s)
    start_s = found[0].due_s
    return tuple(
        Arrival((arrival.due_s - start_s) / speed, arrival.input_tokens, arrival.output_tokens, arrival.blocks)
        for arrival in found
    )


def _first(rows: Iterable[dict[str, str]], limit: int | None) -> Iterable[dict[str, str]]:
    return (row for number, row in enumerate(rows) if limit is None or number < limit)


def _mooncake(row: Mapping[str, Any]) -> Arrival:
    blocks = tuple(int(block) for block in row.get("hash_ids") or ())
    return Arrival(_time(row["timestamp"]) / 1000, int(row["input_length"]), int(row["output_length"]), blocks)


def _burstgpt(row: Mapping[str, str]) -> Arrival:
    return Arrival(_time(row["Timestamp"]), int(row["Request tokens"]), int(row["Response tokens"]))


def _time(value: str | float) -> float:
    time = float(value)
    if not math.isfinite(time):
        raise ValueError(f"no time: {value}")
    return time
