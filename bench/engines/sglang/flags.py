"""Flags: the command line of one SGLang version, matched exactly.

argparse accepts abbreviations and old spellings; a sweep must not, or two launches are one and one is another. Names
are taken as destinations (``mem_fraction_static``) or as option strings, and in the spelling of any version.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from bench.engines.protocol import Value
from bench.engines.sglang import flag_data
from bench.engines.sglang.flag_data import Flag, FlagDataError
from bench.engines.sglang.settings import parse_version
from bench.words import closest, listed

# Given to every launch by the harness, so that it can find, identify and measure the server.
RESERVED = {
    "model_path": "model.path",
    "speculative_draft_model_path": "model.draft_path",
    "quantization": "model.quantization",
    "host": "the loopback address, always",
    "port": "a free one for each launch",
    "served_model_name": "a name of its own for each launch, which proves who answers",
    "enable_metrics": "always on",
    "api_key": "none: servers of a sweep listen on the loopback address only",
    "admin_api_key": "none: servers of a sweep listen on the loopback address only",
}
# Declared and never read: the first in the source of 0.5.10 to 0.5.23, the second in that of 0.5.23.
DEAD = {"num_continuous_decode_steps": (0, 5, 10), "triton_attention_reduce_in_fp32": (0, 5, 23)}
# By the first version that has them; argparse knows no choices from 0.5.12 on (speculative/spec_info.py).
SPECULATIVE_ALGORITHMS = {
    "EAGLE": (0, 5, 10),
    "EAGLE3": (0, 5, 10),
    "NEXTN": (0, 5, 10),
    "STANDALONE": (0, 5, 10),
    "NGRAM": (0, 5, 10),
    "DFLASH": (0, 5, 11),
    "DSPARK": (0, 5, 16),
    "UNO": (0, 5, 20),
}
# Smallest and largest value; the command line takes any number and the server dies later.
RANGES: Mapping[str, tuple[float, float | None]] = {
    "mem_fraction_static": (0.0001, 0.9999),
    "schedule_conservativeness": (0, None),
    "max_running_requests": (1, None),
    "max_total_tokens": (1, None),
    "max_prefill_tokens": (1, None),
    "max_mamba_cache_size": (1, None),
    "mamba_full_memory_ratio": (0.001, None),
    "mamba_track_interval": (1, None),
    "hicache_ratio": (0.001, None),
    "speculative_num_steps": (1, None),
    "speculative_eagle_topk": (1, None),
    "speculative_num_draft_tokens": (1, None),
    "page_size": (1, None),
    "tp_size": (1, None),
}
_WHOLE = ("int", "human_readable_int")
_SWITCHES = ("_StoreTrueAction", "BooleanOptionalAction", "DeprecatedStoreTrueAction", "DeprecatedStoreConstAction")
_ASK_VERSION = "from importlib.metadata import version; print(version('sglang'))"
ASK_VERSION_TIMEOUT_S = 60.0  # an interpreter that starts on a busy machine or a network disk


class UnknownFlagError(LookupError):
    """A version has no such flag; the message says what it has instead."""


class NotInstalledError(Exception):
    """An interpreter has no SGLang, or is none; the message says which."""


@dataclass(frozen=True)
class Found:
    """A flag of this version.

    Attributes:
        name: of the argument, as canonical forms and ``/server_info`` have it.
        option: to pass, e.g. ``--mem-fraction-static``.
        note: how it was renamed, where it was asked for by another name.
    """

    name: str
    option: str
    flag: Flag
    note: str | None = None

    @property
    def is_switch(self) -> bool:
        return self.flag.action in _SWITCHES


class FlagTable:
    """The flags of one version. ``source`` says where they are from: the installed parser or the shipped table."""

    def __init__(self, version: str, flags: Mapping[str, Flag], source: str) -> None:
        self.version = version
        self.parsed_version = parse_version(version)
        self.source = source
        self._flags = flags
        self._by_name: dict[str, Found] = {}

    @classmethod
    def for_version(cls, version: str) -> FlagTable:
        """The shipped table of a version; a post-release has its release's.

        Raises:
            LookupError: there is none; the message says which there are.
        """
        shipped = flag_data.versions()
        release = next((item for item in shipped if parse_version(item) == parse_version(version)[:3]), None)
        if release is None:
            raise LookupError(
                f"the flags of SGLang {version!r} are not known; "
                f"known are {shipped[0]} to {shipped[-1]}, others where they are installed"
            )
        return cls(version, flag_data.flags(release), f"the table shipped for {release}")

    @classmethod
    def installed(cls, python: str | None = None) -> FlagTable:
        """The flags that the installed engine's own parser knows, kept in the user's cache folder by version.

        Args:
            python: interpreter that has the engine, None for this one.

        Raises:
            NotInstalledError: it has none.
            LookupError: its parser cannot be asked, and no table is shipped for its version.
        """
        version = installed_version(python)
        kept = _cache_file(python or sys.executable, version)
        try:
            return cls(
                version, flag_data.from_json(json.loads(kept.read_text())), f"the parser of the installed {version}"
            )
        except (OSError, ValueError, KeyError, TypeError):
            pass  # not asked before, or cut off while it was written
        try:
            _, flags = flag_data.ask(python or sys.executable)
        except FlagDataError as error:
            table = cls.for_version(version)
            table.source += f", because the installed parser could not be asked: {error}"
            return table
        _keep(kept, flags)
        return cls(version, flags, f"the parser of the installed {version}")

    def find(self, name: str) -> Found:
        """A flag by destination or option string, in the spelling of any version.

        Raises:
            UnknownFlagError: with the closest name, or the versions that have it.
        """
        plain = name.removeprefix("--").replace("-", "_")
        if plain not in self._by_name:
            self._by_name[plain] = self._find(plain)
        return self._by_name[plain]

    def problem(self, name: str, value: Value) -> str | None:
        """What is wrong with a flag or its value, in one sentence; None when nothing is."""
        try:
            found = self.find(name)
        except UnknownFlagError as error:
            return str(error)
        if found.name in RESERVED:
            return f"{found.option} is set by the harness: {RESERVED[found.name]}"
        if found.flag.action == "DeprecatedAction":
            return f"{found.option} has no effect any more in SGLang {self.version}; leave it out"
        first_dead = DEAD.get(found.name)
        if first_dead and self.parsed_version >= first_dead:
            return f"{found.option} is declared and never read in SGLang {self.version}; leave it out"
        return self._value_problem(found, value)

    def arguments(self, name: str, value: Value) -> tuple[str, ...]:
        """The command-line arguments that set a flag.

        Raises:
            UnknownFlagError: this version has no such flag.
        """
        found = self.find(name)
        if isinstance(value, bool):
            off = f"--no-{found.option[2:]}"
            return (found.option,) if value else ((off,) if off in self._flags else ())
        if isinstance(value, list):
            return (found.option, *(str(item) for item in value))
        text = str(value)
        return (f"{found.option}={text}",) if text.startswith("-") else (found.option, text)

    def default(self, name: str) -> str:
        """The parser's default as Python writes it; ``None`` where the engine decides later."""
        return self.find(name).flag.default

    def choices(self, name: str) -> tuple[str, ...] | None:
        """What a flag may be set to, None where anything goes."""
        found = self.find(name)
        if found.name == "speculative_algorithm":
            known = [item for item, first in SPECULATIVE_ALGORITHMS.items() if first <= self.parsed_version]
            return tuple(dict.fromkeys([*(found.flag.choices or ()), *known]))
        return found.flag.choices

    def _find(self, plain: str) -> Found:
        for spelling in (plain, *_other_spellings(plain)):
            found = self._exact(spelling)
            if found is not None:
                if found.name == plain or self._same_flag(plain, found):
                    return found
                old = f"--{plain.replace('_', '-')}"
                gone = "" if old in self._flags else ", which does not know the other name"
                note = f"{old} is called {found.option} in SGLang {self.version}{gone}"
                return Found(found.name, found.option, found.flag, note)
        having = [
            version for version in flag_data.versions() if f"--{plain.replace('_', '-')}" in flag_data.flags(version)
        ]
        if having:
            span = having[0] if len(having) == 1 else f"{having[0]} to {having[-1]}"
            raise UnknownFlagError(f"SGLang {self.version} has no flag {plain!r}; it is in {span} ({self.source})")
        raise UnknownFlagError(
            f"SGLang {self.version} has no flag {plain!r}{closest(plain, self._names())} ({self.source}); "
            "names are matched exactly, without abbreviations"
        )

    def _same_flag(self, plain: str, found: Found) -> bool:
        """Whether both are live options of one argument here, e.g. ``--tp-size`` and ``--tensor-parallel-size``."""
        flag = self._flags.get(f"--{plain.replace('_', '-')}")
        return flag is not None and flag.dest == found.flag.dest and not flag.action.startswith("Deprecated")

    def _exact(self, name: str) -> Found | None:
        option = f"--{name.replace('_', '-')}"
        flag = self._flags.get(option)
        if flag is not None and "StoreConst" in flag.action:
            raise UnknownFlagError(
                f"{option} is an old spelling of a value of --{flag.dest.replace('_', '-')} in SGLang {self.version}; "
                f"write {flag.dest}: one of {listed(self.choices(flag.dest) or ())}"
            )
        if flag is not None and flag.action.startswith("DeprecatedAlias"):
            return self._exact(flag.dest) if flag.dest != name else None
        if flag is not None:
            return self._named(option, flag)
        options = [item for item, other in self._flags.items() if other.dest == name]
        live = [item for item in options if not self._flags[item].action.startswith("Deprecated")]
        return self._named(live[0], self._flags[live[0]]) if live else None

    def _named(self, option: str, flag: Flag) -> Found:
        """Named as the argument is called in later versions, if an option of this one is called so too."""
        name = flag.dest
        latest = _latest_destination(option)
        if latest and f"--{latest.replace('_', '-')}" in self._flags:
            name = latest
        own = f"--{name.replace('_', '-')}"
        if own in self._flags and self._flags[own].dest == flag.dest:
            option, flag = own, self._flags[own]
        return Found(name, option, flag)

    def _names(self) -> list[str]:
        return [option.removeprefix("--").replace("-", "_") for option in self._flags]

    def _value_problem(self, found: Found, value: Value) -> str | None:
        flag, shown = found.flag, json.dumps(value)
        if found.is_switch:
            return None if isinstance(value, bool) else f"{found.option} is a switch: true or false, seen {shown}"
        several = flag.nargs in ("+", "*")
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, bool):
                return f"{found.option} takes {_kind(flag)}, seen {shown}"
            if flag.type in _WHOLE and not isinstance(item, int):
                return f"{found.option} takes {_kind(flag)}, seen {shown}"
            if flag.type == "float" and not isinstance(item, (int, float)):
                return f"{found.option} takes {_kind(flag)}, seen {shown}"
        if isinstance(value, list) and not several:
            return f"{found.option} takes {_kind(flag)}, seen a list: {shown}"
        return self._choice_problem(found, value) or _range_problem(found, value)

    def _choice_problem(self, found: Found, value: Value) -> str | None:
        choices = self.choices(found.name)
        if choices is None or isinstance(value, list) or str(value) in choices:
            return None
        having = _versions_with_choice(found.name, str(value))
        elsewhere = f"; {value!r} is allowed in {having}" if having else ""
        return (
            f"{found.option} cannot be {value!r} in SGLang {self.version}{closest(str(value), choices)}; "
            f"allowed: {listed(choices)}{elsewhere}"
        )


