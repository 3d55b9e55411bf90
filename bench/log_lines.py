"""Log lines: what a program said, freed from what wrapped it: colours, progress bars, containers, loggers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

_COLOUR = re.compile(r"(?:\x1b|\\u001b|\\x1b|\\033)(?:\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07|[()][A-B0-2])")
_BARE_COLOUR = re.compile(r"\[(?:\d{1,2};)*\d{0,2}m")  # what is left of a colour code once a terminal's escape is lost
_WARNING = re.compile(r"\b\w*Warning: ")  # printed by Python's warnings, which have no logger
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_LEVEL = r"DEBUG|INFO|NOTICE|WARNING|WARN|ERROR|CRITICAL|FATAL"
_ISO_TIME = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?"
_ZONE = r"(?:Z|[+-]\d\d:?\d\d)"

# In the order in which they are tried; each is taken off the front as long as one fits. ``source`` tells processes
# apart, ``level`` is the logger's. None takes more than one space after itself: a traceback's indentation must survive.
_PREFIXES: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (name, re.compile(pattern))
    for name, pattern in (
        ("quote", r"\s{0,4}> ?"),
        ("pod", r"\s*\[(?P<source>pod/[^\]]+)\] ?"),
        (
            "journal",
            rf"\s*(?:[A-Z][a-z]{{2}} [ \d]\d \d\d:\d\d:\d\d|{_ISO_TIME}{_ZONE}?) "
            r"(?P<source>[\w.-]+ [\w.@/\\-]+\[\d+\]): ?",
        ),
        ("kubernetes", rf"\s*{_ISO_TIME}{_ZONE} (?:std(?:out|err) [FP] )?"),
        ("syslog", r"\s*[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d [\w.-]+ (?P<source>[\w.@/-]+): ?"),
        ("compose", r"(?P<source>[A-Za-z][\w.-]{1,60}) *\| ?"),
        ("group", r" *[|+] (?=\s*(?:File|Traceback|\w+Error|\^))"),
        ("process", r"\s*\((?P<source>[^()]{0,60}\b(?:pid|rank)=[^()]{1,80})\) ?"),
        ("stage", r"\[Stage-\d+\] ?"),
        ("rank", r"\s*\[(?P<source>(?:rank|default)\s?\d+|\d+,\d+)\](?:<\w+>)?: ?"),
        ("task", r"(?P<source>\d{1,4}): (?=\[|\s|\(|$|Traceback|[\w.]+(?:Error|Exception|Interrupt)\b)"),
        (
            "glog",
            r"\s*\[?(?P<glog>[DIWEF])\d{3,8} \d\d:\d\d:\d\d\.\d+ (?:\d+ )?[^\]\s]+:\d+\] ?(?:\[\d+/\d+(?:_\d+)?\] ?)?",
        ),
        ("engine", rf"\s*\[{_ISO_TIME}(?: [A-Z]+\d+)*(?: PP\d+| EP\d+)*\] ?"),
        ("level", rf"\[(?P<level>{_LEVEL})\] ?"),
        ("short", r"\s*\[\d\d-\d\d \d\d:\d\d:\d\d(?: [A-Z]+\d+)*\] ?"),
        (
            "vllm",
            rf"\s*(?P<level>{_LEVEL}) \d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)? (?:\[[^\]]*\]|[\w./]+:\d+\]) ?",
        ),
        ("module", rf"(?P<level>{_LEVEL}) [\w./]+\.py:\d+: ?"),
        ("uvicorn", rf"(?P<level>{_LEVEL}):(?:[\w.]+:)? *"),
        (
            "logging",
            rf"\s*\[?{_ISO_TIME}{_ZONE}?\]?(?: *[-|:] *| +)?(?:\[?[\w.]+\]?(?: - | \| |: ))?"
            rf"(?:\[?(?P<level>{_LEVEL})\b\]?(?: *[-|:] ?| )?)?(?:[\w.]+:[\w<>]+:\d+ - )?",
        ),
    )
)
_MOST_PREFIXES = 8  # a container's, a supervisor's, a process's and two loggers' are five; more is not a prefix
_JSON_TEXT_KEYS = ("log", "message", "msg", "textPayload", "MESSAGE", "event", "line", "text")
_LONGEST = (
    2000  # characters that are looked at; PyTorch's longest message is 800, an engine's dump of its arguments 20,000
)


@dataclass(frozen=True)
class LogLine:
    """One message of a log.

    Attributes:
        number: of the line in the log, from 1.
        raw: the line as it stands in the log, colour codes and overwritten progress removed.
        source: what tells the process that printed it from others (a pid, a rank, a container), else empty.
        wrapping: the kinds of prefix that were taken off.
        level: of the logger that printed it (``D``, ``I``, ``W``, ``E``, ``C``), else empty.
        text: the message; its indentation is kept.
    """

    number: int
    raw: str
    source: str
    wrapping: tuple[str, ...]
    level: str
    text: str

    @property
    def indent(self) -> int:
        return len(self.text) - len(self.text.lstrip())


def log_lines(line: str, number: int) -> Iterator[LogLine]:
    """The messages in one line of a log file: usually one; several in a progress bar, or in JSON around a traceback."""
    clean = _CONTROL.sub("", _COLOUR.sub("", line.rstrip("\r\n")).replace("\r", "\n"))
    for raw in clean.split("\n"):
        inner, source = _from_json(raw)
        if "\\n" in inner and "Traceback (most recent" in inner:
            inner = inner.replace("\\n", "\n")
        texts = inner.rstrip("\n").split("\n")
        for text in texts:
            yield _peeled(text, raw if len(texts) == 1 else text, number, source)


def _from_json(raw: str) -> tuple[str, str]:
    """The message of a JSON log line and who sent it; the line itself where it is not JSON."""
    text = raw.strip()
    if not (text.startswith("{") and text.endswith("}")):
        return raw, ""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return raw, ""
    for key in _JSON_TEXT_KEYS:
        value = record.get(key)
        if isinstance(value, str):
            level = str(record.get("level") or record.get("levelname") or record.get("severity") or "").upper()
            message = _COLOUR.sub("", value).replace("\r", "\n")
            detail = record.get("exc_info") or record.get("exception") or record.get("stack_trace")
            if isinstance(detail, str):
                message += "\n" + detail
            return (f"{level}: {message}" if level in ("WARNING", "ERROR", "CRITICAL") else message), ""
    return raw, ""


def _peeled(text: str, raw: str, number: int, source: str) -> LogLine:
    text = _BARE_COLOUR.sub("", text[:_LONGEST])
    sources, wrapping, level = [source] if source else [], [], ""
    for _ in range(_MOST_PREFIXES):
        for name, pattern in _PREFIXES:
            match = pattern.match(text)
            if match and match.end() > 0 and (name not in wrapping or name == "process"):
                break
        else:
            break
        found = match.groupdict()
        if found.get("source"):
            sources.append(found["source"])
        level = (found.get("level") or found.get("glog") or level)[:1]
        if name == "logging" and level in ("I", "D"):
            level = ""  # of whoever passes on another program's output, which may be anything
        wrapping.append(name)
        text = text[match.end() :]
    level = level or ("W" if _WARNING.search(text) else "")
    return LogLine(number, raw, " ".join(sources), tuple(wrapping), "E" if level == "F" else level, text)
