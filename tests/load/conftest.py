"""What all tests of the load generator share."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _stub_in_our_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stub runs in the client's own thread, so the client is late as a matter of course; and it is steady at once,
    so short bins will do.
    """
    monkeypatch.setattr("bench.load.doubts.MERGING_LAG_SHARE", 1e9)
    monkeypatch.setattr("bench.load.level.STEPS_PER_BIN", 3)
