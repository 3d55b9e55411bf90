"""Stream: one request and the decoding of its response into chunks with arrival times and exact token counts."""

from __future__ import annotations

import re
from array import array
from dataclasses import dataclass
from typing import Any

import orjson

COLUMNS = ("request", "arrival_ns", "lag_ns", "tokens", "gap_ns")
"""Of one chunk: the request's index, when it arrived, how much later it was handled, tokens that it brought, and the
time since the request's chunk before it (-1: its first)."""

COUNT = b'"completion_tokens":'
_DIGITS = re.compile(rb"\s*(\d+)")
_CONTENT_LENGTH = re.compile(rb"\r\ncontent-length:\s*(\d+)")
_ERROR_CHARACTERS = 300
_TEXT_CHARACTERS, _TEXT_EVERY = 200, 32


@dataclass(eq=False, slots=True)
class Stream:
    """One request's life.

    Attributes:
        index: its place in the prompt set.
        request: the bytes to send.
        native: the response is SGLang's ``/generate``, else an OpenAI route's.
        asked_tokens: the limit of output tokens that it was sent with.
        first_wave: sent at the start of a closed loop, with its length cut to spread the ages.
        scheduled_ns, sent_ns, first_ns, last_ns: due; written; first chunk with content; last chunk with a token.
        tokens, first_tokens: arrived in all; of these, with or before the first chunk with content.
        counted: every chunk told its token count; else each was taken for one token until the end told the sum.
        ended: the last byte has arrived, or nothing more will; closed: and all of it is decoded.
        error: why it failed, or None.
        plain: its first tokens are known, so that until its end only counts matter; then it may have a ``slot`` in
            :class:`bench.load.decoding.Decoder`, which holds ``tokens``, ``last_ns`` and ``chunks`` meanwhile.
        unanswered: the kept connection turned out to be closed, without a byte of a response.
    """

    index: int
    request: bytes
    native: bool
    asked_tokens: int
    first_wave: bool = False
    scheduled_ns: int = 0
    sent_ns: int = 0
    first_ns: int = 0
    first_answer_ns: int = 0
    last_ns: int = 0
    tokens: int = 0
    first_tokens: int = 0
    chunks: int = 0
    counted: bool = True
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    verify_steps: int | None = None
    accepted_histogram: tuple[int, ...] = ()
    retractions: int = 0
    finish_reason: str | None = None
    text: str = ""
    error: str | None = None
    ended: bool = False
    ended_ns: int = 0
    closed: bool = False
    unanswered: bool = False
    # the response's head
    status: int | None = None
    chunked: bool = False
    content_length: int | None = None
    keep_alive: bool = True
    body_bytes: int = 0
    # how it is decoded
    plain: bool = False
    slot: int = -1
    _head: bytes = b""
    _body: _Dechunker | None = None
    _partial: bytes = b""
    _last_event: bytes = b""
    _reported: int | None = None  # the response's own count of all output tokens
    _done: bool = False
    _text_wanted: int = 0

    def __post_init__(self) -> None:
        # Of every 32nd reply the text is kept: enough to see that a server repeats itself.
        self._text_wanted = 0 if self.index % _TEXT_EVERY else _TEXT_CHARACTERS

    @property
    def ok(self) -> bool:
        return self.closed and self.error is None

    def renew(self) -> None:
        """Make a request that was not answered ready to be sent once more."""
        self.error, self.ended, self.closed, self.unanswered, self._head = None, False, False, False, b""

    @property
    def complete(self) -> bool:
        """The decoded bytes hold the end of the response."""
        return self._body is not None and self._body.complete

    def read_head(self, data: bytes) -> bytes | None:
        """Take the next bytes of the response's head; what follows the head, or None while that is incomplete.

        Raises:
            ValueError: when it is not HTTP.
        """
        self._head += data
        if not b"HTTP/".startswith(self._head[:5]):
            raise ValueError(f"expected an HTTP response, got {self._head[:40]!r}")
        head, separator, rest = self._head.partition(b"\r\n\r\n")
        if not separator:
            return None
        head = head.lower()
        words = head.split(b"\r\n", 1)[0].split()
        if len(words) < 2 or not words[1].isdigit():
            raise ValueError(f"expected an HTTP status line, got {head[:40]!r}")
        if words[1] == b"100":  # Continue: the real head follows
            self._head = b""
            return self.read_head(rest)
        self.status = int(words[1])
        self.chunked = re.search(rb"\r\ntransfer-encoding:[^\r]*chunked", head) is not None
        length = _CONTENT_LENGTH.search(head)
        self.content_length = int(length[1]) if length and not self.chunked else None
        delimited = self.chunked or self.content_length is not None
        self.keep_alive = delimited and words[0] == b"http/1.1" and b"\r\nconnection: close" not in head
        self._body = _Dechunker() if self.chunked else None
        return rest

    def decode(self, data: bytes, arrival_ns: int, handled_ns: int, chunks: array[int]) -> None:
        """Decode bytes of the body, however they are cut, adding one row per chunk that brought tokens."""
        if self._body is not None:
            try:
                data = self._body.feed(data)
            except ValueError as error:
                self.error = self.error or str(error)
                return
        if b"\r" in data:  # never raw in JSON, so only line ends
            data = data.replace(b"\r", b"")
        *events, self._partial = (self._partial + data).split(b"\n\n")
        if self.status == 200:
            take = self._native_event if self.native else self._openai_event
            for event in events:
                take(event, arrival_ns, handled_ns, chunks)
        between = not self._partial and self._body is not None and self._body.between
        told = self.counted and self.first_answer_ns > 0 and (self.native or len(self.text) >= self._text_wanted)
        self.plain = between and told and self.error is None

    def close(self) -> None:
        """Read the response's end and say whether it failed. To be called once, when all is decoded."""
        if self.closed:
            return
        self.closed = True
        if self.status is not None and self.status != 200:
            text = self._partial.decode(errors="replace").strip()[:_ERROR_CHARACTERS]
            self.error = self.error or f"HTTP {self.status}: {text}"
            return
        if self._partial.strip():
            take = self._native_event if self.native else self._openai_event
            take(self._partial, self.last_ns, self.last_ns, array("q"))
        if self.native and self._last_event:
            self._close_native()
        if self.error is not None:
            return
        if self._body is not None and not self._body.complete:
            self.error = "the response ended inside a chunk"
        elif self.finish_reason is None and not self._done:
            self.error = "the stream ended without a finish reason"
        if not self.counted and self._reported:
            self.tokens = self._reported

    def miscounted(self, *, ignore_eos: bool) -> bool:
        """Whether the response has another number of tokens than its chunks add up to or, if it was to go on past its
        end, than was asked for.
        """
        differs = self._reported is not None and self._reported != self.tokens
        return differs or (ignore_eos and self.tokens != self.asked_tokens)

    @property
    def repeats(self) -> bool:
        """Whether the reply says one thing over and over."""
        words = self.text.split()
        return len(self.text) >= 32 and (len(set(self.text)) <= 2 or (len(words) >= 8 and len(set(words)) <= 2))

    def _row(self, tokens: int, arrival_ns: int, handled_ns: int, chunks: array[int]) -> None:
        gap_ns = arrival_ns - self.last_ns if self.chunks else -1
        chunks.extend((self.index, arrival_ns, handled_ns - arrival_ns, tokens - self.tokens, gap_ns))
        self.tokens = tokens
        self.chunks += 1
        self.last_ns = arrival_ns

    def _native_event(self, event: bytes, arrival_ns: int, handled_ns: int, chunks: array[int]) -> None:
        # The count is searched, not parsed: text and ids are cumulative, so parsing would cost the square of the
        # length. A quote inside JSON text is escaped, so the key cannot occur there.
        place = event.rfind(COUNT)
        if place >= 0:
            found = _DIGITS.match(event, place + len(COUNT))
            tokens = int(found[1]) if found else 0
            self._last_event = event
            if tokens > self.tokens:
                self._row(tokens, arrival_ns, handled_ns, chunks)
                if not self.first_ns:
                    self.first_ns = self.first_answer_ns = arrival_ns
                    self.first_tokens = tokens
            return
        data = _data(event)
        if data == b"[DONE]":
            self._done = True
        elif data:
            self._error_event(data)

    def _close_native(self) -> None:
        try:
            payload = orjson.loads(_data(self._last_event))
            meta: dict[str, Any] = payload["meta_info"]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            self.error = self.error or f"not a generate event: {self._last_event[:80]!r}"
            return
        reason = meta.get("finish_reason")
        if isinstance(reason, dict):
            self.finish_reason = str(reason.get("type"))
            if self.finish_reason == "abort":
                self.error = self.error or f"aborted by the server: {reason.get('message', '')}"[:_ERROR_CHARACTERS]
        elif reason is not None:
            self.finish_reason = str(reason)
        self._reported = meta.get("completion_tokens")
        self.prompt_tokens = meta.get("prompt_tokens")
        self.cached_tokens = meta.get("cached_tokens")
        self.verify_steps = meta.get("spec_verify_ct")
        histogram = meta.get("spec_correct_drafts_histogram") or meta.get("spec_accept_histogram")
        self.accepted_histogram = tuple(histogram or ())
        self.retractions = meta.get("num_retractions") or 0
        self.text = str(payload.get("text") or payload.get("output_ids") or "")[-_TEXT_CHARACTERS:]

    def _openai_event(self, event: bytes, arrival_ns: int, handled_ns: int, chunks: array[int]) -> None:
        data = event[6:] if event.startswith(b"data: {") and b"\n" not in event else _data(event)
        if not data:
            return
        if data == b"[DONE]":
            self._done = True
            return
        try:
            payload: dict[str, Any] = orjson.loads(data)
            choices = payload.get("choices") or ()
            usage: dict[str, Any] | None = payload.get("usage")
        except (orjson.JSONDecodeError, AttributeError):
            self.error = self.error or f"not a stream event: {data[:80]!r}"
            return
        if not choices and not usage:
            if "error" in payload or payload.get("object") == "error":
                self._error_event(data)
            self._extensions(payload)
            return
        content = answer = False
        for choice in choices:
            delta = choice.get("delta") or choice
            text = delta.get("content") or delta.get("text") or ""
            answer = bool(text or delta.get("tool_calls"))
            content = answer or bool(delta.get("reasoning_content") or delta.get("reasoning"))
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            if len(self.text) < self._text_wanted:
                self.text += text or delta.get("reasoning_content") or ""
        tokens = self._tokens(usage, content=content, choices=bool(choices))
        if tokens > self.tokens:
            self._row(tokens, arrival_ns, handled_ns, chunks)
        if content and not self.first_ns:
            self.first_ns = arrival_ns
            self.first_tokens = self.tokens
        if answer and not self.first_answer_ns:
            self.first_answer_ns = arrival_ns
        if "sglext" in payload:
            self._extensions(payload)

    def _tokens(self, usage: dict[str, Any] | None, *, content: bool, choices: bool) -> int:
        """Tokens so far, after an event of an OpenAI route."""
        if usage:
            self._reported = usage.get("completion_tokens") or 0
            self.prompt_tokens = usage.get("prompt_tokens", self.prompt_tokens)
            details = usage.get("prompt_tokens_details")
            if details:
                self.cached_tokens = details.get("cached_tokens", self.cached_tokens)
            if self.counted and (choices or not self.chunks):
                return int(self._reported or 0)
            return self.tokens
        if content:
            self.counted = False
            return self.tokens + 1
        return self.tokens

    def _extensions(self, payload: dict[str, Any]) -> None:
        """SGLang's additions to the OpenAI routes."""
        details = (payload.get("sglext") or {}).get("spec_tokens_details")
        if isinstance(details, list):
            details = details[0] if details else None
        if isinstance(details, dict):
            self.verify_steps = details.get("spec_verify_ct", self.verify_steps)
            self.accepted_histogram = tuple(details.get("spec_correct_drafts_histogram") or ())

    def _error_event(self, data: bytes) -> None:
        self.error = self.error or f"error in the stream: {data.decode(errors='replace')}"[:_ERROR_CHARACTERS]


