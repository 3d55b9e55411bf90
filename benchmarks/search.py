"""python -m benchmarks.search +experiment=NAME [OVERRIDES] seeds=20: the search, measured on simulated servers.

Drives the study and the finalists that a sweep uses against simulated servers in virtual time, one whole search per
seed. Each seed has a host of its own, off from what the forecast expects by up to 1 GiB of memory, 5 % of weights and
10 % of step times, with 2 % of noise on each measurement. The truth is the simulator's steady state without noise.

Prints one JSON line per seed and one with the summary. Own words beside Hydra overrides:

    seeds=20            how many, from 0
    policy=ours         or random, tpe_fail (crash = FAIL), tpe_constraints (all three without forecast and recipes),
                        forecast_tpe (TPE behind our forecast, with recipes)
    --all               every space of this file with every policy (or the given one): the table of docs/search.md
    --pruning           the same candidates on the same hosts with and without pruning, on every space of this file
    space=L40S          of these, only those whose names contain this
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from scipy import stats

from bench import config, engines
from bench.engines.protocol import Candidate, RefusedError, ServerConfig
from bench.engines.sglang.engine import SglangEngine
from bench.engines.simulator.options import Disturbance
from bench.engines.simulator.virtual import SimulatedHost
from bench.experiment import Experiment
from bench.load.measurement import Measurement
from bench.outcome import OUT_OF_MEMORY, Cause, Outcome, OutcomeKind, Phase
from bench.records import RunFolder, Times, TrialRecord
from bench.search import finalists, objective
from bench.search.pruning import Pruning
from bench.search.space import Space
from bench.search.study import Proposal, Study

MAX_ENUMERATED = 20_000  # canonical points up to which the best is the enumerated one; else as many are sampled
MAX_POINTS = 200_000  # points that are looked at to find out
# Points that are looked at on each seed's host: so many, and all that reach this share of the best on a plain host.
LEAST_PROMISING, PROMISING = 3000, 0.8
ASCENT_STARTS = 5
TRIALS = 40
NEAR = 0.95
POLICIES = {
    "ours": ["search.sampler=pool"],
    "forecast_tpe": ["search.sampler=tpe"],
    "random": ["search.sampler=random", "search.forecast=off", "space.recipes=[]"],
    "tpe_fail": ["search.sampler=tpe", "search.forecast=off", "space.recipes=[]"],
    "tpe_constraints": ["search.sampler=tpe", "search.forecast=off", "space.recipes=[]"],
}


_DENSE_SMALL = [
    "space.parameters.max_running_requests={choices: [null, 4, 8, 16, 32], memory: up}",
    "space.parameters.cuda_graph_max_bs_decode={choices: [null, 4, 8, 16, 32], memory: up}",
    "space.parameters.schedule_policy=null",
    "space.parameters.schedule_conservativeness=null",
]
_HYBRID_SMALL = [
    "engine=simulator",
    "engine.flags={}",
    "engine.simulated_acceptance=null",
    "space.parameters.schedule_policy=null",
    "space.parameters.schedule_conservativeness=null",
    "space.parameters.chunked_prefill_size=null",
    "space.parameters.mamba_full_memory_ratio=null",
    "space.parameters.mamba_radix_cache_strategy=null",
    "space.parameters.disable_overlap_schedule=null",
    "space.parameters.max_running_requests={high: 88, step: 16}",
    "space.parameters.mem_fraction_static.step=0.04",
]
# Hybrid and dense models, 24 to 180 GB, with and without speculation, 4 to 128 requests, 400 to two billion points.
SPACES = {
    "27B hybrid, H200, quick": ["+experiment=quickstart"],
    "27B hybrid, RTX PRO 6000": ["+experiment=mtp_rtx_pro_6000"],
    "8B dense, RTX 4090": ["+experiment=baseline_no_spec", "hardware=rtx_4090", "workload.levels=[1,8]", *_DENSE_SMALL],
    "27B hybrid, B200": ["+experiment=mtp_b200"],
    "8B dense, H100": ["+experiment=baseline_no_spec"],
    "27B hybrid in FP8, L40S": [
        "+experiment=mtp_rtx_pro_6000",
        "hardware=l40s",
        "model.quantization=fp8",
        "workload.levels=[1,4]",
    ],
    "8B dense with EAGLE3, A100": [
        "+experiment=eagle3",
        "hardware=a100_80g",
        "model.draft_path=draft",
        "workload.levels=[4,32]",
    ],
    "27B hybrid, H200, small": ["+experiment=mtp_h200", *_HYBRID_SMALL],
}
PRUNING_TRIALS = 20
OWN_WORDS = ("seeds=", "policy=", "space=")
MEMORY_FOLDER = Path("/dev/shm")  # journals are synced to disk line by line, which is most of a simulated sweep's time


class FailStudy(Study):
    """Plain TPE as most tuners use it: a trial without a value is told as FAIL, which the sampler ignores."""

    def tell(self, proposal: Proposal, record: TrialRecord) -> None:
        if record.value is None and proposal.trial is not None:
            self._remember(record)
            self._drop(proposal.trial)
        else:
            super().tell(proposal, record)


def quiet(host: SimulatedHost) -> SimulatedHost:
    """The same host without noise."""
    disturbance = replace(host.disturbance, noise=0.0)
    return SimulatedHost(host.shape, host.hardware, version=host.version, disturbance=disturbance, seed=host.seed)


@dataclass(frozen=True)
class Truth:
    """What a host really gives, without noise, and the best that is known of it."""

    host: SimulatedHost
    experiment: Experiment
    best: float
    near_share: float

    @classmethod
    def of(cls, experiment: Experiment, engine: SglangEngine, host: SimulatedHost, points: Points) -> Truth:
        truth = cls(quiet(host), experiment, 0.0, 0.0)
        found = [(truth.goodness(points.configs[index]), index) for index in points.promising(experiment, host)]
        best = max(goodness for goodness, _ in found)
        near = sum(goodness >= NEAR * best for goodness, _ in found) / len(points.configs)
        if not points.enumerated:
            for _, index in sorted(found, reverse=True)[:ASCENT_STARTS]:
                best = max(best, truth.ascend(engine, points.candidates[index]))
        return replace(truth, best=best, near_share=near)

    def goodness(self, server: ServerConfig) -> float:
        """The objective, inverted where less is better; zero where it fails or misses a limit."""
        launch = self.host.launch(server)
        workload = self.experiment.workload
        if launch.outcome is not None or any(launch.crash(workload, level) for level in workload.levels):
            return 0.0
        measured = launch.measure(workload, objective.level(self.experiment)).measurement
        score = objective.score(self.experiment, [measured] if measured else [])
        if score is None or not score.meets_limits:
            return 0.0
        return score.value if objective.maximized(self.experiment.objective) else 1 / score.value

    def ascend(self, engine: SglangEngine, candidate: Candidate) -> float:
        """The best that is reached from a point by changing one parameter at a time."""
        space, best, seed = Space(self.experiment.space), 0.0, 0
        while True:
            steps = []
            for neighbour in [candidate, *space.neighbours(candidate, seed=seed)]:
                server = canonical(engine, neighbour)
                steps.append((self.goodness(server) if server else 0.0, neighbour))
            reached, candidate = max(steps, key=lambda step: step[0])
            if reached <= best:
                return best
            best, seed = reached, seed + 1


@dataclass(frozen=True)
class Points:
    """Distinct canonical points of a space: all of them, or a fixed sample."""

    candidates: list[Candidate]
    configs: list[ServerConfig]
    enumerated: bool
    ranked: list[int] = field(default_factory=list)

    def promising(self, experiment: Experiment, host: SimulatedHost) -> list[int]:
        """Indices of the better part on a host that is not disturbed. A disturbance only takes memory away and makes
        all steps slower alike, so the best on any host is among them."""
        if not self.ranked:
            plain = Truth(SimulatedHost(host.shape, host.hardware, version=host.version), experiment, 0.0, 0.0)
            values = [plain.goodness(point) for point in self.configs]
            order = sorted(range(len(values)), key=lambda index: -values[index])
            kept = max(LEAST_PROMISING, sum(value >= PROMISING * values[order[0]] for value in values))
            self.ranked.extend(order[:kept])
        return self.ranked

    @classmethod
    def of(cls, engine: SglangEngine, space: Space) -> Points:
        if space.size is not None and space.size <= MAX_POINTS:
            found = _distinct(engine, space.enumerate(), MAX_ENUMERATED)
            if len(found) <= MAX_ENUMERATED:
                return cls([item for item, _ in found], [item for _, item in found], True)
        found = _distinct(engine, space.sample(20 * MAX_ENUMERATED, seed=0), MAX_ENUMERATED - 1)
        return cls([item for item, _ in found], [item for _, item in found], False)


def _distinct(
    engine: SglangEngine, candidates: Iterator[Candidate], limit: int
) -> list[tuple[Candidate, ServerConfig]]:
    """Those that the engine would run, each server once, at most one more than the limit."""
    found: dict[str, tuple[Candidate, ServerConfig]] = {}
    for candidate in candidates:
        server = canonical(engine, candidate)
        if server is not None:
            found.setdefault(server.key, (candidate, server))
        if len(found) > limit:
            break
    return list(found.values())


def canonical(engine: SglangEngine, candidate: Candidate) -> ServerConfig | None:
    try:
        return engine.canonical(candidate)
    except RefusedError:
        return None


def trial(
    experiment: Experiment, engine: SglangEngine, host: SimulatedHost, proposal: Proposal, bar: float | None
) -> TrialRecord:
    """What ``bench.trial.run_trial`` does, with a simulated host in place of a process."""
    times, facts, measured = Times(), None, list[Measurement]()
    outcome = proposal.skip or Outcome(OutcomeKind.COMPLETE)
    if proposal.skip is None:
        launch = host.launch(proposal.config)
        facts, times = launch.facts, replace(times, startup_s=launch.start_s)
        judge = Pruning(experiment, proposal.role, bar)
        levels = judge.levels(facts.max_running_requests)
        outcome = launch.outcome or outcome
        for level in levels if launch.outcome is None else []:
            deciding = level == objective.level(experiment)
            got = launch.measure(
                experiment.workload,
                level,
                attempt=proposal.number,
                should_stop=judge.should_stop if deciding else None,
            )
            times = replace(times, measure_s=times.measure_s + got.duration_s)
            measured += [got.measurement] if got.measurement else []
            outcome = got.outcome or outcome
            if got.stopped or (level != levels[-1] and judge.is_over(measured)):
                outcome = Outcome(OutcomeKind.PRUNED, Cause.CANNOT_WIN, Phase.MEASURE, judge.reason)
            if outcome.kind is not OutcomeKind.COMPLETE:
                break
    score = objective.score(experiment, measured)
    return TrialRecord(
        number=proposal.number,
        role=proposal.role,
        candidate=proposal.candidate,
        config=proposal.config,
        outcome=outcome,
        engine=f"{engine.name} {engine.version}",
        simulated=True,
        started_at=0.0,
        optuna_number=proposal.trial.number if proposal.trial else None,
        forecast=proposal.forecast,
        facts=facts,
        measurements=tuple(measured),
        value=score.value if score and outcome.kind is OutcomeKind.COMPLETE else None,
        objective_level=objective.level(experiment),
        times=replace(times, total_s=times.startup_s + times.measure_s),
    )


def search(
    experiment: Experiment, engine: SglangEngine, host: SimulatedHost, truth: Truth, kind: type[Study] = Study
) -> dict[str, object]:
    """One whole search; what it took and what it found."""
    clock = time.process_time()
    with tempfile.TemporaryDirectory(dir=MEMORY_FOLDER if MEMORY_FOLDER.exists() else None) as folder:
        study = kind(experiment, engine, Space(experiment.space), RunFolder(Path(folder)), [])
        while study.launches < experiment.search.trials and (proposal := study.ask()) is not None:
            study.tell(proposal, trial(experiment, engine, host, proposal, study.bar))
    again = list[TrialRecord]()
    while turn := finalists.next_turn(experiment, study.records, again, frozenset()):
        number, record = turn
        proposal = Proposal(len(study.records) + len(again), "finalist", record.candidate, record.config)
        again.append(replace(trial(experiment, engine, host, proposal, None), round=number))
    chosen = finalists.choose(experiment, study.records, again)
    choice = finalists.winner(experiment, finalists.standings(experiment, chosen, again))
    launches = [record for record in study.records if record.launched]
    ratios = [truth.goodness(record.config) / truth.best if truth.best else 0.0 for record in launches]
    return {
        "seed": host.seed,
        "launches_to_95": next((index for index, ratio in enumerate(ratios, 1) if ratio >= NEAR), None),
        "launches": len(launches),
        "out_of_memory": sum(record.outcome.cause in OUT_OF_MEMORY for record in launches),
        "other_failures": sum(
            record.value is None
            and record.outcome.cause not in OUT_OF_MEMORY
            and record.outcome.kind is not OutcomeKind.PRUNED
            for record in launches
        ),
        "pruned": sum(record.outcome.kind is OutcomeKind.PRUNED for record in launches),
        "baseline_over_best": round(ratios[0], 4),
        "found_over_best": round(max(ratios), 4),
        "pick_over_best": round(truth.goodness(choice[0].config) / truth.best, 4) if choice and truth.best else 0.0,
        "measuring_s": round(sum(record.times.measure_s for record in study.records), 1),
        "search_cpu_s": round(time.process_time() - clock, 2),
    }


def summary(
    experiment: Experiment, policy: str, rows: Sequence[dict[str, object]], points: Points, truths: Sequence[Truth]
) -> dict[str, object]:
    never = experiment.search.trials + 1
    to_near = sorted(int(str(row["launches_to_95"] or never)) for row in rows)
    picks = [float(str(row["pick_over_best"])) for row in rows]
    worst_tenth = to_near[min(len(to_near) - 1, max(0, -(-len(to_near) * 9 // 10) - 1))]
    return {
        "summary": experiment.name,
        "policy": policy,
        "seeds": len(rows),
        "best_is": "enumerated" if points.enumerated else f"of {len(points.configs)} sampled, with local ascent",
        "canonical_points": len(points.configs) if points.enumerated else f"more than {MAX_ENUMERATED}",
        "share_within_5_percent": round(statistics.fmean(truth.near_share for truth in truths), 4),
        "launches_to_95_median": statistics.median(to_near),
        "launches_to_95_p90": worst_tenth,
        "never_reached": sum(value == never for value in to_near),
        "out_of_memory_max": max(int(str(row["out_of_memory"])) for row in rows),
        "out_of_memory_mean": round(statistics.fmean(int(str(row["out_of_memory"])) for row in rows), 2),
        "other_failures_mean": round(statistics.fmean(int(str(row["other_failures"])) for row in rows), 2),
        "picks_within_2_percent": round(sum(pick >= 0.98 for pick in picks) / len(picks), 3),
        "pick_over_best_mean": round(statistics.fmean(picks), 4),
        "measuring_s_mean": round(statistics.fmean(float(str(row["measuring_s"])) for row in rows), 1),
        "search_cpu_s_mean": round(statistics.fmean(float(str(row["search_cpu_s"])) for row in rows), 2),
    }


def load(words: Sequence[str]) -> tuple[Experiment, SglangEngine]:
    """The experiment with the simulator's rules and the named card, whatever GPU is here."""
    words = [f"search.trials={TRIALS}", *words]
    experiment = config.load([*words, "engine.name=simulator"], command="benchmarks.search")
    if experiment.engine.version is None:
        experiment = config.load([*words, "engine=simulator"], command="benchmarks.search")
    engine = engines.create(experiment)
    assert isinstance(engine, SglangEngine)
    return experiment, engine


