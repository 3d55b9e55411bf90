"""Options: what a simulated server is told beside SGLang's flags, through its environment.

They cannot clash with SGLang's command line, which the simulator takes as it is:

    BENCH_SIMULATOR_VERSION        of SGLang to behave like (0.5.15)
    BENCH_SIMULATOR_HARDWARE       JSON of a HardwareSpec (an H200)
    BENCH_SIMULATOR_MODEL_CONFIG   JSON of a config.json (that of the folder in --model-path)
    BENCH_SIMULATOR_DRAFT_CONFIG   JSON of a draft model's config.json
    BENCH_SIMULATOR_TIME_SCALE     virtual seconds per second (1)
    BENCH_SIMULATOR_FAULTS         failures on demand, see ``faults.py``: JSON list, or names with commas between
    BENCH_SIMULATOR_SEED           of everything that is drawn (0)
    BENCH_SIMULATOR_DISTURBANCE    JSON of a Disturbance (none)
    BENCH_SIMULATOR_ACCEPTANCE     chance that the first drafted token is accepted (by algorithm)
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from bench.engines.sglang.settings import GIB, MIB
from bench.experiment import HardwareSpec

PREFIX = "BENCH_SIMULATOR_"
DEFAULT_VERSION = "0.5.15"  # the one whose launches the models were compared with
H200 = HardwareSpec(
    name="h200",
    memory_bytes=143_771 * MIB,
    bandwidth_bytes_per_s=4.8e12,
    flops_bf16=989e12,
    flops_fp8=1979e12,
    architecture="sm90",
    available_bytes=139.09 * GIB,
)


class OptionError(ValueError):
    """An option cannot be read; the message says which, and what was expected."""


@dataclass(frozen=True)
class Disturbance:
    """How a host differs from what a forecast expects of it.

    Attributes:
        overhead_bytes: GPU memory that is not there.
        weight_scale, step_scale: factors on weights and step times.
        noise: relative standard deviation of step times (of one measurement, where nothing is stepped).
    """

    overhead_bytes: float = 0.0
    weight_scale: float = 1.0
    step_scale: float = 1.0
    noise: float = 0.0

    @classmethod
    def drawn(cls, seed: int) -> Disturbance:
        """Up to 1 GiB of overhead, weights up to 5 % more, step times up to 10 % off, 2 % noise."""
        rng = random.Random(f"disturbance {seed}")
        return cls(rng.uniform(0, GIB), 1 + rng.uniform(0, 0.05), 1 + rng.uniform(-0.1, 0.1), 0.02)


@dataclass(frozen=True)
class Options:
    """All of them; ``first_acceptance`` is None where the algorithm decides."""

    version: str = DEFAULT_VERSION
    hardware: HardwareSpec = H200
    model_config: Mapping[str, Any] | None = None
    draft_config: Mapping[str, Any] | None = None
    time_scale: float = 1.0
    faults: tuple[str, ...] = ()
    seed: int = 0
    disturbance: Disturbance = field(default_factory=Disturbance)
    first_acceptance: float | None = None

    @classmethod
    def read(cls, env: Mapping[str, str]) -> Options:
        """Read an environment.

        Raises:
            OptionError: a value is not what it should be.
        """
        text = {name.removeprefix(PREFIX): value for name, value in env.items() if name.startswith(PREFIX) and value}
        acceptance = text.get("ACCEPTANCE")
        return cls(
            version=text.get("VERSION", DEFAULT_VERSION),
            hardware=_fields(HardwareSpec, "HARDWARE", text["HARDWARE"]) if "HARDWARE" in text else H200,
            model_config=_json("MODEL_CONFIG", text["MODEL_CONFIG"]) if "MODEL_CONFIG" in text else None,
            draft_config=_json("DRAFT_CONFIG", text["DRAFT_CONFIG"]) if "DRAFT_CONFIG" in text else None,
            time_scale=_positive("TIME_SCALE", text.get("TIME_SCALE", "1")),
            faults=_names(text.get("FAULTS", "")),
            seed=int(_number("SEED", text.get("SEED", "0"))),
            disturbance=_fields(Disturbance, "DISTURBANCE", text.get("DISTURBANCE", "{}")),
            first_acceptance=None if acceptance is None else _number("ACCEPTANCE", acceptance),
        )


def _json(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise OptionError(f"{PREFIX}{name} is not JSON: {error}; seen {text[:80]!r}") from error
    if not isinstance(value, dict):
        raise OptionError(f"{PREFIX}{name}: expected a JSON object, seen {text[:80]!r}")
    return value


def _fields(kind: type[Any], name: str, text: str) -> Any:
    values = _json(name, text)
    unknown = set(values) - {item.name for item in fields(kind)}
    if unknown:
        known = ", ".join(item.name for item in fields(kind))
        raise OptionError(f"{PREFIX}{name}: unknown {', '.join(sorted(unknown))}; known are {known}")
    try:
        return kind(**values)
    except TypeError as error:
        raise OptionError(f"{PREFIX}{name}: {error}") from error


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise OptionError(f"{PREFIX}{name}: expected a number, seen {text!r}")
    return value


def _positive(name: str, text: str) -> float:
    value = _number(name, text)
    if value <= 0:
        raise OptionError(f"{PREFIX}{name}: expected a number above 0, seen {text!r}")
    return value


def _names(text: str) -> tuple[str, ...]:
    if text.lstrip().startswith("["):
        try:
            return tuple(str(item) for item in json.loads(text))
        except json.JSONDecodeError as error:
            raise OptionError(f"{PREFIX}FAULTS is not JSON: {error}; seen {text[:80]!r}") from error
    return tuple(name.strip() for name in text.split(",") if name.strip())
