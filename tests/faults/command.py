"""The sweep command of these tests: ``python -m tests.faults.command``, as ``bench.sweep`` but for three figures and,
unless TEST_SWEEP_REPORT is set, the report, whose pictures have tests of their own.

At hundreds of times a card's pace a busy test machine slows a simulated server down, which would make its measurements
void; and hangs of a real engine are waited for longer than a test should take.
"""

from __future__ import annotations

import os
import sys

import pytest

from bench import sweep, trial
from bench.load import level


def adjust(patch: pytest.MonkeyPatch) -> None:
    """Make a sweep of this process one for tests."""
    patch.setattr(trial, "VOID_SLOWED_SHARE", 100.0)
    patch.setattr(level, "MIN_STALL_WALL_S", 1.2)  # longer than the simulated watchdog at this pace
    patch.setattr(trial, "LAST_WORDS_S", 0.5)
    if not os.environ.get("TEST_SWEEP_REPORT"):
        patch.setattr(sweep.Sweep, "_report", lambda _self: None)


if __name__ == "__main__":
    adjust(pytest.MonkeyPatch())
    sys.exit(sweep.main())
