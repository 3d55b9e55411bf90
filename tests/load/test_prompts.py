"""Prompts that a seed names."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bench.experiment import PromptSpec, WorkloadSpec
from bench.load.prompts import PromptSet
from bench.load.target import Target


def prompts(spec: PromptSpec, *, seed: int = 1, level: int = 8, salt: str = "", spread: float = 0.0) -> PromptSet:
    workload = WorkloadSpec("test", spec, (8,), 100, output_tokens_spread=spread)
    return PromptSet(workload, seed=seed, level=level, salt=salt)


def test_a_seed_names_a_set_and_anything_else_another() -> None:
    spec = PromptSpec("text", 128)
    names = {
        prompts(spec).hash,
        prompts(spec, seed=2).hash,
        prompts(spec, level=9).hash,
        prompts(spec, salt="repeat 2").hash,
        prompts(PromptSpec("text", 129)).hash,
    }
    assert len(names) == 5
    assert prompts(spec).hash == prompts(spec).hash
    assert prompts(spec)[7] == prompts(spec)[7]


@pytest.mark.parametrize("tokens", [16, 300, 9000])
def test_text_has_about_the_length_and_no_two_begin_alike(tokens: int) -> None:
    texts = [prompts(PromptSpec("text", tokens))[index].text for index in range(50)]
    assert all(abs(len(text) - 4 * tokens) < 40 for text in texts)
    assert len({text[:12] for text in texts}) == 50


def test_random_ids_have_the_length_and_keep_off_special_tokens() -> None:
    spec = PromptSpec("random_ids", 200, input_tokens_spread=0.5, vocabulary_size=32_000)
    found = [prompts(spec)[index].ids for index in range(200)]
    assert {100 <= len(ids) <= 300 for ids in found} == {True}
    assert min(map(min, found)) >= 256
    assert max(map(max, found)) < 32_000 * 0.95 + 1
    assert len({len(ids) for ids in found}) > 50


def test_output_lengths_are_spread_around_the_middle() -> None:
    lengths = [prompts(PromptSpec("text", 8), spread=0.2)[index].output_tokens for index in range(300)]
    assert (min(lengths), max(lengths)) == (80, 120)
    assert sum(lengths) / 300 == pytest.approx(100, rel=0.03)


def test_a_shared_prefix_is_shared_and_the_rest_is_not() -> None:
    spec = PromptSpec("shared_prefix", 200, shared_prefix_share=0.5)
    one, other = prompts(spec)[0].text, prompts(spec)[1].text
    common = next(place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    assert 360 < common < 420


def test_files_are_read(tmp_path: Path) -> None:
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('{"prompt": "one", "output_tokens": 5}\n\n{"messages": [{"role": "user", "content": "two"}]}\n')
    found = prompts(PromptSpec("jsonl", path=str(lines)))
    both = sorted((found[0], found[1]), key=lambda prompt: prompt.output_tokens)
    assert (both[0].text, both[0].output_tokens) == ("one", 5)
    assert both[1].messages[0]["content"] == "two"
    assert found.size == 2
    assert found[2] == found[0]
    share = tmp_path / "share.json"
    turns = [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi"}]
    share.write_text(json.dumps([{"conversations": turns}, {"conversations": turns[::-1]}, {"conversations": []}]))
    assert prompts(PromptSpec("sharegpt", path=str(share)))[0].text == "hello"


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (PromptSpec("poems"), "expected one of text"),
        (PromptSpec("random_ids"), "vocabulary_size"),
        (PromptSpec("jsonl"), "need a path"),
        (PromptSpec("jsonl", path="/nowhere.jsonl"), "No such file"),
    ],
)
def test_what_cannot_be_read_says_why(spec: PromptSpec, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        prompts(spec)


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text('\n{"text": ""}\n')
    with pytest.raises(ValueError, match="there is none in it"):
        prompts(PromptSpec("jsonl", path=str(path)))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"question": "why?", "id": 3}', "expected one of prompt, text, messages, input_ids; seen question, id"),
        ("{}", "expected one of prompt, text, messages, input_ids; seen nothing"),
        ("[1]", "expected an object, seen list"),
        ('{"text": ', "not JSON"),
    ],
)
def test_a_line_that_is_no_prompt_is_named_with_its_number(line: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(f'{{"text": "Hello."}}\n\n{line}\n')
    with pytest.raises(ValueError, match=re.escape(f"{path}, line 3: {said}")):
        prompts(PromptSpec("jsonl", path=str(path)))


def test_prompts_that_a_route_cannot_take_are_refused() -> None:
    spec = PromptSpec("random_ids", 4, vocabulary_size=100)
    workload = WorkloadSpec("test", spec, (8,), 100)
    with pytest.raises(ValueError, match="not token ids"):
        Target("http://localhost:1", "chat").request(prompts(spec)[0], workload, 5)
    with pytest.raises(ValueError, match="expected http"):
        Target("https://localhost").request(prompts(spec)[0], workload, 5)
