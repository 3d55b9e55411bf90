"""Faults: reads a server's log as it grows and says what went wrong, where, and which line proves it.

What engines print is known by the engines (`Rules`); how logs are built is known here: tracebacks and their chains,
processes that print at the same time, warnings that explain a later failure, consequences that only repeat one.

A log names its root once and its consequences many times, so proofs are ranked, and among equals the first in the log
wins: an exception nobody caught that the rules know; an uncaught one that they do not know; a known error that somebody
may have caught, then an unknown one; a warning that explains; a consequence. What a server survived (it became ready
afterwards, or served on) does not count.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cache
from typing import Literal

from bench.log_lines import LogLine, log_lines
from bench.outcome import OUT_OF_MEMORY, Cause, Fault, FlagAdvice, Phase

Direction = Literal["raise", "lower", "set", "unset", "change"]


class Rank(IntEnum):
    """How much a message proves."""

    DEATH = 0  # something died
    CONSEQUENCE = 1  # something else had failed before
    SUSPECT = 2  # explains a failure, and is also seen in logs of servers that work
    CRASH = 3  # an exception that no rule knows
    ROOT = 4  # names what went wrong


def any_of(patterns: str) -> str:
    """One pattern that fits where any of these does, one a line."""
    return "|".join(pattern for line in patterns.split("\n") if (pattern := line.strip()))


@dataclass(frozen=True)
class Rule:
    """One message an engine, or what it stands on, is known to print.

    Attributes:
        pattern: searched, whatever its case, in ``Type: message`` of an exception.
        raised: searched in the same text, and must fit as well: which exceptions the rule is about.
        where: searched in the frames of its traceback, the innermost first, each ``path:function: source``.
        depth: how many of the innermost frames ``where`` may look at; 0 is all of them.
        startup: only while the server starts: the same words of a server that serves are a bug.
        exit_code: only until the engine says that it ends its own processes: it kills them as the kernel would.
        plain: the message also counts outside a traceback.
        fatal: outside a traceback it is decisive on its own: nothing recovers from it.
        placed: GPU memory ran out: where it did decides the cause (`Rules.places`).
        moves: what to do, by knob (`Rules.knobs`); what the message itself names comes first.
        bound: a pattern with one group, the value that the message names for the first move.
        next_line: the proof is the first indented line of the message, not the exception's own.
        phase: where it happens, where that is known better than from the log.
    """

    cause: Cause
    pattern: str = ""
    rank: Rank = Rank.ROOT
    raised: str = ""
    where: str = ""
    depth: int = 0
    startup: bool = False
    exit_code: bool = False
    plain: bool = False
    fatal: bool = False
    placed: bool = False
    moves: tuple[tuple[str, Direction], ...] = ()
    bound: str = ""
    advice: str = ""
    next_line: bool = False
    phase: Phase | None = None


@dataclass(frozen=True)
class Place:
    """Part of an engine's code: the phase that runs it, and what GPU memory is for there."""

    where: str
    phase: Phase
    memory: Cause


@dataclass(frozen=True)
class Rules:
    """What one engine's logs look like.

    Attributes:
        engine: its name.
        rules: tried in this order, the first that fits is taken.
        milestones: patterns of lines that begin a phase.
        ready: lines of a server that has just come up.
        serving: lines that only a server prints that serves.
        fatal_headers: what stands before the traceback of an exception that ends the process.
        handled: what stands before the traceback of an exception that somebody caught.
        entries: frames that only the engine's own processes have.
        deaths: lines that say that the server, or part of it, is gone; they say nothing of why.
        cleanup: lines that say that the engine ends its own processes.
        stops: lines of a stop that was asked for.
        hints: what wrappers print whatever the cause; it and what follows it in a message prove nothing.
        places: parts of the code, the more specific first.
        knobs: option strings, by what they do.
        options: option names (with underscores) that messages mention without their dashes.
        moves, advice: by cause, where a rule has none.
    """

    engine: str
    rules: tuple[Rule, ...]
    milestones: tuple[tuple[str, Phase], ...]
    ready: str
    serving: str
    fatal_headers: str
    handled: str
    entries: str
    deaths: str
    cleanup: str
    stops: str
    hints: str
    places: tuple[Place, ...]
    knobs: Mapping[str, str]
    options: frozenset[str]
    moves: Mapping[Cause, tuple[tuple[str, Direction], ...]]
    advice: Mapping[Cause, str]


