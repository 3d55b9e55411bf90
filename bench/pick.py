"""Pick: ``python -m bench.pick RUN`` prints the best configuration of a run and writes what production needs."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench import best, config, deployment, records
from bench.experiment import Experiment
from bench.records import RecordError, RunFolder, TrialRecord
from bench.search import objective
from bench.words import Parser

EXIT_NO_ANSWER = 3
_LIMIT = re.compile(r"(?P<metric>[a-z_]+(\.[a-z0-9]+)?)<=?(?P<value>[0-9.e-]+)")


class PickError(Exception):
    """The question cannot be put to this run; the message says why."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the answer; 0 with one, 2 on bad input, 3 where the run has none yet or nothing meets the limits."""
    options = _parser().parse_args(arguments)
    folder = RunFolder(options.run)
    try:
        trials, again = records.read(folder.trials), records.read(folder.finalists)
        version = trials[0].engine.partition(" ")[2] if trials else None
        experiment = config.load_run(options.run, measured_with=version)
        asked = _question(options, experiment, trials)
        answer = best.decide(asked, trials, again, unconfirmed=bool(options.level or options.limit))
        if answer is None:
            print(_no_answer(trials), file=sys.stderr)
            return EXIT_NO_ANSWER
        target = folder.path.joinpath(*_subfolder(options))
        deployment.write(answer, asked, target, best.source(answer, trials), host=options.host)
    except (config.ConfigError, RecordError, PickError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    for sentence in answer.sentences:
        print(sentence)
    for name in deployment.FILES:
        print(target / name)
    return EXIT_NO_ANSWER if answer.verdict == "not_meeting_limits" else 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m bench.pick", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run, results/<experiment>/<run>")
    parser.add_argument("--level", type=int, help="best at this load level instead, one of workload.levels")
    parser.add_argument(
        "--limit",
        action="append",
        metavar="METRIC<SECONDS",
        help="best under this limit instead, e.g. 'ttft_s.p95<0.5' (quote it); may be given several times",
    )
    parser.add_argument(
        "--simplest-within",
        type=float,
        metavar="PERCENT",
        help="the configuration with the fewest settings among those that lie this close to the best",
    )
    parser.add_argument(
        "--host", default=deployment.DEFAULT_HOST, help="address to listen on (default: only this machine reaches it)"
    )
    return parser


def _question(options: argparse.Namespace, experiment: Experiment, trials: Sequence[TrialRecord]) -> Experiment:
    """The experiment with what was asked on the command line.

    Raises:
        PickError: it was not measured, or cannot be understood.
    """
    measured = [item for record in trials for item in record.measurements if item.valid]
    levels = sorted({item.concurrency for item in measured if item.concurrency})
    if options.level is not None and options.level not in levels:
        raise PickError(f"--level {options.level} was not measured; measured were {_listed(levels)}")
    limits = {}
    for text in options.limit or ():
        match = _LIMIT.fullmatch(text.replace(" ", ""))
        value = _number(match["value"]) if match else None
        if match is None or value is None:
            raise PickError(f"--limit {text}: expected METRIC<SECONDS, for example 'ttft_s.p95<0.5'")
        if measured and all(objective.metric(item, match["metric"]) is None for item in measured):
            raise PickError(
                f"--limit {text}: {match['metric']} was not measured; names are like ttft_s.p95, tpot_s.mean"
            )
        limits[match["metric"]] = value
    within = options.simplest_within
    if within is not None and not 0 <= within < 100:
        raise PickError(f"--simplest-within {within:g}: expected a percentage from 0 to 100")
    if not re.fullmatch(r"[\w.:-]+", options.host):
        raise PickError(f"--host {options.host}: expected an address or a name")
    return best.asked_otherwise(
        experiment,
        level=options.level,
        limits=limits or None,
        tie_relative=None if within is None else within / 100,
    )


def _subfolder(options: argparse.Namespace) -> tuple[str, ...]:
    """Where the answer to another question goes; the run's own answer stays where it is."""
    parts = [f"level-{options.level}"] if options.level is not None else []
    parts += [text.replace(" ", "").replace("<=", "<").replace("<", "-") for text in options.limit or ()]
    parts += [f"within-{options.simplest_within:g}"] if options.simplest_within is not None else []
    return ("picked", "_".join(parts)) if parts else ()


def _no_answer(trials: Sequence[TrialRecord]) -> str:
    succeeded = sum(record.value is not None for record in trials)
    return (
        f"no best configuration yet: {len(trials)} trials, {succeeded} of them measured, no finalist measured "
        "again. The same sweep command with the same run= goes on from here"
    )


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value > 0 else None


def _listed(levels: Iterable[int]) -> str:
    return ", ".join(str(level) for level in levels) or "none"


if __name__ == "__main__":
    sys.exit(main())
