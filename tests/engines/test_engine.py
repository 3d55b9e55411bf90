"""SGLang behind the engine protocol: commands, identity, counters, refusals."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import config, engines
from bench.engines.protocol import Calibration, Candidate, EngineError, RefusedError, ServerConfig
from bench.engines.sglang.engine import SglangEngine
from bench.experiment import Experiment

SERVER_INFO = Path(__file__).parents[1] / "fixtures" / "server_info"
MTP = {"speculative_algorithm": "NEXTN", "speculative_num_steps": 3, "speculative_eagle_topk": 1}


def experiment(*arguments: str) -> Experiment:
    return config.load(list(arguments), command="test", clock=lambda: 0.0)


@pytest.fixture(scope="module")
def h200() -> SglangEngine:
    loaded = experiment("+experiment=mtp_h200", "model.path=/models/qwen27b", "engine.version=0.5.15")
    engine = engines.create(loaded)
    assert isinstance(engine, SglangEngine)
    return engine


@pytest.fixture
def report() -> dict[str, Any]:
    """What the server of ``base`` replied on an H200."""
    return dict(json.loads((SERVER_INFO / "h200_0515_base_f80.json").read_text()))


def base(engine: SglangEngine, **more: Any) -> ServerConfig:
    return engine.canonical(Candidate({"mem_fraction_static": 0.8, **more}))


NAME = "/models/qwen27b"  # the recorded server was launched without a name of its own


def test_a_command_is_a_list_that_listens_on_the_loopback_address_only(h200: SglangEngine) -> None:
    command = h200.command(base(h200, **MTP), port=31000, served_model_name="trial-7")
    arguments = list(command.argv)
    assert arguments[:5] == [sys.executable, "-m", "sglang.launch_server", "--model-path", "/models/qwen27b"]
    for option, value in [
        ("--host", "127.0.0.1"),
        ("--port", "31000"),
        ("--served-model-name", "trial-7"),
        ("--speculative-algorithm", "NEXTN"),
        ("--speculative-num-draft-tokens", "4"),
        ("--load-format", "dummy"),
        ("--mem-fraction-static", "0.8"),
    ]:
        assert arguments[arguments.index(option) + 1] == value
    assert "--enable-metrics" in arguments
    assert command.env == (("SGLANG_SIMULATE_ACC_LEN", "2.95"),)


def test_a_wrapper_takes_the_place_of_the_interpreter() -> None:
    loaded = experiment("+experiment=mtp_b200", "engine.command=[docker, run, --gpus, all, image, serve]")
    engine = engines.create(loaded)
    command = engine.command(engine.canonical(Candidate()), port=1, served_model_name="x")
    assert command.argv[:7] == ("docker", "run", "--gpus", "all", "image", "serve", "--model-path")


def test_the_server_that_was_asked_for_has_no_differences(h200: SglangEngine, report: dict[str, Any]) -> None:
    assert h200.differences(base(h200), report, served_model_name=NAME) == ()


def test_the_engines_own_choices_are_no_differences_when_they_were_asked_for(
    h200: SglangEngine, report: dict[str, Any]
) -> None:
    explicit = base(
        h200,
        mamba_radix_cache_strategy="extra_buffer",
        chunked_prefill_size=8192,
        mamba_ssm_dtype="float32",
        schedule_policy="fcfs",
        cuda_graph_bs=[1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 64],
    )
    assert h200.differences(explicit, report, served_model_name=NAME) == ()


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"max_running_requests": 64}, "max_running_requests"),
        ({"mem_fraction_static": 0.82}, "mem_fraction_static"),
        ({"disable_radix_cache": True}, "disable_radix_cache"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype"),
        ({"schedule_policy": "lpm"}, "schedule_policy"),
        ({"cuda_graph_max_bs": 32}, "cuda_graph_max_bs_decode"),
        ({"chunked_prefill_size": 4096}, "chunked_prefill_size"),
        (MTP, "speculative_algorithm"),
    ],
)
def test_another_configuration_is_named(
    h200: SglangEngine, report: dict[str, Any], asked: dict[str, Any], named: str
) -> None:
    config_ = h200.canonical(Candidate({"mem_fraction_static": 0.8, **asked}))
    found = {item.name: item for item in h200.differences(config_, report, served_model_name=NAME)}
    assert named in found


def test_an_implied_choice_that_the_engine_did_not_make_is_named(h200: SglangEngine, report: dict[str, Any]) -> None:
    explicit = base(h200, mamba_radix_cache_strategy="extra_buffer")
    report["mamba_radix_cache_strategy"] = "no_buffer"
    report["internal_states"] = []
    (found,) = h200.differences(explicit, report, served_model_name=NAME)
    assert (found.name, found.asked, found.seen) == ("mamba_radix_cache_strategy", "extra_buffer", "no_buffer")
    assert h200.differences(base(h200), report, served_model_name=NAME) == ()


def test_a_foreign_server_a_foreign_model_and_another_version_are_named(
    h200: SglangEngine, report: dict[str, Any]
) -> None:
    report.update(model_path="/models/other", version="0.5.14", internal_states=[])
    names = [item.name for item in h200.differences(base(h200), report, served_model_name="trial-1")]
    assert names == ["served_model_name", "version", "model_path"]


def test_speculation_that_nobody_asked_for_is_named(h200: SglangEngine, report: dict[str, Any]) -> None:
    report["speculative_algorithm"] = "EAGLE"
    report["internal_states"][0]["speculative_algorithm"] = "EAGLE"
    assert [item.name for item in h200.differences(base(h200), report, served_model_name=NAME)] == [
        "speculative_algorithm"
    ]


def test_nextn_is_reported_as_eagle(h200: SglangEngine, report: dict[str, Any]) -> None:
    resolved = {
        "speculative_algorithm": "EAGLE",
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4,
        "max_running_requests": 48,
    }
    report.update(resolved)
    report["internal_states"] = [resolved]
    asked = base(h200, **MTP, max_running_requests=48)
    assert "max_running_requests" in dict(asked.implied)
    assert h200.differences(asked, report, served_model_name=NAME) == ()


@pytest.mark.parametrize("version", ["0.5.15", "0.5.23"])
def test_a_real_cpu_server_is_recognised(version: str) -> None:
    loaded = experiment("+experiment=cpu_smoke", "model.path=/models/tiny", f"engine.version={version}")
    engine = engines.create(loaded)
    report = json.loads((SERVER_INFO / f"cpu_{version.replace('.', '')}.json").read_text())
    assert engine.differences(engine.canonical(Candidate()), report, served_model_name="/models/tiny") == ()
    asked = engine.canonical(Candidate({"max_running_requests": 4}))
    assert [item.name for item in engine.differences(asked, report, served_model_name="/models/tiny")] == [
        "max_running_requests"
    ]


def test_a_parameter_takes_the_place_of_the_fixed_flag(h200: SglangEngine) -> None:
    assert dict(base(h200).flags)["attention_backend"] == "triton"
    assert dict(base(h200, attention_backend="flashinfer").flags)["attention_backend"] == "flashinfer"


def test_a_refusal_keeps_what_it_would_be_launched_with(h200: SglangEngine) -> None:
    with pytest.raises(RefusedError) as caught:
        base(h200, mamba_radix_cache_strategy="no_buffer")
    assert caught.value.config is not None
    assert {"load_format", "mamba_radix_cache_strategy"} <= set(dict(caught.value.config.flags))


def test_environment_variables_are_parameters_too() -> None:
    loaded = experiment(
        "+experiment=mtp_b200", "++space.parameters.SGLANG_CACHE_MODE={choices: [null, 1, 2], env: true}"
    )
    engine = engines.create(loaded)
    with_it = engine.canonical(Candidate({"SGLANG_CACHE_MODE": 2}))
    assert with_it.env == (("SGLANG_CACHE_MODE", "2"),)
    assert with_it != engine.canonical(Candidate())


def test_counters_are_read_from_the_metrics_page(h200: SglangEngine) -> None:
    page = (
        "# HELP sglang:generation_tokens_total Number of generation tokens processed.\n"
        'sglang:generation_tokens_total{model_name="a",tp_rank="0"} 13456.0\n'
        'sglang:num_running_reqs{model_name="a",tp_rank="0"} 24.0\n'
        'sglang:generation_tokens_histogram_count{model_name="a"} 3\n'
    )
    counters = h200.counters(page)
    assert (counters.generated_tokens, counters.retractions, counters.running_requests) == (13456.0, 0.0, 24.0)
    more = h200.counters(page + 'sglang:num_retracted_requests_total{model_name="a"} 2.0\n')
    assert more.retractions == 2.0
    assert h200.counters("").generated_tokens is None


def test_simulated_acceptance_is_told(h200: SglangEngine) -> None:
    assert h200.acceptance_is_simulated(base(h200, **MTP))
    assert not h200.acceptance_is_simulated(base(h200))


def test_no_engine_and_no_version_says_what_to_give() -> None:
    loaded = experiment("+experiment=mtp_b200")
    with pytest.raises(EngineError, match=r"give e\.g\. engine\.version=") as caught:
        SglangEngine(
            dataclasses.replace(loaded.engine, version=None, command=("docker",)), loaded.model, loaded.hardware
        )
    assert caught.value.key == "engine.version"


def test_the_simulator_gets_card_model_and_version_in_its_environment() -> None:
    loaded = experiment("+experiment=quickstart", "engine.faults=[oom_at_start]", "engine.time_scale=5")
    engine = engines.create(loaded)
    command = engine.command(engine.canonical(Candidate()), port=1, served_model_name="x")
    env = dict(command.env)
    assert command.argv[:3] == (sys.executable, "-m", "bench.simulator")
    assert json.loads(env["BENCH_SIMULATOR_HARDWARE"])["name"] == "h200"
    assert json.loads(env["BENCH_SIMULATOR_MODEL_CONFIG"])["model_type"] == "qwen3_5"
    assert (env["BENCH_SIMULATOR_VERSION"], env["BENCH_SIMULATOR_TIME_SCALE"]) == ("0.5.15", "5.0")
    assert env["BENCH_SIMULATOR_FAULTS"] == "oom_at_start"
    assert engine.simulated


def test_launches_tried_by_hand_are_forecast_as_they_went() -> None:
    loaded = experiment("+experiment=mtp_rtx_pro_6000", "engine.version=0.5.12")
    engine = engines.create(loaded)
    servers = [engine.canonical(Candidate(dict(values))) for values in loaded.space.tried[1:]]
    verdicts = [engine.forecast(server, Calibration()).verdict for server in servers]
    assert verdicts == ["does_not_fit", "edge", "edge"]