_TRACEBACK = "Traceback (most recent call last)"
_FRAME = re.compile(r'\s*File "(?P<path>[^"]*)", line \d+(?:, in (?P<function>.+))?$')
_NATIVE_EXCEPTION = re.compile(r"\s*what\(\):\s+(?P<message>\S.*)")
_EXCEPTION = re.compile(r"\s*(?P<type>[A-Za-z_]\w*(?:\.\w+)*)(?::\s(?P<message>.*)|:?\s*$|\(['\"](?P<quoted>.*))")
_EXCEPTION_NAME = re.compile(r"(?:Error|Exception|Interrupt|Failure|Timeout|OutOfMemory\w*|OutOfResources|Exit)$")
_TRANSLATED = "The above exception was the direct cause"
_DOTTED_NAME = re.compile(r"\.[A-Z]\w+$")  # a class of some package, whatever its name ends in
_CHAINED = re.compile(rf"During handling of the above|{_TRANSLATED}")
_OMITTED = re.compile(r"\s*(?:\[?\.\.\.|\[Previous line repeated|<\d+ more lines|~*\^+~*\s*$)")
# A test or a benchmark that shares the log; its failed assertion is no fault of the server.
_CLIENT = re.compile(r"unittest/|/pytest|_pytest/|/tests?/|bench_serving|benchmark_serving|locust|test_utils\.py")
_REQUEST = re.compile(r"uvicorn/protocols|starlette/|fastapi/|aiohttp/web_protocol")
_OUTERMOST = re.compile(r":<module>:|runpy|multiprocessing/\w+\.py:(?:_bootstrap|spawn_main|_main):")
_UNCAUGHT_HEADER = re.compile(r"Process [\w:. -]+:\s*$")
_COMPLAINT = re.compile(r"(?:docker: |Error response from daemon|error: |fatal: |panic: |Error: )", re.I)
_ALARMING = re.compile(r"error|exception|fail|fatal|abort|killed|cannot|unable|not found|denied|timed out", re.I)
_MESSAGE_LINES = 30  # of one exception; NCCL's and the hub's longest are half of that

_OPTION = re.compile(r"(?<![\w-])--[a-zA-Z][\w-]*\w")
_RAISE = r"increas\w*|rais\w+|(?:larger|higher|greater)(?! than)|enlarg\w*"
_LOWER = r"reduc\w*|decreas\w*|lower\w*(?! than)|smaller(?! than)|shrink\w*"
_UNSET = r"unset|remov\w+|drop\w*|without|disable (?=-)|turn off"
_SET = r"(?<!re)set(?:ting)?|us(?:e|ing)|pass(?:ing)?|add(?:ing)?|specify(?:ing)?|enabl\w+|choos\w+|requires?"
_VERB = re.compile(rf"\b(?:(?P<raise>{_RAISE})|(?P<lower>{_LOWER})|(?P<unset>{_UNSET})|(?P<set>{_SET}))\b", re.I)
_AFTERWARDS = re.compile(
    r"[`'\"]?\s*(?:to|=)?\s*(?:an?\s)?(?:(?P<raise>larger|higher|greater)|(?P<lower>smaller|lower))", re.I
)
_BOUND = re.compile(
    r"[`'\"]?\s*(?:above|over|to at least|at least|>=?|below|under|to at most|at most|<=?)\s*(\d+(?:\.\d+)?)"
)
_CLAUSE = re.compile(r"[.;:]\s|,\s|\)\s|\bor\b|\band\b")


@cache
def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.I)


@dataclass
class _Proof:
    """A message that says something about the fault, as far as it has been read."""

    line: LogLine
    text: str
    rule: Rule
    rank: Rank
    cause: Cause
    phase: Phase
    fatal: bool
    from_exception: bool
    after_ready: bool
    translated: bool = False  # a later exception of its chain says the same in the engine's words

    @property
    def weight(self) -> tuple[int, bool]:
        certain = self.fatal and self.rank >= Rank.CRASH
        return self.rank + (2 if certain else 0), self.from_exception


