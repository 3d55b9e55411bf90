"""Flag data: the command lines of released SGLang versions, as one small file.

``flag_data.json`` holds the oldest version's flags whole and each later version's changes to the one before. To add a
release, install it somewhere and run ``python -m bench.engines.sglang.flag_data PYTHON``, which asks the parser of the
SGLang that this interpreter has; a JSON dump of a parser is taken as well.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("flag_data.json")
ASK_TIMEOUT_S = 180.0  # importing the parser takes 5 to 9 s on a quiet machine, many times that on a busy one

# What an installed engine's interpreter runs. Sentinels, because imports print what they like.
DUMP = """
import argparse, json, sys
from importlib.metadata import version
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser(add_help=False)
ServerArgs.add_cli_args(parser)
flags = {}
for action in parser._actions:
    for option in action.option_strings:
        flags[option] = {
            "dest": action.dest, "default": repr(action.default), "action": type(action).__name__,
            "type": getattr(action.type, "__name__", str(action.type)), "nargs": str(action.nargs),
            "choices": None if action.choices is None else list(action.choices),
        }
print("<<<" + json.dumps({"version": version("sglang"), "flags": flags}, default=str) + ">>>")
"""


class FlagDataError(Exception):
    """An interpreter's SGLang could not be asked for its flags; the message says why."""


@dataclass(frozen=True)
class Flag:
    """One option string of one version.

    Attributes:
        dest: name of the argument it sets.
        action: class of argparse's action, e.g. ``_StoreAction``; ``Deprecated...`` for one on its way out.
        type: name of the function that reads its value, ``None`` for text.
        nargs: as argparse takes it, ``None`` for one value.
        default: as Python writes it.
        choices: what is allowed, None where nothing is said.
    """

    dest: str
    action: str
    type: str
    nargs: str
    default: str
    choices: tuple[str, ...] | None = None


@cache
def versions() -> tuple[str, ...]:
    """Versions whose flags are known, oldest first."""
    return tuple(_data())


@cache
def flags(version: str) -> Mapping[str, Flag]:
    """Flags by option string.

    Raises:
        KeyError: the version is not among ``versions()``.
    """
    table: dict[str, Flag] = {}
    for name, change in _data().items():
        for option in change["removed"]:
            del table[option]
        table.update({option: _flag(fields) for option, fields in change["set"].items()})
        if name == version:
            return table
    raise KeyError(version)


def ask(python: str) -> tuple[str, dict[str, Flag]]:
    """Version and flags of the SGLang that an interpreter has, from its own parser.

    Raises:
        FlagDataError: it has none, or its parser does not import.
    """
    try:
        done = subprocess.run([python, "-c", DUMP], capture_output=True, text=True, timeout=ASK_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise FlagDataError(f"cannot ask {python} for SGLang's flags: {error}") from error
    _, found, rest = done.stdout.partition("<<<")
    if done.returncode or not found:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise FlagDataError(f"cannot ask {python} for SGLang's flags: {last}")
    data = json.loads(rest.rpartition(">>>")[0])
    return data["version"], {option: _flag(fields) for option, fields in data["flags"].items()}


def to_json(table: Mapping[str, Flag]) -> dict[str, Any]:
    return {option: asdict(flag) for option, flag in table.items()}


def from_json(data: Mapping[str, Any]) -> dict[str, Flag]:
    return {option: _flag(fields) for option, fields in data.items()}


def main(arguments: list[str]) -> int:
    """Add versions to the shipped file, from interpreters or from dumps named ``flags_VERSION.json``."""
    tables = {version: dict(flags(version)) for version in versions()} if PATH.exists() else {}
    for argument in arguments:
        path = Path(argument)
        if path.suffix == ".json":
            version, table = path.stem.partition("_")[2], from_json(json.loads(path.read_text())["flags"])
        else:
            version, table = ask(argument)
        tables[version] = {option: flag for option, flag in table.items() if flag.action != "_HelpAction"}
        print(f"{version}: {len(tables[version])} option strings")
    _write(tables)
    print(f"{PATH}: {PATH.stat().st_size} bytes, {len(tables)} versions")
    return 0


def _flag(fields: Mapping[str, Any]) -> Flag:
    choices = fields.get("choices")
    return Flag(
        dest=fields["dest"],
        action=fields["action"],
        type=fields["type"],
        nargs=fields["nargs"],
        default=fields["default"],
        choices=None if choices is None else tuple(str(choice) for choice in choices),
    )


@cache
def _data() -> dict[str, Any]:
    """Changes by version, oldest first."""
    keys = ("dest", "action", "type", "nargs", "default", "choices")
    content = json.loads(PATH.read_text())
    return {
        version: {
            "removed": change["removed"],
            "set": {option: dict(zip(keys, row, strict=False)) for option, row in change["set"].items()},
        }
        for version, change in content.items()
    }


def _write(tables: Mapping[str, Mapping[str, Flag]]) -> None:
    """One flag a line, so that a new version is a readable difference."""
    before: Mapping[str, Flag] = {}
    parts = []
    for version in sorted(tables, key=lambda name: [int(part) for part in name.split(".")[:3]]):
        table = tables[version]
        removed = sorted(set(before) - set(table))
        rows = []
        for option in sorted(table):
            flag = table[option]
            if before.get(option) != flag:
                row = [flag.dest, flag.action, flag.type, flag.nargs, flag.default]
                rows.append(
                    f"    {json.dumps(option)}: {json.dumps(row if flag.choices is None else [*row, flag.choices])}"
                )
        parts.append(
            f'{json.dumps(version)}: {{\n  "removed": {json.dumps(removed)},\n  "set": {{\n'
            + ",\n".join(rows)
            + "\n  }}"
        )
        before = table
    PATH.write_text("{\n" + ",\n".join(parts) + "\n}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
