"""Words: the phrases that messages to a person have in common."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def closest(name: str, names: Iterable[str]) -> str:
    """``; closest: NAME`` if one of the names is near, else nothing."""
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f"; closest: {near[0]}" if near else ""


def listed(items: Iterable[object], limit: int = 30) -> str:
    """``a, b, c``, cut short after ``limit``."""
    texts = [str(item) for item in items]
    return ", ".join(texts[:limit]) + (f" and {len(texts) - limit} more" if len(texts) > limit else "")
