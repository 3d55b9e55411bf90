"""Failures on demand: every way in which a real server fails, by name.

``name`` or ``name:value``:

    crash_args, crash_load, crash_kv_alloc, crash_graph_capture     dies there, of an exception, not of memory
    oom_weights, oom_kv_pool, oom_state_cache, oom_graph_capture    runs out of GPU memory there, whatever the forecast
    oom_host                        the hierarchical cache does not fit into host memory
    oom_kernel                      the kernel's OOM killer takes the scheduler while it loads
    start_hang                      stops while loading, alive and silent
    slow_start:30                   takes so many (virtual) seconds more
    never_healthy                   serves, and /health says 503
    lying_health                    /health says 200, and no request is ever answered
    crash_under_load:8              dies after so many finished requests
    crash_at_batch:16               dies when that many requests run (without a value: as many as can)
    no_crash_at_batch               not even the crash that 0.5.15 has with speculation
    oom_runtime:8                   runs out of GPU memory in a prefill after so many finished requests
    illegal_access:8                a kernel reads where it must not, after so many
    hang_under_load:8               stops answering after so many
    watchdog:8                      the same, and its watchdog ends it
    errors_under_load:0.1           that share of requests is answered with status 500
    reset_under_load:0.1            that share of connections is closed in the middle
    wrong_configuration             serves with another fraction and limit than it was asked for
    wrong_name                      says another model name
    garbage_empty, garbage_repeated, garbage_bytes, garbage_count   answers nothing, one token, no UTF-8, fewer tokens
    orphan                          leaves a child behind that has a session of its own
    slow_stop:10                    takes so many (virtual) seconds to end after SIGTERM
    ignore_sigterm                  only SIGKILL ends it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.engines.simulator.options import OptionError

# Names with what a missing value means; None: there is none.
KNOWN: dict[str, float | None] = {
    "crash_args": None,
    "crash_load": None,
    "crash_kv_alloc": None,
    "crash_graph_capture": None,
    "oom_weights": None,
    "oom_kv_pool": None,
    "oom_state_cache": None,
    "oom_graph_capture": None,
    "oom_host": None,
    "oom_kernel": None,
    "start_hang": None,
    "slow_start": 30.0,
    "never_healthy": None,
    "lying_health": None,
    "crash_under_load": 8.0,
    "crash_at_batch": 0.0,
    "no_crash_at_batch": None,
    "oom_runtime": 8.0,
    "illegal_access": 8.0,
    "hang_under_load": 8.0,
    "watchdog": 8.0,
    "errors_under_load": 0.1,
    "reset_under_load": 0.1,
    "wrong_configuration": None,
    "wrong_name": None,
    "garbage_empty": None,
    "garbage_repeated": None,
    "garbage_bytes": None,
    "garbage_count": None,
    "orphan": None,
    "slow_stop": 10.0,
    "ignore_sigterm": None,
}


@dataclass(frozen=True)
class Faults:
    """What was demanded, by name."""

    values: dict[str, float]

    @classmethod
    def read(cls, names: Sequence[str]) -> Faults:
        """Read names, with values.

        Raises:
            OptionError: one of them is not known.
        """
        values = {}
        for entry in names:
            name, _, value = entry.partition(":")
            if name not in KNOWN:
                raise OptionError(f"no simulated failure is called {name!r}; there are {', '.join(KNOWN)}")
            try:
                values[name] = float(value) if value else KNOWN[name] or 0.0
            except ValueError:
                raise OptionError(f"simulated failure {entry!r}: expected a number after the colon") from None
        return cls(values)

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def after(self, name: str, finished: int) -> bool:
        """Whether a failure under load is due after so many finished requests."""
        return name in self.values and finished >= self.values[name]
