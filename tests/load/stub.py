"""An asyncio server in the test's own loop that streams like SGLang, with a known truth and failures on demand."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import orjson


@dataclass
class Behaviour:
    """How the server answers.

    Attributes:
        first_s, step_s: to the first chunk, and between chunks. burst: all streams' chunks leave together.
        tokens_per_chunk: of each request's n-th chunk.
        cut: splits the bytes of one write into several writes.
        status: by the number of the request.
        reset_after: chunks after which request number n is cut off, else None.
    """

    first_s: float = 0.01
    step_s: float = 0.002
    tokens_per_chunk: Callable[[int], int] = lambda _chunk: 1
    cut: Callable[[bytes], list[bytes]] | None = None
    status: Callable[[int], int] = lambda _number: 200
    reset_after: Callable[[int], int | None] = lambda _number: None
    prefix: bytes = b""  # before every event, e.g. a comment
    role_chunk: bool = True
    empty_every: int = 0  # an event without text after so many
    usage: bool = True
    done: bool = True
    keep_alive: bool = True
    chunked: bool = True
    error_event: Callable[[int], bool] = lambda _number: False
    length_of: Callable[[int], int] = lambda asked: asked
    silent_after: int | None = None  # requests
    text: str = "word%d "
    verify_steps: bool = False
    cached_tokens: int = 0
    answers_at: int = 0  # tokens before it are reasoning
    slow_until: int = 0  # steps of the server that take ten times as long: it is cold
    fixed_reported: int | None = None
    once: bool = False  # a connection's second request finds it closed, as an idle one may be
    gate: asyncio.Semaphore | None = None  # requests that are served at once


@dataclass
class Stub:
    """The truth: what was sent."""

    behaviour: Behaviour
    port: int = 0
    tokens: int = 0
    requests: list[dict] = field(default_factory=list)
    connections: int = 0
    verify_steps: int = 0
    finished_tokens: int = 0
    started: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextlib.asynccontextmanager
async def serving(behaviour: Behaviour) -> AsyncIterator[Stub]:
    """Serve on a free port."""
    stub = Stub(behaviour)
    tasks: set[asyncio.Task] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())
        stub.connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while await _answer(stub, reader, writer):
                if behaviour.once:
                    await reader.readuntil(b"\r\n\r\n")
                    writer.transport.abort()
        writer.transport.abort() if not behaviour.keep_alive and not behaviour.chunked else writer.close()
        tasks.discard(asyncio.current_task())

    server = await asyncio.start_server(handle, "127.0.0.1", 0, backlog=2048)
    stub.port = server.sockets[0].getsockname()[1]
    try:
        yield stub
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _answer(stub: Stub, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    behaviour = stub.behaviour
    head = await reader.readuntil(b"\r\n\r\n")
    if head.startswith(b"GET"):
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        return True
    length = int(re.search(rb"content-length: *(\d+)", head.lower())[1])
    body = orjson.loads(await reader.readexactly(length))
    number = len(stub.requests)
    stub.requests.append(body)
    if behaviour.silent_after is not None and number >= behaviour.silent_after:
        await asyncio.sleep(3600)
    status = behaviour.status(number)
    if status != 200:
        text = b'{"error": {"message": "no such thing"}}'
        writer.write(b"HTTP/1.1 %d No\r\nContent-Length: %d\r\n\r\n" % (status, len(text)) + text)
        await writer.drain()
        return True
    framing = b"Transfer-Encoding: chunked\r\n" if behaviour.chunked else b""
    closing = b"" if behaviour.keep_alive else b"Connection: close\r\n"
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n" + framing + closing + b"\r\n")
    native = b"/generate" in head.split(b"\r\n")[0]
    async with behaviour.gate or contextlib.nullcontext():
        await _stream(stub, writer, body, number, native=native)
    if behaviour.chunked:
        writer.write(b"0\r\n\r\n")
    await writer.drain()
    return behaviour.keep_alive and behaviour.chunked


async def _stream(stub: Stub, writer: asyncio.StreamWriter, body: dict, number: int, *, native: bool) -> None:
    behaviour = stub.behaviour
    asked = body["sampling_params"]["max_new_tokens"] if native else body["max_tokens"]
    total = behaviour.length_of(asked)
    chat = "messages" in body
    sent = chunk = steps = 0
    text = ""
    loop = asyncio.get_running_loop()
    due = loop.time() + behaviour.first_s

    def event(payload: object) -> None:
        content = payload if isinstance(payload, bytes) else orjson.dumps(payload)
        data = behaviour.prefix + b"data: " + content + b"\n\n"
        framed = b"%x\r\n%s\r\n" % (len(data), data) if behaviour.chunked else data
        for part in behaviour.cut(framed) if behaviour.cut else [framed]:
            writer.write(part)

    def usage() -> dict:
        return {
            "prompt_tokens": 7,
            "completion_tokens": behaviour.fixed_reported or sent,
            "prompt_tokens_details": {"cached_tokens": behaviour.cached_tokens},
        }

    def meta(finish: dict | None) -> dict:
        found = {
            "id": str(number),
            "finish_reason": finish,
            "prompt_tokens": 7,
            "cached_tokens": behaviour.cached_tokens,
        }
        found["completion_tokens"] = behaviour.fixed_reported or sent
        if finish and behaviour.verify_steps:
            found["spec_verify_ct"] = steps
        return found

    if chat and behaviour.role_chunk:
        event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
    if not total and native:
        event({"text": "", "output_ids": [], "meta_info": meta({"type": "stop"})})
    while sent < total:
        await asyncio.sleep(max(0.0, due - loop.time()))
        stub.started += 1
        due += behaviour.step_s * (10 if stub.started < behaviour.slow_until else 1)
        count = min(behaviour.tokens_per_chunk(chunk), total - sent)
        sent += count
        steps += chunk > 0
        stub.tokens += count
        piece = "".join(
            behaviour.text % i if "%" in behaviour.text else behaviour.text for i in range(sent - count, sent)
        )
        text += piece
        finish = "length" if sent == total else None
        if native:
            event({"text": text, "output_ids": list(range(sent)), "meta_info": meta(finish and {"type": finish})})
        else:
            kind = "content" if sent > behaviour.answers_at else "reasoning_content"
            choice = {"index": 0, "finish_reason": finish} | ({"delta": {kind: piece}} if chat else {"text": piece})
            event({"choices": [choice]} | ({"usage": usage()} if behaviour.usage else {}))
        chunk += 1
        if behaviour.empty_every and chunk % behaviour.empty_every == 0 and not native:
            event(
                {"choices": [{"index": 0, "delta": {"content": ""}}]} | ({"usage": usage()} if behaviour.usage else {})
            )
        if behaviour.error_event(number):
            event({"error": {"message": "out of luck", "code": 500}})
            return
        if chunk == behaviour.reset_after(number):
            writer.transport.abort()
            raise ConnectionResetError
        await writer.drain()
    stub.verify_steps += steps
    stub.finished_tokens += sent
    if not native:
        event({"choices": [], "usage": usage()})
    if behaviour.done:
        event(b"[DONE]")


def random_cuts(seed: int) -> Callable[[bytes], list[bytes]]:
    """Splits bytes at random places."""
    rng = random.Random(seed)

    def cut(data: bytes) -> list[bytes]:
        places = sorted(rng.sample(range(1, len(data)), min(rng.randrange(4), len(data) - 1)))
        return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]

    return cut
