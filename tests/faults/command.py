"""The sweep command of these tests: ``python -m tests.faults.command``, as ``bench.sweep`` but for three figures.

At hundreds of times a card's pace a busy test machine slows a simulated server down, which would make its measurements
void; and hangs of a real engine are waited for longer than a test should take.
"""

from __future__ import annotations

import sys

import pytest

from bench import sweep, trial
from bench.load import level


def adjust(patch: pytest.MonkeyPatch) -> None:
    """Make a sweep of this process one for tests."""
    patch.setattr(trial, "VOID_SLOWED_SHARE", 100.0)
    patch.setattr(level, "MIN_STALL_WALL_S", 1.2)  # longer than the simulated watchdog at this pace
    patch.setattr(trial, "LAST_WORDS_S", 0.5)


if __name__ == "__main__":
    adjust(pytest.MonkeyPatch())
    sys.exit(sweep.main())
