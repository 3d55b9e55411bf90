"""Engines: what can be swept."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from bench.engines.protocol import EngineError

if TYPE_CHECKING:  # the experiment's types stand on the protocol beside this file
    from bench.engines.protocol import Engine
    from bench.experiment import Experiment, HardwareSpec

# A card of the same name differs by less than this between drivers and boards.
SAME_CARD_TOLERANCE = 0.02
# Of these the engine reads dozens; others (CUDA_*, NCCL_*, proxies) belong to the host.
ENGINE_VARIABLES = "SGLANG_"


def create(experiment: Experiment) -> Engine:
    """The engine that an experiment names; a real one forecasts for the GPU that is here, if there is one.

    Raises:
        EngineError: it cannot be set up.
    """
    from bench.engines.sglang.engine import SglangEngine
    from bench.engines.simulator.engine import SimulatorEngine

    names = frozenset(parameter.name for parameter in experiment.space.parameters if parameter.env)
    if experiment.engine.name == "simulator":
        return SimulatorEngine(experiment.engine, experiment.model, experiment.hardware, names)
    return SglangEngine(experiment.engine, experiment.model, _seen(experiment), names)


def _seen(experiment: Experiment) -> HardwareSpec:
    """The described card with the memory of the one that is here; a forecast never trusts a table where it can ask."""
    from bench.launch.gpus import Gpus

    hardware = experiment.hardware
    if hardware.architecture == "cpu":
        return hardware
    with Gpus(experiment.engine.visible_gpus(os.environ)) as gpus:
        totals = [gpu.total_bytes for gpu in gpus.facts()]
    if not totals:
        return hardware
    total = float(min(totals))
    same = abs(total - hardware.memory_bytes) <= SAME_CARD_TOLERANCE * hardware.memory_bytes
    return dataclasses.replace(hardware, memory_bytes=total, available_bytes=hardware.available_bytes if same else None)


def see_that_the_shell_is_neutral(experiment: Experiment, shell: Mapping[str, str]) -> None:
    """See that no variable of the shell steers a server beside what the experiment says.

    Raises:
        EngineError: one would.
    """
    searched = {parameter.name for parameter in experiment.space.parameters if parameter.env}
    stray = sorted(
        name
        for name in shell
        if (name.startswith(ENGINE_VARIABLES) or name in searched) and name not in experiment.engine.env
    )
    if stray:
        raise EngineError(
            "engine.env",
            f"{', '.join(stray)} set in this shell would change every server, and nothing would record it: give it as "
            "+engine.env.NAME=VALUE, or unset it",
        )
