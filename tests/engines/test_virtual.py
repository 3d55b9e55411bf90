"""The virtual host: as the scheduler would, deterministic, and never by the forecast's grace."""

from __future__ import annotations

import itertools
import random

import pytest

from bench.engines.protocol import Calibration, ServerConfig
from bench.engines.sglang.memory import calibrate, forecast
from bench.engines.simulator.acceptance import Acceptance
from bench.engines.simulator.options import H200, Disturbance
from bench.engines.simulator.scheduler import Request, Scheduler, run_closed_loop
from bench.engines.simulator.virtual import SimulatedHost, SimulatedLaunch
from bench.experiment import PromptSpec, WorkloadSpec
from bench.outcome import Cause, OutcomeKind, Phase
from tests.engines.simulated import shape

MTP = {"speculative_algorithm": "NEXTN", "speculative_num_steps": 3, "speculative_eagle_topk": 1}
HALF = {"mamba_ssm_dtype": "bfloat16"}


def config(**flags: object) -> ServerConfig:
    values = {"attention_backend": "triton", "mem_fraction_static": 0.8, **flags}
    return ServerConfig(tuple(sorted(values.items())))  # type: ignore[arg-type]


def workload(prompt: int = 128, output: int = 128) -> WorkloadSpec:
    return WorkloadSpec("w", PromptSpec("text", prompt), (1, 32), output)


def host(version: str = "0.5.16", **options: object) -> SimulatedHost:
    return SimulatedHost(shape(), H200, version=version, **options)  # type: ignore[arg-type]


def stepped(launch: SimulatedLaunch, wanted: WorkloadSpec, concurrency: int) -> float:
    """Output tokens per second of the same server, step by step; the first requests are cut short to spread ages."""
    state = launch.steady_state(wanted, concurrency)
    acceptance = launch.model.acceptance(wanted.temperature)
    scheduler = Scheduler(launch.model.plan, launch.model.times, hybrid=True, rng=random.Random(1))
    output, prompt = wanted.output_tokens, wanted.prompts.input_tokens

    def request(number: int, now: float) -> Request:
        tokens = max(1, round(output * (number + 1) / concurrency)) if number < concurrency else output
        return Request(str(number), prompt, tokens, now, acceptance=acceptance)

    round_s = state.steps * state.cycle_s * concurrency / state.running
    until = {1: 60, 8: 20}.get(concurrency, 7) * round_s
    done = [item for item in run_closed_loop(scheduler, concurrency, request, until_s=until) if item.finished_s]
    done = [item for item in done if (item.finished_s or 0) > 2 * round_s]
    first, last = done[0].finished_s or 0.0, done[-1].finished_s or 0.0
    return sum(item.output for item in done[1:]) / (last - first)


@pytest.mark.parametrize(
    "flags",
    [
        {},
        HALF,
        {**HALF, **MTP},
        {"disable_radix_cache": True, "max_running_requests": 48},
        {"chunked_prefill_size": 1024},
    ],
    ids=["base", "bf16", "mtp", "no_radix", "small_chunk"],
)
@pytest.mark.parametrize("concurrency", [1, 8, 64])
@pytest.mark.parametrize(("prompt", "output"), [(128, 128), (512, 1024), (2048, 256)])
def test_the_formula_agrees_with_the_scheduler_within_5_percent(
    flags: dict[str, object], concurrency: int, prompt: int, output: int
) -> None:
    launch = host().launch(config(**flags))
    wanted = workload(prompt, output)
    told = launch.steady_state(wanted, concurrency).output_tok_per_s
    assert told == pytest.approx(stepped(launch, wanted, concurrency), rel=0.05)


def test_the_same_seed_gives_the_same_numbers_whatever_was_launched_before() -> None:
    disturbed = Disturbance.drawn(3)
    one, other = host(disturbance=disturbed, seed=3), host(disturbance=disturbed, seed=3)
    other.launch(config(**MTP)).measure(workload(), 8)
    first = one.launch(config()).measure(workload(), 8)
    assert first == other.launch(config()).measure(workload(), 8)
    assert first != one.launch(config()).measure(workload(), 8, attempt=1)
    assert first != host(disturbance=disturbed, seed=4).launch(config()).measure(workload(), 8)


def test_noise_is_what_was_asked_for() -> None:
    launch = host(disturbance=Disturbance(noise=0.02)).launch(config())
    truth = launch.steady_state(workload(), 16).output_tok_per_s
    seen = []
    for attempt in range(300):
        measured = launch.measure(workload(), 16, attempt=attempt).measurement
        assert measured is not None
        seen.append(measured.output_tok_per_s.mean / truth - 1)
    mean = sum(seen) / len(seen)
    assert abs(mean) < 0.004
    assert (sum((value - mean) ** 2 for value in seen) / len(seen)) ** 0.5 == pytest.approx(0.02, rel=0.15)


