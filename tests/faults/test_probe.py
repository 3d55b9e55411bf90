"""Text that is no answer is told from text that is one."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable

import aiohttp
import pytest
from aiohttp import web

from bench import probe


@pytest.fixture
async def ask() -> AsyncIterator[Callable]:
    """Asks a server that gives this response."""
    runners = []

    async def asked(status: int, body: bytes) -> probe.Reply | None:
        async def answer(_request: web.Request) -> web.Response:
            return web.Response(status=status, body=body)

        application = web.Application()
        application.router.add_post("/generate", answer)
        runner = web.AppRunner(application)
        runners.append(runner)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            return await probe.ask(session)

    yield asked
    for runner in runners:
        await runner.cleanup()


def body(text: str, tokens: int = probe.TOKENS) -> bytes:
    return json.dumps({"text": text, "meta_info": {"completion_tokens": tokens}}).encode()


@pytest.mark.parametrize(
    ("text", "odd"),
    [
        (" one, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, thirteen", ""),
        (" 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13", ""),
        ("", "empty"),
        (" \n\n ", "empty"),
        ("!!!!!!!!!!!!!!!!", "repetitive"),
        (" the the the the the the", "repetitive"),
        ("no way, no way, no way, no way, no wa", "repetitive"),
        ("\N{REPLACEMENT CHARACTER}" * 40, "undecodable"),
    ],
)
async def test_odd_text_is_named(ask: Callable, text: str, odd: str) -> None:
    reply = await ask(200, body(text))
    assert (reply.broken, reply.odd) == ("", odd)


@pytest.mark.parametrize(
    ("status", "content", "said"),
    [
        (500, b"scheduler is gone", "HTTP 500: scheduler is gone"),
        (200, b"\xff\xfe", "a reply that cannot be read"),
        (200, b"[]", "a reply that cannot be read"),
        (200, body("one", 3), f"3 tokens where {probe.TOKENS} were asked for"),
    ],
)
async def test_a_broken_reply_is_named(ask: Callable, status: int, content: bytes, said: str) -> None:
    reply = await ask(status, content)
    assert said in reply.broken


async def test_no_reply_is_none() -> None:
    async with aiohttp.ClientSession("http://127.0.0.1:9") as session:
        assert await probe.ask(session) is None
