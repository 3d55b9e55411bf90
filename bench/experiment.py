"""Experiment: what the user asked for, typed and frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bench.engines.protocol import Value


@dataclass(frozen=True)
class EngineSpec:
    """Which engine runs, and what every launch of it gets.

    Attributes:
        name: ``sglang`` or ``simulator``.
        python: interpreter that has the engine; None is the one that runs the harness.
        command: argument list that takes the place of ``python -m sglang.launch_server`` (a container, a wrapper).
        version: used where no engine is installed (and by the simulator, which then behaves like it).
        flags: of every launch, by destination name; a parameter of the space takes the place of its flag here.
        env: fixed environment variables.
        start_timeout_s: from launch to ready, at most; ``stall_timeout_s``: without any progress.
        time_scale: simulator only: virtual seconds per second.
        faults: simulator only: failures on demand, by name.
        simulated_acceptance: chance of each drafted token in turn to be accepted, for dummy weights, which would accept
            nothing; the engine is told to simulate it. None: acceptance is real.
    """

    name: str
    python: str | None = None
    command: tuple[str, ...] = ()
    version: str | None = None
    flags: Mapping[str, Value] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    start_timeout_s: float = 900.0
    stall_timeout_s: float = 300.0
    stop_timeout_s: float = 20.0
    time_scale: float = 1.0
    faults: tuple[str, ...] = ()
    simulated_acceptance: float | None = None

    def visible_gpus(self, shell: Mapping[str, str]) -> str | None:
        """What a server will find in CUDA_VISIBLE_DEVICES."""
        return self.env.get("CUDA_VISIBLE_DEVICES", shell.get("CUDA_VISIBLE_DEVICES"))


@dataclass(frozen=True)
class ModelSpec:
    """A model: a folder or hub name, and its config.json (read from the folder, else given under ``config``)."""

    name: str
    path: str
    config: Mapping[str, object] = field(default_factory=dict)
    quantization: str | None = None
    draft_path: str | None = None
    draft_config: Mapping[str, object] | None = None


@dataclass(frozen=True)
class HardwareSpec:
    """A card and its host, as data.

    Attributes:
        memory_bytes: total, as the driver reports it. ``available_bytes``: free for one process before it loads
            anything (total less context), where known.
        bandwidth_bytes_per_s: of GPU memory. ``flops_bf16``, ``flops_fp8``: dense, per second.
        price_per_hour: for cost figures, in ``currency``; None leaves them out.
    """

    name: str
    memory_bytes: float
    bandwidth_bytes_per_s: float
    flops_bf16: float
    flops_fp8: float
    architecture: str
    available_bytes: float | None = None
    host_memory_bytes: float = 128e9
    gpu_count: int = 1
    price_per_hour: float | None = None
    currency: str = "USD"


@dataclass(frozen=True)
class PromptSpec:
    """Where prompts come from: ``text`` (shipped), ``random_ids``, ``jsonl``, ``sharegpt`` or ``shared_prefix``."""

    kind: str
    input_tokens: int = 256
    input_tokens_spread: float = 0.0
    path: str | None = None
    shared_prefix_share: float = 0.0
    vocabulary_size: int | None = None

    @property
    def shared_share(self) -> float:
        """Share of each prompt that all have in common."""
        return self.shared_prefix_share if self.kind == "shared_prefix" else 0.0


@dataclass(frozen=True)
class WorkloadSpec:
    """What is sent. ``levels``: concurrencies of the closed loop, each one measured; one launch serves all of them.

    Attributes:
        output_tokens: asked for per request, ``output_tokens_spread`` is the relative half-width around it.
        min_window_s, max_window_s: the window ends once the interval is as narrow as ``target_relative_half_width``.
        max_warmup_s: give up waiting for steady state after that, and say so.
        chat: apply the model's chat template (through the chat route).
    """

    name: str
    prompts: PromptSpec
    levels: tuple[int, ...]
    output_tokens: int
    output_tokens_spread: float = 0.0
    ignore_eos: bool = True
    temperature: float = 0.0
    chat: bool = False
    seed: int = 0
    min_window_s: float = 5.0
    max_window_s: float = 60.0
    max_warmup_s: float = 60.0
    target_relative_half_width: float = 0.02
    flush_cache: bool = True


@dataclass(frozen=True)
class Condition:
    """A parameter exists only when another one has one of these values (None stands for the engine's default)."""

    parameter: str
    values: tuple[Value | None, ...]


@dataclass(frozen=True)
class Parameter:
    """One dimension of the space.

    Attributes:
        kind: ``int``, ``float``, ``categorical`` or ``flag`` (on/off).
        choices: of a categorical; None among them is what every launch gets (engine.flags), else the engine's default.
        env: it is an environment variable, not a flag.
        when: all of these must hold, else the parameter is absent.
        memory: ``up`` if a larger value needs more GPU memory, ``down`` if less, None where it is not monotone.
    """

    name: str
    kind: str
    low: float | None = None
    high: float | None = None
    step: float | None = None
    log: bool = False
    choices: tuple[Value | None, ...] = ()
    env: bool = False
    when: tuple[Condition, ...] = ()
    memory: str | None = None


@dataclass(frozen=True)
class SpaceSpec:
    """Parameters, constraints between them (``a <= 2 * b + 1``), known recipes to try early, the baseline's values.

    Attributes:
        tried: configurations that somebody tried by hand; ``bench.check`` says what becomes of each, nothing more.
    """

    name: str
    parameters: tuple[Parameter, ...]
    constraints: tuple[str, ...] = ()
    recipes: tuple[Mapping[str, Value], ...] = ()
    baseline: Mapping[str, Value] = field(default_factory=dict)
    tried: tuple[Mapping[str, Value], ...] = ()


@dataclass(frozen=True)
class ObjectiveSpec:
    """What is best: a metric of the measurement at one level (None: the busiest), under limits in seconds.

    Attributes:
        metric: ``output_tok_per_s`` (larger is better), or a latency such as ``ttft_s.p95`` (smaller is better).
        limits: by metric, e.g. ``{"ttft_s.p95": 0.5}``: larger values do not count as meeting the objective.
    """

    name: str
    metric: str = "output_tok_per_s"
    level: int | None = None
    limits: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SearchSpec:
    """How to search.

    Attributes:
        trials: launches at most, the baseline among them; hours: wall-clock at most (None: no limit). Both are the
            search's; the finalists come on top.
        sampler: ``pool`` (our own, led by the forecast) or Optuna's ``tpe``, ``gp``, ``random``.
        forecast: ``off``, ``advise`` (record it, launch anyway) or ``prune`` (do not launch what cannot fit).
        finalists: how many are measured again beside the baseline; finalist_rounds: how often, in turns
            (two more for the best and the baseline, where these leave open which of them it is).
        max_same_failures: the sweep stops after this many launches in a row that died of one cause.
        require_baseline: the sweep stops when the baseline itself fails.
    """

    trials: int = 20
    hours: float | None = None
    seed: int = 0
    sampler: str = "pool"
    forecast: str = "prune"
    prune: bool = True
    finalists: int = 2
    finalist_rounds: int = 2
    tie_relative: float = 0.01
    max_same_failures: int = 8
    require_baseline: bool = True


@dataclass(frozen=True)
class Experiment:
    """One resolved configuration.

    Attributes:
        folder: ``results_dir/<name>/<run>``.
        overrides: as typed on the command line.
        resolved: the whole resolved configuration as plain data, for the record.
    """

    name: str
    run: str
    folder: Path
    engine: EngineSpec
    model: ModelSpec
    hardware: HardwareSpec
    workload: WorkloadSpec
    space: SpaceSpec
    objective: ObjectiveSpec
    search: SearchSpec
    overrides: tuple[str, ...] = ()
    resolved: Mapping[str, object] = field(default_factory=dict)