@dataclass
class _Traceback:
    """A traceback that is being read, with those it is chained to."""

    wrapping: tuple[str, ...]
    fatal: bool
    handled: bool
    frames: list[str] = field(default_factory=list)
    frame_indent: int = 0
    source_line: LogLine | None = None
    proof: _Proof | None = None
    chain: list[_Proof] = field(default_factory=list)
    message_lines: int = 0
    hinting: bool = False
    translates: bool = False
    chained: str = ""  # how the next traceback is chained to this one

    @property
    def where(self) -> str:
        return "\n".join(reversed(self.frames))


_UNKNOWN_EXCEPTION = Rule(Cause.ENGINE_CRASH, rank=Rank.CRASH)
_STOP = Rule(Cause.OTHER, rank=Rank.SUSPECT, advice="Somebody stopped it before it was ready.")
_DEATH = Rule(Cause.ENGINE_CRASH, rank=Rank.DEATH)


class LogReader:
    """Reads one server's log, line by line.

    Args:
        rules: what the engine's logs look like.
    """

    phase: Phase

    def __init__(self, rules: Rules) -> None:
        self.phase = Phase.ARGS
        self._rules = rules
        self._number = 0
        self._tracebacks: dict[str, _Traceback] = {}
        self._last_text: dict[str, str] = {}
        self._proofs: list[_Proof] = []
        self._kinds: set[tuple[object, ...]] = set()
        self._ready: LogLine | None = None
        self._came_up = False
        self._started: LogLine | None = None
        self._stopped = False
        self._died = False
        self._cleaning = False
        self._last: LogLine | None = None
        self._alarm: LogLine | None = None
        self._decisive: Fault | None = None

    def feed(self, line: str) -> Fault | None:
        """Take the next line.

        Returns:
            The fault, from the line on that makes it decisive (the server cannot recover), else None. A better
            proof may still follow, printed by a slower process; `verdict` weighs the whole log.
        """
        self._number += 1
        for message in log_lines(line, self._number):
            if message.text.strip():
                self._take(message)
        return self._decisive

    def verdict(self) -> Fault:
        """The fault that the log shows as a whole, its cause ``healthy`` or ``unknown`` where it shows none."""
        unfinished = (self._unfinished(traceback) for traceback in self._tracebacks.values())
        best = self._best([*self._proofs, *(proof for proof in unfinished if proof)])
        if best:
            return self._fault(best)
        if self._ready:
            return Fault(Cause.HEALTHY, Phase.SERVING, self._ready.raw.strip(), self._ready.number)
        if self._started:
            advice = self._rules.advice[Cause.STARTUP_HANG]
            return Fault(Cause.STARTUP_HANG, self.phase, self._started.raw.strip(), self._started.number, advice=advice)
        line = self._alarm or self._last
        advice = self._rules.advice[Cause.UNKNOWN]
        text, number = (line.raw.strip(), line.number) if line else (None, None)
        return Fault(Cause.UNKNOWN, self.phase, text, number, advice=advice)

    # Reading

    def _take(self, line: LogLine) -> None:
        if self._stopped:
            if not self._begins(line):
                return
            self._stopped, self._ready, self._came_up = False, None, False
        traceback = self._tracebacks.get(line.source)
        if _TRACEBACK in line.text:
            self._open(line, traceback)
        elif not (traceback and self._read_traceback(line, traceback)):
            if _FRAME.match(line.text):  # the log begins, or goes on after an omission, inside a traceback
                self._open(line, traceback)
                self._read_traceback(line, self._tracebacks[line.source])
            else:
                self._read_plain(line)
        self._last_text[line.source] = line.text
        self._last = line

    def _begins(self, line: LogLine) -> bool:
        """Whether another server starts in the same log."""
        return any(
            phase == Phase.ARGS and _regex(pattern).search(line.text) for pattern, phase in self._rules.milestones
        )

    def _open(self, line: LogLine, before: _Traceback | None) -> None:
        header = line.text.partition(_TRACEBACK)[0].strip() or self._last_text.get(line.source, "")
        self._milestone(line)
        fatal = bool(_regex(self._rules.fatal_headers).search(header) or _UNCAUGHT_HEADER.match(header))
        handled = not fatal and (line.level == "W" or bool(_regex(self._rules.handled).search(header)))
        traceback = _Traceback(line.wrapping, fatal, handled)
        if before and before.chained:
            traceback.fatal |= before.fatal
            traceback.handled |= before.handled
            traceback.chain = before.chain
            traceback.translates = before.chained == _TRANSLATED
        elif before:
            self._settle(before)
        self._tracebacks[line.source] = traceback

    def _read_traceback(self, line: LogLine, traceback: _Traceback) -> bool:
        """Whether the line belongs to the traceback; takes it if so."""
        frame = _FRAME.match(line.text)
        if traceback.proof:
            return not frame and self._read_message(line, traceback)
        if frame:
            traceback.frames.append(f"{frame['path']}:{frame['function'] or ''}:")
            traceback.frame_indent = line.indent
            return True
        if _OMITTED.match(line.text):
            return True
        match = _EXCEPTION.match(line.text)
        known = match and (
            _EXCEPTION_NAME.search(match["type"]) or (_DOTTED_NAME.search(match["type"]) and match["message"])
        )
        # Logs that were pasted lose their indentation: then only the line after a frame can be its source.
        first = bool(traceback.frames) and traceback.frames[-1].endswith(":")
        if traceback.frames and (line.indent > traceback.frame_indent or (first and not known and not line.indent)):
            traceback.frames[-1] += " " + line.text.strip()
            traceback.source_line = line
            return True
        if known and (traceback.frames or line.wrapping == traceback.wrapping):
            self._prove(traceback, line, line.text.strip())
            return True
        return False

    def _read_message(self, line: LogLine, traceback: _Traceback) -> bool:
        """Go on with the message of an exception whose first line has been read."""
        proof = traceback.proof
        chained = _CHAINED.search(line.text)
        if chained:
            traceback.chained = chained[0]
            return True
        goes_on = line.wrapping == proof.line.wrapping and traceback.message_lines < _MESSAGE_LINES if proof else False
        if not proof or not goes_on or traceback.chained or self._is_announcement(line):
            self._settle(traceback)
            return False
        traceback.message_lines += 1
        traceback.hinting |= bool(_regex(self._rules.hints).search(line.text))
        if traceback.hinting:
            return True
        proof.text += "\n" + line.text.strip()
        if proof.rule.next_line and line.indent > proof.line.indent:
            self._prove_by(line, self._rule_for(_as_exception(line.text), "") or proof.rule, proof, traceback)
        elif proof.rank < Rank.ROOT:
            rule = self._rule_for(line.text.strip(), "")
            if rule and rule.rank > proof.rank:
                self._prove_by(line, rule, proof, traceback)
        return True

    def _prove_by(self, line: LogLine, rule: Rule, proof: _Proof, traceback: _Traceback) -> None:
        """Let a line of an exception's message prove more than its first line does."""
        proof.line, proof.rule, proof.rank = line, replace(rule, next_line=False), rule.rank
        proof.cause, proof.phase = self._placed(rule, traceback.where, proof.text)
        self._decide(proof)

    def _is_announcement(self, line: LogLine) -> bool:
        """Whether a line begins something new, though it looks like the rest of a message."""
        return bool(
            _UNCAUGHT_HEADER.match(line.text)
            or _regex(self._rules.fatal_headers).search(line.text)
            or _regex(self._rules.deaths).search(line.text)
        )

    def _settle(self, traceback: _Traceback) -> None:
        """The traceback has been read to its end: an exception that ends a process is decisive, known or not."""
        if traceback.proof and traceback.fatal and not traceback.chained:
            self._decisive = self._decisive or self._best_fault()

    def _prove(self, traceback: _Traceback, line: LogLine, text: str) -> None:
        """Take the exception at the end of a traceback for a proof."""
        where = traceback.where
        traceback.fatal |= not traceback.handled and self._is_uncaught(traceback)
        traceback.handled |= not traceback.fatal and bool(_REQUEST.search(where) or _CLIENT.search(where))
        traceback.hinting = bool(_regex(self._rules.hints).search(text))
        proof = traceback.proof = self._weighed(traceback, line, text)
        if self._is_stop(proof.rule):
            self._stopped = True
            return
        traceback.chain.append(proof)
        if traceback.handled and proof.cause not in _SERIOUS:
            return
        self._proofs.append(proof)
        for earlier in traceback.chain[:-1]:
            earlier.fatal |= traceback.fatal
            earlier.translated |= traceback.translates and earlier.cause == proof.cause and proof.rank == Rank.ROOT
        self._decide(proof)

    def _weighed(self, traceback: _Traceback, line: LogLine, text: str) -> _Proof:
        """What an exception proves that ends a traceback with this line."""
        where = traceback.where
        if text.rstrip(":") in ("AssertionError", "") and traceback.source_line:
            # An assertion without a message: its condition is the line above.
            line, text = traceback.source_line, f"{text} {traceback.source_line.text.strip()}".strip()
        hint = _regex(self._rules.hints).search(text)
        rule = self._rule_for(text[: hint.start()] if hint else text, where) or _UNKNOWN_EXCEPTION
        cause, phase = self._placed(rule, where, text)
        return _Proof(line, text, rule, rule.rank, cause, phase, traceback.fatal, True, self._ready is not None)

    def _unfinished(self, traceback: _Traceback) -> _Proof | None:
        """What a traceback proves that the log's end cut off before the exception's own line."""
        where = traceback.where
        if traceback.proof or traceback.handled or not traceback.source_line or _CLIENT.search(where):
            return None
        proof = self._weighed(traceback, traceback.source_line, "")
        if proof.rank == Rank.CRASH:  # it may say anything
            proof.rank = Rank.CONSEQUENCE
        return None if _REQUEST.search(where) else proof

    def _is_uncaught(self, traceback: _Traceback) -> bool:
        """Whether a traceback is of an exception that went through the outermost frame of an engine's process."""
        where = traceback.where
        if not traceback.frames or _CLIENT.search(where) or _REQUEST.search(where):
            return False
        if self._ready:
            return bool(_regex(self._rules.entries).search(where))
        return bool(_OUTERMOST.search(traceback.frames[0]) or _regex(self._rules.entries).search(traceback.frames[0]))

    def _read_plain(self, line: LogLine) -> None:
        rules, text = self._rules, line.text
        if self._milestone(line):
            return
        if _regex(rules.stops).search(text):
            self._stopped = self._ready is not None
            if not self._stopped:
                self._add(self._plain_proof(line, _STOP, fatal=False))
            return
        if line.level in ("I", "D"):
            return
        hint = _regex(rules.hints).search(text)
        text = text[: hint.start()] if hint else text
        native = _NATIVE_EXCEPTION.match(text)
        match = _EXCEPTION.match(text)
        exception = match and match["message"] and _EXCEPTION_NAME.search(match["type"]) and line.level != "W"
        anything = bool(exception or native or line.level in ("E", "C") or _COMPLAINT.match(text))
        rule = self._rule_for(native["message"] if native else text.strip(), "", plain=not anything)
        if rule and self._is_stop(rule):
            self._stopped = True
            return
        if rule and (exception or native or rule.plain or rule.rank == Rank.ROOT):
            fatal = bool(native) or (rule.fatal and line.level != "W")
            self._add(self._plain_proof(line, rule, fatal, from_exception=bool(exception)))
        elif exception:
            self._add(self._plain_proof(line, _UNKNOWN_EXCEPTION, fatal=False, from_exception=True))
        self._cleaning |= bool(_regex(rules.cleanup).search(text))
        if _regex(rules.deaths).search(text):
            self._died = True
            self._add(self._plain_proof(line, _DEATH, fatal=True))
            self._decisive = self._decisive or self._best_fault()
        elif line.level != "W" and _ALARMING.search(text):
            self._alarm = line

    def _add(self, proof: _Proof) -> None:
        """Keep a proof, unless one that weighs as much stands before it: logs repeat some lines a million times."""
        kind = (proof.cause, proof.rank, proof.fatal, proof.from_exception, proof.after_ready)
        if kind not in self._kinds:
            self._kinds.add(kind)
            self._proofs.append(proof)
            self._decide(proof)

    def _is_stop(self, rule: Rule) -> bool:
        """Whether a message is somebody's stop of a server that served."""
        return rule.cause == Cause.OTHER and self._ready is not None and not self._died

    def _plain_proof(self, line: LogLine, rule: Rule, fatal: bool, from_exception: bool = False) -> _Proof:
        cause, phase = self._placed(rule, "", line.text)
        rank = min(rule.rank, Rank.SUSPECT) if line.level == "W" else rule.rank
        after_ready = self._ready is not None
        return _Proof(line, line.text.strip(), rule, rank, cause, phase, fatal, from_exception, after_ready)

    def _milestone(self, line: LogLine) -> bool:
        """Note the phase that a line begins; whether it is one that only a server prints that serves."""
        came_up = bool(_regex(self._rules.ready).search(line.text))
        if came_up or _regex(self._rules.serving).search(line.text):
            self._came_up |= came_up
            self._ready = self._ready or line
            self.phase = Phase.SERVING
            return True
        for pattern, phase in self._rules.milestones:
            if _regex(pattern).search(line.text):
                self._started = line
                self.phase = Phase.SERVING if self._ready else phase
                break
        return False

    # Weighing

    def _rule_for(self, text: str, where: str, plain: bool = False) -> Rule | None:
        inner = where.split("\n")
        serving = self._place(where)[0] == Phase.SERVING
        for rule in self._rules.rules:
            if (rule.where and not where) or (plain and not rule.plain):
                continue
            if (rule.startup and serving) or (rule.exit_code and self._cleaning):
                continue
            if not (_regex(rule.pattern).search(text) and _regex(rule.raised).search(text)):
                continue
            frames = "\n".join(inner[: rule.depth]) if rule.depth else where
            if not rule.where or _regex(rule.where).search(frames):
                return rule
        return None

    def _placed(self, rule: Rule, where: str, text: str) -> tuple[Cause, Phase]:
        """The cause and the phase of a message that came from this part of the code."""
        phase, memory = self._place(where)
        if rule.placed:
            return (Cause.GPU_BUSY if _is_held_by_others(text) else memory), phase
        return rule.cause, phase if self._ready or not rule.phase else rule.phase

    def _place(self, where: str) -> tuple[Phase, Cause]:
        """The phase that runs this part of the code, and what GPU memory is for there."""
        if not self._ready:
            for frame in where.split("\n"):
                for place in self._rules.places:
                    if _regex(place.where).search(frame):
                        return place.phase, place.memory
        return self.phase, _MEMORY_OF_PHASE[self.phase]

    def _decide(self, proof: _Proof) -> None:
        if proof.fatal and proof.rank == Rank.ROOT and not proof.rule.next_line:
            self._decisive = self._decisive or self._best_fault()

    def _counts(self, proof: _Proof) -> bool:
        if proof.translated:
            return False
        if proof.fatal or not self._ready:
            return True
        serious = proof.cause in _SERIOUS and proof.from_exception
        if not proof.after_ready:  # survived, unless the log begins after the start
            return serious and not self._came_up
        return serious or self._died

    def _best(self, proofs: list[_Proof]) -> _Proof | None:
        """The first of the heaviest of those that count."""
        return max((proof for proof in proofs if self._counts(proof)), key=lambda proof: proof.weight, default=None)

    def _best_fault(self) -> Fault | None:
        best = self._best(self._proofs)
        return self._fault(best) if best else None

    def _fault(self, proof: _Proof) -> Fault:
        rules, rule = self._rules, proof.rule
        moves = rule.moves or rules.moves.get(proof.cause, ())
        named = _named_flags(proof.text, rules, proof.cause)
        own = [FlagAdvice(rules.knobs[knob], direction) for knob, direction in moves if knob in rules.knobs]
        bound = re.search(rule.bound, proof.text) if rule.bound else None
        if bound and own:
            own[0] = replace(own[0], bound=float(bound[1]))
        flags: dict[str, FlagAdvice] = {}
        for flag in own + named if bound else named + own:
            flags.setdefault(flag.flag, flag)
        advice = rule.advice or rules.advice.get(proof.cause, "")
        return Fault(proof.cause, proof.phase, proof.line.raw.strip(), proof.line.number, tuple(flags.values()), advice)


