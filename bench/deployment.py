"""Deployment: the files that put a configuration into production, all from one script.

``launch.sh`` is what was launched and measured. The systemd unit and the Compose file start that same script.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bench.best import Best, requests
from bench.engines.sglang.settings import parse_version
from bench.engines.simulator.model import FULL_BATCH_CRASH_VERSION
from bench.experiment import Experiment
from bench.records import TrialRecord, write_json
from bench.secrets import REDACTED

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 30000  # SGLang's own
FILES = ("best.yaml", "best.json", "launch.sh", "server.service", "compose.yaml")
# Left to the environment of the script: where it listens, and the interpreter, which is another one in a container.
LISTENING = frozenset({"HOST", "PORT"})
RESTART_DELAY_S = 10
PROBE_TIMEOUT_S = 5
_VARIABLE = re.compile(r'"\$([A-Z][A-Z0-9_]*)"')
_LISTENING_DEFAULT = re.compile(r'(HOST|PORT)="\$\{\1:-[\w.:-]+\}"')


def write(best: Best, experiment: Experiment, folder: Path, record: TrialRecord, *, host: str = DEFAULT_HOST) -> None:
    """Write ``FILES`` into a folder.

    Args:
        record: the launch that was measured; its command is what the script holds.
        host: address to listen on, unless HOST says another when the script runs.

    Raises:
        RecordError: best.json cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "best.json", best)
    script = launch_script(best, experiment, record, host=host)
    path = folder / "launch.sh"
    _write_text(folder / "best.yaml", override_file(best, experiment))
    _write_text(path, script)
    path.chmod(0o755)
    _write_text(folder / "server.service", unit(best, experiment, path.resolve(), script, host=host))
    _write_text(folder / "compose.yaml", compose_file(best, experiment, script, host=host))


def override_file(best: Best, experiment: Experiment) -> str:
    """The configuration as a Hydra override file."""
    head = [
        *_evidence(best, experiment),
        "Use: copy to <folder>/experiment/best.yaml, then --config-dir <folder> '+experiment=[NAME,best]'",
    ]
    body, left_out = without_secrets(best)
    if left_out:
        head.append(f"Secrets are left out; keep giving them yourself: {', '.join(left_out)}")
    return "# @package _global_\n" + _comments(head) + yaml.safe_dump({"engine": body}, sort_keys=True)