def test_a_stop_ends_the_window_early() -> None:
    launch = host(disturbance=Disturbance(noise=0.02)).launch(config())
    whole = launch.measure(workload(), 16)
    cut = launch.measure(workload(), 16, should_stop=lambda seconds, interval: seconds > 1)
    assert cut.stopped
    assert cut.duration_s < whole.duration_s


def test_a_stop_in_the_warm_up_spares_the_rest_of_it() -> None:
    launch = host(disturbance=Disturbance(noise=0.02)).launch(config())
    whole = launch.measure(workload(), 16)
    cut = launch.measure(workload(), 16, should_stop=lambda seconds, interval: interval is not None)
    assert cut.stopped
    assert whole.measurement is not None
    assert cut.duration_s <= whole.measurement.warmup_s


def test_what_does_not_fit_dies_with_the_engine_s_own_line() -> None:
    outcome = host("0.5.15").launch(config(mem_fraction_static=0.4, **MTP)).outcome
    assert outcome is not None
    assert (outcome.kind, outcome.cause) == (OutcomeKind.INFEASIBLE, Cause.OOM_GPU_STATE_CACHE)
    assert "--max-running-requests" in [advice.flag for advice in outcome.flags]


def test_what_is_refused_is_rejected() -> None:
    outcome = host("0.5.15").launch(config(mamba_radix_cache_strategy="no_buffer")).outcome
    assert outcome is not None
    assert (outcome.kind, outcome.phase) == (OutcomeKind.REJECTED, Phase.ARGS)


def test_0_5_15_dies_at_a_full_batch_and_serves_below_it() -> None:
    launch = host("0.5.15").launch(config(**HALF, **MTP))
    assert launch.outcome is None
    limit = launch.model.plan.max_running_requests
    assert launch.measure(workload(), limit - 1).outcome is None
    died = launch.measure(workload(), limit).outcome
    assert died is not None
    assert died.cause is Cause.ENGINE_CRASH
    assert host("0.5.16").launch(config(**HALF, **MTP)).measure(workload(), limit).outcome is None


def test_a_disturbed_host_surprises_the_forecast_until_it_has_launched_once() -> None:
    """Overhead and heavier weights cost tokens that the config alone does not show, and a launch does."""
    disturbed = Disturbance(overhead_bytes=float(1 << 30), weight_scale=1.05)
    launch = host("0.5.15", disturbance=disturbed).launch(config())
    flags = dict(config().flags)
    blind = forecast(flags, version="0.5.15", shape=shape(), hardware=H200)
    taught = forecast(
        flags, version="0.5.15", shape=shape(), hardware=H200, calibration=calibrate(Calibration(), launch.facts)
    )
    assert launch.facts.kv_tokens is not None
    assert blind.kv_tokens is not None
    assert blind.kv_tokens > 1.05 * launch.facts.kv_tokens
    assert taught.kv_tokens == pytest.approx(launch.facts.kv_tokens, rel=0.005)


def test_disturbances_stay_in_their_bounds() -> None:
    for seed in range(50):
        drawn = Disturbance.drawn(seed)
        assert 0 <= drawn.overhead_bytes <= 1 << 30
        assert 1 <= drawn.weight_scale <= 1.05
        assert 0.9 <= drawn.step_scale <= 1.1


def test_acceptance_grows_with_steps_and_ever_less() -> None:
    lengths = []
    for steps in range(1, 7):
        flags = {**MTP, "speculative_num_steps": steps}
        lengths.append(host().launch(config(**flags)).model.acceptance(0.0).mean)
    gains = [after - before for before, after in itertools.pairwise(lengths)]
    assert all(gain > 0 for gain in gains)
    assert gains == sorted(gains, reverse=True)


def test_sampled_acceptance_has_its_mean() -> None:
    launch = host().launch(config(**MTP))
    rng = random.Random(0)
    for acceptance in (launch.model.acceptance(0.0), Acceptance.of(launch.model.settings, simulated_length=2.4)):
        drawn = sum(acceptance.tokens(rng.random()) for _ in range(50_000)) / 50_000
        assert drawn == pytest.approx(acceptance.mean, rel=0.01)


def test_a_shared_prefix_saves_prefill() -> None:
    launch = host().launch(config())
    shared = WorkloadSpec("w", PromptSpec("shared_prefix", 2048, shared_prefix_share=0.5), (8,), 64)
    assert launch.steady_state(shared, 8).cached_tokens == 1024
    alone = launch.steady_state(workload(2048, 64), 8)
    assert launch.steady_state(shared, 8).output_tok_per_s > 1.1 * alone.output_tok_per_s
