"""Secrets: keeps tokens, keys and passwords out of every file, by the name they go under and by their value.

Standard library only, since the guard of a launch imports it without site-packages.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

REDACTED = "[redacted]"

# A value this short is a word like "none" or "1", and taking it out of a text would only garble the text.
_SHORTEST_SECRET = 6

_ALWAYS_SECRET = frozenset({"PASSWORD", "PASSWD", "PASSPHRASE", "SECRET", "SECRETS", "CREDENTIAL", "CREDENTIALS"})
_KEY_OF = frozenset({"API", "ACCESS", "ADMIN", "AUTH", "ENCRYPTION", "LICENSE", "MASTER", "PRIVATE", "SIGNING", "SSH"})
# What a model's token is called, as opposed to an access token.
_SPECIAL_TOKENS = frozenset({"BOS", "CLS", "EOS", "MASK", "PAD", "SEP", "SPECIAL", "START", "END", "STOP", "UNK"})
_COUNTED_TOKENS = frozenset({"DRAFT", "EACH", "FIRST", "INPUT", "LAST", "MAX", "MIN", "NEXT", "NUM", "OUTPUT", "PER"})
# `--something-token 4`, `token=true`: a setting.
_SETTING = re.compile(r"[-+\d.,\s]*|true|false|none|null|yes|no|on|off", re.IGNORECASE)

# Secrets that show by their form: Hugging Face, OpenAI-like, GitHub, GitLab, AWS, Slack, NVIDIA, a bearer header, a
# password in a URL. A digit is asked for where a plain word could look the same.
_FORMS = re.compile(
    r"""
    \bhf_(?:[A-Za-z]{30,}|(?=[A-Za-z]*\d)[A-Za-z0-9]{12,})
    | \bsk-(?=[\w-]*\d)[\w-]{16,}
    | \bgh[oprsu]_[A-Za-z0-9]{20,}
    | \bgithub_pat_\w{20,}
    | \bglpat-[\w-]{16,}
    | \b(?:AKIA|ASIA)[A-Z0-9]{16}\b
    | \bxox[abprs]-[\w-]{10,}
    | \bnvapi-[\w-]{16,}
    | (?<=\bBearer\s)[\w.~+/=-]{8,}
    | (?<=://)[^\s/:@'"]*:[^\s/@'"]+(?=@)
    """,
    re.VERBOSE,
)
# What stands before a value: `NAME=`, `name: `, `"name": ` or `--flag `.
_NAME = re.compile(
    r"""
    (?P<name>(?<![\w-])-{0,2}[A-Za-z_][\w-]*)['"]?[ \t]*[=:](?!=)[ \t]*
    | (?P<flag>(?<![\w-])--[A-Za-z][\w-]*)[ \t]+(?!-)
    """,
    re.VERBOSE,
)
_VALUE = re.compile(r"""(?P<quote>['"])(?P<quoted>[^\n]*?)(?P=quote)|(?P<bare>[^\s,;)}\]'"]+)""")
# A line without any of these, in small letters, cannot hold a secret that is known by name or form.
_HINTS = (
    *("key", "token", "passw", "passph", "secret", "credential", "authorization", "bearer", "://"),
    *("hf_", "sk-", "gho_", "ghp_", "ghr_", "ghs_", "ghu_", "github_pat", "glpat-", "akia", "asia", "xox", "nvapi-"),
)
_WORD_BOUNDARY = re.compile(r"[_\W]+|(?<=[a-z0-9])(?=[A-Z])")


def is_secret(name: str, value: str | None = None) -> bool:
    """Whether what goes under this name (environment variable, flag, field) must not be written down.

    ``HF_TOKEN``, ``--admin-api-key`` and ``db_password`` are; ``max_total_tokens``, ``--tokenizer-path`` and
    ``--ssl-keyfile`` (a path) are not.
    """
    words = [word.upper() for word in _WORD_BOUNDARY.split(name) if word]
    if not words:
        return False
    pairs = list(itertools.pairwise(words))
    if not _ALWAYS_SECRET.isdisjoint(words) or any(last == "KEY" and of in _KEY_OF for of, last in pairs):
        return True
    if words[-1] == "KEY":
        return len(words) > 1 and name.isupper()  # KAGGLE_KEY, but not sort_key
    if words[-1] not in ("TOKEN", "AUTHORIZATION") or (pairs and pairs[-1][0] in _SPECIAL_TOKENS | _COUNTED_TOKENS):
        return False
    return value is None or not _SETTING.fullmatch(value)


def secret_values(environment: Mapping[str, str], argv: Sequence[str] = ()) -> frozenset[str]:
    """The values that stand under secret names, to be looked for wherever text is written."""
    named = [*environment.items(), *_flag_values(argv)]
    return frozenset(value for name, value in named if len(value) >= _SHORTEST_SECRET and is_secret(name, value))


def redact_text(text: str, values: Iterable[str] | None = None) -> str:
    """Take secrets out of a text, line by line: the number of lines stays.

    Args:
        values: secrets that are known by value; by default those in this process's environment.
    """
    for value in sorted(secret_values(os.environ) if values is None else values, key=len, reverse=True):
        text = text.replace(value, REDACTED)
    return "\n".join(_redact_line(line) for line in text.split("\n"))


def redact_argv(argv: Sequence[str], values: Iterable[str] | None = None) -> tuple[str, ...]:
    """Take secrets out of an argument list, which keeps its length."""
    redacted: list[str] = []
    previous = ""
    for argument in argv:
        name, equals, value = argument.partition("=")
        if previous.startswith("--") and not argument.startswith("--") and is_secret(previous, argument):
            redacted.append(REDACTED)
        elif argument.startswith("-") and equals and is_secret(name, value):
            redacted.append(f"{name}={REDACTED}")
        else:
            redacted.append(redact_text(argument, values))
        previous = "" if equals else argument
    return tuple(redacted)


def redact_env(environment: Mapping[str, str], values: Iterable[str] | None = None) -> dict[str, str]:
    """Take secrets out of environment variables; the names stay."""
    return {
        name: REDACTED if value and is_secret(name, value) else redact_text(value, values)
        for name, value in environment.items()
    }


def redact_tree(value: Any, values: Iterable[str] | None = None) -> Any:
    """Take secrets out of plain data (what JSON or YAML hold), by the keys that they stand under and by their value."""
    if isinstance(value, Mapping):
        return {
            key: REDACTED if _is_scalar(item) and is_secret(str(key), str(item)) else redact_tree(item, values)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [redact_tree(item, values) for item in value]
    return redact_text(value, values) if isinstance(value, str) else value


def _is_scalar(value: object) -> bool:
    return isinstance(value, (str, int, float)) and not isinstance(value, bool) and value != ""


def _flag_values(argv: Sequence[str]) -> list[tuple[str, str]]:
    pairs = [(name, value) for name, equals, value in (argument.partition("=") for argument in argv) if equals]
    followers = itertools.pairwise(argv)
    return pairs + [(flag, value) for flag, value in followers if flag.startswith("--") and not value.startswith("--")]


def _redact_line(line: str) -> str:
    small = line.lower()
    if not any(hint in small for hint in _HINTS):
        return line
    return _FORMS.sub(REDACTED, _redact_assignments(line))


def _redact_assignments(text: str) -> str:
    parts: list[str] = []
    done = 0
    for name in _NAME.finditer(text):
        value = _VALUE.match(text, name.end())
        if name.start() < done or value is None or not _stands_for_secret(name, value):
            continue
        group = "bare" if value["quote"] is None else "quoted"
        parts += [text[done : value.start(group)], REDACTED]
        done = value.end(group)
    return "".join(parts) + text[done:]


def _stands_for_secret(name_match: re.Match[str], value_match: re.Match[str]) -> bool:
    name = name_match["name"] or name_match["flag"]
    value = value_match["quoted"] or value_match["bare"] or ""
    metavar = name.lstrip("-").upper().replace("-", "_")  # in a usage text
    if value.startswith("--"):  # a flag, as in "api_key: --api-key is ..."
        return False
    if value in ("", "None", "null", metavar) or name in ("token", "Token"):  # "Unexpected token: 'x'"
        return False
    return is_secret(name, value)