def without_secrets(best: Best) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Flags and environment that may be written down, and the names of the others."""
    body: dict[str, dict[str, Any]] = {
        "flags": {name: value for name, value in best.flags.items() if REDACTED not in str(value)},
        "env": {name: value for name, value in best.env.items() if REDACTED not in value},
    }
    return body, sorted({*best.flags, *best.env} - {*body["flags"], *body["env"]})


def launch_script(best: Best, experiment: Experiment, record: TrialRecord, *, host: str = DEFAULT_HOST) -> str:
    """A shell script that starts the server that was measured; it refuses another version of the engine."""
    words, asked = _words(record.command, experiment.model.name)
    lines = [
        "#!/usr/bin/env bash",
        *_comments([*_evidence(best, experiment), *_cautions(best, record)]).splitlines(),
        "# HOST and PORT choose where it listens, PYTHON the interpreter. Whoever reaches it can use it.",
        "set -euo pipefail",
        f'HOST="${{HOST:-{host}}}"',
        f'PORT="${{PORT:-{DEFAULT_PORT}}}"',
    ]
    if _is_module(record.command):
        words[0] = words[0].replace(shlex.quote(record.command[0]), '"$PYTHON"', 1)
        lines += [f"measured_with={shlex.quote(record.command[0])}", 'PYTHON="${PYTHON:-$measured_with}"']
        lines += [] if best.simulated else _version_check(best)
    for name, value in record.env:
        lines += [f"{_ask_for(name)}; export {name}" if REDACTED in value else f"export {name}={shlex.quote(value)}"]
    lines += [_ask_for(name) for name in asked]
    lines.append("exec " + " \\\n    ".join(words) + ' "$@"')
    return "\n".join(lines) + "\n"


def unit(best: Best, experiment: Experiment, script: Path, text: str, *, host: str = DEFAULT_HOST) -> str:
    """A systemd unit that keeps the script running.

    Args:
        script: absolute path of launch.sh. text: what is in it.
    """
    secrets = secrets_of(text)
    head = [
        *_evidence(best, experiment),
        "Use: copy to /etc/systemd/system/, add User= (the account that the engine is installed for), then",
        "systemctl enable --now server. The path of launch.sh below is where this file was written.",
    ]
    # systemd takes no special characters in the path of an executable; in an argument it takes them escaped.
    path = str(script).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    lines = [
        "[Unit]",
        f"Description={experiment.model.name.replace('%', '%%')}, for {requests(best.level)}",
        "Wants=network-online.target",
        "After=network-online.target",
        "",
        "[Service]",
        f"Environment=HOST={host} PORT={DEFAULT_PORT}",
        *([f"# It has to set {', '.join(secrets)}.", "EnvironmentFile=/etc/server.env"] if secrets else []),
        f'ExecStart=/usr/bin/env bash "{path}"',
        "Restart=on-failure",
        f"RestartSec={RESTART_DELAY_S}",
        "KillMode=mixed",
        f"TimeoutStopSec={experiment.engine.stop_timeout_s:.0f}",
        "",
        "[Install]",
        "WantedBy=multi-user.target",
    ]
    return _comments(head) + "\n".join(lines) + "\n"


def compose_file(best: Best, experiment: Experiment, text: str, *, host: str = DEFAULT_HOST) -> str:
    """A Compose file that runs the script in a container; the image is asked for, as none was measured here.

    Args:
        text: what is in launch.sh.
    """
    head = [
        *_evidence(best, experiment),
        f"Use: IMAGE=<an image that has {best.engine} for its python3> docker compose up",
        "HOST is the address of this machine that the port is published at.",
        "This file was validated against the schema of the Compose specification, and never run: try it first.",
    ]
    probe = (
        f"import urllib.request as u; u.urlopen('http://127.0.0.1:{DEFAULT_PORT}/health', timeout={PROBE_TIMEOUT_S})"
    )
    volumes = ["./launch.sh:/launch.sh:ro"]
    for path in (experiment.model.path, experiment.model.draft_path):
        if path and Path(path).is_absolute():
            volumes.append(f"{_literal(path)}:{_literal(path)}:ro")
        elif path and "${HF_HOME" not in volumes[-1]:
            volumes.append("${HF_HOME:-~/.cache/huggingface}:/root/.cache/huggingface")
    service: dict[str, Any] = {
        "image": "${IMAGE:?name an image that has the engine}",
        "entrypoint": ["bash", "/launch.sh"],
        "environment": {
            "HOST": "0.0.0.0",  # noqa: S104 (inside the container; what is published is said under ports)
            "PORT": str(DEFAULT_PORT),
            "PYTHON": "python3",
            **{name: f"${{{name}:?it is a secret that launch.sh asks for}}" for name in secrets_of(text)},
        },
        "ports": [f"${{HOST:-{host}}}:${{PORT:-{DEFAULT_PORT}}}:{DEFAULT_PORT}"],
        "volumes": volumes,
        "ipc": "host",
        "restart": "unless-stopped",
        "stop_grace_period": f"{experiment.engine.stop_timeout_s:.0f}s",
        "healthcheck": {
            "test": ["CMD", "python3", "-c", probe],
            "interval": "30s",
            "timeout": f"{2 * PROBE_TIMEOUT_S}s",
            "start_period": f"{experiment.engine.start_timeout_s:.0f}s",
        },
    }
    if not best.simulated and experiment.hardware.architecture != "cpu":
        gpu = {"driver": "nvidia", "count": experiment.hardware.gpu_count, "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [gpu]}}}
    return _comments(head) + yaml.safe_dump({"services": {"server": service}}, sort_keys=False, width=200)


@dataclass(frozen=True)
class Script:
    """What a launch.sh says, apart from its comments.

    Attributes:
        flags: of the command, by their spelling; the words before the first are under an empty name.
        env: what it exports. rest: every other line, default host and port left out.
    """

    flags: Mapping[str, tuple[str, ...]]
    env: Mapping[str, str]
    rest: tuple[str, ...]


def read_script(text: str) -> Script:
    """Take a launch.sh apart.

    Raises:
        ValueError: it is not written as a launch.sh is.
    """
    flags: dict[str, tuple[str, ...]] = {}
    env: dict[str, str] = {}
    rest: list[str] = []
    for line in text.replace("\\\n", " ").splitlines():
        if line.startswith("export "):
            name, _, value = line.removeprefix("export ").partition("=")
            env[name] = " ".join(shlex.split(value))
        elif line.startswith("exec "):
            name = ""
            for word in shlex.split(line.removeprefix("exec ")):
                name = word if word.startswith("--") else name
                flags[name] = (*flags.get(name, ()), *(() if word == name else (word,)))
        elif line.strip() and not line.startswith("#") and not _LISTENING_DEFAULT.fullmatch(line):
            rest.append(line)
    if not flags:
        raise ValueError("it has no line that begins with exec")
    return Script(flags, env, tuple(rest))


def differences(seen: Script, expected: Script) -> list[str]:
    """What a script says otherwise than the one that was written, one sentence each."""
    found = [
        f"{name or 'command'}: the file has {_said(mine.get(name))}, {_said(other.get(name))} was measured"
        for mine, other in ((seen.flags, expected.flags), (seen.env, expected.env))
        for name in dict.fromkeys([*other, *mine])
        if mine.get(name) != other.get(name)
    ]
    found += [f"a line that does not belong there: {line}" for line in seen.rest if line not in expected.rest]
    found += [f"a line is missing: {line}" for line in expected.rest if line not in seen.rest]
    return found


def secrets_of(text: str) -> list[str]:
    """Names of the variables that a launch.sh asks for."""
    return re.findall(r'^: "\$\{([A-Za-z_][A-Za-z0-9_]*):\?', text, re.MULTILINE)


def _said(value: str | tuple[str, ...] | None) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) else " ".join(value) or "it"


def _evidence(best: Best, experiment: Experiment) -> list[str]:
    return [
        *best.sentences,
        f"Found by the run {experiment.name}/{experiment.run}, trial {best.trial}, with {best.engine}.",
        f"Meant for {requests(best.level)}.",
    ]


def _cautions(best: Best, record: TrialRecord) -> list[str]:
    """What is known to kill this server in production although it was measured well."""
    algorithm = best.flags.get("speculative_algorithm")
    # As the simulator has it, whose docs/simulator.md says on what this rests: a draft model, and Triton's attention.
    if (
        parse_version(best.engine.partition(" ")[2])[:3] != FULL_BATCH_CRASH_VERSION
        or algorithm in (None, "NGRAM")
        or best.flags.get("attention_backend") not in (None, "triton")
    ):
        return []
    version = ".".join(map(str, FULL_BATCH_CRASH_VERSION))
    limit = record.facts.max_running_requests if record.facts is not None else None
    number = "max_running_requests of its /server_info" if limit is None else str(limit)
    return [
        f"CAUTION: SGLang {version} with a draft model dies once as many requests run as max_running_requests allows"
        " (seen on an H200 with the triton attention backend).",
        f"Keep the requests of all clients together below {number}, for example in a proxy before it: what comes above"
        " that does not wait in a queue, it ends the server.",
    ]


def _comments(sentences: Iterable[str]) -> str:
    return "".join(f"# {' '.join(sentence.split())}\n" for sentence in sentences)


def _is_module(command: Sequence[str]) -> bool:
    """Whether an interpreter is started, and no wrapper such as a container."""
    return len(command) > 1 and command[1] == "-m"


def _version_check(best: Best) -> list[str]:
    """Refuse another version than the measured one: flags and their effects change between releases."""
    name, _, version = best.engine.partition(" ")
    probe = shlex.quote(f"import importlib.metadata as m; print(m.version({name!r}))")
    return [
        f'seen=$("$PYTHON" -c {probe})',
        f'if [ "$seen" != {shlex.quote(version)} ]; then',
        f'    echo "{name} $seen is installed, but these flags were measured with {version};'
        ' set ANY_VERSION=1 to start all the same" >&2',
        '    [ "${ANY_VERSION:-0}" = 1 ] || exit 1',
        "fi",
    ]


def _ask_for(name: str) -> str:
    return f': "${{{name}:?set it first: it is a secret, and is not kept here}}"'


def _words(command: Sequence[str], served_name: str) -> tuple[list[str], list[str]]:
    """The argument list quoted, one flag a line, host, port and secrets taken from the environment; and the names of
    those secrets. The measured server had a name of its own, for its identity; this one has the model's."""
    shown = {"--host": '"$HOST"', "--port": '"$PORT"', "--served-model-name": shlex.quote(served_name)}
    words: list[str] = []
    asked: list[str] = []
    previous = ""
    for word in command:
        text = shown.get(previous, shlex.quote(word))
        if REDACTED in word and previous.startswith("--"):
            asked.append(previous.lstrip("-").replace("-", "_").upper())
            text = f'"${asked[-1]}"'
        if word.startswith("--") or not words:
            words.append(text)
        else:
            words[-1] += " " + text
        previous = word
    return words, asked


def _literal(text: str) -> str:
    """As Compose takes it without filling in variables."""
    return text.replace("$", "$$")


def _write_text(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(text)
    temporary.replace(path)