# A server goes on after most errors of one request, not after these, and what it answers then is void.
_SERIOUS = OUT_OF_MEMORY | {Cause.ILLEGAL_MEMORY_ACCESS}
# Their messages name options of other programs: installers, compilers, downloaders.
_FLAGLESS = {
    Cause.MISSING_DEPENDENCY,
    Cause.HUB_ACCESS,
    Cause.DRIVER_MISMATCH,
    Cause.KERNEL_BUILD,
    Cause.DISK_FULL,
    Cause.PERMISSION,
    Cause.NCCL,
}
_MEMORY_OF_PHASE = {
    Phase.ARGS: Cause.OOM_GPU_WEIGHTS,
    Phase.LOAD: Cause.OOM_GPU_WEIGHTS,
    Phase.KV_ALLOC: Cause.OOM_GPU_KV_POOL,
    Phase.GRAPH_CAPTURE: Cause.OOM_GPU_GRAPH_CAPTURE,
    Phase.SERVING: Cause.OOM_GPU_RUNTIME,
}
_HELD_BY_OTHERS = 0.25  # of the GPU; an engine's own helper processes hold a context each, well under 5 %


def _is_held_by_others(text: str) -> bool:
    """Whether PyTorch's out-of-memory message (2.0 and later) names another process that holds much of the GPU."""
    sizes = {"GiB": 1.0, "MiB": 1 / 1024, "KiB": 1 / 1024**2}
    total = re.search(r"total capacity of ([\d.]+) ([GMK]iB)", text)
    held = [float(v) * sizes[u] for v, u in re.findall(r"Process \d+ has ([\d.]+) ([GMK]iB) memory in use", text)]
    if not total or not held:
        return False
    if (
        "this process has" not in text
    ):  # older wording: one of the processes is this one, the nearest to what it allocated
        allocated = re.search(r"allocated memory ([\d.]+) ([GMK]iB) is allocated by PyTorch", text)
        own = float(allocated[1]) * sizes[allocated[2]] if allocated else 0.0
        held.remove(min(held, key=lambda value: abs(value - own)))
    return sum(held) > _HELD_BY_OTHERS * float(total[1]) * sizes[total[2]]


