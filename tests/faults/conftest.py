"""A sweep that several tests look at."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from tests.faults.sweeps import Sweep, cleaned_up

Begun = tuple[Sweep, "subprocess.Popen[str]"]


@pytest.fixture(scope="package", autouse=True)
def _begun(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Begun | None]:
    """It takes a while, mostly of waiting: it is begun before the first test if any test will look at it."""
    if not any("gallery" in getattr(item, "fixturenames", ()) for item in request.session.items):
        yield None
        return
    with cleaned_up(Sweep(tmp_path_factory.mktemp("results"), experiment="gallery")) as swept:
        yield swept, swept.command()


@pytest.fixture(scope="package")
def gallery(_begun: Begun) -> Sweep:
    """One server for each way to fail, between servers that run."""
    swept, process = _begun
    return swept.finish(process)
