"""Flags are matched exactly, against the right version, in any version's spelling."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench.engines.protocol import Value
from bench.engines.sglang import flag_data, flags
from bench.engines.sglang.flags import FlagTable, NotInstalledError, UnknownFlagError

VERSIONS = [f"0.5.{number}" for number in range(10, 24)]


def test_tables_of_all_fourteen_versions_are_shipped_in_little_space() -> None:
    assert list(flag_data.versions()) == VERSIONS
    assert flag_data.PATH.stat().st_size < 300_000
    # Option strings of the parsers, help left out.
    assert {version: len(flag_data.flags(version)) for version in ("0.5.10", "0.5.15", "0.5.23")} == {
        "0.5.10": 365,
        "0.5.15": 451,
        "0.5.23": 559,
    }


@pytest.mark.parametrize(
    ("version", "written", "name", "option"),
    [
        ("0.5.12", "mamba_radix_cache_strategy", "mamba_scheduler_strategy", "--mamba-scheduler-strategy"),
        ("0.5.15", "mamba_scheduler_strategy", "mamba_radix_cache_strategy", "--mamba-radix-cache-strategy"),
        ("0.5.20", "mamba_scheduler_strategy", "mamba_radix_cache_strategy", "--mamba-radix-cache-strategy"),
        ("0.5.12", "cuda_graph_max_bs_decode", "cuda_graph_max_bs", "--cuda-graph-max-bs"),
        ("0.5.20", "--cuda-graph-max-bs", "cuda_graph_max_bs_decode", "--cuda-graph-max-bs-decode"),
        ("0.5.23", "cuda_graph_bs", "cuda_graph_bs_decode", "--cuda-graph-bs-decode"),
        ("0.5.16", "enable_linear_replayssm_spec", "enable_gdn_replayssm_spec", "--enable-gdn-replayssm-spec"),
        ("0.5.15", "enable_hicache", "enable_hierarchical_cache", "--enable-hierarchical-cache"),
    ],
)
def test_a_renamed_flag_is_understood_in_either_spelling(version: str, written: str, name: str, option: str) -> None:
    found = FlagTable.for_version(version).find(written)
    assert (found.name, found.option) == (name, option)
    assert found.note
    assert f"is called {option} in SGLang {version}" in found.note


@pytest.mark.parametrize("version", ["0.5.10", "0.5.13", "0.5.14", "0.5.23"])
@pytest.mark.parametrize("written", ["tp_size", "tensor_parallel_size", "--tp-size"])
def test_two_names_of_one_argument_are_one_flag(version: str, written: str) -> None:
    found = FlagTable.for_version(version).find(written)
    assert (found.name, found.note) == ("tp_size", None)


@pytest.mark.parametrize("abbreviation", ["max_mamba", "mem_frac", "speculative_algo", "dp"])
def test_abbreviations_that_argparse_would_take_are_unknown(abbreviation: str) -> None:
    with pytest.raises(UnknownFlagError, match="has no flag"):
        FlagTable.for_version("0.5.15").find(abbreviation)


@pytest.mark.parametrize(
    ("version", "name", "said"),
    [
        ("0.5.15", "mem_fraction_statc", "closest: mem_fraction_static"),
        ("0.5.12", "cuda_graph_backend_prefill", "it is in 0.5.14 to 0.5.23"),
        ("0.5.23", "torchao_config", "it is in 0.5.10 to 0.5.17"),
        ("0.5.15", "disable_piecewise_cuda_graph", "write cuda_graph_backend_prefill: one of breakable, disabled"),
    ],
)
def test_an_unknown_flag_says_what_there_is_instead(version: str, name: str, said: str) -> None:
    text = FlagTable.for_version(version).problem(name, True)
    assert text is not None
    assert said in text


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("mamba_radix_cache_strategy", "extra_buffer_lazy", "allowed in 0.5.13 to 0.5.23"),
        ("speculative_algorithm", "DSPARK", "allowed: EAGLE, EAGLE3, NEXTN, STANDALONE, NGRAM, DFLASH"),
        ("speculative_algorithm", "NEXTNN", "closest: NEXTN"),
        ("schedule_policy", "hrrn", "'hrrn' is allowed in 0.5.20 to 0.5.23"),
        ("mem_fraction_static", 1.5, "out of range"),
        ("mem_fraction_static", "most", "takes a number"),
        ("max_running_requests", 4.5, "takes a whole number"),
        ("max_running_requests", True, "takes a whole number"),
        ("max_running_requests", [1, 2], "seen a list"),
        ("cuda_graph_bs", [1, 2.5], "takes a whole number, or a list"),
        ("disable_radix_cache", 1, "is a switch"),
        ("served_model_name", "mine", "is set by the harness"),
        ("api_key", "secret", "is set by the harness"),
        ("num_continuous_decode_steps", 4, "never read"),
        ("collect_tokens_histogram", True, "no effect"),
    ],
)
def test_values_are_checked(name: str, value: Value, said: str) -> None:
    text = FlagTable.for_version("0.5.12").problem(name, value)
    assert text is not None
    assert said in text


def test_good_values_pass() -> None:
    table = FlagTable.for_version("0.5.23")
    good: dict[str, Value] = {
        "mem_fraction_static": 0.8,
        "schedule_conservativeness": 1,
        "chunked_prefill_size": -1,
        "cuda_graph_bs_decode": [1, 2],
        "disable_radix_cache": True,
        "speculative_algorithm": "UNO",
        "max_prefill_tokens": 16384,
    }
    assert [table.problem(name, value) for name, value in good.items()] == [None] * len(good)


def test_arguments_are_a_list_that_argparse_reads_as_meant() -> None:
    table = FlagTable.for_version("0.5.23")
    assert table.arguments("cuda_graph_bs_decode", [1, 2]) == ("--cuda-graph-bs-decode", "1", "2")
    assert table.arguments("chunked_prefill_size", -1) == ("--chunked-prefill-size=-1",)
    assert table.arguments("disable_radix_cache", True) == ("--disable-radix-cache",)
    assert table.arguments("disable_radix_cache", False) == ()
    assert table.arguments("enable_tf32_matmul", False) == ("--no-enable-tf32-matmul",)


def test_a_post_release_has_its_releases_table_and_others_are_refused() -> None:
    assert FlagTable.for_version("0.5.15.post1").find("max_mamba_cache_size").option == "--max-mamba-cache-size"
    with pytest.raises(LookupError, match=r"known are 0\.5\.10 to 0\.5\.23"):
        FlagTable.for_version("0.4.0")


class TestInstalled:
    """A stand-in for an interpreter: a script that answers as one with SGLang would."""

    @pytest.fixture(autouse=True)
    def cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        flags._version_of.cache_clear()

    def python(self, folder: Path, version: str, dump: str) -> str:
        script = folder / "python"
        script.write_text(
            f"#!{sys.executable}\nimport pathlib, sys\n"
            f"log = pathlib.Path({str(folder / 'asked')!r})\n"
            "log.write_text(log.read_text() + 'x' if log.exists() else 'x')\n"
            f"print({version!r}) if 'version' in sys.argv[2] and 'argparse' not in sys.argv[2] else exec({dump!r})\n"
        )
        script.chmod(0o755)
        return str(script)

    def test_the_installed_parser_counts_before_the_shipped_table_and_is_asked_once(self, tmp_path: Path) -> None:
        flag = {"dest": "brand_new", "action": "_StoreAction", "type": "int", "nargs": "None", "default": "1"}
        answer = json.dumps({"version": "0.5.15", "flags": {"--brand-new": {**flag, "choices": None}}})
        python = self.python(tmp_path, "0.5.15", f"print('noise <', '<<<' + {answer!r} + '>>>')")
        table = FlagTable.installed(python)
        assert table.find("brand_new").option == "--brand-new"
        assert table.problem("mem_fraction_static", 0.8) is not None
        assert "installed 0.5.15" in table.source
        asked = (tmp_path / "asked").read_text()
        assert FlagTable.installed(python).find("brand_new").option == "--brand-new"
        assert (tmp_path / "asked").read_text() == asked  # version remembered, flags kept

    def test_a_parser_that_does_not_import_falls_back_to_the_shipped_table_and_says_so(self, tmp_path: Path) -> None:
        table = FlagTable.installed(self.python(tmp_path, "0.5.15", "sys.exit('ImportError: no kernels')"))
        assert table.find("max_mamba_cache_size")
        assert "ImportError: no kernels" in table.source

    def test_an_interpreter_without_sglang_is_said(self) -> None:
        with pytest.raises(NotInstalledError, match="has no SGLang"):
            FlagTable.installed(f"{sys.prefix}/bin/python")

    def test_an_interpreter_that_does_not_exist_is_said(self) -> None:
        with pytest.raises(NotInstalledError, match="cannot run /nowhere/python"):
            FlagTable.installed("/nowhere/python")
