"""Outcome of a trial: how it ended, why, and the log line that proves it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal


class OutcomeKind(StrEnum):
    """How a trial ended. Stable strings: they stand in records and are told to the search."""

    COMPLETE = "complete"
    PRUNED = "pruned"  # stopped early, because it could no longer win
    INFEASIBLE = "infeasible"  # memory: it does not fit
    REJECTED = "rejected"  # the engine refuses the flags, the model or the hardware
    CRASHED = "crashed"
    HUNG = "hung"
    UNHEALTHY = "unhealthy"  # ready, but answers garbage or errors
    MISMATCHED = "mismatched"  # the server that answered is not the one that was asked for
    INTERRUPTED = "interrupted"
    INFRASTRUCTURE = "infrastructure"  # never counts against a configuration


class Cause(StrEnum):
    """Why. The first group are the labels of the log classifier, the second what only the harness can see."""

    OOM_GPU_WEIGHTS = "oom_gpu_weights"
    OOM_GPU_KV_POOL = "oom_gpu_kv_pool"
    OOM_GPU_STATE_CACHE = "oom_gpu_state_cache"
    OOM_GPU_GRAPH_CAPTURE = "oom_gpu_graph_capture"
    OOM_GPU_RUNTIME = "oom_gpu_runtime"
    OOM_HOST = "oom_host"
    CONFIG_INCOMPATIBLE = "config_incompatible"
    UNKNOWN_ARGUMENT = "unknown_argument"
    MODEL_NOT_FOUND = "model_not_found"
    HUB_ACCESS = "hub_access"
    WEIGHTS_MISMATCH = "weights_mismatch"
    PORT_IN_USE = "port_in_use"
    MISSING_DEPENDENCY = "missing_dependency"
    KERNEL_BUILD = "kernel_build"
    DRIVER_MISMATCH = "driver_mismatch"
    UNSUPPORTED_HARDWARE = "unsupported_hardware"
    NCCL = "nccl"
    WATCHDOG_TIMEOUT = "watchdog_timeout"
    STARTUP_HANG = "startup_hang"
    ILLEGAL_MEMORY_ACCESS = "illegal_memory_access"
    ENGINE_CRASH = "engine_crash"
    DISK_FULL = "disk_full"
    PERMISSION = "permission"
    GPU_BUSY = "gpu_busy"
    OTHER = "other"
    HEALTHY = "healthy"

    NONE = "none"  # nothing went wrong
    UNKNOWN = "unknown"
    FORECAST = "forecast"  # not launched: the forecast says that it cannot fit
    DOMINATED = "dominated"  # not launched: something no larger already ran out of memory
    CANNOT_WIN = "cannot_win"  # pruned: its upper bound stays below the incumbent
    WRONG_CONFIGURATION = "wrong_configuration"
    FOREIGN_SERVER = "foreign_server"  # somebody else answers on the port
    GARBAGE_OUTPUT = "garbage_output"
    SERVER_ERRORS = "server_errors"  # 5xx, resets or empty replies under load
    SERVING_HANG = "serving_hang"
    MEASUREMENT_VOID = "measurement_void"  # e.g. the client distorted it
    OPERATOR = "operator"  # Ctrl-C or SIGTERM to the harness


class Phase(StrEnum):
    """Where in a server's life. The first five are what a log shows."""

    ARGS = "args"
    LOAD = "load"
    KV_ALLOC = "kv_alloc"
    GRAPH_CAPTURE = "graph_capture"
    SERVING = "serving"

    FORECAST = "forecast"
    IDENTITY = "identity"
    WARMUP = "warmup"
    MEASURE = "measure"
    TEARDOWN = "teardown"


@dataclass(frozen=True)
class FlagAdvice:
    """One flag that a fault implicates.

    Attributes:
        flag: option string, e.g. ``--mem-fraction-static``.
        direction: how to move it.
        bound: the value that the engine names, where it names one (e.g. "Raise --mem-fraction-static above 0.74").
    """

    flag: str
    direction: Literal["raise", "lower", "set", "unset", "change"]
    bound: float | None = None


@dataclass(frozen=True)
class Fault:
    """What a log says went wrong.

    Attributes:
        line: the one line that proves it, colour codes removed, else None.
        line_number: its number in the log, from 1.
        advice: one or two sentences for a person.
    """

    cause: Cause
    phase: Phase
    line: str | None = None
    line_number: int | None = None
    flags: tuple[FlagAdvice, ...] = ()
    advice: str = ""


@dataclass(frozen=True)
class Outcome:
    """How a trial ended.

    Attributes:
        detail: what was seen, in one sentence for a person.
        line, line_number: the proving line of the server's log, where there is one.
        flags: what the fault implicates.
    """

    kind: OutcomeKind
    cause: Cause = Cause.NONE
    phase: Phase | None = None
    detail: str = ""
    line: str | None = None
    line_number: int | None = None
    flags: tuple[FlagAdvice, ...] = ()

    @property
    def started(self) -> bool:
        """Whether the server ran and kept up its load, for as long as anybody wanted to measure it."""
        return self.kind in (OutcomeKind.COMPLETE, OutcomeKind.PRUNED)

    @property
    def counts(self) -> bool:
        """Whether the search may learn from it; an infrastructure failure or an interruption says nothing."""
        return self.kind not in (OutcomeKind.INFRASTRUCTURE, OutcomeKind.INTERRUPTED)


INFRASTRUCTURE = frozenset(
    {
        Cause.GPU_BUSY,
        Cause.PORT_IN_USE,
        Cause.DISK_FULL,
        Cause.PERMISSION,
        Cause.HUB_ACCESS,
        Cause.MISSING_DEPENDENCY,
        Cause.DRIVER_MISMATCH,
        Cause.MODEL_NOT_FOUND,
        Cause.NCCL,
    }
)
REJECTED = frozenset(
    {
        Cause.CONFIG_INCOMPATIBLE,
        Cause.UNKNOWN_ARGUMENT,
        Cause.UNSUPPORTED_HARDWARE,
        Cause.WEIGHTS_MISMATCH,
        Cause.KERNEL_BUILD,
    }
)
OUT_OF_MEMORY = frozenset(cause for cause in Cause if cause.startswith("oom_"))


def kind_of(cause: Cause) -> OutcomeKind:
    """The outcome that a log's cause leads to."""
    if cause in OUT_OF_MEMORY:
        return OutcomeKind.INFEASIBLE
    if cause in REJECTED:
        return OutcomeKind.REJECTED
    if cause in INFRASTRUCTURE:
        return OutcomeKind.INFRASTRUCTURE
    if cause in (Cause.STARTUP_HANG, Cause.WATCHDOG_TIMEOUT, Cause.SERVING_HANG):
        return OutcomeKind.HUNG
    return OutcomeKind.CRASHED
