from __future__ import annotations

import heapq
import json
import math
import random
from pathlib import Path

import numpy as np
import pytest

import analysis
from analysis.frames import AnalysisError
from analysis.plan import Job, estimate, main, residual_lengths, tail_seconds
from tests.analysis.runs import make_run

CURVE = {1: 60.0, 4: 200.0, 16: 600.0}


def simulated_makespan(lengths: list[float], level: int) -> float:
    """A closed loop in which the requests in flight share the speed of the curve, event by event."""
    speeds = np.interp(range(level + 1), [0, *CURVE], [0.0, *CURVE.values()])
    waiting, running, written, clock = list(lengths), [], 0.0, 0.0
    while waiting or running:
        while waiting and len(running) < level:
            heapq.heappush(running, written + waiting.pop())
        each = float(speeds[len(running)]) / len(running)
        clock += (running[0] - written) / each
        written = heapq.heappop(running)
    return clock


@pytest.mark.parametrize("variation", [0.3, 1.0])
def test_steady_phase_and_tail_add_up_to_what_a_simulation_takes(variation: float) -> None:
    sigma = math.sqrt(math.log1p(variation**2))
    draw, level, count, mean = random.Random(3), 16, 3000, 500.0
    times = []
    for _ in range(8):
        lengths = [draw.lognormvariate(math.log(mean) - sigma**2 / 2, sigma) for _ in range(count)]
        times.append(simulated_makespan(lengths, level) / sum(lengths) * count * mean)
    residual = residual_lengths(level, mean, variation)
    tail = tail_seconds(residual, CURVE)
    planned = (count * mean - residual.sum()) / CURVE[level] + tail
    assert planned == pytest.approx(np.mean(times), rel=0.01)
    assert tail > 2 * residual.sum() / count  # the tail is a part of it that can be seen


def test_requests_alike_have_half_of_their_length_left_on_average() -> None:
    assert residual_lengths(100, 400.0, 0.0).mean() == pytest.approx(200.0, rel=0.01)


def test_the_widely_spread_have_more_left() -> None:
    # Renewal theory: mean residual = mean * (1 + variation^2) / 2.
    assert residual_lengths(4000, 400.0, 1.0).mean() == pytest.approx(400.0, rel=0.03)


def test_the_job_takes_what_its_tokens_take(finished: Path) -> None:
    run = analysis.load(finished)
    (best, baseline, *_) = estimate(run, Job(902087, 2073.0, gpus=8, price_per_hour=1.8))
    assert best.label.startswith("best")
    assert baseline.label == "baseline"
    steady_s = 902087 * 2073 / 8 / best.output_tok_per_s.mean
    assert best.wall_s.mean == pytest.approx(steady_s, rel=0.01)
    assert best.wall_s.low < best.wall_s.mean < best.wall_s.high < baseline.wall_s.mean
    assert best.gpu_hours.mean == pytest.approx(8 * best.wall_s.mean / 3600)
    assert best.cost is not None
    assert best.cost.mean == pytest.approx(1.8 * best.gpu_hours.mean)


def test_a_server_over_two_gpus_leaves_half_as_many_servers(tmp_path: Path) -> None:
    run = make_run(tmp_path / "toy" / "wide", trials=6)
    for name in ("trials.jsonl", "finalists.jsonl"):
        file = run / name
        file.write_text(file.read_text().replace('["load_format","dummy"]', '["load_format","dummy"],["tp_size",2]'))
    best = json.loads((run / "best.json").read_text())
    (run / "best.json").write_text(json.dumps({**best, "key": "other"}))
    found = estimate(analysis.load(run), Job(1000, 100.0, gpus=8))
    assert {item.servers for item in found} == {4}
    with pytest.raises(AnalysisError, match="takes 2 GPUs for one server; --gpus 1 is too few"):
        estimate(analysis.load(run), Job(1000, 100.0, gpus=1))


def test_a_job_smaller_than_the_load_is_all_start_and_tail(finished: Path) -> None:
    (best, *_) = estimate(analysis.load(finished), Job(3, 100.0))
    assert best.wall_s.mean == pytest.approx(best.startup_s + best.ramp_s + best.tail_s)


def test_what_makes_the_plan_doubtful_is_said(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(finished), "--completions", "1000", "--mean-output-tokens", "2073"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert (
        "! Not everything behind these numbers is real: simulated engine, dummy weights, acceptance simulated." in out
    )
    assert "Measured with 512 output tokens a request, the job has 2073" in out
    assert "Throughput still rises" in out


def test_json_has_units_in_its_keys(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(finished), "--completions", "10", "--mean-output-tokens", "20", "--level", "4", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert {"output_tok_per_s", "wall_s", "gpu_hours", "startup_s", "tail_s"} <= plan["estimates"][0].keys()
    assert plan["estimates"][0]["level"] == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--completions", "0", "--mean-output-tokens", "5"], "--completions is 0"),
        (
            ["--completions", "5", "--mean-output-tokens", "5", "--level", "3"],
            "--level 3 was not measured; measured were 1, 4",
        ),
    ],
)
def test_bad_input_ends_with_code_2(
    finished: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(finished), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_run_without_success_cannot_be_planned_with(failed: Path) -> None:
    with pytest.raises(AnalysisError, match="no valid measurement to plan with"):
        estimate(analysis.load(failed), Job(10, 10.0))
