"""Overhead: what the harness itself costs per trial, against the simulator.

    python -m benchmarks.overhead [TRIALS]

A trial's overhead is the time from its start to the next one's, less the server's start-up, warm-up, measuring and
stop: asking and telling the search, forecasting, starting the process, the identity check, reading the log, evaluating
the samples and writing the record. Prints one line of JSON; docs/overhead.md holds a run of it.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import statistics
import sys
import tempfile
from pathlib import Path

from bench import records, sweep

# Windows as short as they can be: the overhead does not depend on them.
OVERRIDES = (
    "+experiment=quickstart",
    "run=overhead",
    "workload.levels=[4]",
    "workload.min_window_s=2",
    "workload.max_window_s=4",
    "search.finalists=0",
    "search.max_same_failures=1000",
)


def overheads_s(results: Path, trials: int) -> list[float]:
    """Seconds of each trial but the last, whose successor is not a trial."""
    with contextlib.redirect_stdout(io.StringIO()):
        sweep.main([*OVERRIDES, f"results_dir={results}", f"search.trials={trials}"])
    done = [record for record in records.read(results / "quickstart/overhead/trials.jsonl") if record.launched]
    return [
        following.started_at
        - record.started_at
        - sum((record.times.startup_s, record.times.warmup_s, record.times.measure_s, record.times.teardown_s))
        for record, following in itertools.pairwise(done)
    ]


def main() -> int:
    trials = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    with tempfile.TemporaryDirectory() as folder:
        seconds = overheads_s(Path(folder), trials)
    print(
        json.dumps(
            {
                "trials": len(seconds),
                "overhead_median_s": round(statistics.median(seconds), 3),
                "overhead_p90_s": round(statistics.quantiles(seconds, n=10)[-1], 3),
                "overhead_max_s": round(max(seconds), 3),
                "engine": "simulator",
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
