"""Schema: plain data as the experiment's dataclasses, with everything that is wrong said at once."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import time
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import engines
from bench.composition import Composition, ConfigError
from bench.engines.protocol import EngineError, Value
from bench.experiment import Condition, Experiment, Parameter, SpaceSpec
from bench.load.measurement import Measurement, Summary
from bench.load.prompts import PromptSet
from bench.load.target import Target
from bench.search import space
from bench.words import closest, listed

Key: typing.TypeAlias = tuple[str | int, ...]

MISSING = "???"  # OmegaConf's mark for a value that somebody has to give
FOLDER_NAME = re.compile(r"\w[\w.\-]*")
SECTIONS = ("engine", "model", "hardware", "workload", "space", "objective", "search")
TOP_LEVEL = ("name", "run", "results_dir", *SECTIONS)

CHOICES: Mapping[str, tuple[str, ...]] = {
    "engine.name": ("sglang", "simulator"),
    "search.forecast": ("off", "advise", "prune"),
    "search.sampler": ("pool", "tpe", "gp", "random"),
    "workload.prompts.kind": ("text", "random_ids", "jsonl", "sharegpt", "shared_prefix"),
}
PARAMETER_KEYS = [item.name for item in dataclasses.fields(Parameter) if item.name != "name"]
# Smallest and largest value by key; None is no limit. The bounds are what the words mean, not taste.
RANGES: Mapping[str, tuple[float | None, float | None]] = {
    "engine.start_timeout_s": (1, None),
    "engine.stall_timeout_s": (1, None),
    "engine.stop_timeout_s": (1, None),
    "engine.time_scale": (1e-3, 1e6),
    "engine.simulated_acceptance": (0, 1),
    "hardware.memory_bytes": (1, None),
    "hardware.available_bytes": (1, None),
    "hardware.bandwidth_bytes_per_s": (1, None),
    "hardware.flops_bf16": (1, None),
    "hardware.flops_fp8": (1, None),
    "hardware.host_memory_bytes": (1, None),
    "hardware.gpu_count": (1, None),
    "hardware.price_per_hour": (0, None),
    "workload.levels": (1, None),
    "workload.output_tokens": (1, None),
    "workload.output_tokens_spread": (0, 1),
    "workload.temperature": (0, None),
    "workload.min_window_s": (0, None),
    "workload.max_window_s": (0, None),
    "workload.max_warmup_s": (0, None),
    "workload.target_relative_half_width": (0, 1),
    "workload.prompts.input_tokens": (1, None),
    "workload.prompts.input_tokens_spread": (0, 1),
    "workload.prompts.shared_prefix_share": (0, 1),
    "workload.prompts.vocabulary_size": (1, None),
    "objective.level": (1, None),
    "search.trials": (1, None),
    "search.seed": (0, 2**31),  # NumPy's generators take 32 bits, and a resumed search adds its trials
    "workload.seed": (0, 2**31),
    "search.hours": (0, None),
    "search.finalists": (0, None),
    "search.finalist_rounds": (0, None),
    "search.tie_relative": (0, 1),
    "search.max_same_failures": (1, None),
}
ASKED_FOR = {
    "model.path": "the model's folder or hub name",
    "model.draft_path": "the draft model's folder or hub name",
}
UNITS = {
    **{unit: 1000.0**power for power, unit in enumerate(("B", "kB", "MB", "GB", "TB"))},
    **{unit: 1024.0**power for power, unit in enumerate(("KiB", "MiB", "GiB", "TiB"), 1)},
    **{unit + "FLOP": 1000.0**power for power, unit in enumerate(("", "k", "M", "G", "T", "P"))},
}


class Reader:
    """Builds the dataclasses and collects what is wrong."""

    def __init__(self, composition: Composition, *, measured: bool = False) -> None:
        """Read this configuration; one that was measured was checked when its run began, maybe on another host."""
        self._composition = composition
        self._measured = measured
        self.problems: list[str] = []

    def problem(self, key: Sequence[str | int], text: str) -> None:
        """Note what is wrong with a key, and which file or override set it."""
        source = self._composition.sources.of(key)
        said = f"{'.'.join(str(part) for part in key)}: {text}" + (f" (from {source})" if source else "")
        if said not in self.problems:
            self.problems.append(said)

    def experiment(self, overrides: tuple[str, ...], clock: Callable[[], float]) -> Experiment:
        """The whole experiment, checked.

        Args:
            overrides: as typed, for the record.
            clock: seconds since the epoch, for the name of a fresh run.

        Raises:
            ConfigError: with every problem that was found.
        """
        data = self._named(clock)
        self._unknown(self._composition.plain, TOP_LEVEL, ())
        data["model"] = self._with_config_json(data.get("model"))  # into the record too: the folder may be gone later
        resolved = {key: value for key, value in data.items() if key in TOP_LEVEL}
        folder = Path(data["results_dir"]) / data["name"] / data["run"]
        if isinstance(data.get("objective"), Mapping):
            data["objective"] = {**data["objective"], "limits": _flat(data["objective"].get("limits") or {})}
        hints = typing.get_type_hints(Experiment)
        parts = {name: self.build(hints[name], data.get(name), (name,)) for name in SECTIONS}
        built = Experiment(data["name"], data["run"], folder, **parts, overrides=overrides, resolved=resolved)
        if not self._measured:
            self._check(built)
        if self.problems:
            raise ConfigError(self.problems)
        return built

    def _named(self, clock: Callable[[], float]) -> dict[str, Any]:
        """The plain data with name, run and results_dir filled in."""
        data = {key: value for key, value in self._composition.plain.items() if key in TOP_LEVEL}
        data["name"] = str(data.get("name") or (self._composition.experiment or "experiment").replace("/", "-"))
        data["run"] = str(data.get("run") or time.strftime("%Y-%m-%d_%H-%M-%S", time.localtime(clock())))
        data["results_dir"] = str(data.get("results_dir") or "results")
        for key in ("name", "run"):
            if not FOLDER_NAME.fullmatch(data[key]):
                self.problem((key,), f"{data[key]!r} names a folder; allowed are letters, digits, _ . and -")
        return data

    def build(self, kind: type[Any], data: Any, key: Key) -> Any:
        """A dataclass; None when a problem keeps it from being built."""
        if not isinstance(data, Mapping):
            self.problem(key, f"expected several keys, seen {_shown(data)}")
            return None
        if kind is SpaceSpec:
            data = self._space(data, key)
        before = len(self.problems)
        if key:
            self._unknown(data, [item.name for item in dataclasses.fields(kind)], key)
        hints = typing.get_type_hints(kind)
        values: dict[str, Any] = {}
        for item in dataclasses.fields(kind):
            if item.name in data:
                values[item.name] = self.convert(hints[item.name], data[item.name], (*key, item.name))
            elif item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
                self.problem((*key, item.name), "is missing")
        return kind(**values) if len(self.problems) == before else None

    def _unknown(self, data: Mapping[str, Any], known: Sequence[str], key: Key) -> None:
        for name in data:
            if name not in known:
                self.problem((*key, name), f"unknown key{closest(str(name), known)}; allowed: {listed(known)}")

    def convert(self, hint: Any, value: Any, key: Key) -> Any:
        """A value as its type asks, with units, choices and ranges checked."""
        dotted = ".".join(str(part) for part in key if not isinstance(part, int))
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if value == MISSING:
            self.problem(key, f"{ASKED_FOR.get(dotted, 'a value')} is asked for: give {dotted}=VALUE")
            result = None
        elif origin in (typing.Union, types.UnionType):
            result = self._union(arguments, value, key)
        elif dataclasses.is_dataclass(hint):
            result = value if isinstance(value, Parameter) else self.build(typing.cast(type[Any], hint), value, key)
        elif origin is tuple:
            result = self._tuple(arguments[0], value, key)
        elif origin is not None and issubclass(origin, Mapping):
            result = self._mapping(arguments[1], value, key)
        else:
            result = value if hint is object else self._scalar(hint, value, key, dotted)
        return result

    def _tuple(self, hint: Any, value: Any, key: Key) -> tuple[Any, ...]:
        if isinstance(value, list):
            return tuple(self.convert(hint, item, (*key, index)) for index, item in enumerate(value))
        self.problem(key, f"expected a list, seen {_shown(value)}")
        return ()

    def _mapping(self, hint: Any, value: Any, key: Key) -> dict[str, Any]:
        if isinstance(value, Mapping):
            return {str(name): self.convert(hint, item, (*key, str(name))) for name, item in value.items()}
        self.problem(key, f"expected keys with values, seen {_shown(value)}")
        return {}

    def _union(self, arguments: tuple[Any, ...], value: Any, key: Key) -> Any:
        if value is None:
            if type(None) not in arguments:
                self.problem(key, "null is not allowed here")
            return None
        concrete = [item for item in arguments if item is not type(None)]
        if len(concrete) == 1:
            return self.convert(concrete[0], value, key)
        # A flag's value: bool, int, float, str or a list of int
        if isinstance(value, (bool, int, float, str)) or (
            isinstance(value, list) and all(type(item) is int for item in value)
        ):
            return value
        self.problem(key, f"expected a number, a word, true, false or a list of whole numbers, seen {_shown(value)}")
        return None

    def _scalar(self, hint: Any, value: Any, key: Key, dotted: str) -> Any:
        choices = CHOICES.get(dotted)
        if choices and isinstance(value, bool):
            value = "on" if value else "off"  # YAML reads a bare off as false
        if hint is float and isinstance(value, str) and _is_quantity(str(key[-1])):
            amount = _quantity(value)
            if amount is None:
                self.problem(
                    key, f"cannot read {value!r}; write a number, or one with a unit such as 97887 MiB, 1.79 TB/s"
                )
            value = amount
        converted = _as(hint, value)
        if converted is None:
            if value is not None:
                self.problem(key, f"expected {_type_name(hint)}, seen {_shown(value)}")
            elif not isinstance(hint, type) or not _is_quantity(str(key[-1])):
                self.problem(key, "null is not allowed here")
            return None
        if choices and converted not in choices:
            self.problem(
                key, f"{converted!r} is not allowed{closest(str(converted), choices)}; allowed: {listed(choices)}"
            )
        low, high = RANGES.get(dotted, (None, None))
        if (low is not None and converted < low) or (high is not None and converted > high):
            span = f"at least {low:g}" if high is None else f"{low:g} to {high:g}"
            self.problem(key, f"{converted} is out of range; allowed: {span}")
        return converted

    def _space(self, data: Mapping[str, Any], key: Key) -> dict[str, Any]:
        """A space as it is written has its parameters by name, and their conditions by parameter."""
        parameters = data.get("parameters") or {}
        if not isinstance(parameters, Mapping):
            self.problem((*key, "parameters"), f"expected parameters by name, seen {_shown(parameters)}")
            return {**data, "parameters": []}
        built = []
        for name, item in parameters.items():
            where = (*key, "parameters", str(name))
            if item is None:
                continue  # how an experiment leaves out a parameter of the space that it builds on
            if not isinstance(item, Mapping):
                self.problem(where, f"expected kind, low, high or choices, seen {_shown(item)}")
                continue
            self._unknown(item, PARAMETER_KEYS, where)
            built.append((str(name), item, where))
        known = [name for name, item, _ in built if "kind" in item or "choices" in item]
        return {**data, "parameters": [self._parameter(name, item, where, known) for name, item, where in built]}

    def _parameter(self, name: str, item: Mapping[str, Any], key: Key, known: Sequence[str]) -> Any:
        hints = typing.get_type_hints(Parameter)
        values: dict[str, Any] = {
            "name": name,
            "kind": item.get("kind") or ("categorical" if "choices" in item else ""),
        }
        if not values["kind"]:
            self.problem(key, f"has neither kind nor choices{closest(name, known)}")
        for part, value in item.items():
            if part == "when":
                values["when"] = self._conditions(value, (*key, "when"))
            elif part not in ("kind", "name") and part in hints and value is not None:
                values[part] = self.convert(hints[part], value, (*key, part))
        return Parameter(**values)

    def _conditions(self, value: Any, key: Key) -> tuple[Condition, ...]:
        if value is None:
            return ()
        if not isinstance(value, Mapping):
            self.problem(key, f"expected {{PARAMETER: VALUE or [VALUES]}}, seen {_shown(value)}")
            return ()
        return tuple(
            Condition(str(name), tuple(wanted) if isinstance(wanted, list) else (wanted,))
            for name, wanted in value.items()
        )

    def _with_config_json(self, model: Any) -> Any:
        """A config.json that is there counts before the shape that the YAML gives."""
        if not isinstance(model, Mapping):
            return model
        model = dict(model)
        for path_key, config_key in (("path", "config"), ("draft_path", "draft_config")):
            path = model.get(path_key)
            found = _config_json(path) if isinstance(path, str) and path != MISSING else None
            if found is None:
                continue
            try:
                model[config_key] = json.loads(found.read_text())
            except (OSError, ValueError) as error:
                self.problem(("model", path_key), f"cannot read {found}: {error}")
        if not model.get("config") and model.get("path") not in (None, MISSING):
            text = f"no config.json in {model['path']!r} and no shape under model.config: give a folder that has one"
            self.problem(("model", "path"), text)
        return model

    def _check(self, experiment: Experiment) -> None:
        """What only shows when the parts are put together; a part that could not be built is None and left out."""
        if experiment.objective and experiment.workload:
            self._check_load(experiment)
        if experiment.space:
            for found in space.problems(experiment.space):
                self.problem(("space", *found.key), found.text)
        if (
            experiment.engine
            and experiment.model
            and experiment.model.config
            and experiment.hardware
            and experiment.space
        ):
            self._check_flags(experiment)

    def _check_load(self, experiment: Experiment) -> None:
        metrics, levels = _metrics(), experiment.workload.levels
        named: list[tuple[Key, str]] = [(("objective", "metric"), experiment.objective.metric)]
        named += [(("objective", "limits", name), name) for name in experiment.objective.limits]
        for key, metric in named:
            if metric not in metrics:
                text = f"unknown metric {metric!r}{closest(metric, metrics)}; allowed: {listed(metrics, 60)}"
                self.problem(key, text)
        for name, limit in experiment.objective.limits.items():
            if not limit > 0:
                self.problem(("objective", "limits", name), f"{limit:g} can never be kept; give more than 0")
        try:
            target = Target("http://127.0.0.1", "chat" if experiment.workload.chat else "generate")
            target.request(PromptSet(experiment.workload, seed=experiment.workload.seed)[0], experiment.workload, 1)
        except ValueError as error:
            self.problem(("workload", "prompts"), str(error))
        if not levels:
            self.problem(("workload", "levels"), "there is nothing to measure: give at least one concurrency")
        if experiment.objective.level is not None and experiment.objective.level not in levels:
            text = f"{experiment.objective.level} is not among workload.levels: {listed(levels)}"
            self.problem(("objective", "level"), text)
        if experiment.workload.min_window_s > experiment.workload.max_window_s:
            self.problem(("workload", "min_window_s"), "is above workload.max_window_s")

    def _check_flags(self, experiment: Experiment) -> None:
        try:
            engine = engines.create(experiment)
        except EngineError as error:
            self.problem(error.key.split("."), str(error))
            return
        for key, values in _flag_values(experiment):
            for name, value in values:
                for text in engine.problems({name: value}):
                    self.problem(key, text)


def _flag_values(experiment: Experiment) -> list[tuple[Key, list[tuple[str, Value]]]]:
    """Every flag that a run may pass, with each value or with the ends of its range, and where it is written."""
    written: list[tuple[Key, list[tuple[str, Value]]]] = [
        (("engine", "flags", name), [(name, value)]) for name, value in experiment.engine.flags.items()
    ]
    for parameter in experiment.space.parameters:
        if parameter.env:
            continue
        values: list[Value] = [value for value in parameter.choices if value is not None]
        if parameter.kind == "flag":
            values = [True]
        for bound in (parameter.low, parameter.high):
            if bound is not None:
                values.append(int(bound) if parameter.kind == "int" else bound)
        written.append((("space", "parameters", parameter.name), [(parameter.name, value) for value in values]))
    environment = {parameter.name for parameter in experiment.space.parameters if parameter.env}
    for key, points in (
        ("recipes", experiment.space.recipes),
        ("baseline", (experiment.space.baseline,)),
        ("tried", experiment.space.tried),
    ):
        for index, point in enumerate(points):
            where: Key = ("space", key) if key == "baseline" else ("space", key, index)
            written.extend(
                ((*where, name), [(name, value)]) for name, value in point.items() if name not in environment
            )
    return written


def _config_json(path: str) -> Path | None:
    """config.json of a model's folder, or of a hub name that was downloaded before."""
    folder = Path(path).expanduser()
    if (folder / "config.json").is_file():
        return folder / "config.json"
    home = Path(os.environ.get("HF_HOME") or Path("~/.cache/huggingface").expanduser())
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    snapshots = cache / f"models--{path.replace('/', '--')}" / "snapshots"
    found = sorted(snapshots.glob("*/config.json"), key=lambda item: item.stat().st_mtime) if "/" in path else []
    return found[-1] if found else None