def _as_exception(text: str) -> str:
    """A line of a validation report in the words of the exception behind it."""
    return text.strip().replace("Value error, ", "ValueError: ").replace("Assertion failed, ", "AssertionError: ")


def _named_flags(text: str, rules: Rules, cause: Cause) -> list[FlagAdvice]:
    """The options that a message names, with the direction that it gives them."""
    if cause in _FLAGLESS:
        return []
    text = text[:2000]
    found: dict[str, FlagAdvice] = {}
    names = r"(?<![\w-])(?:" + "|".join(sorted(rules.options, key=len, reverse=True)) + r")\b"
    reported = cause in OUT_OF_MEMORY  # these messages also repeat the values that they were given
    default: Direction = "unset" if "unrecognized argument" in text else "change"
    for match in sorted([*_OPTION.finditer(text), *re.finditer(names, text)], key=lambda match: match.start()):
        name = match[0] if match[0].startswith("--") else "--" + match[0].replace("_", "-")
        before, after = _CLAUSE.split(text[: match.start()])[-1], text[match.end() :]
        later = _AFTERWARDS.match(after)
        verbs = list(_VERB.finditer(before))
        if reported and not later and not verbs:
            continue
        verb = later or (verbs[-1] if verbs else None)
        example: Direction = "set" if after.startswith("=") else default
        direction = verb.lastgroup if verb else example
        bound = _BOUND.match(after)
        flag = FlagAdvice(name, direction, float(bound[1]) if bound else None)  # type: ignore[arg-type]
        if name not in found or (direction != default and found[name].direction == default):
            found[name] = flag
    return list(found.values())
