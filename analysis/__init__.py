"""Analysis: reads the results of a run, and only those; ``analysis.load(RUN)`` gives tidy pandas frames."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from analysis.frames import Run, load

__all__ = ["Run", "load"]


def __getattr__(name: str) -> Any:
    # Lazy: ``import analysis`` alone does not pay for pandas.
    if name in __all__:
        from analysis import frames

        return getattr(frames, name)
    raise AttributeError(f"module 'analysis' has no attribute {name!r}")
