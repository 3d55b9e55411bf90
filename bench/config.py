"""Config: from a command line to a typed, checked experiment."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import time
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from bench import engines
from bench.engines.protocol import EngineError, Value
from bench.experiment import Condition, Experiment, Parameter, SpaceSpec
from bench.load.measurement import Measurement, Summary
from bench.search import space
from bench.words import closest, listed

GROUPS = ("engine", "model", "hardware", "workload", "space", "objective", "search", "experiment")
REQUIRED_GROUPS = ("model", "hardware", "workload", "space")
MISSING = "???"  # OmegaConf's mark for a value that somebody has to give
NAME = re.compile(r"[\w.\-]+")

CHOICES: Mapping[str, tuple[str, ...]] = {
    "engine.name": ("sglang", "simulator"),
    "search.forecast": ("off", "advise", "prune"),
    "search.sampler": ("tpe", "gp", "random"),
    "workload.prompts.kind": ("text", "random_ids", "jsonl", "sharegpt", "shared_prefix"),
}
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


class ConfigError(Exception):
    """A configuration cannot be used; ``problems`` says why, a sentence each: what was seen, what is allowed, where."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        head = "one problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n".join([f"{head} in the configuration:", *(f"  - {text}" for text in self.problems)]))


def load(arguments: Sequence[str], *, command: str, clock: Callable[[], float] = time.time) -> Experiment:
    """Read a command line and the files it names.

    Args:
        arguments: Hydra overrides such as ``+experiment=quickstart search.trials=8``, and ``--config-dir DIR``.
            ``--help`` and ``--cfg`` print and exit.
        command: name of the command, for messages.
        clock: seconds since the epoch, for the name of a fresh run.

    Raises:
        ConfigError: with every problem that was found.
        SystemExit: after ``--help`` and ``--cfg``, or with code 2 on an unknown option.
    """
    folders, options = _command_line(arguments, command)
    reader, plain = _read(folders, options.overrides)
    if options.cfg:
        print(OmegaConf.to_yaml(OmegaConf.create(dict(plain))), end="")
        raise SystemExit(0)
    experiment = reader.experiment(plain, tuple(options.overrides), clock)
    if reader.problems:
        raise ConfigError(reader.problems)
    return experiment


