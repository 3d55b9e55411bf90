"""Explain: reads the log of a server, SGLang's or vLLM's, and says what killed it, where, and what to change.

python -m bench.explain server.log
docker logs sglang 2>&1 | python -m bench.explain - --json
"""

from __future__ import annotations

import codecs
import json
import re
import sys
from pathlib import Path

from bench.engines import vllm_faults
from bench.engines.sglang import faults as sglang_faults
from bench.faults import LogReader, Rules
from bench.outcome import Cause, Fault, FlagAdvice
from bench.words import Parser

_TITLES = {
    Cause.OOM_GPU_WEIGHTS: "GPU memory ran out while weights were loaded",
    Cause.OOM_GPU_KV_POOL: "the KV pool does not fit, or nothing is left for it",
    Cause.OOM_GPU_STATE_CACHE: "the state cache (mamba, linear attention) does not fit",
    Cause.OOM_GPU_GRAPH_CAPTURE: "GPU memory ran out while CUDA graphs were captured",
    Cause.OOM_GPU_RUNTIME: "GPU memory ran out while serving",
    Cause.OOM_HOST: "host memory ran out",
    Cause.CONFIG_INCOMPATIBLE: "flags exclude each other, or the model, or this version",
    Cause.UNKNOWN_ARGUMENT: "the command line does not know a flag or a value",
    Cause.MODEL_NOT_FOUND: "the model's path or name does not exist",
    Cause.HUB_ACCESS: "the hub gave no access to the model",
    Cause.WEIGHTS_MISMATCH: "checkpoint and code disagree",
    Cause.PORT_IN_USE: "the address is taken",
    Cause.MISSING_DEPENDENCY: "an import fails, or a package is too old or too new",
    Cause.KERNEL_BUILD: "a kernel does not compile or load",
    Cause.DRIVER_MISMATCH: "driver and CUDA versions do not fit",
    Cause.UNSUPPORTED_HARDWARE: "this hardware cannot do what is asked",
    Cause.NCCL: "communication between ranks failed",
    Cause.WATCHDOG_TIMEOUT: "a watchdog ended it",
    Cause.STARTUP_HANG: "no error, and never ready",
    Cause.ILLEGAL_MEMORY_ACCESS: "a GPU kernel touched memory that it must not",
    Cause.ENGINE_CRASH: "an exception or a signal inside the engine",
    Cause.DISK_FULL: "the disk is full",
    Cause.PERMISSION: "something may not be used by this user",
    Cause.GPU_BUSY: "another process holds the GPU's memory",
    Cause.OTHER: "none of the known failures",
    Cause.HEALTHY: "nothing is wrong, the server became ready",
    Cause.UNKNOWN: "no known failure, and no sign of a server that serves; the most telling line",
}
_VLLM = re.compile(r"\bvllm\b|EngineCore|APIServer pid", re.I)
_SGLANG = re.compile(r"\bsglang\b|server_args=|mem.fraction.static", re.I)
_WORDS = {"raise": "above", "lower": "to at most"}


def explain(text: str) -> Fault:
    """Read a whole log, with the rules of the engine that it names."""
    reader = LogReader(rules_for(text))
    for line in text.split("\n"):
        reader.feed(line)
    return reader.verdict()


def rules_for(text: str) -> Rules:
    """SGLang's rules, unless the log names vLLM more often."""
    return vllm_faults.RULES if _count(_VLLM, text) > _count(_SGLANG, text) else sglang_faults.RULES


def _count(pattern: re.Pattern[str], text: str) -> int:
    return sum(1 for _ in pattern.finditer(text))


def in_words(fault: Fault) -> str:
    """What a person reads."""
    lines = [f"{fault.cause} in phase {fault.phase}: {_TITLES[fault.cause]}"]
    if fault.line:
        lines.append(f"line {fault.line_number}: {fault.line}")
    lines += [_move(flag) for flag in fault.flags]
    if fault.advice:
        lines.append(fault.advice)
    return "\n".join(lines)


def _move(flag: FlagAdvice) -> str:
    bound = "" if flag.bound is None else f" {_WORDS.get(flag.direction, 'to')} {flag.bound:g}"
    return f"{flag.direction} {flag.flag}{bound}"


def as_json(fault: Fault) -> str:
    """What a program reads: cause, phase, line, line_number, flags, advice."""
    return json.dumps(
        {
            "cause": fault.cause,
            "phase": fault.phase,
            "line": fault.line,
            "line_number": fault.line_number,
            "flags": [{"flag": f.flag, "direction": f.direction, "bound": f.bound} for f in fault.flags],
            "advice": fault.advice,
        },
        ensure_ascii=False,
    )


def decoded(content: bytes) -> str:
    """The text of a log: UTF-8 unless it says that it is UTF-16, as redirected output on Windows does."""
    utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return content.decode("utf-16" if utf16 else "utf-8-sig", errors="replace")


def main(arguments: list[str] | None = None) -> int:
    """Run the command; 0 when the log could be read, whatever it says, else 2."""
    parser = Parser(prog="python -m bench.explain", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("log", help="file, or - for standard input")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of words")
    options = parser.parse_args(arguments)
    try:
        content = sys.stdin.buffer.read() if options.log == "-" else Path(options.log).read_bytes()
    except OSError as error:
        print(
            f"cannot read {options.log}: {error.strerror or error}; give a log file, or - for standard input",
            file=sys.stderr,
        )
        return 2
    except ValueError as error:  # a path that no file can have, e.g. with a zero byte
        print(f"cannot read {options.log!r}: {error}", file=sys.stderr)
        return 2
    fault = explain(decoded(content))
    output = as_json(fault) if options.json else in_words(fault)
    sys.stdout.buffer.write(output.encode("utf-8", errors="replace") + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
