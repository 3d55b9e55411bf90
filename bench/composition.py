"""Composition: the files and overrides of a configuration merged by Hydra, and where each value came from."""

from __future__ import annotations

import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

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

from bench.secrets import redact_text
from bench.words import closest, listed

GROUPS = ("engine", "model", "hardware", "workload", "space", "objective", "search", "experiment")
REQUIRED_GROUPS = ("model", "hardware", "workload", "space")


class ConfigError(Exception):
    """A configuration cannot be used; ``problems`` says why, a sentence each: what was seen, what is allowed, where."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(redact_text(text) for text in problems)  # they quote what was given
        head = "one problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n".join([f"{head} in the configuration:", *(f"  - {text}" for text in self.problems)]))


@dataclass(frozen=True)
class Composition:
    """A merged configuration.

    Attributes:
        plain: as plain data, interpolations resolved.
        experiment: name of the experiment's file, None where none was chosen.
    """

    plain: Mapping[str, Any]
    sources: Sources
    experiment: str | None


def composed(folders: Mapping[Path, str], lines: Sequence[str]) -> Composition:
    """Merge files and overrides.

    Args:
        folders: with configuration, by the name that messages give them; the first has ``config.yaml``.
        lines: overrides as typed.

    Raises:
        ConfigError: an override cannot be read, or a file is missing or wrong.
    """
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
            plain = OmegaConf.to_container(compose("config", texts), resolve=True)
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise ConfigError([*_misplaced(overrides, folders), _explained(error, folders)]) from error
    typed = tuple((override.key_or_group, override.input_line or "") for override in overrides)
    sources = Sources(typed, lambda: _layers(texts, folders))
    chosen = next((_names(item)[0] for item in overrides if item.key_or_group == "experiment"), None)
    return Composition(typing.cast(dict[str, Any], plain), sources, chosen)


def files(folders: Sequence[Path], group: str) -> dict[str, Path]:
    """The files of a group by the name that chooses them."""
    found: dict[str, Path] = {}
    for folder in folders:
        for path in sorted((folder / group).rglob("*.yaml")):
            found.setdefault(path.relative_to(folder / group).with_suffix("").as_posix(), path)
    return found


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
        options = files(folders, group)
        problems += [
            f"no {group} {name!r}{closest(name, options)}; there are: {listed(sorted(options))} "
            f"(from the command line: {override.input_line})"
            for name in _names(override)
            if name not in options
        ]
    given = {override.key_or_group for override in overrides}
    lacking = [group for group in REQUIRED_GROUPS if group not in given]
    if "experiment" not in given and lacking:
        names = listed(sorted(files(folders, "experiment")))
        problems.append(f"no experiment: give +experiment=NAME; there are: {names} (or choose {listed(lacking)} each)")
    return problems


def _names(override: Override) -> list[str]:
    """The files that a group's override chooses: one, or several that are merged in turn (``experiment=[a,b]``)."""
    value = override.value()
    return [str(item) for item in value] if isinstance(value, list) else [str(value)]


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


def _misplaced(overrides: Sequence[Override], folders: Mapping[Path, str]) -> list[str]:
    """Experiment files without the line that puts their keys where they belong, which is why a group is missing."""
    found = files(tuple(folders), "experiment")
    chosen = [name for item in overrides if item.key_or_group == "experiment" for name in _names(item)]
    return [
        f"{found[name]} has no line '# @package _global_' before its first key, so all in it is taken for keys of "
        "'experiment'"
        for name in chosen
        if not re.search(r"^# @package _global_\s*$", found[name].read_text(), re.MULTILINE)
    ]


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _explained(error: Exception, folders: Mapping[Path, str]) -> str:
    text = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        options = files(tuple(folders), group)
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
    with initialize_config_dir(version_base="1.3", config_dir=str(next(iter(folders)))):
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


class Sources:
    """Where values came from: files in the order in which they were merged, then the command line.

    Args:
        overrides: key and whole text of each, as typed.
        read_layers: called when the first problem asks, since it takes as long as composing.
    """

    def __init__(
        self, overrides: tuple[tuple[str, str], ...] = (), read_layers: Callable[[], tuple[Layer, ...]] = tuple
    ) -> None:
        self._overrides = overrides
        self._layers = cache(read_layers)

    def of(self, key: Sequence[str | int]) -> str:
        """The last file or override that set this key, or as much of it as anybody set; empty when nobody did."""
        parts = [str(part) for part in key]
        for length in range(len(parts), 0, -1):
            dotted = ".".join(parts[:length])
            for name, line in reversed(self._overrides):
                below = length == len(parts) and name.startswith(dotted + ".")
                if name == dotted or dotted.startswith(name + ".") or below:
                    return f"the command line: {line}"
            for layer in reversed(self._layers()):
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