def hosts(engine: SglangEngine, seeds: int) -> list[SimulatedHost]:
    return [
        SimulatedHost(
            engine.shape, engine.hardware, version=engine.version, disturbance=Disturbance.drawn(seed), seed=seed
        )
        for seed in range(seeds)
    ]


def compare(spaces: Mapping[str, Sequence[str]], seeds: int, policies: Sequence[str]) -> None:
    """Policies on every space."""
    for name, words in spaces.items():
        experiment, engine = load(words)
        points = Points.of(engine, Space(experiment.space))
        truths = [Truth.of(experiment, engine, host, points) for host in hosts(engine, seeds)]
        for policy in policies:
            experiment, _ = load([*words, *POLICIES[policy]])
            rows = run(experiment, engine, hosts(engine, seeds), truths, policy)
            print(json.dumps({**summary(experiment, policy, rows, points, truths), "space": name}), flush=True)


def compare_pruning(spaces: Mapping[str, Sequence[str]], seeds: int) -> None:
    """Random candidates, which do not depend on what was measured, so that both searches launch the same."""
    worse = pairs = 0
    saved = []
    for name, words in spaces.items():
        common = [*words, "search.sampler=random", f"search.trials={PRUNING_TRIALS}"]
        experiment, engine = load(common)
        whole = replace(experiment, search=replace(experiment.search, prune=False))
        truths = [
            Truth(quiet(host), experiment, 1.0, 0.0) for host in hosts(engine, seeds)
        ]  # picks are compared with each other, the best is not needed
        with_pruning = run(experiment, engine, hosts(engine, seeds), truths, "random")
        without = run(whole, engine, hosts(engine, seeds), truths, "random")
        here = sum(
            float(str(a["pick_over_best"])) < 0.98 * float(str(b["pick_over_best"]))
            for a, b in zip(with_pruning, without, strict=True)
        )
        better = sum(
            float(str(b["pick_over_best"])) < 0.98 * float(str(a["pick_over_best"]))
            for a, b in zip(with_pruning, without, strict=True)
        )
        spent = [sum(float(str(row["measuring_s"])) for row in rows) for rows in (with_pruning, without)]
        saved.append(1 - spent[0] / spent[1])
        worse, pairs = worse + here, pairs + seeds
        print(
            json.dumps(
                {"space": name, "pairs": seeds, "worse": here, "better": better, "time_saved": round(saved[-1], 3)}
            ),
            flush=True,
        )
    interval = stats.binomtest(worse, pairs).proportion_ci(method="exact")
    print(
        json.dumps(
            {
                "pairs": pairs,
                "worse": worse,
                "worse_share_interval_95": [round(interval.low, 4), round(interval.high, 4)],
                "time_saved_mean": round(statistics.fmean(saved), 3),
                "time_saved_least": round(min(saved), 3),
            }
        )
    )


