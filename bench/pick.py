"""Pick: ``python -m bench.pick RUN`` prints the best configuration of a run and writes what production needs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import best, config, engines, records
from bench.records import RecordError, RunFolder

EXIT_NO_ANSWER = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the answer; 0 with one, 2 on bad input, 3 where the run has none yet."""
    parser = argparse.ArgumentParser(prog="python -m bench.pick", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run, results/<experiment>/<run>")
    options = parser.parse_args(arguments)
    folder = RunFolder(options.run)
    try:
        experiment = config.load_run(options.run)
        trials = records.read(folder.trials)
        again = records.read(folder.finalists)
    except (config.ConfigError, RecordError) as error:
        print(error, file=sys.stderr)
        return 2
    answer = best.decide(experiment, trials, again)
    if answer is None:
        succeeded = sum(record.value is not None for record in trials)
        print(
            f"no best configuration yet: {len(trials)} trials, {succeeded} of them measured, no finalist measured "
            "again. The same sweep command with the same run= goes on from here",
            file=sys.stderr,
        )
        return EXIT_NO_ANSWER
    best.write(answer, experiment, engines.create(experiment), folder, best.source(answer, trials))
    for sentence in answer.sentences:
        print(sentence)
    for name in ("best.yaml", "best.json", "launch.sh"):
        print(folder.path / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
