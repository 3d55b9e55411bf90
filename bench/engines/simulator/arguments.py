"""Arguments: SGLang's command line, parsed as its own parser does, abbreviations and complaints included."""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.engines.sglang import flag_data
from bench.engines.sglang.flag_data import Flag
from bench.engines.sglang.flags import FlagTable

_MULTIPLIERS = {"k": 1_000, "m": 1_000_000, "g": 1_000_000_000, "b": 1_000_000_000}


@dataclass(frozen=True)
class Arguments:
    """A parsed command line.

    Attributes:
        given: what was passed, by destination; ``values``: all arguments, defaults included.
        warnings: what SGLang prints of deprecated flags.
    """

    given: dict[str, Any]
    values: dict[str, Any]
    warnings: tuple[str, ...]


def parse(argv: Sequence[str], version: str) -> Arguments:
    """Parse a command line of a version.

    Raises:
        SystemExit: code 2, after argparse's usage and error on standard error.
        LookupError: the flags of that version are not known.
    """
    table = FlagTable.for_version(version)
    release = next(name for name in reversed(flag_data.versions()) if version.startswith(name))
    later = table.parsed_version >= (0, 5, 14)
    parser = argparse.ArgumentParser(prog="sglang serve" if later else "launch_server.py")
    options: dict[tuple[str, str], list[str]] = {}
    flags = flag_data.flags(release)
    for option, flag in flags.items():
        if option.startswith("--no-") and flag.action == "BooleanOptionalAction":
            continue
        kind = "" if not flag.action.startswith("Deprecated") else flag.action + option
        options.setdefault((flag.dest, kind), []).append(option)
    for names in options.values():
        _add(parser, names, flags[names[0]])
    passed = parser.parse_args(argv)
    given = {name: value for name, value in vars(passed).items() if value is not None}
    values = {flag.dest: _default(flag) for flag in flags.values()} | given
    warnings = [_deprecated(option, flags[option]) for option in argv if option.split("=")[0] in flags]
    return Arguments(given, values, tuple(filter(None, warnings)))


def _add(parser: argparse.ArgumentParser, names: list[str], flag: Flag) -> None:
    """One argument; its default stays None, so that what was passed can be told apart."""
    options: dict[str, Any] = {"dest": flag.dest, "default": None}
    if "StoreTrue" in flag.action:
        options["action"] = "store_true"
    elif flag.action == "BooleanOptionalAction":
        options["action"] = argparse.BooleanOptionalAction
    elif flag.action in ("DeprecatedAction", "DeprecatedStoreConstAction"):
        options["action"] = "store_const"
        options["const"] = True
    else:
        options["type"] = _TYPES.get(flag.type, str)
        options["choices"] = flag.choices
        options["required"] = flag.dest == "model_path"
        if flag.nargs != "None":
            options["nargs"] = flag.nargs
    parser.add_argument(*names, **options)


def _human_readable_int(text: str) -> int:
    suffix = text[-1:].lower()
    if suffix in _MULTIPLIERS:
        return int(float(text[:-1]) * _MULTIPLIERS[suffix])
    return int(text)


_TYPES: dict[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "human_readable_int": _human_readable_int,
    "loads": json.loads,
    "json_list_type": json.loads,
    "parse_cuda_graph_config_arg": json.loads,
}


def _default(flag: Flag) -> Any:
    try:
        return ast.literal_eval(flag.default)
    except (ValueError, SyntaxError):
        return None


def _deprecated(option: str, flag: Flag | None) -> str:
    if flag is None or not flag.action.startswith("DeprecatedAlias"):
        return ""
    new = f"--{flag.dest.replace('_', '-')}"
    return f"\033[1;33m'{option}' is deprecated and will be removed in a future release. Use '{new}' instead.\033[0m"
