"""Config: from a command line to a typed, checked experiment."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import yaml
from omegaconf import OmegaConf

from bench.composition import GROUPS, Composition, ConfigError, Sources, composed, files
from bench.experiment import Experiment
from bench.schema import Reader
from bench.words import Parser, listed

__all__ = ["ConfigError", "conf_dir", "load", "load_run"]


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
    composition = composed(folders, options.overrides)
    if options.cfg:
        print(OmegaConf.to_yaml(OmegaConf.create(dict(composition.plain))), end="")
        raise SystemExit(0)
    return Reader(composition).experiment(tuple(options.overrides), clock)


def load_run(folder: Path, *, measured_with: str | None = None) -> Experiment:
    """Read the experiment of a run from its own record.

    Args:
        folder: of the run, ``results/<experiment>/<run>``.
        measured_with: version of the engine; the run is only read, and the interpreter that had it need not be here.

    Raises:
        ConfigError: the folder holds no run, or its ``experiment.yaml`` cannot be read.
    """
    path = folder / "experiment.yaml"
    try:
        plain = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(
            [f"{folder} is not the folder of a run: cannot read experiment.yaml there ({error})"]
        ) from error
    if not isinstance(plain, dict):
        raise ConfigError([f"{path}: expected the record of an experiment, seen {plain!r}"])
    if measured_with is not None and isinstance(plain.get("engine"), dict):
        plain["engine"] = {**plain["engine"], "python": None, "command": [], "version": measured_with}
    overrides = tuple(str(item) for item in plain.pop("overrides", ()))
    experiment = Reader(Composition(plain, Sources(), None), measured=measured_with is not None).experiment(
        overrides, time.time
    )
    return dataclasses.replace(experiment, folder=folder)


def conf_dir() -> Path:
    """The folder of the shipped configuration: inside the package where it is installed, beside it in a checkout."""
    installed = Path(__file__).parent / "conf"
    return installed if installed.is_dir() else Path(__file__).parent.parent / "conf"


def _command_line(arguments: Sequence[str], command: str) -> tuple[Mapping[Path, str], argparse.Namespace]:
    parser = Parser(prog=f"python -m {command}", add_help=False)
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
    for name, path in sorted(files(folders, "experiment").items()):
        comments = [line[2:] for line in path.read_text().splitlines() if line.startswith("# ")]
        said = itertools.takewhile(lambda line: not line.startswith(" "), (c for c in comments if c[:1] != "@"))
        lines.append(textwrap.fill(" ".join(said), 120, initial_indent=f"  {name:20} ", subsequent_indent=" " * 23))
    lines.append("\ngroups (GROUP=NAME):")
    lines += [f"  {group:20} {listed(sorted(files(folders, group)))}" for group in GROUPS if group != "experiment"]
    lines.append(
        "\nany value: search.trials=8, space.parameters.mem_fraction_static.high=0.9, '~space.parameters.NAME'"
    )
    lines.append("--cfg prints the resolved configuration, --config-dir DIR adds a folder of your own")
    return "\n".join(lines)
