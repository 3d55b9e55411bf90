"""python -m benchmarks.simulator: the simulator against what was measured on a real H200, row by row.

``h200_rows.jsonl`` holds SGLang 0.5.15 with the 27B shape: *steady* rows are decode log lines whose batch was the same
40 steps before; *waves* are whole runs of N requests at once (128 tokens in), taken by a client that opened its
connections on the way, so that each holds about 0.1 s of client and, at a batch size met for the first time, some time
of compiling kernels. The first judge the step-time model, the second the scheduler. Prints the tables of
``docs/simulator.md``.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from bench.engines.sglang.model_shape import ModelShape
from bench.engines.simulator.model import ServerModel
from bench.engines.simulator.options import H200, Disturbance
from bench.engines.simulator.scheduler import Request, Scheduler

ROWS = Path(__file__).with_name("h200_rows.jsonl")
MODEL = Path(__file__).parents[1] / "tests" / "fixtures" / "models" / "qwen27b.json"
PROMPT_TOKENS = 128
CLIENT_S = 0.1  # what is left of the one-request waves once prefill and steps are taken off


def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in ROWS.read_text().splitlines()]


def model_of(row: dict[str, Any]) -> ServerModel:
    accepted = row["simulated_acceptance"]
    return ServerModel.of(
        row["flags"],
        version="0.5.15",
        shape=ModelShape.from_config(json.loads(MODEL.read_text())),
        hardware=H200,
        env={"SGLANG_SIMULATE_ACC_LEN": str(accepted)} if accepted else {},
        disturbance=Disturbance(),
    )


def steady_tok_per_s(model: ServerModel, measured: dict[str, Any]) -> float:
    """Of a steady batch, with the acceptance that the log line shows."""
    step_s = model.times.decode_s(measured["requests"], measured["context_tokens"])
    return float(measured["requests"] * (measured["acceptance_length"] or 1.0) / step_s)


def wave_tok_per_s(model: ServerModel, measured: dict[str, Any], client_s: float = CLIENT_S) -> float:
    """Of requests that all come at once, until the last one ends."""
    scheduler = Scheduler(model.plan, model.times, hybrid=True, rng=random.Random(0))
    acceptance = model.acceptance(0.0)
    for number in range(measured["requests"]):
        scheduler.submit(Request(str(number), PROMPT_TOKENS, measured["output_tokens"], 0.0, acceptance=acceptance))
    now = 0.0
    while not scheduler.idle:
        now += scheduler.step(now).duration_s
    return float(measured["requests"] * measured["output_tokens"] / (now + client_s))


def table(kind: str) -> tuple[list[str], list[float]]:
    """Lines of a Markdown table, and the errors."""
    lines = ["| configuration | requests | measured tok/s | simulated | off by |", "|---|---|---|---|---|"]
    errors = []
    for row in rows():
        model = model_of(row)
        for measured in row[kind]:
            simulate = steady_tok_per_s if kind == "steady" else wave_tok_per_s
            told = simulate(model, measured)
            seen = measured["tok_per_s"]
            errors.append(told / seen - 1)
            lines.append(f"| {row['name']} | {measured['requests']} | {seen:,.0f} | {told:,.0f} | {errors[-1]:+.1%} |")
    return lines, errors


def main() -> int:
    for kind, title in (("steady", "Steady decode batches"), ("waves", f"Waves, {CLIENT_S} s of client counted")):
        lines, errors = table(kind)
        sizes = sorted(abs(error) for error in errors)
        print(f"\n{title}: median {sizes[len(sizes) // 2]:.1%}, worst {sizes[-1]:.1%}\n")
        print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
