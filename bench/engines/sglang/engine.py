"""The SGLang engine: everything that the harness knows of SGLang, behind the engine protocol."""

from __future__ import annotations

import contextlib
import math
import re
import sys
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from bench.engines.protocol import (
    Calibration,
    Candidate,
    Command,
    Difference,
    EngineError,
    Forecast,
    LaunchFacts,
    RefusedError,
    ServerConfig,
    ServerCounters,
    Value,
)
from bench.engines.sglang import memory
from bench.engines.sglang.canonical import ACCEPTANCE_ENV, Surroundings, canonical
from bench.engines.sglang.faults import RULES
from bench.engines.sglang.flags import FlagTable, NotInstalledError, UnknownFlagError
from bench.engines.sglang.log_facts import read_facts
from bench.engines.sglang.model_shape import ModelShape, ShapeError
from bench.experiment import EngineSpec, HardwareSpec, ModelSpec
from bench.faults import LogReader
from bench.secrets import REDACTED, redact_env

# What /server_info calls an algorithm that the command line knows by another name.
REPORTED_ALGORITHMS = {"NEXTN": ("EAGLE", "FROZEN_KV_MTP"), "EAGLE": ("EAGLE", "FROZEN_KV_MTP")}
# Where /server_info keeps a setting beside the flag's own name: path of keys, from 0.5.14 on.
REPORTED_ELSEWHERE = {
    "cuda_graph_max_bs_decode": ("cuda_graph_config", "decode", "max_bs"),
    "cuda_graph_bs_decode": ("cuda_graph_config", "decode", "bs"),
    "cuda_graph_backend_decode": ("cuda_graph_config", "decode", "backend"),
    "cuda_graph_backend_prefill": ("cuda_graph_config", "prefill", "backend"),
}
MAX_CANONICAL_KEPT = 50_000  # canonical forms kept in memory, a few hundred bytes each
_SAMPLE = re.compile(r"^(sglang:[a-z_]+)(?:\{[^}]*\})?\s+(\S+)", re.MULTILINE)


