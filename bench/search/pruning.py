"""Pruning: in which order a trial's load levels are measured, and when no more of it is worth measuring."""

from __future__ import annotations

from collections.abc import Sequence

from bench.experiment import Experiment
from bench.load.measurement import Interval, Measurement
from bench.search import objective

# Half-widths of the interim 95 % interval above its mean: it is looked at again and again, and one look in forty would
# lie outside it by chance. 1.5 of them are three standard deviations.
BOUND_WIDTHS = 1.5
# Parts of ``min_window_s`` at which a window is looked at first, and from which on its interval is trusted.
# Before, an interval may be too narrow, since it has not seen the slower changes (waves of prompts, growing contexts):
# a trial is only stopped then where its upper bound lies below a share of the bar, growing from EARLY_SHARE to 1. That
# share holds for the second half of the warm-up too: servers that compiled kernels read 0.76 of what they gave later
# while they looked steady (docs/runs/h200-mtp).
FIRST_LOOK, TRUSTED = 0.1, 0.5
EARLY_SHARE = 0.7
# Roles whose trials are only of use if they can win. The others are measured for what they say about others.
PRUNED_ROLES = frozenset({"search", "recipe"})


def ordered_levels(experiment: Experiment, limit: int | None) -> list[int]:
    """The order of the levels: busiest first among those that the server can run at once, since that one decides most;
    then those that fill it to its limit, least first, since that is where engines have died (SGLang 0.5.15 with
    speculation does, once the running batch reaches max_running_requests) and what was measured is kept.

    Args:
        limit: effective running requests of the server, None where it did not tell.
    """
    levels = sorted(set(experiment.workload.levels), reverse=True)
    if limit is None:
        return levels
    return [level for level in levels if level < limit] + sorted(level for level in levels if level >= limit)


class Pruning:
    """Judges whether one trial can still become a finalist.

    Args:
        role: of the trial.
        bar: value of the objective that it must reach for that; None never prunes.
    """

    def __init__(self, experiment: Experiment, role: str, bar: float | None) -> None:
        self._experiment = experiment
        self._role = role
        self._active = (
            experiment.search.prune
            and role in PRUNED_ROLES
            and bar is not None
            and experiment.objective.metric == "output_tok_per_s"
        )
        self._bar = bar or 0.0
        self.reason = ""

    def levels(self, limit: int | None) -> list[int]:
        """The levels of this trial in order: the deciding one first where it can spare all others, and alone where the
        trial only shows whether the host has changed."""
        found = ordered_levels(self._experiment, limit)
        deciding = objective.level(self._experiment)
        if self._role == "anchor":
            return [deciding]
        if not self._active or deciding not in found:
            return found
        return [deciding, *(item for item in found if item != deciding)]

    def should_stop(self, elapsed_s: float, interim: Interval | None) -> bool:
        """Whether the deciding level need not be measured further: even the upper bound of the interim interval lies
        below the bar, the range in which two configurations count as equal included, and during warm-up and early in
        the window far below it.

        Args:
            elapsed_s: of the window; 0 during warm-up.
        """
        seen = elapsed_s / self._experiment.workload.min_window_s
        if interim is None or 0 < seen < FIRST_LOOK:
            return False
        upper = interim.mean + BOUND_WIDTHS * (interim.high - interim.mean)
        early = (TRUSTED - min(max(seen, FIRST_LOOK), TRUSTED)) / (TRUSTED - FIRST_LOOK)
        share = (1 - early * (1 - EARLY_SHARE)) * (1 - self._experiment.search.tie_relative)
        return self._loses(elapsed_s, upper, self._bar * share)

    def is_over(self, measurements: Sequence[Measurement]) -> bool:
        """Whether the levels that are left need not be measured: the deciding one was measured whole and lies below
        the bar. Finalists are chosen by these very values, so no interval is needed."""
        deciding = objective.level(self._experiment)
        return any(
            item.concurrency == deciding
            and item.valid
            and self._loses(item.window_s, item.output_tok_per_s.mean, self._bar)
            for item in measurements
        )

    def _loses(self, elapsed_s: float, reached: float, needed: float) -> bool:
        if not self._active or reached >= needed:
            return False
        when = f"after {elapsed_s:.1f} s" if elapsed_s else "in its warm-up"
        self.reason = f"{when} at most {reached:.0f} tok/s, a finalist needs {self._bar:.0f}"
        return True
