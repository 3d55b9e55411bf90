"""Probe: one request whose reply is read, because a fast server that answers garbage must never win."""

from __future__ import annotations

from dataclasses import dataclass

import aiohttp
import orjson

PROMPT = "Count from one to thirty in words, separated by commas:"
TOKENS = 24  # a third of a second on most servers, enough to see a loop
# A period that fits so often into a reply is a loop; a sane reply to the prompt has none.
_LEAST_REPEATS = 4


@dataclass(frozen=True)
class Reply:
    """What came back.

    Attributes:
        broken: why it is no reply at all (status, encoding, another number of tokens), else empty.
        odd: what is wrong with the text: ``empty``, ``undecodable`` or ``repetitive``, else empty. Random weights give
            such text as well, so only a difference to the baseline's reply tells anything.
    """

    text: str = ""
    broken: str = ""
    odd: str = ""


async def ask(session: aiohttp.ClientSession) -> Reply | None:
    """Send the request; None when no reply comes in the session's time."""
    sampling = {"max_new_tokens": TOKENS, "ignore_eos": True, "temperature": 0.0}
    try:
        async with session.post("/generate", json={"text": PROMPT, "sampling_params": sampling}) as response:
            body = await response.read()
    except (aiohttp.ClientError, TimeoutError):
        return None
    if response.status != 200:
        return Reply(broken=f"HTTP {response.status}: {body[:200].decode(errors='replace')}")
    try:
        plain = orjson.loads(body)
        text, tokens = str(plain["text"]), int(plain["meta_info"]["completion_tokens"])
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        return Reply(broken=f"a reply that cannot be read ({type(error).__name__}: {error})")
    if tokens != TOKENS:
        return Reply(text, broken=f"{tokens} tokens where {TOKENS} were asked for")
    return Reply(text, odd=_oddity(text))


def _oddity(text: str) -> str:
    if not text.strip():
        return "empty"
    if text.count("\N{REPLACEMENT CHARACTER}") > len(text) / 2:
        return "undecodable"
    periods = range(1, len(text) // _LEAST_REPEATS + 1)
    return "repetitive" if any(text[period:] == text[:-period] for period in periods) else ""