def installed_version(python: str | None = None) -> str:
    """Version of the SGLang that an interpreter has, without importing it.

    Raises:
        NotInstalledError: it has none, or there is no such interpreter.
    """
    if python is None or python == sys.executable:
        try:
            return importlib.metadata.version("sglang")
        except importlib.metadata.PackageNotFoundError as error:
            raise NotInstalledError(f"{sys.executable} has no SGLang") from error
    return _version_of(python)


@cache
def _version_of(python: str) -> str:
    try:
        done = subprocess.run(
            [python, "-c", _ASK_VERSION], capture_output=True, text=True, timeout=ASK_VERSION_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotInstalledError(f"cannot run {python}: {error}") from error
    if done.returncode:
        raise NotInstalledError(f"{python} has no SGLang")
    return done.stdout.strip()


def _range_problem(found: Found, value: Value) -> str | None:
    low, high = RANGES.get(found.name, (None, None))
    if low is None or not isinstance(value, (int, float)):
        return None
    if value < low or (high is not None and value > high):
        span = f"at least {low:g}" if high is None else f"{low:g} to {high:g}"
        return f"{found.option} {value:g} is out of range; allowed: {span}"
    return None


def _kind(flag: Flag) -> str:
    one = {"int": "a whole number", "human_readable_int": "a whole number", "float": "a number"}.get(
        flag.type, "a word"
    )
    return f"{one}, or a list" if flag.nargs in ("+", "*") else one


def _other_spellings(name: str) -> Iterator[str]:
    """What the flag is called in other versions: its option's destination there, or an option with that destination."""
    option = f"--{name.replace('_', '-')}"
    for version in reversed(flag_data.versions()):
        flags = flag_data.flags(version)
        if option in flags and flags[option].dest != name and "Const" not in flags[option].action:
            yield flags[option].dest
        for other, flag in flags.items():
            if flag.dest == name and other != option and "Const" not in flag.action:
                yield other.removeprefix("--").replace("-", "_")


@cache
def _latest_destination(option: str) -> str | None:
    for version in reversed(flag_data.versions()):
        if option in flag_data.flags(version):
            return flag_data.flags(version)[option].dest
    return None


def _versions_with_choice(name: str, choice: str) -> str:
    having = []
    for version in flag_data.versions():
        try:
            allowed = FlagTable.for_version(version).choices(name)
        except UnknownFlagError:
            continue
        if choice in (allowed or ()):
            having.append(version)
    return having[0] if len(having) == 1 else f"{having[0]} to {having[-1]}" if having else ""


def _cache_file(python: str, version: str) -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    place = hashlib.sha256(f"{python} {os.environ.get('PYTHONPATH', '')}".encode()).hexdigest()[:12]
    return home / "serving-sweep" / "flags" / f"sglang-{version}-{place}.json"


def _keep(path: Path, flags: Mapping[str, Flag]) -> None:
    """Kept for the next time, if the cache folder lets us."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(flag_data.to_json(flags)))
        temporary.replace(path)
    except OSError:
        pass
