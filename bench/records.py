"""Records: the files of a run, schema-versioned, each line on disk before the next step begins."""

from __future__ import annotations

import dataclasses
import enum
import os
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import orjson

from bench.engines.protocol import Candidate, Forecast, LaunchFacts, ServerConfig
from bench.load.measurement import Measurement
from bench.outcome import Outcome, Phase

SCHEMA_VERSION = 1

T = TypeVar("T")


class RecordError(Exception):
    """A file of the run cannot be read or written; the message says which, what was seen and what to do."""


@dataclass(frozen=True)
class Times:
    """Where the wall time of a trial went, in seconds; ``harness_s`` is all that is none of the others."""

    startup_s: float = 0.0
    identity_s: float = 0.0
    warmup_s: float = 0.0
    measure_s: float = 0.0
    teardown_s: float = 0.0
    total_s: float = 0.0

    @property
    def harness_s(self) -> float:
        return self.total_s - self.startup_s - self.identity_s - self.warmup_s - self.measure_s - self.teardown_s


@dataclass(frozen=True)
class TrialRecord:
    """One line of ``trials.jsonl`` or ``finalists.jsonl``: one trial, from candidate to outcome.

    Attributes:
        number: of the trial, from 0 (the baseline); finalists go on counting.
        role: ``baseline``, ``anchor`` (the baseline once more, see ``search.drift``), ``search``, ``recipe``
            or ``finalist``.
        round: of the finalists, from 1; 0 in the search.
        optuna_number: of the trial in the study, None where it is not told.
        value: of the objective, None where there is none; ``objective_level`` the load level that it was taken at.
        simulated: the engine was the simulator. ``acceptance_simulated`` is in each measurement.
        engine: name and version, e.g. ``sglang 0.5.15``.
        command: the argument list, secrets redacted; ``env`` what was added to the environment, likewise.
        started_at: seconds since the epoch.
    """

    number: int
    role: str
    candidate: Candidate
    config: ServerConfig
    outcome: Outcome
    engine: str
    simulated: bool
    started_at: float
    round: int = 0
    optuna_number: int | None = None
    forecast: Forecast | None = None
    facts: LaunchFacts | None = None
    measurements: tuple[Measurement, ...] = ()
    value: float | None = None
    objective_level: int | None = None
    times: Times = field(default_factory=Times)
    command: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    schema_version: int = SCHEMA_VERSION

    @property
    def launched(self) -> bool:
        """A process was started, or was to be: nothing before had settled it."""
        return self.outcome.phase is not Phase.FORECAST


@dataclass(frozen=True)
class RunFolder:
    """``results/<experiment>/<run>/`` and what lies in it."""

    path: Path

    @property
    def experiment(self) -> Path:
        return self.path / "experiment.yaml"

    @property
    def environment(self) -> Path:
        return self.path / "environment.json"

    @property
    def journal(self) -> Path:
        return self.path / "study.journal"

    @property
    def trials(self) -> Path:
        return self.path / "trials.jsonl"

    @property
    def finalists(self) -> Path:
        return self.path / "finalists.jsonl"

    @property
    def report(self) -> Path:
        return self.path / "report"

    def trial(self, number: int) -> Path:
        """Folder of one trial: command.sh, server.log, server_info.json, requests-LEVEL.parquet, outcome.json."""
        return self.path / "trials" / f"{number:04d}"


def append(path: Path, record: TrialRecord) -> None:
    """Append one line and have it on disk before returning.

    Raises:
        RecordError: the file cannot be written (full disk, read-only folder).
    """
    line = to_json(record) + b"\n"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            end = os.lseek(descriptor, 0, os.SEEK_END)
            if end and os.pread(descriptor, 1, end - 1) != b"\n":
                # The last writer was killed in the middle of a line: keep what it wrote, on a line of its own.
                line = b"\n" + line
            written = os.write(descriptor, line)
            if written != len(line):
                raise OSError(f"only {written} of {len(line)} bytes were written")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise RecordError(f"cannot write {path}: {error}; free some space or choose another results_dir=") from error


def read(path: Path) -> list[TrialRecord]:
    """All records of a file, in order; a line cut off by a kill is left out.

    Raises:
        RecordError: the file was written by a newer version of this package.
    """
    return list(_records(path))


def _records(path: Path) -> Iterator[TrialRecord]:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error}") from error
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            plain = orjson.loads(line)
            version = plain["schema_version"]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            continue  # cut off in the middle by a kill: that trial did not finish
        if version > SCHEMA_VERSION:
            raise RecordError(
                f"{path}, line {number}: schema {version} is newer than this version's {SCHEMA_VERSION}; "
                "use the version that wrote it, or another run= name"
            )
        try:
            record: TrialRecord = from_plain(TrialRecord, plain)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise RecordError(
                f"{path}, line {number}: not a record of this version ({error}); mend or remove that line, "
                "or take another run= name"
            ) from error
        yield record


def write_json(path: Path, value: Any) -> None:
    """Write a file whole or not at all: to a neighbour first, then renamed over it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".new")
    try:
        with temporary.open("wb") as file:
            file.write(orjson.dumps(to_plain(value), option=orjson.OPT_INDENT_2))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise RecordError(f"cannot write {path}: {error}") from error


def to_json(value: Any) -> bytes:
    return orjson.dumps(to_plain(value))


def to_plain(value: Any) -> Any:
    """Dataclasses, tuples and enums as what JSON has."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: to_plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    return value


def from_plain(kind: type[T], data: Any) -> T:
    """The dataclass that ``to_plain`` took apart; fields that are unknown are dropped, missing ones get defaults."""
    return typing.cast(T, _build(kind, data))


def _build(kind: Any, data: Any) -> Any:  # noqa: PLR0911
    if data is None:
        return None
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        concrete = [item for item in arguments if item is not type(None)]
        return _build(concrete[0], data) if len(concrete) == 1 else data
    if origin is tuple:
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return tuple(_build(arguments[0], item) for item in data)
        return tuple(_build(item_kind, item) for item_kind, item in zip(arguments, data, strict=True))
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return kind(**{name: _build(hints[name], item) for name, item in data.items() if name in hints})
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(data)
    return data
