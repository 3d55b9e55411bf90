"""What an out-of-memory launch rules out, and what it does not."""

from bench.engines.protocol import Candidate
from bench.experiment import Parameter, SpaceSpec
from bench.outcome import Cause, FlagAdvice, OutcomeKind, Phase
from bench.search import feasibility
from tests import build

SPACE = SpaceSpec(
    "space",
    (
        Parameter("mem_fraction_static", "float", 0.5, 0.95, 0.05),
        Parameter("max_running_requests", "int", 8, 64, memory="up"),
        Parameter("mamba_ssm_dtype", "categorical", choices=("float32", "bfloat16")),
    ),
)


def failed(cause, direction, **values):
    advice = (FlagAdvice("--mem-fraction-static", direction),)
    return build.record(1, None, kind=OutcomeKind.INFEASIBLE, cause=cause, flags=advice, values=values)


def ruled_out(record, **values):
    return feasibility.dominating(Candidate(values), [record], SPACE) is not None


def test_more_requests_at_the_same_fraction_are_not_launched_again():
    record = failed(Cause.OOM_GPU_RUNTIME, "lower", mem_fraction_static=0.9, max_running_requests=32)
    assert ruled_out(record, mem_fraction_static=0.9, max_running_requests=48)
    assert not ruled_out(record, mem_fraction_static=0.9, max_running_requests=16)


def test_opposite_advice_rules_out_opposite_sides():
    small_pool = failed(Cause.OOM_GPU_KV_POOL, "raise", mem_fraction_static=0.6, max_running_requests=32)
    assert ruled_out(small_pool, mem_fraction_static=0.55, max_running_requests=32)
    assert not ruled_out(small_pool, mem_fraction_static=0.8, max_running_requests=32)
    no_slack = failed(Cause.OOM_GPU_GRAPH_CAPTURE, "lower", mem_fraction_static=0.9, max_running_requests=32)
    assert ruled_out(no_slack, mem_fraction_static=0.95, max_running_requests=32)
    assert not ruled_out(no_slack, mem_fraction_static=0.8, max_running_requests=32)


def test_another_value_of_a_parameter_that_is_not_monotone_is_launched():
    record = failed(Cause.OOM_GPU_RUNTIME, "lower", mem_fraction_static=0.9, max_running_requests=32)
    assert not ruled_out(record, mem_fraction_static=0.95, max_running_requests=48, mamba_ssm_dtype="bfloat16")


def test_a_forecast_or_a_crash_rules_nothing_out():
    advice = (FlagAdvice("--mem-fraction-static", "lower"),)
    kind, cause, phase = OutcomeKind.INFEASIBLE, Cause.FORECAST, Phase.FORECAST
    values = {"mem_fraction_static": 0.9}
    forecast = build.record(1, None, kind=kind, cause=cause, phase=phase, flags=advice, values=values)
    assert not ruled_out(forecast, mem_fraction_static=0.95)
    crash = build.record(2, None, kind=OutcomeKind.CRASHED, values={"mem_fraction_static": 0.9})
    assert not ruled_out(crash, mem_fraction_static=0.9)
