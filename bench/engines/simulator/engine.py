"""The simulator engine: SGLang's flags, rules and log, served by a program of this package."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping

from bench.engines.protocol import Command, ServerConfig
from bench.engines.sglang.engine import SglangEngine
from bench.engines.sglang.flags import FlagTable

PREFIX = "BENCH_SIMULATOR_"


class SimulatorEngine(SglangEngine):
    """A server that behaves like SGLang of ``engine.version`` on the experiment's card; its numbers are simulated."""

    name = "simulator"
    simulated = True

    def command(self, config: ServerConfig, *, port: int, served_model_name: str) -> Command:
        """The simulator's command, with card, model and failures on demand in its environment."""
        real = super().command(config, port=port, served_model_name=served_model_name)
        settings = {
            "HARDWARE": json.dumps(dataclasses.asdict(self.hardware)),
            "MODEL_CONFIG": json.dumps(self.model.config),
            "VERSION": self.version,
            "TIME_SCALE": repr(self.spec.time_scale),
        }
        if self.spec.faults:  # else a parameter of the space may bring them
            settings["FAULTS"] = ",".join(self.spec.faults)
        if self.model.draft_config:
            settings["DRAFT_CONFIG"] = json.dumps(self.model.draft_config)
        env = {**dict(real.env), **{PREFIX + name: value for name, value in settings.items()}}
        return Command(real.argv, tuple(sorted(env.items())))

    def lost_s(self, server_info: Mapping[str, object]) -> float:
        """What the server says of itself."""
        lost_s = server_info.get("simulator_lost_s", 0.0)
        return float(lost_s) if isinstance(lost_s, (int, float)) else 0.0

    def acceptance_is_simulated(self, config: ServerConfig) -> bool:
        """Always, where there is any."""
        return any(name == "speculative_algorithm" for name, _ in config.flags)

    def _table(self) -> FlagTable:
        return self._named_table()

    def _launcher(self) -> list[str]:
        return [sys.executable, "-m", "bench.simulator"]
