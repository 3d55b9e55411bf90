"""The README's first command, judged against every configuration of its space."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from bench import config, engines
from bench.engines.protocol import Candidate, RefusedError, ServerConfig
from bench.engines.simulator.engine import SimulatorEngine
from bench.engines.simulator.virtual import SimulatedHost
from bench.experiment import Experiment
from bench.search import objective
from bench.search.space import Space

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def truth(experiment: Experiment, engine: SimulatorEngine, server: ServerConfig) -> float:
    """Output tok/s of a configuration without any noise; 0 where it does not survive the load."""
    host = SimulatedHost(engine.shape, engine.hardware, version=engine.version)
    launch = host.launch(server)
    level = objective.level(experiment)
    if launch.outcome is not None or launch.measure(experiment.workload, level).measurement is None:
        return 0.0
    return launch.steady_state(experiment.workload, level).output_tok_per_s


def enumerated(experiment: Experiment, engine: SimulatorEngine) -> float:
    best, seen = 0.0, set()
    for candidate in [Candidate(), *Space(experiment.space).enumerate()]:
        try:
            server = engine.canonical(candidate)
        except RefusedError:
            continue
        if server.key not in seen:
            seen.add(server.key)
            best = max(best, truth(experiment, engine, server))
    return best


def test_the_quickstart_ends_within_five_percent_of_the_best_of_its_space(tmp_path: Path) -> None:
    overrides = ["+experiment=quickstart", "run=first", f"results_dir={tmp_path}"]
    done = subprocess.run(
        [sys.executable, "-m", "bench.sweep", *overrides], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "quickstart" / "first"
    answer = orjson.loads((folder / "best.json").read_bytes())
    experiment = config.load(overrides, command="bench.sweep")
    engine = engines.create(experiment)
    assert isinstance(engine, SimulatorEngine)
    found = ServerConfig(
        tuple((name, value) for name, value in sorted(answer["flags"].items())), tuple(sorted(answer["env"].items()))
    )
    assert truth(experiment, engine, found) >= 0.95 * enumerated(experiment, engine)
    assert (folder / "launch.sh").exists()
    assert list((folder / "report").glob("*.png"))
    assert "simulated" in done.stdout
