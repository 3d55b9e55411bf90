"""Whole searches on simulated hosts that are not as the forecast expects: what they find, and what they waste."""

from dataclasses import replace

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from bench.engines.protocol import Calibration
from bench.engines.simulator.options import Disturbance
from bench.engines.simulator.virtual import SimulatedHost
from bench.outcome import OUT_OF_MEMORY, Cause, Outcome, OutcomeKind, Phase
from bench.records import RunFolder
from bench.search import drift, objective, pool
from bench.search.space import Space
from bench.search.study import Study
from benchmarks import search as benchmark
from tests import build

SMALL = [
    "+experiment=mtp_rtx_pro_6000",
    "search.trials=12",
    "space.parameters.schedule_policy=null",
    "space.parameters.schedule_conservativeness=null",
    "space.parameters.attention_backend=null",
    "space.parameters.enable_hierarchical_cache=null",
    "space.parameters.hicache_ratio=null",
    "space.parameters.hicache_write_policy=null",
    "space.parameters.mamba_full_memory_ratio=null",
    "space.parameters.max_mamba_cache_size=null",
    "space.recipes=[]",
]


@pytest.fixture(scope="module")
def small():
    return benchmark.load(SMALL)


def searched(experiment, engine, host, folder, launches):
    """Records of a search that is driven as a sweep does."""
    study = Study(experiment, engine, Space(experiment.space), RunFolder(folder), [])
    while study.launches < launches and (proposal := study.ask()) is not None:
        study.tell(proposal, benchmark.trial(experiment, engine, host, proposal, study.bar))
    return study


@pytest.mark.parametrize("seed", [0, 1])
def test_a_few_launches_find_what_a_sample_of_the_space_has_to_offer(small, tmp_path, seed):
    experiment, engine = small
    host = benchmark.hosts(engine, seed + 1)[seed]
    truth = benchmark.Truth(benchmark.quiet(host), experiment, 1.0, 0.0)
    sample = [benchmark.canonical(engine, item) for item in Space(experiment.space).sample(400, seed=9)]
    best = max(truth.goodness(item) for item in sample if item is not None)
    study = searched(experiment, engine, host, tmp_path, 9)
    assert max(truth.goodness(record.config) for record in study.records) >= 0.95 * best
    assert sum(record.outcome.cause in OUT_OF_MEMORY for record in study.records if record.launched) <= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "most"),
    [
        # its edge is a server that starts with an empty state cache and serves nothing
        pytest.param(["+experiment=mtp_rtx_pro_6000", "engine.version=0.5.12", "workload.levels=[1]"], 2, id="hangs"),
        # every server that speculates crashes as soon as its batch is full, whatever else it sets
        pytest.param(
            [
                "+experiment=mtp_h200",
                "engine=simulator",
                "engine.flags={}",
                "engine.simulated_acceptance=null",
                "workload.levels=[128]",
            ],
            8,
            id="crashes when it is full",
        ),
        # its fastest servers lie where a host that takes more than was forecast runs out of memory
        pytest.param(
            ["+experiment=baseline_no_spec", "hardware=rtx_4090", "workload.levels=[32]", "engine.version=0.5.10"],
            2,
            id="runs out of memory",
        ),
    ],
)
def test_launches_are_not_spent_beyond_an_edge_that_some_have_shown(words, most, tmp_path):
    experiment, engine = benchmark.load(words)
    study = searched(experiment, engine, benchmark.hosts(engine, 1)[0], tmp_path, 28)
    failed = [record for record in study.records if record.launched and not record.outcome.started]
    assert len(failed) <= most


def test_the_same_seed_makes_the_same_search(small, tmp_path):
    experiment, engine = small
    runs = [searched(experiment, engine, benchmark.hosts(engine, 1)[0], tmp_path, 5) for _ in range(2)]
    first, second = ([record.config.key for record in run.records] for run in runs)
    assert first == second


def test_no_server_is_launched_twice_but_the_baseline(small, tmp_path):
    experiment, engine = small
    study = searched(experiment, engine, benchmark.hosts(engine, 1)[0], tmp_path, 11)
    keys = [record.config.key for record in study.records if record.role not in drift.BASELINES]
    assert len(set(keys)) == len(keys)


def test_limits_steer_the_search(tmp_path):
    experiment, engine = benchmark.load(
        [*SMALL, "objective=throughput_under_limits", "objective.limits={tpot_s.p95: 0.02}"]
    )
    study = searched(experiment, engine, benchmark.hosts(engine, 1)[0], tmp_path, 9)
    scores = [objective.score(experiment, record.measurements) for record in study.records]
    assert any(score is not None and score.meets_limits for score in scores)


class SettlingHost(SimulatedHost):
    """A host whose first launches are slower by a quarter, as they compile kernels."""

    launches = 0

    def launch(self, config):
        SettlingHost.launches += 1
        scale = 1 / 0.75 if SettlingHost.launches <= 6 else 1.0
        disturbance = replace(Disturbance(noise=0.02), step_scale=scale)
        host = SimulatedHost(self.shape, self.hardware, version=self.version, disturbance=disturbance, seed=self.seed)
        return host.launch(config)