def _metrics() -> list[str]:
    """What an objective can name: the numbers of a measurement, and of its latencies the statistics."""
    hints = typing.get_type_hints(Measurement)
    plain = ["output_tok_per_s", "request_per_s"]
    statistics = [item.name for item in dataclasses.fields(Summary) if item.name != "count"]
    latencies = [name for name, hint in hints.items() if Summary in typing.get_args(hint)]
    return plain + [f"{name}.{statistic}" for name in latencies for statistic in statistics]


def _flat(limits: Any) -> Any:
    """``{ttft_s: {p95: 1}}``, which an override makes of ``objective.limits.ttft_s.p95=1``, as ``{ttft_s.p95: 1}``."""
    if not isinstance(limits, Mapping):
        return limits
    flat: dict[str, Any] = {}
    for name, value in limits.items():
        flat.update(
            {f"{name}.{part}": item for part, item in value.items()} if isinstance(value, Mapping) else {name: value}
        )
    return flat


def _is_quantity(name: str) -> bool:
    return name.endswith(("_bytes", "_bytes_per_s")) or name.startswith("flops_")


def _quantity(text: str) -> float | None:
    """``97887 MiB``, ``1.79 TB/s`` or ``500 TFLOP/s`` as a number."""
    match = re.fullmatch(r"\s*([\d.]+(?:e[+-]?\d+)?)\s*([A-Za-z]*)(?:/s)?\s*", text)
    if match is None or match[2] not in {"", *UNITS}:
        return None
    try:
        return float(match[1]) * UNITS.get(match[2], 1.0)
    except ValueError:
        return None


def _as(hint: Any, value: Any) -> Any:
    """The value if it is of this type or turns into it without loss, else None."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    turns = {
        bool: isinstance(value, bool),
        int: number and value == int(value),
        float: number,
        str: number or isinstance(value, str),
        Path: isinstance(value, str),
    }
    return hint(value) if turns.get(hint, False) else None


def _type_name(hint: Any) -> str:
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a word", Path: "a path"}
    return names.get(hint, str(hint))


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