class SglangEngine:
    """SGLang, as the experiment names it.

    Args:
        environment_names: parameters of the space that are environment variables.

    Raises:
        EngineError: no flags are known for the version, or the model's config cannot be read.
    """

    name = "sglang"
    simulated = False

    def __init__(
        self,
        engine: EngineSpec,
        model: ModelSpec,
        hardware: HardwareSpec,
        environment_names: frozenset[str] = frozenset(),
    ) -> None:
        self.spec = engine
        self.model = model
        self.hardware = hardware
        self.missing: str | None = None
        self.table = self._table()
        self.version = self.table.version
        self.flags_from = self.table.source
        self.shape = _shape(model)
        self._environment_names = environment_names
        # Keys and tokens stay here: a configuration, which is recorded, holds what is left of them without the secret.
        self._secret_flags = self._kept_flags()
        self._secret_env = {name: value for name, value in engine.env.items() if _without_secret(name, value) != value}
        self._around = Surroundings(
            table=self.table,
            shape=self.shape,
            gpu_memory_bytes=hardware.memory_bytes,
            architecture=hardware.architecture,
            draft_path=model.draft_path,
            simulated_acceptance=engine.simulated_acceptance,
        )
        self._canonical = lru_cache(MAX_CANONICAL_KEPT)(self._canonical_of)

    def problems(self, flags: Mapping[str, Value]) -> list[str]:
        """What is wrong with flag names and values, one sentence each."""
        found = (self.table.problem(name, value) for name, value in flags.items())
        return [text for text in found if text]

    def renamed(self, name: str) -> str | None:
        """How this version calls a flag that is written in another version's spelling."""
        return self.table.find(name).note

    def canonical(self, candidate: Candidate) -> ServerConfig:
        """The server that a candidate really starts, the experiment's fixed flags included.

        Raises:
            RefusedError: SGLang would refuse it; ``config`` is what it would be launched with all the same.
        """
        items = tuple(
            (name, tuple(value) if isinstance(value, list) else value)
            for name, value in sorted(candidate.values.items())
        )
        config = self._canonical(items)
        if isinstance(config, RefusedError):
            raise RefusedError(str(config), config.config)
        return config

    def forecast(self, config: ServerConfig, calibration: Calibration) -> Forecast:
        """Memory and effective limits of a configuration."""
        return memory.forecast(
            dict(config.flags),
            version=self.version,
            shape=self.shape,
            hardware=self.hardware,
            calibration=calibration,
            env=dict(config.env),
        )

    def calibrated(self, calibration: Calibration, facts: LaunchFacts) -> Calibration:
        """What is known of this host after one more launch; what its log did not say stays as it was."""
        return memory.calibrate(calibration, facts)

    def command(self, config: ServerConfig, *, port: int, served_model_name: str) -> Command:
        """The command that launches it on the loopback address; the name is the nonce that proves who answers."""
        arguments = [*self._launcher(), "--model-path", self.model.path]
        if self.model.quantization:
            arguments += ["--quantization", self.model.quantization]
        for name, value in config.flags:
            arguments += self.table.arguments(name, self._secret_flags.get(name, value))
        arguments += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", served_model_name]
        env = tuple((name, self._secret_env.get(name, value)) for name, value in config.env)
        return Command((*arguments, "--enable-metrics"), env)

    def log_reader(self) -> LogReader:
        """A reader that knows SGLang's failures."""
        return LogReader(RULES)

    def facts(self, lines: Iterable[str]) -> LaunchFacts:
        """What a log tells of a start."""
        return read_facts(lines)

    def differences(
        self, config: ServerConfig, server_info: Mapping[str, object], *, served_model_name: str
    ) -> tuple[Difference, ...]:
        """What ``/server_info`` reports otherwise than it was asked for.

        Compared are the name that proves who answers, the version, the model, every flag that was asked for (also if it
        was left out as the engine's own choice), and whether a server without speculation speculates. A flag that is
        not reported at all cannot be compared.
        """
        reports = _reports(server_info)
        asked: dict[str, Value] = {
            "served_model_name": served_model_name,
            "version": self.version,
            "model_path": self.model.path,
            "speculative_algorithm": "None",
            **dict(config.flags),
        }
        found = []
        for name, value in [*asked.items(), *config.implied]:
            seen = [report[name] for report in reports if name in report] + _elsewhere(name, reports)
            if name not in asked:
                seen = [item for item in seen if item is not None]  # decided too late to be reported
            if seen and REDACTED not in str(value) and not any(_same(name, value, item) for item in seen):
                found.append(Difference(name, str(value), str(seen[0])))
        return tuple(found)

    def counters(self, metrics_text: str) -> ServerCounters:
        """The server's own counters, from its Prometheus page."""
        sums: dict[str, float] = {}
        for name, value in _SAMPLE.findall(metrics_text):
            sums[name] = sums.get(name, 0.0) + float(value)
        generated = sums.get("sglang:generation_tokens_total")
        retracted = sums.get("sglang:num_retracted_requests_total")
        # The counter appears with the first retraction.
        return ServerCounters(
            generated_tokens=generated,
            retractions=0.0 if retracted is None and generated is not None else retracted,
            running_requests=sums.get("sglang:num_running_reqs"),
        )

    def lost_s(self, server_info: Mapping[str, object]) -> float:
        """A real server loses none."""
        return 0.0

    def acceptance_is_simulated(self, config: ServerConfig) -> bool:
        """Whether SGLang was told to make the acceptance length up."""
        return any(name == ACCEPTANCE_ENV for name, _ in config.env)

    def _table(self) -> FlagTable:
        """The installed engine's flags, else those of the version that the experiment names."""
        try:
            if not self.spec.command:
                return FlagTable.installed(self.spec.python)
        except NotInstalledError as error:
            if self.spec.python is not None:
                raise EngineError("engine.python", f"{error}; give an interpreter that has SGLang") from error
            self.missing = f"no SGLang is installed in {sys.executable}"
        except LookupError as error:
            raise EngineError("engine.python", str(error)) from error
        return self._named_table()

    def _named_table(self) -> FlagTable:
        if not self.spec.version:
            wrapped = "engine.command cannot be asked for it" if self.spec.command else "no SGLang is installed here"
            raise EngineError("engine.version", f"is needed: {wrapped}; give e.g. engine.version=0.5.23")
        try:
            return FlagTable.for_version(self.spec.version)
        except LookupError as error:
            raise EngineError("engine.version", str(error)) from error

    def _launcher(self) -> list[str]:
        return list(self.spec.command) or [self.spec.python or sys.executable, "-m", "sglang.launch_server"]

    def _kept_flags(self) -> dict[str, Value]:
        kept = {}
        for name, value in self.spec.flags.items():
            if _without_secret(name, value) != value:
                with contextlib.suppress(UnknownFlagError):  # ``problems`` says so
                    kept[self.table.find(name).name] = value
        return kept

    def _canonical_of(self, items: tuple[tuple[str, Any], ...]) -> ServerConfig | RefusedError:
        flags = {name: _without_secret(name, value) for name, value in self.spec.flags.items()}
        env = {name: str(_without_secret(name, value)) for name, value in self.spec.env.items()}
        given = {self.table.find(name).name: name for name in flags}
        for name, kept in items:
            value = list(kept) if isinstance(kept, tuple) else kept
            if name in self._environment_names:
                env[name] = str(int(value)) if isinstance(value, bool) else str(value)
                continue
            try:
                fixed = given.get(self.table.find(name).name)
            except UnknownFlagError as error:
                return RefusedError(str(error))
            if fixed is not None:
                del flags[fixed]
            flags[name] = value
        try:
            return canonical(flags, env, self._around)
        except RefusedError as error:
            as_asked = sorted((self.table.find(name).name, value) for name, value in flags.items())
            return RefusedError(str(error), ServerConfig(tuple(as_asked), tuple(sorted(env.items()))))


def _without_secret(name: str, value: Value) -> Value:
    """The value of a flag or an environment variable as it may be written down."""
    return redact_env({name: value}, ())[name] if isinstance(value, str) else value


def _shape(model: ModelSpec) -> ModelShape:
    try:
        return ModelShape.from_config(model.config, quantization=model.quantization, draft_config=model.draft_config)
    except ShapeError as error:
        raise EngineError("model.config", str(error)) from error


def _reports(server_info: Mapping[str, object]) -> list[Mapping[str, object]]:
    """The launcher's view of the arguments and the scheduler's, which differ where the scheduler resolved more."""
    states = server_info.get("internal_states")
    inner = states[0] if isinstance(states, list) and states and isinstance(states[0], Mapping) else {}
    return [server_info, inner]


def _elsewhere(name: str, reports: Iterable[Mapping[str, object]]) -> list[object]:
    found = []
    for report in reports:
        value: object = report
        for key in REPORTED_ELSEWHERE.get(name, ()):
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is not None and value is not report:
            found.append(value)
    return found


def _same(name: str, asked: Value, seen: object) -> bool:
    if name == "speculative_algorithm" and str(asked) in REPORTED_ALGORITHMS:
        return str(seen) in REPORTED_ALGORITHMS[str(asked)]
    if isinstance(asked, bool) or isinstance(seen, bool):
        return bool(asked) == bool(seen)
    if isinstance(asked, (int, float)) and isinstance(seen, (int, float)):
        return math.isclose(asked, seen, rel_tol=1e-6)
    return str(asked) == str(seen)
