"""Engines: what can be swept."""

from __future__ import annotations

from bench.engines.protocol import Engine
from bench.experiment import Experiment


def create(experiment: Experiment) -> Engine:
    """The engine that an experiment names.

    Raises:
        EngineError: it cannot be set up.
    """
    from bench.engines.sglang.engine import SglangEngine
    from bench.engines.simulator.engine import SimulatorEngine

    kind = SimulatorEngine if experiment.engine.name == "simulator" else SglangEngine
    names = frozenset(parameter.name for parameter in experiment.space.parameters if parameter.env)
    return kind(experiment.engine, experiment.model, experiment.hardware, names)
