"""Secrets stay out of what is written down; settings that sound like secrets stay in."""

import re
from pathlib import Path

import pytest

from bench.secrets import REDACTED, is_secret, redact_argv, redact_env, redact_text, redact_tree, secret_values

SECRET_NAMES = [
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "OPENAI_API_KEY",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_ACCESS_KEY_ID",
    "KAGGLE_KEY",
    "DB_PASSWORD",
    "GITHUB_TOKEN",
    "--api-key",
    "--admin-api-key",
    "--ssl-keyfile-password",
    "admin_api_key",
    "hfToken",
]
SETTINGS = [
    "max_total_tokens",
    "num_draft_tokens",
    "TOKENIZERS_PARALLELISM",
    "SGLANG_SIMULATE_ACC_TOKEN_MODE",
    "--tokenizer-path",
    "--tokenizer-worker-num",
    "--speculative-token-map",
    "--ssl-keyfile",
    "--bucket-time-to-first-token",
    "--kt-max-deferred-experts-per-token",
    "eos_token",
    "sort_key",
    "key",
]


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_a_secret_is_known_by_its_name(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_that_sounds_like_a_secret_is_none(name: str) -> None:
    assert not is_secret(name)


def test_no_flag_of_sglang_but_the_keys_and_the_password_is_redacted() -> None:
    tables = sorted((Path(__file__).parents[2] / "shared" / "flags").glob("flags_*.json"))
    if not tables:
        pytest.skip("needs the flag tables of SGLang's releases")
    names = re.findall(r"--[a-z0-9-]+", tables[-1].read_text())
    secret = {name for name in names if is_secret(name)}
    assert secret == {"--api-key", "--admin-api-key", "--ssl-keyfile-password"}


def test_an_argument_list_keeps_its_length_and_loses_its_keys() -> None:
    argv = ["python", "-m", "server", "--api-key", "topsecret1", "--admin-api-key=123456", "--max-total-tokens", "4096"]
    expected = ("python", "-m", "server", "--api-key", REDACTED, f"--admin-api-key={REDACTED}", *argv[6:])
    assert redact_argv(argv, values=()) == expected


def test_environment_keeps_names_and_settings() -> None:
    environment = {"HF_TOKEN": "anything-at-all", "CUDA_VISIBLE_DEVICES": "0", "MAX_TOKEN": "8", "X_TOKEN": "true"}
    assert redact_env(environment, values=()) == {**environment, "HF_TOKEN": REDACTED}


@pytest.mark.parametrize(
    "secret",
    [
        "hf_" + "aB3dEfGhIjKlMnOpQrStUvWxYz01234567",
        "sk-proj-0123456789abcdefABCDEF",
        "ghp_" + "a1B2" * 9,
        "AKIA" + "ABCDEFGH12345678",
    ],
)
def test_a_secret_is_known_by_its_form_anywhere_in_a_text(secret: str) -> None:
    assert (
        redact_text(f"downloading with {secret}, please wait", values=()) == f"downloading with {REDACTED}, please wait"
    )


def test_a_secret_of_the_environment_is_known_by_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_PASSWORD", "correct horse")
    assert redact_text("refused 'correct horse'") == f"refused '{REDACTED}'"


def test_the_keys_in_a_dump_of_server_arguments_are_taken_out() -> None:
    assert redact_text("args=Args(api_key='a b', n=1)", values=()) == f"args=Args(api_key='{REDACTED}', n=1)"
    line = "server_args=ServerArgs(model_path='m', api_key='abc', admin_api_key=None, max_total_tokens=20000, seed=1)"
    assert redact_text(line, values=()) == line.replace("'abc'", f"'{REDACTED}'")
    assert redact_text('{"api_key": "abc", "num_draft_tokens": 4}', values=()) == (
        f'{{"api_key": "{REDACTED}", "num_draft_tokens": 4}}'
    )
    assert redact_text("serve --api-key abc --port 3", values=()) == f"serve --api-key {REDACTED} --port 3"
    assert redact_text("http://user:pass@proxy:80/", values=()) == f"http://{REDACTED}@proxy:80/"


def test_log_lines_are_left_as_they_are() -> None:
    lines = [
        "Decode batch, #running-req: 4, #full token: 1234, full token usage: 0.01, mamba num: 20, accept len: 2.87",
        "max_total_num_tokens=20000, chunked_prefill_size=2048, context_len=4096",
        "JSONDecodeError: Unexpected token: 'abc' at disk-cache-directory-2024-long",
        "KeyError: 'model.layers.0.mlp.gate_proj.weight_scale'",
        "argument --tokenizer-path: expected one argument",
        "  [--api-key API_KEY] [--admin-api-key ADMIN_API_KEY]",
        "    if _idx_token == 0:",
        '{"ssl_keyfile_password": null, "api_key": null}',
    ]
    assert redact_text("\n".join(lines), values=()) == "\n".join(lines)


def test_short_values_do_not_garble_texts() -> None:
    assert secret_values({"A_TOKEN": "abc", "B_TOKEN": "long enough"}) == {"long enough"}


def test_plain_data_loses_secrets_by_key_and_by_value() -> None:
    data = {
        "engine": {"env": {"HF_TOKEN": "abc", "N": "4"}, "flags": {"api_key": 123456, "max_total_tokens": 4096}},
        "overrides": ["engine.env.HF_TOKEN=abc", "run=topsecret"],
        "nothing": {"api_key": None, "password": ""},
    }
    assert redact_tree(data, values=("topsecret",)) == {
        "engine": {"env": {"HF_TOKEN": REDACTED, "N": "4"}, "flags": {"api_key": REDACTED, "max_total_tokens": 4096}},
        "overrides": [f"engine.env.HF_TOKEN={REDACTED}", f"run={REDACTED}"],
        "nothing": {"api_key": None, "password": ""},
    }


def test_the_name_of_a_flag_is_no_secret() -> None:
    assert redact_text("api_key: --api-key", values=()) == "api_key: --api-key"