def run(
    experiment: Experiment,
    engine: SglangEngine,
    machines: Sequence[SimulatedHost],
    truths: Sequence[Truth],
    policy: str,
) -> list[dict[str, object]]:
    kind = FailStudy if policy == "tpe_fail" else Study
    return [
        search(replace(experiment, search=replace(experiment.search, seed=host.seed)), engine, host, truth, kind)
        for host, truth in zip(machines, truths, strict=True)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    given = dict(word.split("=", 1) for word in words if word.startswith(OWN_WORDS))
    words = [word for word in words if not word.startswith(OWN_WORDS)]
    seeds, policy = int(given.get("seeds", 20)), given.get("policy", "ours")
    if policy not in POLICIES:
        print(f"policy={policy}: expected one of {', '.join(POLICIES)}", file=sys.stderr)
        return 2
    spaces = {name: words for name, words in SPACES.items() if given.get("space", "").lower() in name.lower()}
    if not spaces:
        print(f"space={given['space']}: in no name of {'; '.join(SPACES)}", file=sys.stderr)
        return 2
    if words == ["--all"]:
        compare(spaces, seeds, [policy] if "policy" in given else list(POLICIES))
        return 0
    if words == ["--pruning"]:
        compare_pruning(spaces, seeds)
        return 0
    try:
        experiment, engine = load([*words, *POLICIES[policy]])
    except config.ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    points = Points.of(engine, Space(experiment.space))
    rows, truths = [], []
    for host in hosts(engine, seeds):
        truths.append(Truth.of(experiment, engine, host, points))
        rows += run(experiment, engine, [host], truths[-1:], policy)
        print(json.dumps(rows[-1]), flush=True)
    print(json.dumps(summary(experiment, policy, rows, points, truths)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