def load_run(folder: Path) -> Experiment:
    """Read the experiment of a run from its own record.

    Args:
        folder: of the run, ``results/<experiment>/<run>``.

    Raises:
        ConfigError: the folder holds no run, or its ``experiment.yaml`` cannot be read.
    """
    path = folder / "experiment.yaml"
    try:
        plain = yaml.safe_load(path.read_text())
    except (OSError, YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(
            [f"{folder} is not the folder of a run: cannot read experiment.yaml there ({error})"]
        ) from error
    if not isinstance(plain, dict):
        raise ConfigError([f"{path}: expected the record of an experiment, seen {_shown(plain)}"])
    overrides = tuple(str(item) for item in plain.pop("overrides", ()))
    reader = _Reader(Sources((), ()), None)
    experiment = reader.experiment(plain, overrides, time.time)
    if reader.problems:
        raise ConfigError(reader.problems)
    return dataclasses.replace(experiment, folder=folder)


def conf_dir() -> Path:
    """The folder of the shipped configuration: inside the package where it is installed, beside it in a checkout."""
    installed = Path(__file__).parent / "conf"
    return installed if installed.is_dir() else Path(__file__).parent.parent / "conf"


def _command_line(arguments: Sequence[str], command: str) -> tuple[Mapping[Path, str], argparse.Namespace]:
    parser = argparse.ArgumentParser(prog=f"python -m {command}", add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--config-dir", type=Path, help="a folder of your own, with groups like those in conf/")
    parser.add_argument("--cfg", action="store_true", help="print the resolved configuration and exit")
    parser.add_argument("-h", "--help", action="store_true", help="print this and exit")
    options = parser.parse_intermixed_args(list(arguments))
    folders = {conf_dir(): "conf"}
    if options.config_dir is not None:
        folder = options.config_dir.expanduser()
        if not folder.is_dir():
            raise ConfigError([f"--config-dir {options.config_dir}: there is no such folder"])
        folders[folder.resolve()] = str(options.config_dir)
    if options.help:
        print(parser.format_usage(), _help(tuple(folders)), sep="\n")
        raise SystemExit(0)
    return folders, options


def _help(folders: Sequence[Path]) -> str:
    lines = ["experiments (+experiment=NAME):"]
    for name, path in sorted(_files(folders, "experiment").items()):
        comments = [line[1:].strip() for line in path.read_text().splitlines() if line.startswith("# ")]
        said = next((text for text in comments if not text.startswith("@")), "")
        lines.append(f"  {name:20} {said}")
    lines.append("\ngroups (GROUP=NAME):")
    lines += [f"  {group:20} {listed(sorted(_files(folders, group)))}" for group in GROUPS if group != "experiment"]
    lines.append(
        "\nany value: search.trials=8, space.parameters.mem_fraction_static.high=0.9, '~space.parameters.NAME'"
    )
    lines.append("--cfg prints the resolved configuration, --config-dir DIR adds a folder of your own")
    return "\n".join(lines)


def _files(folders: Sequence[Path], group: str) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for folder in folders:
        for path in sorted((folder / group).rglob("*.yaml")):
            found.setdefault(path.relative_to(folder / group).with_suffix("").as_posix(), path)
    return found


def _read(folders: Mapping[Path, str], lines: Sequence[str]) -> tuple[_Reader, dict[str, Any]]:
    """Compose the configuration and note where each value came from."""
    overrides, problems = _parsed(lines)
    problems += _group_problems(overrides, tuple(folders))
    if problems:
        raise ConfigError(problems)
    texts = [_lenient(override, folders) for override in overrides]
    main, *more = folders
    if more:
        texts.append("hydra.searchpath=[" + ",".join(_quoted(f"file://{folder}") for folder in more) + "]")
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(main)):
            composed = compose("config", texts)
            layers = _layers(texts, folders)
        plain = OmegaConf.to_container(composed, resolve=True)
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise ConfigError([_explained(error, folders)]) from error
    assert isinstance(plain, dict)
    sources = Sources(layers, tuple((override.key_or_group, override.input_line or "") for override in overrides))
    chosen = next((str(item.value()) for item in overrides if item.key_or_group == "experiment"), None)
    return _Reader(sources, chosen), typing.cast(dict[str, Any], plain)


def _parsed(lines: Sequence[str]) -> tuple[list[Override], list[str]]:
    parser = OverridesParser.create()
    overrides, problems = [], []
    for line in lines:
        try:
            override = parser.parse_override(line)
        except (OverrideParseException, HydraException) as error:
            reason = str(error).splitlines()[0]
            problems.append(f"cannot read {line!r}: {reason}; write KEY=VALUE, e.g. +experiment=quickstart")
            continue
        if override.is_sweep_override():
            problems.append(
                f"{line!r} names several values; a run takes one. To search it, put it into the space: "
                f"++space.parameters.NAME.choices=[...]"
            )
        overrides.append(override)
    return overrides, problems


def _group_problems(overrides: Sequence[Override], folders: Sequence[Path]) -> list[str]:
    problems = []
    for override in overrides:
        group = override.key_or_group
        if group not in GROUPS or override.is_delete() or isinstance(override.value(), dict):
            continue
        options = _files(folders, group)
        if str(override.value()) not in options:
            hint = closest(str(override.value()), options)
            problems.append(
                f"no {group} {override.value()!r}{hint}; there are: {listed(sorted(options))} "
                f"(from the command line: {override.input_line})"
            )
    given = {override.key_or_group for override in overrides}
    lacking = [group for group in REQUIRED_GROUPS if group not in given]
    if "experiment" not in given and lacking:
        names = listed(sorted(_files(folders, "experiment")))
        problems.append(f"no experiment: give +experiment=NAME; there are: {names} (or choose {listed(lacking)} each)")
    return problems


def _lenient(override: Override, folders: Mapping[Path, str]) -> str:
    """Let Hydra take unknown keys, so that they are reported by us, all at once and with the closest name."""
    line = override.input_line or ""
    if override.is_delete() or override.is_hydra_override():
        return line
    bare = line.lstrip("+")
    if override.key_or_group == "experiment":
        return "+" + bare
    is_group = any((folder / override.key_or_group).is_dir() for folder in folders)
    if is_group and not isinstance(override.value(), dict):
        return bare
    return "++" + bare


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _explained(error: Exception, folders: Mapping[Path, str]) -> str:
    text = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        options = _files(tuple(folders), group)
        asker = re.match(r"In '([^']+)'", text)
        source = f" (from {asker[1]}.yaml)" if asker else ""
        return f"no {group} {name!r}{closest(name, options)}; there are: {listed(sorted(options))}{source}"
    return text


@dataclass(frozen=True)
class Layer:
    """One file of the composed configuration: its name for messages, and the keys it sets."""

    name: str
    content: Mapping[str, Any]


def _layers(overrides: Sequence[str], folders: Mapping[Path, str]) -> tuple[Layer, ...]:
    """The files that were merged, in order. Hydra keeps no record of it, so its defaults list is read again."""
    hydra = GlobalHydra.instance()
    loader = hydra.config_loader()
    assert isinstance(loader, ConfigLoaderImpl)
    defaults = loader.compute_defaults_list("config", list(overrides), RunMode.RUN).defaults
    _, repository = loader._parse_overrides_and_create_caching_repo("config", list(overrides))
    assert isinstance(repository, CachingConfigRepository)
    layers = []
    for default in defaults:
        if default.config_path is None or default.config_path.startswith("hydra"):
            continue
        loaded = loader._load_single_config(default, repository)
        folder = folders.get(Path(loaded.path.removeprefix("file://")), loaded.path)
        content = OmegaConf.to_container(typing.cast(DictConfig, loaded.config), resolve=False)
        layers.append(Layer(f"{folder}/{default.config_path}.yaml", typing.cast(Mapping[str, Any], content)))
    return tuple(layers)


@dataclass(frozen=True)
class Sources:
    """Where values came from: files in the order in which they were merged, then the command line."""

    layers: tuple[Layer, ...]
    overrides: tuple[tuple[str, str], ...]

    def of(self, key: Sequence[str | int]) -> str:
        """The last file or override that set this key, or as much of it as anybody set."""
        parts = [str(part) for part in key]
        for length in range(len(parts), 0, -1):
            dotted = ".".join(parts[:length])
            for name, line in reversed(self.overrides):
                if (
                    name == dotted
                    or dotted.startswith(name + ".")
                    or (length == len(parts) and name.startswith(dotted + "."))
                ):
                    return f"the command line: {line}"
            for layer in reversed(self.layers):
                if _has(layer.content, parts[:length]):
                    return layer.name
        return ""


def _has(content: Any, parts: Sequence[str]) -> bool:
    for part in parts:
        if isinstance(content, Mapping) and part in content:
            content = content[part]
        elif isinstance(content, list) and part.isdigit() and int(part) < len(content):
            content = content[int(part)]
        else:
            return False
    return True


@dataclass
class _Reader:
    """Builds the dataclasses from plain data and collects what is wrong."""

    sources: Sources
    chosen: str | None
    problems: list[str] = field(default_factory=list)

    def problem(self, key: Sequence[str | int], text: str, source_key: Sequence[str | int] | None = None) -> None:
        source = self.sources.of(source_key or key)
        where = ".".join(str(part) for part in key)
        said = f"{where}: {text}" + (f" (from {source})" if source else "")
        if said not in self.problems:
            self.problems.append(said)

    def experiment(
        self, plain: Mapping[str, Any], overrides: tuple[str, ...], clock: Callable[[], float]
    ) -> Experiment:
        data = dict(plain)
        data["name"] = data.get("name") or self.chosen or "experiment"
        data["run"] = data.get("run") or time.strftime("%Y-%m-%d_%H-%M-%S", time.localtime(clock()))
        results = str(data.pop("results_dir", None) or "results")
        for key in ("name", "run"):
            data[key] = str(data[key])
            if not NAME.fullmatch(data[key]):
                self.problem((key,), f"{data[key]!r} names a folder; allowed are letters, digits, _ . and -")
        data["folder"] = str(Path(results) / data["name"] / data["run"])
        resolved = {**plain, "name": data["name"], "run": data["run"], "results_dir": results}
        self._unknown(data, Experiment, (), also=("results_dir",))
        self._read_model_configs(data)
        if isinstance(data.get("objective"), Mapping):
            data["objective"] = {**data["objective"], "limits": _flat(data["objective"].get("limits") or {})}
        experiment = self.build(
            Experiment, {key: value for key, value in data.items() if key not in ("overrides", "resolved")}, ()
        )
        if self.problems or experiment is None:
            raise ConfigError(self.problems)
        experiment = dataclasses.replace(experiment, overrides=overrides, resolved=resolved)
        self._check(experiment)
        return typing.cast(Experiment, experiment)

    def build(self, kind: type[Any], data: Any, key: tuple[str | int, ...]) -> Any:
        """A dataclass; None when a problem keeps it from being built."""
        if not isinstance(data, Mapping):
            self.problem(key, f"expected several keys, seen {_shown(data)}")
            return None
        if kind is SpaceSpec:
            data = self._space(data, key)
        before = len(self.problems)
        if key:
            self._unknown(data, kind, key)
        hints = typing.get_type_hints(kind)
        values: dict[str, Any] = {}
        for item in dataclasses.fields(kind):
            if item.name in data:
                values[item.name] = self.convert(hints[item.name], data[item.name], (*key, item.name))
            elif item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
                self.problem((*key, item.name), "is missing")
        return kind(**values) if len(self.problems) == before else None

    def _unknown(
        self, data: Mapping[str, Any], kind: type[Any], key: tuple[str | int, ...], also: Sequence[str] = ()
    ) -> None:
        known = [item.name for item in dataclasses.fields(kind)] + list(also)
        for name in data:
            if name not in known:
                self.problem((*key, name), f"unknown key{closest(str(name), known)}; allowed: {listed(known)}")

    def convert(self, hint: Any, value: Any, key: tuple[str | int, ...]) -> Any:
        """A value as its type asks, with units, choices and ranges checked."""
        dotted = ".".join(str(part) for part in key if not isinstance(part, int))
        if value == MISSING:
            wanted = ASKED_FOR.get(dotted, "a value")
            self.problem(key, f"{wanted} is asked for: give {dotted}=VALUE")
            return None
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if origin in (typing.Union, types.UnionType):
            return self._union(hint, arguments, value, key)
        if dataclasses.is_dataclass(hint):
            return value if isinstance(value, Parameter) else self.build(typing.cast(type[Any], hint), value, key)
        if origin is tuple:
            if not isinstance(value, list):
                self.problem(key, f"expected a list, seen {_shown(value)}")
                return ()
            return tuple(self.convert(arguments[0], item, (*key, index)) for index, item in enumerate(value))
        if origin is not None and issubclass(origin, Mapping):
            if not isinstance(value, Mapping):
                self.problem(key, f"expected keys with values, seen {_shown(value)}")
                return {}
            return {str(name): self.convert(arguments[1], item, (*key, str(name))) for name, item in value.items()}
        if hint is object:
            return value
        return self._scalar(hint, value, key, dotted)

    def _union(self, hint: Any, arguments: tuple[Any, ...], value: Any, key: tuple[str | int, ...]) -> Any:
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

    def _scalar(self, hint: Any, value: Any, key: tuple[str | int, ...], dotted: str) -> Any:
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

    def _space(self, data: Mapping[str, Any], key: tuple[str | int, ...]) -> dict[str, Any]:
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
            self._unknown(item, Parameter, where)
            built.append((str(name), item, where))
        known = [name for name, item, _ in built if "kind" in item or "choices" in item]
        return {**data, "parameters": [self._parameter(name, item, where, known) for name, item, where in built]}

    def _parameter(self, name: str, item: Mapping[str, Any], key: tuple[str | int, ...], known: Sequence[str]) -> Any:
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

    def _conditions(self, value: Any, key: tuple[str | int, ...]) -> tuple[Condition, ...]:
        if value is None:
            return ()
        if not isinstance(value, Mapping):
            self.problem(key, f"expected {{PARAMETER: VALUE or [VALUES]}}, seen {_shown(value)}")
            return ()
        return tuple(
            Condition(str(name), tuple(wanted) if isinstance(wanted, list) else (wanted,))
            for name, wanted in value.items()
        )

    def _read_model_configs(self, data: dict[str, Any]) -> None:
        """A config.json that is there counts before the shape that the YAML gives."""
        model = data.get("model")
        if not isinstance(model, Mapping):
            return
        model = dict(model)
        for path_key, config_key in (("path", "config"), ("draft_path", "draft_config")):
            path = model.get(path_key)
            if not isinstance(path, str) or path == MISSING:
                continue
            found = _config_json(path)
            if found is None:
                continue
            try:
                model[config_key] = json.loads(found.read_text())
            except (OSError, ValueError) as error:
                self.problem(("model", path_key), f"cannot read {found}: {error}")
        if not model.get("config") and isinstance(model.get("path"), str) and model["path"] != MISSING:
            self.problem(
                ("model", "path"),
                f"no config.json in {model['path']!r} and no shape under model.config: give a folder that has one",
            )
        data["model"] = model

    def _check(self, experiment: Experiment) -> None:
        """What only shows when the parts are put together."""
        metrics = _metrics()
        for key, metric in [
            (("objective", "metric"), experiment.objective.metric),
            *((("objective", "limits", name), name) for name in experiment.objective.limits),
        ]:
            if metric not in metrics:
                self.problem(
                    key, f"unknown metric {metric!r}{closest(metric, metrics)}; allowed: {listed(metrics, 60)}"
                )
        levels = experiment.workload.levels
        if not levels:
            self.problem(("workload", "levels"), "there is nothing to measure: give at least one concurrency")
        if experiment.objective.level is not None and experiment.objective.level not in levels:
            text = f"{experiment.objective.level} is not among workload.levels: {listed(levels)}"
            self.problem(("objective", "level"), text)
        if experiment.workload.min_window_s > experiment.workload.max_window_s:
            self.problem(("workload", "min_window_s"), "is above workload.max_window_s")
        for found in space.problems(experiment.space):
            self.problem(("space", *found.key), found.text)
        self._check_flags(experiment)

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


def _flag_values(experiment: Experiment) -> list[tuple[tuple[str | int, ...], list[tuple[str, Value]]]]:
    """Every flag that a run may pass, with each value or with the ends of its range, and where it is written."""
    written: list[tuple[tuple[str | int, ...], list[tuple[str, Value]]]] = [
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
            where: tuple[str | int, ...] = ("space", key) if key == "baseline" else ("space", key, index)
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
    if hint is bool:
        return value if isinstance(value, bool) else None
    if isinstance(value, bool):
        return None
    if hint is int:
        return int(value) if isinstance(value, (int, float)) and value == int(value) else None
    if hint is float:
        return float(value) if isinstance(value, (int, float)) else None
    if hint is Path:
        return Path(value) if isinstance(value, str) else None
    if hint is str:
        return str(value) if isinstance(value, (str, int, float)) else None
    return value


def _type_name(hint: Any) -> str:
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a word", Path: "a path"}
    return names.get(hint, str(hint))


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
