"""Replies: the bytes of SGLang's answers to a generation request, streamed or whole.

Text and token ids are made up, with a fixed width per token, so that a cumulative chunk is two slices of bytes.
"""

from __future__ import annotations

import json
import random
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from bench.engines.simulator.http import Exchange
from bench.engines.simulator.scheduler import Request

WIDTH = 6  # bytes of one token's text, and of its id with a comma
_TOKENS = 8192
_CONSONANTS, _VOWELS = "bcdfghklmnprstvw", "aeiou"


def _made_up() -> tuple[bytes, bytes]:
    rng = random.Random(0)
    words = []
    for _ in range(_TOKENS):
        syllables = (rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(2))
        words.append(" " + "".join(syllables) + rng.choice(_CONSONANTS))
    ids = "".join(f"{10_000 + rng.randrange(89_999)}," for _ in range(_TOKENS))
    return "".join(words).encode(), ids.encode()


_TEXT, _IDS = _made_up()


@dataclass(frozen=True)
class Garbage:
    """What is wrong with a server's answers; nothing by default."""

    empty: bool = False
    repeated: bool = False
    undecodable: bool = False
    short: bool = False


@dataclass
class Reply(ABC):
    """An answer on its way.

    Attributes:
        seed_offset: where in the made-up text it begins.
        incremental: chunks hold what is new instead of everything so far.
        model: the served model's name.
        drafts: drafted tokens that a verify step checks, 0 without speculation.
    """

    exchange: Exchange
    request: Request
    stream: bool
    model: str
    version: tuple[int, ...]
    drafts: int
    metrics: bool
    wall_start_s: float
    offset: int = 0
    incremental: bool = False
    garbage: Garbage = field(default_factory=Garbage)
    sent: int = 0
    started: bool = False

    def progress(self, finished: bool) -> None:
        """Send what a step brought."""
        if self.stream:
            if not self.started:
                self.started = True
                self.exchange.begin_stream()
                self.open_stream()
            self.chunk(finished)
            if finished:
                self.exchange.end_stream()
        elif finished:
            self.whole()
        self.sent = self.request.output

    def open_stream(self) -> None:  # noqa: B027 - only the chat route has any
        """Events before the first token."""

    @abstractmethod
    def chunk(self, finished: bool) -> None:
        """Write what is new, as one event."""

    @abstractmethod
    def whole(self) -> None:
        """Write the whole answer at once."""

    def text(self, start: int, end: int) -> bytes:
        """Made-up text of tokens ``start`` to ``end``, ready for JSON."""
        if self.garbage.empty:
            return b""
        if self.garbage.repeated:
            return _TEXT[:WIDTH] * (end - start)
        if self.garbage.undecodable:
            return b"\\ufffd" * (end - start)
        return _cut(_TEXT, self.offset + start, self.offset + end)

    def ids(self, start: int, end: int) -> bytes:
        if self.garbage.repeated:
            return (_IDS[:WIDTH] * (end - start))[:-1]
        return _cut(_IDS, self.offset + start, self.offset + end)[:-1]

    def counted(self) -> int:
        """Tokens so far, as the answer says."""
        return self.request.output // 2 if self.garbage.short else self.request.output

    def speculation(self) -> dict[str, Any]:
        """Of a finished request; names by version (tokenizer_manager._calculate_spec_decoding_metrics)."""
        request = self.request
        if not self.drafts or not request.verify_steps:
            return {}
        correct = sum(index * count for index, count in enumerate(request.histogram))
        proposed = request.verify_steps * self.drafts
        common = {
            "spec_accept_rate": correct / proposed if proposed else 0.0,
            "spec_accept_length": request.output / request.verify_steps,
            "spec_verify_ct": request.verify_steps,
        }
        histogram = request.histogram
        if self.version < (0, 5, 11):
            return common | {
                "spec_accept_token_num": correct + request.verify_steps,
                "spec_draft_token_num": proposed + request.verify_steps,
                "spec_accept_histogram": histogram,
            }
        if self.version < (0, 5, 12):
            return common | {
                "spec_accepted_drafts": correct,
                "spec_proposed_drafts": proposed,
                "spec_accept_histogram": histogram,
            }
        named = {
            "spec_num_correct_drafts": correct,
            "spec_num_proposed_drafts": proposed,
            "spec_correct_drafts_histogram": histogram,
        }
        if self.version < (0, 5, 21):
            named |= {
                "spec_accepted_drafts": correct,
                "spec_proposed_drafts": proposed,
                "spec_accept_histogram": histogram,
            }
        return common | named


