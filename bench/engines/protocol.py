"""The engine protocol: all that search, trial and launch know of an engine.

A second engine (vLLM) is added by writing one more class with these methods; nothing outside ``bench/engines`` names
an engine's flags, log lines or routes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, TypeAlias

from bench.faults import LogReader

Value: TypeAlias = bool | int | float | str | list[int]


@dataclass(frozen=True)
class Candidate:
    """One point of the space.

    Attributes:
        values: by parameter name (a flag's destination, e.g. ``mem_fraction_static``, or an environment variable).
            A parameter that is absent keeps the engine's default.
    """

    values: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True)
class ServerConfig:
    """A candidate in canonical form: what the engine will really run.

    Attributes:
        flags: by the destination's name in this engine version, sorted; True is an on-flag, absent is the default.
        env: environment variables, sorted.
        rewrites: what was changed against the candidate, one sentence each.
        implied: flags that were asked for and left out, because the engine chooses the same by itself; whether it does
            is checked against what the server reports.
    """

    flags: tuple[tuple[str, Value], ...]
    env: tuple[tuple[str, str], ...] = ()
    rewrites: tuple[str, ...] = field(default=(), compare=False)
    implied: tuple[tuple[str, Value], ...] = field(default=(), compare=False)

    @cached_property
    def key(self) -> str:
        """Twelve hex digits, equal for equal configurations, over runs and machines."""
        text = json.dumps([self.flags, self.env], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


class EngineError(Exception):
    """An engine cannot be set up; ``key`` is what to change in the configuration, e.g. ``engine.version``."""

    def __init__(self, key: str, text: str) -> None:
        self.key = key
        super().__init__(text)


class RefusedError(Exception):
    """The engine would refuse this candidate at its command line; the message is the reason, the flags it names.

    Attributes:
        config: what it would be launched with all the same, with the experiment's fixed flags; None when that is not
            possible because the engine has no such flag.
    """

    def __init__(self, reason: str, config: ServerConfig | None = None) -> None:
        self.config = config
        super().__init__(reason)


@dataclass(frozen=True)
class Command:
    """How to start a server: an argument list (never a shell line) and what to add to the environment."""

    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Difference:
    """One argument that the server reports otherwise than it was asked for."""

    name: str
    asked: str
    seen: str


@dataclass(frozen=True)
class Calibration:
    """What real launches taught about this host; None where it is not known yet and has to be forecast.

    Attributes:
        available_bytes: free GPU memory before weights are loaded.
        weight_bytes, draft_weight_bytes: of the target and of the draft model.
        runtime_bytes: what start-up needed beyond weights and pools (graphs, draft's pool, activations).
    """

    available_bytes: float | None = None
    weight_bytes: float | None = None
    draft_weight_bytes: float | None = None
    runtime_bytes: float | None = None


@dataclass(frozen=True)
class DecodeDemand:
    """What one decode step asks of the card, from the model's shape and the flags alone: nothing here was timed.

    Attributes:
        step_bytes: read whatever the batch: weights, those of a draft model once for each draft step.
        request_bytes: moved for each running request (states of linear attention).
        token_bytes: read for each token of its context (keys and values).
        token_flops: for each token that is computed.
        step_tokens: computed for each request (more than one where draft tokens are verified).
        depth: tokens that a step may yield beyond the first.
        graph_requests: running requests up to which a step is a captured graph.
        prefix_cache: a prefix that was computed before is not computed again.
    """

    step_bytes: float
    request_bytes: float
    token_bytes: float
    token_flops: float
    step_tokens: int = 1
    depth: int = 0
    graph_requests: int = 0
    prefix_cache: bool = False


@dataclass(frozen=True)
class Forecast:
    """What is known of a configuration before it is launched.

    Attributes:
        verdict: ``fits``, ``edge`` (launch and see), ``does_not_fit`` or ``refused`` (by the engine's own rules).
        margin_bytes: memory left in the tightest place; negative is missing.
        split_bytes: memory by use (weights, draft_weights, kv_pool, draft_kv_pool, state_cache, draft_state, graphs,
            activations, slack).
        reasons: one sentence each, naming the flags.
        demand: of a decode step, None where the engine does not tell.
    """

    verdict: str
    reasons: tuple[str, ...] = ()
    margin_bytes: float | None = None
    kv_tokens: int | None = None
    state_slots: int | None = None
    max_running_requests: int | None = None
    host_bytes: float | None = None
    split_bytes: tuple[tuple[str, float], ...] = ()
    demand: DecodeDemand | None = None


@dataclass(frozen=True)
class LaunchFacts:
    """What a server's log told about its start; None where the log did not say.

    Attributes:
        max_running_requests: the effective one.
        graph_bytes: of all captured graphs together.
        available_after_start_bytes: free GPU memory when it began to serve.
        warnings: lines in which the engine said that it changed something.
        retractions: requests that were thrown back into the queue for want of memory.
    """

    available_bytes: float | None = None
    weight_bytes: float | None = None
    draft_weight_bytes: float | None = None
    kv_tokens: int | None = None
    kv_bytes: float | None = None
    draft_kv_bytes: float | None = None
    state_slots: int | None = None
    state_bytes: float | None = None
    max_running_requests: int | None = None
    graph_bytes: float | None = None
    available_after_pools_bytes: float | None = None
    available_after_start_bytes: float | None = None
    warnings: tuple[str, ...] = ()
    retractions: int = 0


@dataclass(frozen=True)
class ServerCounters:
    """The server's own counters at one moment, for comparison with the client's; None where it does not tell."""

    generated_tokens: float | None = None
    retractions: float | None = None
    running_requests: float | None = None


class Engine(Protocol):
    """What the harness asks of an engine.

    Attributes:
        version: the installed one, else the one that the experiment names; ``flags_from``: what its flags are checked
            against, in words.
    """

    name: str
    version: str
    simulated: bool
    missing: str | None  # why it cannot be launched here, None where it can
    flags_from: str

    def problems(self, flags: Mapping[str, Value]) -> list[str]:
        """Say what is wrong with flag names and values, one sentence each, with the closest name or the choices."""

    def renamed(self, name: str) -> str | None:
        """How this version calls a flag that is written as another version has it, in a sentence; None if as here."""

    def canonical(self, candidate: Candidate) -> ServerConfig:
        """Apply the engine's silent rewrites, so that equal servers are equal values.

        Raises:
            RefusedError: when the engine would reject it before it allocates anything.
        """

    def forecast(self, config: ServerConfig, calibration: Calibration) -> Forecast:
        """Forecast memory and effective limits."""

    def calibrated(self, calibration: Calibration, facts: LaunchFacts) -> Calibration:
        """What is known of this host after one more launch."""

    def command(self, config: ServerConfig, *, port: int, served_model_name: str) -> Command:
        """The command that launches it on the loopback address."""

    def log_reader(self) -> LogReader:
        """A fresh reader of one server's log."""

    def facts(self, lines: Iterable[str]) -> LaunchFacts:
        """Read the facts of a start from a log."""

    def differences(
        self, config: ServerConfig, server_info: Mapping[str, object], *, served_model_name: str
    ) -> tuple[Difference, ...]:
        """Compare what a server reports about itself with what was asked; empty when it is the same."""

    def counters(self, metrics_text: str) -> ServerCounters:
        """Read the server's own counters from its metrics page."""

    def lost_s(self, server_info: Mapping[str, object]) -> float:
        """Seconds of its own clock that a simulated server has lost to a busy host so far; 0 for a real one."""

    def acceptance_is_simulated(self, config: ServerConfig) -> bool:
        """Whether the engine itself was told to make the acceptance length up."""
