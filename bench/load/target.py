"""Target: a server, one of its routes, and the bytes of a request to it."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

import orjson

from bench.experiment import WorkloadSpec
from bench.load.prompts import Prompt

ROUTES = {"generate": "/generate", "completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True)
class Target:
    """Where requests go.

    Attributes:
        base_url: ``http://host:port`` (https is not supported: the kernel cannot stamp what it cannot read).
        route: ``generate`` (SGLang's own), ``completions`` or ``chat``.
        model: name that the OpenAI routes want.
        headers: more request headers, e.g. an authorization.
        speculation_details: ask the OpenAI routes for SGLang's ``return_spec_tokens_details`` (0.5.20 and later).
    """

    base_url: str
    route: str = "generate"
    model: str | None = None
    headers: tuple[tuple[str, str], ...] = ()
    speculation_details: bool = False

    @property
    def address(self) -> tuple[str, int]:
        """Host and port.

        Raises:
            ValueError: for another scheme than http, or an unknown route.
        """
        parts = urlsplit(self.base_url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"base URL {self.base_url!r}: expected http://host:port")
        if self.route not in ROUTES:
            raise ValueError(f"route {self.route!r}: expected one of {', '.join(ROUTES)}")
        return parts.hostname, parts.port or 80

    def request(self, prompt: Prompt, workload: WorkloadSpec, output_tokens: int) -> bytes:
        """A whole HTTP request.

        Raises:
            ValueError: when the prompt's kind does not go with the route.
        """
        build = self._native if self.route == "generate" else self._openai
        body = orjson.dumps(build(prompt, workload, output_tokens))
        path = urlsplit(self.base_url).path.rstrip("/").removesuffix("/v1") + ROUTES[self.route]
        host, port = self.address
        lines = [
            f"POST {path} HTTP/1.1",
            f"Host: {host}:{port}",
            "Content-Type: application/json",
            "Accept: text/event-stream",
            f"Content-Length: {len(body)}",
            *(f"{name}: {value}" for name, value in self.headers),
        ]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body

    def _native(self, prompt: Prompt, workload: WorkloadSpec, output_tokens: int) -> dict[str, object]:
        if prompt.messages is not None:
            raise ValueError("chat messages need the chat route (workload.chat: true), not generate")
        return {
            **({"input_ids": prompt.ids} if prompt.ids is not None else {"text": prompt.text}),
            "sampling_params": {
                "max_new_tokens": output_tokens,
                "temperature": workload.temperature,
                "ignore_eos": workload.ignore_eos,
            },
            "stream": True,
        }

    def _openai(self, prompt: Prompt, workload: WorkloadSpec, output_tokens: int) -> dict[str, object]:
        body: dict[str, object] = {
            "model": self.model or "default",
            "max_tokens": output_tokens,
            "temperature": workload.temperature,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        if workload.ignore_eos:
            body["ignore_eos"] = True
        if self.speculation_details:
            body["return_spec_tokens_details"] = True
        if self.route == "completions":
            if prompt.messages is not None:
                raise ValueError("chat messages need the chat route (workload.chat: true), not completions")
            body["prompt"] = prompt.ids if prompt.ids is not None else prompt.text
            return body
        if prompt.ids is not None:
            raise ValueError("the chat route takes text, not token ids; use generate or completions for random_ids")
        body["messages"] = prompt.messages or [{"role": "user", "content": prompt.text}]
        return body
