"""What a newcomer does first, and what must be said before a night is spent on it."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from bench import check, config, sweep


def test_two_experiments_can_be_merged_as_best_yaml_says(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "best.yaml").write_text(
        "# @package _global_\nengine:\n  flags: {mem_fraction_static: 0.8}\n"
    )
    loaded = config.load(["--config-dir", str(tmp_path), "+experiment=[quickstart,best]"], command="bench.sweep")
    assert loaded.name == "quickstart"
    assert loaded.engine.flags["mem_fraction_static"] == 0.8


@pytest.mark.skipif(find_spec("sglang") is not None, reason="SGLang is installed in this interpreter")
def test_a_sweep_without_an_engine_launches_nothing_and_says_what_to_give(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = sweep.main(["+experiment=mtp_b200", f"results_dir={tmp_path}", "run=none"])
    assert code == 2
    assert "engine.python=" in capsys.readouterr().err
    assert not (tmp_path / "mtp_b200" / "none" / "trials").exists()


@pytest.mark.parametrize(
    ("override", "said"),
    [("hardware=rtx_4090", "the baseline does not fit"), ("engine.flags.tp_size=2", "hardware.gpu_count=1")],
)
def test_a_check_of_what_cannot_run_fails_in_its_last_line(
    override: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check.main(["+experiment=mtp_b200", override]) == 2
    assert said in capsys.readouterr().err
