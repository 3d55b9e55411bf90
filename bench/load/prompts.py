"""Prompts: what is sent, by number, so that a seed names a whole set and any of its prompts can be made again."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import orjson

from bench.experiment import PromptSpec, WorkloadSpec
from bench.load.traces import Arrival

JSONL_KEYS = ("prompt", "text", "messages", "input_ids")
KINDS = ("text", "random_ids", "jsonl", "sharegpt", "shared_prefix")
CHARACTERS_PER_TOKEN = 4.0  # usual for English text and code; the server's own prompt_tokens is what is recorded
BLOCK_TOKENS = 512  # of Mooncake's hash_ids
_HASHED = 64
_TASKS = (
    "Summarise the notes below in your own words, then answer what you would check first.",
    "Read the following and explain it step by step to somebody new to the subject.",
    "Continue the last of these notes in the same manner, with care for detail.",
    "Find a mistake in the material below, if there is one, and say how to correct it.",
    "Rewrite the following more clearly, and say what you changed and why.",
    "Write three questions that a careful reader would ask about these notes, with answers.",
)


@dataclass(frozen=True)
class Prompt:
    """One prompt: text, token ids or chat messages.

    Attributes:
        output_tokens: to ask for at most.
    """

    output_tokens: int
    text: str | None = None
    ids: Sequence[int] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None


class PromptSet:
    """The prompts of one load level. The same spec, seed, level and salt give the same prompts everywhere.

    Args:
        workload: whose prompts and output lengths.
        level: of load; another level gets other prompts, so that the prefix cache knows none of them.
        salt: anything else that shall change the set, e.g. the number of a repeat.
        trace: gives the lengths, and which prefixes are shared, for prompts that are made here.

    Raises:
        ValueError: for an unknown kind, a missing path or vocabulary, or a file without prompts.
    """

    def __init__(
        self, workload: WorkloadSpec, *, seed: int, level: int | str = "", salt: str = "", trace: Sequence[Arrival] = ()
    ) -> None:
        self.spec = workload.prompts
        self._workload = workload
        self._name = f"{seed}/{level}/{salt}"
        self._records = _records(self.spec)
        self._trace = trace
        self._start = random.Random(self._name).randrange(len(self._records)) if self._records else 0
        self._prefix = ""
        if self.spec.kind == "shared_prefix":
            tokens = self.spec.input_tokens * self.spec.shared_prefix_share
            self._prefix = _text(random.Random(f"{self._name}/prefix"), round(tokens * CHARACTERS_PER_TOKEN))

    @property
    def size(self) -> int | None:
        """How many different prompts there are; None is no limit."""
        return len(self._records) or None

    def __getitem__(self, index: int) -> Prompt:
        # Not for secrets: the point is that anybody gets the same.
        rng = random.Random(f"{self._name}/{index}")
        workload, spec = self._workload, self.spec
        output_tokens = _around(rng, workload.output_tokens, workload.output_tokens_spread)
        if self._records:
            record = self._records[(self._start + index) % len(self._records)]
            return Prompt(
                min(output_tokens, record.output_tokens) if record.output_tokens else output_tokens,
                record.text,
                record.ids,
                record.messages,
            )
        if self._trace:
            return self._recorded(rng, self._trace[index % len(self._trace)])
        input_tokens = _around(rng, spec.input_tokens, spec.input_tokens_spread)
        if spec.kind == "random_ids":
            return Prompt(output_tokens, ids=_ids(rng, input_tokens, spec.vocabulary_size or 0))
        characters = round(input_tokens * CHARACTERS_PER_TOKEN) - len(self._prefix)
        return Prompt(output_tokens, self._prefix + _text(rng, max(characters, 1)))

    def _recorded(self, rng: random.Random, arrival: Arrival) -> Prompt:
        """As long as it was, and with the blocks that it shared with others."""
        if self.spec.kind == "random_ids":
            return Prompt(arrival.output_tokens, ids=_ids(rng, arrival.input_tokens, self.spec.vocabulary_size or 0))
        characters = round(arrival.input_tokens * CHARACTERS_PER_TOKEN)
        blocks = (
            _text(random.Random(f"{self._name}/block/{block}"), round(BLOCK_TOKENS * CHARACTERS_PER_TOKEN))
            for block in arrival.blocks
        )
        text = "".join(blocks)[:characters]
        if len(text) < characters:
            text += _text(rng, characters - len(text))
        return Prompt(arrival.output_tokens, text)

    @property
    def hash(self) -> str:
        """Twelve hex digits of the first 64 prompts and their output lengths; equal for equal sets."""
        digest = hashlib.sha256()
        for index in range(_HASHED):
            prompt = self[index]
            digest.update(orjson.dumps([prompt.text, prompt.ids, prompt.messages, prompt.output_tokens]))
        return digest.hexdigest()[:12]


def _around(rng: random.Random, middle: int, spread: float) -> int:
    """Uniform in ``middle * (1 +- spread)``, at least 1."""
    if not spread:
        return max(1, middle)
    return max(1, rng.randint(round(middle * (1 - spread)), round(middle * (1 + spread))))


def _ids(rng: random.Random, count: int, vocabulary_size: int) -> list[int]:
    # Special tokens sit at both ends of a vocabulary: bytes and markers at the start, added ones at the end.
    low, high = min(256, vocabulary_size // 4), max(2, round(vocabulary_size * 0.95))
    return rng.choices(range(low, high), k=count)


def _text(rng: random.Random, characters: int) -> str:
    """Real text of about this length. A number leads, so that no two prompts share more than a word or two."""
    parts = [f"Note {rng.randrange(10**8)}.", rng.choice(_TASKS)]
    length = sum(len(part) + 2 for part in parts)
    passages = _passages()
    left: list[str] = []
    while length < characters:
        left = left or list(passages)
        passage = left.pop(int(rng.random() * len(left)))
        parts.append(passage)
        length += len(passage) + 2
    text = "\n\n".join(parts)[:characters]
    if characters < length:  # whole words only
        end = max(text.rfind(" "), text.rfind("\n"))
        return text[:end] if end > 0 else text
    return text


@cache
def _passages() -> tuple[str, ...]:
    folder = resources.files("bench.load") / "passages"
    texts = [(folder / f"{name}.txt").read_text(encoding="utf-8") for name in ("english", "maths", "code")]
    return tuple(passage.strip("\n") for text in texts for passage in text.split("%%\n"))


@lru_cache(maxsize=2)  # such files are large, and each driver asks for them again
def _records(spec: PromptSpec) -> tuple[Prompt, ...]:
    """Prompts of a file, empty for a kind that makes its own; ``output_tokens`` 0 where the file does not say."""
    if spec.kind not in KINDS:
        raise ValueError(f"prompts of kind {spec.kind!r}: expected one of {', '.join(KINDS)}")
    if spec.kind == "random_ids" and (spec.vocabulary_size or 0) < 16:
        raise ValueError("random ids need vocabulary_size (the model's config.json has it as vocab_size)")
    if spec.kind not in ("jsonl", "sharegpt"):
        return ()
    if spec.path is None:
        raise ValueError(f"prompts of kind {spec.kind} need a path")
    try:
        content = Path(spec.path).read_bytes()
        if spec.kind == "sharegpt":
            found = [_sharegpt(record) for record in orjson.loads(content)]
        else:
            lines = list(enumerate(content.split(b"\n"), 1))
            found = [_jsonl(line, f"{spec.path}, line {number}") for number, line in lines if line.strip()]
    except OSError as error:
        raise ValueError(f"prompts in {spec.path}: {error.strerror}") from None
    except (orjson.JSONDecodeError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ValueError(f"prompts in {spec.path}: not {spec.kind} ({error!r})") from None
    records = [record for record in found if record is not None]
    if not records:
        raise ValueError(f"prompts in {spec.path}: there is none in it")
    return tuple(records)


def _jsonl(line: bytes, place: str) -> Prompt | None:
    """``prompt`` or ``text``, ``messages``, or ``input_ids``; ``output_tokens`` or ``max_tokens`` if it is there."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"prompts in {place}: not JSON ({error.msg})") from None
    if not isinstance(record, dict):
        raise ValueError(f"prompts in {place}: expected an object, seen {type(record).__name__}")
    if not any(name in record for name in JSONL_KEYS):
        seen = ", ".join(record) or "nothing"
        raise ValueError(f"prompts in {place}: expected one of {', '.join(JSONL_KEYS)}; seen {seen}")
    text = record.get("prompt") or record.get("text")
    limit = int(record.get("output_tokens") or record.get("max_tokens") or 0)
    prompt = Prompt(limit, text, record.get("input_ids"), record.get("messages"))
    return prompt if prompt.text or prompt.ids or prompt.messages else None


def _sharegpt(record: Mapping[str, Any]) -> Prompt | None:
    """The first turn, if it is a person's."""
    turns = record.get("conversations") or record.get("conversation") or []
    if not turns or turns[0].get("from", "human") not in ("human", "user") or not turns[0]["value"].strip():
        return None
    return Prompt(0, turns[0]["value"])
