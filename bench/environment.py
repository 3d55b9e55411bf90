"""Environment: the host, the packages and the commit that a run's numbers come from."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

PACKAGES = ("optuna", "hydra-core", "aiohttp", "numpy", "pandas", "matplotlib")


@dataclass(frozen=True)
class Environment:
    """Recorded once per process that works on a run.

    Attributes:
        gpus: as the driver describes them, one sentence each; empty without a GPU.
        commit: of this package's checkout, None where it is installed without one.
    """

    harness_version: str
    commit: str | None
    engine: str
    host: str
    cpu: str
    cpu_count: int
    memory_bytes: int
    gpus: tuple[str, ...]
    python: str
    packages: tuple[tuple[str, str], ...]
    schema_version: int = 1


def observe(engine: str, gpus: tuple[str, ...]) -> Environment:
    return Environment(
        harness_version=_version("serving-sweep"),
        commit=_commit(),
        engine=engine,
        host=platform.node(),
        cpu=_cpu(),
        cpu_count=os.cpu_count() or 0,
        memory_bytes=psutil.virtual_memory().total,
        gpus=gpus,
        python=sys.version.split()[0],
        packages=tuple((name, _version(name)) for name in PACKAGES),
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str | None:
    here = Path(__file__).resolve().parent.parent
    if not (here / ".git").exists():
        return None
    try:
        result = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=here,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None


def _cpu() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
