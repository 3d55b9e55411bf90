"""Words: the phrases that messages to a person have in common."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable
from typing import Any, NoReturn

_UNKNOWN = "unrecognized arguments: "


def closest(name: str, names: Iterable[str]) -> str:
    """``; closest: NAME`` if one of the names is near, else nothing."""
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f"; closest: {near[0]}" if near else ""


def listed(items: Iterable[object], limit: int = 30) -> str:
    """``a, b, c``, cut short after ``limit``."""
    texts = [str(item) for item in items]
    return ", ".join(texts[:limit]) + (f" and {len(texts) - limit} more" if len(texts) > limit else "")


class Parser(argparse.ArgumentParser):
    """Takes options by their whole names only, and names the closest one to what it does not know."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        if message.startswith(_UNKNOWN):
            options = list(self._option_string_actions)
            unknown = [word for word in message.removeprefix(_UNKNOWN).split() if word.startswith("-")]
            message += "".join(closest(word.partition("=")[0], options) for word in unknown)
        super().error(message)