def test_values_of_a_host_that_was_settling_are_forgotten_and_the_best_of_them_launched_again(small, tmp_path):
    experiment, engine = small
    experiment = replace(experiment, search=replace(experiment.search, trials=drift.LEAST_TRIALS))
    SettlingHost.launches = 0
    host = SettlingHost(engine.shape, engine.hardware, version=engine.version, seed=0)
    study = searched(experiment, engine, host, tmp_path, drift.ANCHOR_AFTER + 6)
    anchor = next(record for record in study.records if record.role == "anchor")
    assert study.stale == set(range(anchor.number))
    before = {record.config.key for record in study.records if record.number < anchor.number}
    again = [r for r in study.records if r.number > anchor.number and r.config.key in before]
    assert again
    assert study.bar <= max(r.value for r in study.records if r.number >= anchor.number and r.value)
    resumed = Study(experiment, engine, Space(experiment.space), RunFolder(tmp_path), study.records)
    assert resumed.stale == study.stale
    assert resumed.bar == study.bar


GPU_BUSY = Outcome(OutcomeKind.INFRASTRUCTURE, Cause.GPU_BUSY, Phase.ARGS)


def the_hosts_fault(record):
    return replace(record, outcome=GPU_BUSY, measurements=(), value=None)


def test_what_the_host_failed_is_no_evidence_against_a_configuration_in_a_resumed_search_either(small, tmp_path):
    experiment, engine = small
    experiment = replace(experiment, search=replace(experiment.search, sampler="tpe"))
    study = searched(experiment, engine, benchmark.hosts(engine, 1)[0], tmp_path, 4)
    told = [record for record in study.records if record.optuna_number is not None]
    records = [the_hosts_fault(record) if record is told[-1] else record for record in study.records]
    Study(experiment, engine, Space(experiment.space), RunFolder(tmp_path), records)
    kept = optuna.load_study(
        study_name=experiment.name, storage=JournalStorage(JournalFileBackend(str(RunFolder(tmp_path).journal)))
    )
    states = {trial.user_attrs["record"]: trial.state for trial in kept.trials}
    assert states[told[-1].number] is TrialState.FAIL
    assert states[told[0].number] is TrialState.COMPLETE


def test_a_recipe_that_the_host_failed_is_launched_again_before_anything_else(small, tmp_path):
    experiment, engine = small
    recipes = ({"mem_fraction_static": 0.8}, {"mem_fraction_static": 0.75})
    experiment = replace(experiment, space=replace(experiment.space, recipes=recipes))
    host = benchmark.hosts(engine, 1)[0]
    study = Study(experiment, engine, Space(experiment.space), RunFolder(tmp_path), [])
    baseline = study.ask()
    study.tell(baseline, benchmark.trial(experiment, engine, host, baseline, study.bar))
    recipe = study.ask()
    assert recipe.role == "recipe"
    study.tell(recipe, the_hosts_fault(benchmark.trial(experiment, engine, host, recipe, study.bar)))
    study.retry(recipe)
    again = study.ask()
    assert (again.role, again.config.key) == ("recipe", recipe.config.key)


def test_acceptance_that_a_launch_showed_reaches_every_candidate(small, monkeypatch):
    # The first launch that speculates shows both: how many drafts are accepted, and what memory the host has.
    experiment, engine = small
    monkeypatch.setattr(pool, "FRONT", 5)

    def forecast_after(calibration):
        taught = pool.Pool(experiment, engine, Space(experiment.space), seed=0)
        taught._draw()
        taught._foresee(Calibration(), 0.7)
        taught._foresee(calibration, 0.9)
        entries = [entry for entry in taught._entries.values() if entry.roofline]
        return {entry.config.key: entry.roofline.tok_per_s for entry in entries if "NEXTN" in str(entry.config.flags)}

    assert forecast_after(Calibration(runtime_bytes=5e9)) == forecast_after(Calibration())


@pytest.mark.parametrize(
    ("values", "bar"),
    [
        ([1000, 990, 980, 970], 980),  # the last of three finalists
        ([1000, 600, 500, 400], 900),  # what lies a tenth below the best is no finalist worth a launch
        ([650, 600, 500, 400], 700),  # the baseline
    ],
)
def test_the_bar_of_a_trial(small, tmp_path, values, bar):
    experiment, engine = small
    study = Study(experiment, engine, Space(experiment.space), RunFolder(tmp_path), [])
    study.records = [build.record(0, 700, role="baseline")]
    study.records += [build.record(number, value) for number, value in enumerate(values, 1)]
    assert study.bar == bar


def test_optuna_is_told_what_each_level_gave_also_of_trials_that_were_stopped(small, tmp_path):
    experiment, engine = small
    study = searched(experiment, engine, benchmark.hosts(engine, 1)[0], tmp_path, 6)
    kept = optuna.load_study(
        study_name=experiment.name, storage=JournalStorage(JournalFileBackend(str(RunFolder(tmp_path).journal)))
    )
    told = {trial.user_attrs["record"]: trial.intermediate_values for trial in kept.trials}
    for record in study.records:
        if record.number in told:
            assert set(told[record.number]) == {item.concurrency for item in record.measurements}
    assert any(told.values())
