"""Tokens, keys and passwords reach neither a file of the run nor the terminal, whichever way they were given."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import pick
from tests.faults.sweeps import Sweep, assert_intact, assert_nothing_left, cleaned_up

INHERITED, GIVEN, FLAG = "hf-inherited-0a1b2c", "given-3d4e5f-key", "flag-6g7h8i-word"


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sweep]:
    with cleaned_up(Sweep(tmp_path_factory.mktemp("results"))) as made, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", INHERITED)
        secret = (f"+engine.env.MY_API_KEY={GIVEN}", f"+engine.flags.ssl_keyfile_password={FLAG}")
        once = (*secret, "search.trials=1", "search.finalists=1", "search.finalist_rounds=1")
        made.here(*once)
        assert made.code == 0, made.output
        yield made.here(*once)  # the same secrets are the same experiment


def test_no_secret_reaches_a_file_or_the_terminal(swept: Sweep) -> None:
    assert swept.code == 0
    assert len(swept.trials) == 1
    files = [path for path in swept.results.rglob("*") if path.is_file()]
    assert {"launch.sh", "best.yaml", "experiment.yaml", "server.log", "trials.jsonl"} <= {path.name for path in files}
    for secret in (INHERITED, GIVEN, FLAG):
        assert secret not in swept.output
        for path in files:
            assert secret.encode() not in path.read_bytes(), f"{secret} in {path}"
    assert_nothing_left(swept)
    assert_intact(swept)


def test_the_server_itself_is_given_them(swept: Sweep) -> None:
    words = dict(swept.trials[0].env)
    assert words["MY_API_KEY"] == "[redacted]"
    assert "--ssl-keyfile-password" in swept.trials[0].command
    assert "ssl_keyfile_password='[redacted]'" in swept.log_of(0)


def test_the_launch_script_asks_for_them(swept: Sweep, tmp_path: Path) -> None:
    script = swept.folder.path / "launch.sh"
    environment = {name: value for name, value in os.environ.items() if name != "MY_API_KEY"}
    asked = subprocess.run([str(script)], env=environment, capture_output=True, text=True, check=False)
    assert asked.returncode != 0
    assert "MY_API_KEY" in asked.stderr
    text = script.read_text()
    shown = tmp_path / "shown.sh"  # the same script, that prints what it would run
    shown.write_text(text.replace("\nexec ", '\nprintf "%s\\n" "$MY_API_KEY" '))
    given = {**environment, "MY_API_KEY": "k e y", "SSL_KEYFILE_PASSWORD": "p$w"}
    said = subprocess.run(["bash", str(shown)], env=given, capture_output=True, text=True, check=True).stdout
    assert said.startswith("k e y\n")
    assert "--ssl-keyfile-password\np$w\n" in said


def test_the_override_file_leaves_them_to_the_user(swept: Sweep) -> None:
    text = (swept.folder.path / "best.yaml").read_text()
    assert "MY_API_KEY, ssl_keyfile_password" in text
    assert "[redacted]" not in text


def test_the_answer_can_be_written_again_without_them(swept: Sweep, capsys: pytest.CaptureFixture[str]) -> None:
    before = (swept.folder.path / "launch.sh").read_text()
    assert pick.main([str(swept.folder.path)]) == 0
    assert (swept.folder.path / "launch.sh").read_text() == before


def test_a_refused_setting_is_named_without_its_value(tmp_path: Path) -> None:
    refused = Sweep(tmp_path / "results").here(f"+engine.flags.api_key={FLAG}")
    assert refused.code == 2
    assert "api_key" in refused.output
    assert FLAG not in refused.output