def _data(event: bytes) -> bytes:
    """The data of a server-sent event; empty for a comment."""
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines).strip()


class _Dechunker:
    """Takes HTTP/1.1 chunked framing off, wherever it was cut."""

    def __init__(self) -> None:
        self.complete = False
        self._left = 0  # of the chunk, its line end not counted
        self._line = b""
        self._line_end = False  # a chunk's bytes are all there, its line end is not

    @property
    def between(self) -> bool:
        """The next byte begins a chunk."""
        return not (self._left or self._line or self._line_end or self.complete)

    def feed(self, data: bytes) -> bytes:
        """Payload in these bytes.

        Raises:
            ValueError: where a chunk's size should stand and does not.
        """
        parts: list[bytes] = []
        place, length = 0, len(data)
        while place < length and not self.complete:
            if self._left:
                part = data[place : place + self._left]
                parts.append(part)
                place += len(part)
                self._left -= len(part)
                self._line_end = not self._left
                if length - place >= 2 and self._line_end:
                    place += 2
                    self._line_end = False
                continue
            end = data.find(b"\n", place)
            if end < 0:
                self._line += data[place:]
                break
            line = (self._line + data[place:end]).rstrip(b"\r")
            self._line = b""
            place = end + 1
            if self._line_end:  # it came in a later read than its chunk
                self._line_end = False
                continue
            try:
                self._left = int(line.partition(b";")[0], 16)
            except ValueError:
                raise ValueError(f"expected the size of an HTTP chunk, got {line[:40]!r}") from None
            self.complete = self._left == 0
        return parts[0] if len(parts) == 1 else b"".join(parts)
