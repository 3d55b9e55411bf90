"""When requests are due."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from bench.experiment import PromptSpec, WorkloadSpec
from bench.load.patterns import Pattern
from bench.load.prompts import PromptSet
from bench.load.traces import read


def gaps(pattern: Pattern, count: int = 20_000) -> np.ndarray:
    return np.diff([0.0, *itertools.islice(pattern.due_s(3), count)])


def test_every_pattern_has_the_rate_that_was_asked_for() -> None:
    for pattern in (
        Pattern("constant", rate_per_s=50),
        Pattern("poisson", rate_per_s=50),
        Pattern("gamma", rate_per_s=50, burstiness=0.5),
    ):
        assert gaps(pattern).mean() == pytest.approx(1 / 50, rel=0.03)


def test_burstiness_is_the_shape_of_the_gaps() -> None:
    def variation(pattern: Pattern) -> float:
        return gaps(pattern).std() * 10

    assert variation(Pattern("constant", rate_per_s=10)) == pytest.approx(0, abs=1e-6)
    assert variation(Pattern("poisson", rate_per_s=10)) == pytest.approx(1, rel=0.05)
    assert variation(Pattern("gamma", rate_per_s=10, burstiness=0.25)) == pytest.approx(2, rel=0.05)
    assert variation(Pattern("gamma", rate_per_s=10, burstiness=4)) == pytest.approx(0.5, rel=0.05)


def test_a_ramp_grows_evenly_to_the_rate() -> None:
    due = np.array(list(itertools.islice(Pattern("constant", rate_per_s=100, ramp_s=10).due_s(1), 1500)))
    assert (due <= 10).sum() == pytest.approx(500, abs=2)
    assert (due <= 5).sum() == pytest.approx(125, abs=2)
    assert np.diff(due[due > 10]) == pytest.approx(0.01, abs=1e-9)


def test_shares_of_a_pattern_add_up() -> None:
    parts = [Pattern("batch", 7, requests=10).share(shard, 3) for shard in range(3)]
    assert sum(part.concurrency for part in parts) == 7
    assert sum(part.requests for part in parts) == 10


def test_traces_are_read_in_either_form(tmp_path: Path) -> None:
    mooncake, burst = tmp_path / "trace.jsonl", tmp_path / "trace.csv"
    lines = [
        {"timestamp": 27_000, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]},
        {"timestamp": 29_000, "input_length": 700, "output_length": 6, "hash_ids": [1, 3]},
    ]
    mooncake.write_text("\n".join(map(json.dumps, lines)))
    burst.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,1087,0,1087,Conversation log\n"
        "47,GPT-4,417,276,693,Conversation log\n"
    )
    first = read(str(mooncake), speed=2)
    assert [(a.due_s, a.input_tokens, a.output_tokens) for a in first] == [(0, 600, 5), (1, 700, 6)]
    assert [(a.due_s, a.output_tokens) for a in read(str(burst))] == [(0, 18), (42, 276)]
    prompts = PromptSet(WorkloadSpec("test", PromptSpec("text"), (), 1), seed=1, trace=first)
    one, other = prompts[0].text, prompts[1].text
    assert one[:2000] == other[:2000]
    assert one[2100:2300] != other[2100:2300]
    assert abs(len(one) - 2400) < 20
    assert prompts[1].output_tokens == 6


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", '{"timestamp": 1}', '{"timestamp": "nan", "input_length": 1}'])
def test_a_trace_that_is_none_says_what_is_expected(text: str, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"trace .*(empty|expected timestamp)"):
        read(str(path))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"kind": "closed"}, "concurrency of 1"),
        ({"kind": "poisson"}, "rate above 0"),
        ({"kind": "gamma", "rate_per_s": 1, "burstiness": 0}, "burstiness"),
        ({"kind": "batch", "concurrency": 1}, "number of requests"),
        ({"kind": "sine"}, "expected one of closed"),
    ],
)
def test_a_pattern_that_is_none_says_what_is_missing(values: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Pattern(**values)
