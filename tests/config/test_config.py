"""What a person sees who writes a configuration, right or wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import config
from bench.experiment import Experiment


def load(*arguments: str) -> Experiment:
    return config.load(list(arguments), command="bench.check", clock=lambda: 0.0)


def problems(*arguments: str) -> tuple[str, ...]:
    with pytest.raises(config.ConfigError) as caught:
        load(*arguments)
    return caught.value.problems


def only(found: tuple[str, ...]) -> str:
    assert len(found) == 1, found
    return found[0]


GIVEN = {
    "dflash_b200": ("model.draft_path=some/draft",),
    "eagle3": ("model.draft_path=some/draft",),
    "cpu_smoke": ("model.path=some/model",),
}
EXPERIMENTS = sorted(path.stem for path in (config.conf_dir() / "experiment").glob("*.yaml"))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_shipped_experiment_is_valid_and_has_a_baseline(name: str) -> None:
    experiment = load(f"+experiment={name}", *GIVEN.get(name, ()))
    assert experiment.name == name
    assert experiment.space.parameters
    assert "speculative_algorithm" not in experiment.space.baseline
    assert experiment.workload.levels


@pytest.mark.parametrize("version", ["0.5.10", "0.5.13", "0.5.20"])
@pytest.mark.parametrize("name", ["mtp_rtx_pro_6000", "baseline_no_spec"])
def test_the_space_is_valid_in_every_version_whatever_spelling_it_uses(name: str, version: str) -> None:
    assert load(f"+experiment={name}", f"engine.version={version}").engine.version == version


def test_the_mtp_space_has_every_parameter_that_matters_there() -> None:
    names = {parameter.name for parameter in load("+experiment=mtp_b200").space.parameters}
    assert names >= {
        "mem_fraction_static",
        "mamba_radix_cache_strategy",
        "max_mamba_cache_size",
        "mamba_full_memory_ratio",
        "mamba_ssm_dtype",
        "max_running_requests",
        "enable_hierarchical_cache",
        "hicache_ratio",
        "hicache_write_policy",
        "disable_radix_cache",
        "speculative_num_steps",
        "speculative_eagle_topk",
        "speculative_num_draft_tokens",
        "chunked_prefill_size",
        "schedule_policy",
        "schedule_conservativeness",
        "cuda_graph_max_bs_decode",
        "kv_cache_dtype",
        "attention_backend",
    }


def test_a_draft_model_is_asked_for_by_name() -> None:
    text = only(problems("+experiment=eagle3"))
    assert "draft model" in text
    assert "give model.draft_path=" in text


def test_a_fresh_run_is_named_by_the_time_and_a_named_one_by_its_name() -> None:
    assert load("+experiment=quickstart").run != load("+experiment=quickstart", "run=mine").run
    assert load("+experiment=quickstart", "run=mine").folder == Path("results/quickstart/mine")
    assert load("+experiment=quickstart", "run=7", "results_dir=/data").folder == Path("/data/quickstart/7")


def test_units_are_understood() -> None:
    hardware = load("+experiment=quickstart").hardware
    assert hardware.memory_bytes == 143771 * 2**20
    assert hardware.bandwidth_bytes_per_s == 4.8e12
    assert hardware.flops_bf16 == 989e12


def test_unknown_experiment_lists_those_there_are() -> None:
    text = only(problems("+experiment=mtp_b20"))
    assert "closest: mtp_b200" in text
    assert "quickstart" in text


def test_an_experiment_whose_keys_are_in_the_wrong_place_is_said_to_be(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("defaults:\n  - override /engine: simulator\nname: mine\n")
    with pytest.raises(config.ConfigError, match="has no line '# @package _global_'"):
        config.load(["--config-dir", str(tmp_path), "+experiment=mine"], command="bench.check")


def test_no_experiment_lists_those_there_are() -> None:
    assert "give +experiment=NAME; there are: baseline_no_spec" in only(problems())


def test_experiment_may_be_written_without_its_plus() -> None:
    assert load("experiment=quickstart").name == "quickstart"


def test_unknown_key_names_the_closest_and_its_override() -> None:
    text = only(problems("+experiment=quickstart", "search.trils=3"))
    assert text.startswith("search.trils: unknown key; closest: trials; allowed: trials, hours")
    assert text.endswith("(from the command line: search.trils=3)")


def test_all_problems_are_said_at_once() -> None:
    found = problems(
        "+experiment=quickstart",
        "serch.trials=3",
        "search.trials=many",
        "search.forecast=prun",
        "workload.levels=[0, 2]",
        "hardware.memory_bytes=99 zb",
        "objective.metric=ttft.p95",
        "engine.flags.max_mamba=3",
        "space.parameters.mem_fraction_static.low=0.95",
    )
    keys = [text.split(":")[0] for text in found]
    assert set(keys) == {
        "serch",
        "search.trials",
        "search.forecast",
        "workload.levels.0",
        "hardware.memory_bytes",
        "space.parameters.mem_fraction_static.low",
    }


def test_flags_and_metrics_are_checked_beside_other_sections_that_are_wrong() -> None:
    found = problems("+experiment=quickstart", "search.trils=3", "engine.flags.max_mamba=40", "objective.metric=ttft")
    assert any("has no flag 'max_mamba'; closest: max_mamba_cache_size" in text for text in found)
    assert any("unknown metric 'ttft'" in text for text in found)
    assert any("search.trils" in text for text in found)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("search.trials=0", "0 is out of range; allowed: at least 1"),
        ("search.trials=2.5", "expected a whole number, seen 2.5"),
        ("search.prune=1", "expected true or false, seen 1"),
        ("search.hours=.inf", "expected a number"),
        ("search.seed=-1", "-1 is out of range"),
        ("workload.seed=99999999999999999999", "out of range"),
        ("+objective.limits.ttft_s.p95=0", "can never be kept"),
        ("workload.prompts={kind: jsonl, path: /no/such.jsonl}", "/no/such.jsonl"),
        ("workload.prompts={kind: random_ids, input_tokens: 64}", "random ids need vocabulary_size"),
        ("search.tie_relative=2", "2.0 is out of range; allowed: 0 to 1"),
        ("search.forecast=prun", "'prun' is not allowed; closest: prune; allowed: off, advise, prune"),
        ("engine.name=sglan", "closest: sglang"),
        ("workload.levels=8", "expected a list, seen 8"),
        ("workload.levels=[]", "nothing to measure"),
        ("objective.level=7", "7 is not among workload.levels"),
        ("run=a/b", "names a folder"),
        ("engine.version=0.5.99", "known are 0.5.10 to 0.5.23"),
        ("engine.flags.num_continuous_decode_steps=4", "declared and never read"),
        ("engine.flags.port=4", "is set by the harness"),
        ("engine.flags.mem_fraction_static=1.5", "out of range"),
        ("engine.flags.schedule_policy=lpn", "closest: lpm"),
        ("space.recipes.0.mem_fraction_statc=0.8", "closest: mem_fraction_static"),
        ("~model.config", "no shape under model.config"),
        ("search.trials=1,2", "names several values"),
        ("search.trials", "cannot read 'search.trials'"),
        ("~search.nothing", "does not exist"),
    ],
)
def test_one_mistake_is_one_sentence(override: str, said: str) -> None:
    assert said in only(problems("+experiment=quickstart", override))


def test_the_word_off_is_not_taken_for_false() -> None:
    assert load("+experiment=quickstart", "search.forecast=off").search.forecast == "off"


def test_limits_can_be_set_one_by_one() -> None:
    experiment = load("+experiment=quickstart", "objective.limits.ttft_s.p95=0.5")
    assert experiment.objective.limits == {"ttft_s.p95": 0.5}


def test_an_experiment_leaves_a_parameter_of_its_space_out() -> None:
    names = {parameter.name for parameter in load("+experiment=mtp_h200").space.parameters}
    assert "attention_backend" not in names
    assert "speculative_num_steps" in names


class TestOwnFolder:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        for group, name, text in [
            (
                "hardware",
                "mine",
                "name: mine\nmemory_bytes: 48 GB\nbandwidth_bytes_per_s: 1 TB/s\n"
                "flops_bf16: 100 TFLOP/s\nflops_fp8: 200 TFLOP/s\narchitecture: sm89\n",
            ),
            (
                "experiment",
                "own",
                "# @package _global_\ndefaults:\n  - override /model: qwen3_8b\n"
                "  - override /hardware: mine\n  - override /workload: short\n  - override /space: no_spec\n"
                "search:\n  trils: 3\n",
            ),
            (
                "experiment",
                "lost",
                "# @package _global_\ndefaults:\n  - override /model: qwen3_9b\n"
                "  - override /hardware: mine\n  - override /workload: short\n  - override /space: no_spec\n",
            ),
        ]:
            (tmp_path / group).mkdir(exist_ok=True)
            (tmp_path / group / f"{name}.yaml").write_text(text)
        return tmp_path

    def test_problems_name_the_file(self, folder: Path) -> None:
        text = only(problems(f"--config-dir={folder}", "+experiment=own"))
        assert text.endswith(f"(from {folder}/experiment/own.yaml)")

    def test_a_default_that_does_not_exist_names_the_closest(self, folder: Path) -> None:
        text = only(problems("--config-dir", str(folder), "+experiment=lost"))
        assert text.startswith("no model 'qwen3_9b'; closest: qwen3_8b")

    def test_own_files_work_from_any_folder(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(folder)
        experiment = load("--config-dir", ".", "+experiment=own", "~search.trils")
        assert experiment.hardware.name == "mine"
        assert experiment.name == "own"

    def test_a_missing_folder_is_said(self) -> None:
        assert "there is no such folder" in only(problems("--config-dir", "/nowhere", "+experiment=own"))

    def test_help_lists_them(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as ended:
            load("--config-dir", str(folder), "--help")
        assert ended.value.code == 0
        said = capsys.readouterr().out
        assert "quickstart" in said
        assert "own" in said


def test_a_models_own_config_counts_before_the_described_shape(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "hidden_size": 64}')
    found = problems("+experiment=quickstart", f"model.path={tmp_path}")
    assert "model.config" in only(found)  # the shape of the file that is there lacks most of what is needed


def test_cfg_prints_the_resolved_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load("+experiment=quickstart", "search.trials=7", "--cfg")
    assert ended.value.code == 0
    assert "trials: 7" in capsys.readouterr().out