class NativeReply(Reply):
    """``/generate``: cumulative text, ids and ``meta_info``."""

    def chunk(self, finished: bool) -> None:
        request, count = self.request, self.request.output
        start = self.sent if self.incremental else 0
        if finished:
            meta = json.dumps(self.meta()).encode()
        else:
            meta = (
                b'{"id":"%b","finish_reason":null,"prompt_tokens":%d,"weight_version":"default","num_retractions":%d,'
                b'"reasoning_tokens":0,"cached_tokens":%d,"completion_tokens":%d}'
                % (request.name.encode(), request.prompt_tokens, request.retractions, request.cached, self.counted())
            )
        self.exchange.event(
            b'{"text":"%b","output_ids":[%b],"meta_info":%b}' % (self.text(start, count), self.ids(start, count), meta)
        )

    def whole(self) -> None:
        count = self.request.output
        self.exchange.reply(
            200,
            b'{"text":"%b","output_ids":[%b],"meta_info":%b}'
            % (self.text(0, count), self.ids(0, count), json.dumps(self.meta()).encode()),
        )

    def meta(self) -> dict[str, Any]:
        """Of a finished request; times are virtual."""
        request = self.request
        arrived = self.wall_start_s + request.arrival_s
        first = request.first_token_s or request.arrival_s
        last = request.finished_s or first
        meta: dict[str, Any] = {
            "id": request.name,
            "finish_reason": {"type": "length", "length": self.counted()},
            "prompt_tokens": request.prompt_tokens,
            "weight_version": "default",
            "num_retractions": request.retractions,
            "queue_time": (request.admitted_s or request.arrival_s) - request.arrival_s,
            "reasoning_tokens": 0,
            "cached_tokens": request.cached,
            "cached_tokens_details": None,
            "dp_rank": None,
            "e2e_latency": last - request.arrival_s,
            **self.speculation(),
        }
        if self.metrics:
            meta |= {
                "request_received_ts": arrived,
                "first_token_latency": first - request.arrival_s,
                "prefill_finished_time": self.wall_start_s + first,
                "request_finished_ts": self.wall_start_s + last,
                "decode_throughput": (request.output - 1) / (last - first) if last > first else 0.0,
            }
        return meta | {"completion_tokens": self.counted()}


@dataclass
class OpenAiReply(Reply):
    """The OpenAI routes; chunks hold what is new.

    Attributes:
        chat: the chat route, else completions.
        include_usage, continuous_usage: of the stream, as asked for.
        spec_details: SGLang's ``return_spec_tokens_details`` was asked for.
        report_cached: ``--enable-cache-report``.
    """

    chat: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    spec_details: bool = False
    report_cached: bool = False

    def head(self) -> bytes:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return b'{"id":"%b","object":"%b","created":%d,"model":%b,"choices":[' % (
            self.request.name.encode(),
            kind.encode(),
            int(time.time()),
            json.dumps(self.model).encode(),
        )

    def usage(self) -> bytes:
        prompt, count = self.request.prompt_tokens, self.counted()
        details = b'{"cached_tokens":%d}' % self.request.cached if self.report_cached else b"null"
        return (
            b'{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d,"prompt_tokens_details":%b,'
            b'"reasoning_tokens":0}' % (prompt, prompt + count, count, details)
        )

    def open_stream(self) -> None:
        if self.chat:
            self.exchange.event(
                self.head() + b'{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,'
                b'"finish_reason":null,"matched_stop":null}],"usage":null}'
            )

    def chunk(self, finished: bool) -> None:
        text = self.text(self.sent, self.request.output)
        body = b'"delta":{"content":"%b"}' % text if self.chat else b'"text":"%b"' % text
        usage = self.usage() if self.continuous_usage else b"null"
        self.exchange.event(
            b'%b{"index":0,%b,"logprobs":null,"finish_reason":null,"matched_stop":null}],"usage":%b}'
            % (self.head(), body, usage)
        )
        if finished:
            self.close_stream()

    def close_stream(self) -> None:
        body = b'"delta":{}' if self.chat else b'"text":""'
        extension = b""
        if self.spec_details and self.version >= (0, 5, 20):
            extension = b',"sglext":' + json.dumps({"spec_tokens_details": self.speculation() or None}).encode()
        self.exchange.event(
            b'%b{"index":0,%b,"logprobs":null,"finish_reason":"length","matched_stop":null}],"usage":%b%b}'
            % (self.head(), body, self.usage() if self.continuous_usage else b"null", extension)
        )
        if self.include_usage:
            self.exchange.event(self.head() + b'],"usage":' + self.usage() + b"}")

    def whole(self) -> None:
        text = self.text(0, self.request.output)
        body = b'"message":{"role":"assistant","content":"%b"}' % text if self.chat else b'"text":"%b"' % text
        kind = b"chat.completion" if self.chat else b"text_completion"
        extension = b""
        if self.spec_details and self.version >= (0, 5, 20):
            extension = b',"sglext":' + json.dumps({"spec_tokens_details": self.speculation() or None}).encode()
        head = self.head().replace(b"chat.completion.chunk", kind)
        self.exchange.reply(
            200,
            b'%b{"index":0,%b,"logprobs":null,"finish_reason":"length","matched_stop":null}],"usage":%b%b}'
            % (head, body, self.usage(), extension),
        )


def _cut(source: bytes, start: int, end: int) -> bytes:
    """Tokens of a made-up source that begins anew when it ends."""
    begin = start % _TOKENS
    length = end - start
    if begin + length <= _TOKENS:
        return source[begin * WIDTH : (begin + length) * WIDTH]
    repeated = source * ((begin + length) // _TOKENS + 1)
    return repeated[begin * WIDTH : (begin + length) * WIDTH]
