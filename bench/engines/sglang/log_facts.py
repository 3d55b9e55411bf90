"""Log facts: what the log of SGLang 0.5.10 to 0.5.23 says about a server's start."""

from __future__ import annotations

import re
from collections.abc import Iterable

from bench.engines.protocol import LaunchFacts

GIB = float(1 << 30)  # SGLang prints "GB" and means GiB.

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_PREFIX = re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d((?: [A-Z]+\d+)*)\] ")
_LOAD_BEGIN = re.compile(r"Load weight begin\. avail mem=([\d.]+) GB")
_LOAD_END = re.compile(r"Load weight end\. .*mem usage=(-?[\d.]+) GB")
_STATE = re.compile(r"Mamba Cache is allocated\. max_mamba_cache_size: (\d+), (.*)")
_SIZE = re.compile(r"size: ([\d.]+) ?GB")
_KV = re.compile(r"KV Cache .*#tokens: (\d+), (.*size: [\d.]+ ?GB)")
_POOLS_END = re.compile(r"Memory pool end\. avail mem=([\d.]+) GB")
# "Capture target verify CUDA graph end. elapsed=…", until 0.5.13 "Capture cuda graph end. Time elapsed: …".
_GRAPH = re.compile(r"Capture .*graph end\. .*mem usage=(-?[\d.]+) GB", re.IGNORECASE)
_LIMITS = re.compile(r"max_total_num_tokens=(\d+), .*max_running_requests=(\d+), .*available_[cg]pu_mem=([\d.]+) GB")
_RETRACTED = re.compile(r"#retracted_reqs: (\d+)")

# Lines in which SGLang says that it runs something else than was asked for (any of 0.5.10 to 0.5.23).
_CHANGED = re.compile(
    "|".join(
        (
            r"is reset to \d+ for speculative decoding",
            r"is adjusted to ",
            r"is capped to \d+ by the mamba state cache",
            r"was reduced from the requested",
            r"is larger than the profiled value",
            r"is incompatible with .*; disabling",
            r"Non-overlap \(synchronous\) spec v2 is used",
            r"speculative_adaptive disabled",
            r"Page first layout is not supported with direct IO backend",
            r"HiCache auto-sizing: ratio",
            r"Disabling (overlap schedule|[Rr]adix [Cc]ache)",
            r"Automatically setting page_size",
            r"Mixed chunked prefill is disabled",
            r"Overlap schedul\w+ is disabled",
            r"Cuda graph is disabled because",
            r"KV pool holds \d+ tokens, fewer than --context-length",
        )
    )
)


def read_facts(lines: Iterable[str]) -> LaunchFacts:
    """Read a log, whole or cut off anywhere; of several ranks the first speaks for all.

    Args:
        lines: merged standard output and error, with or without line ends and colour codes.
    """
    reader = _Reader()
    for line in lines:
        reader.read(line)
    return reader.facts()


class _Reader:
    """Collects facts line by line; the second load is the draft model's."""

    def __init__(self) -> None:
        self.available: float | None = None
        self.weights: list[float] = []
        self.slots: int | None = None
        self.state_bytes: float | None = None
        self.kv: list[tuple[int, float]] = []
        self.graphs: list[float] = []
        self.after_pools: float | None = None
        self.limits: tuple[int, int, float] | None = None
        self.warnings: list[str] = []
        self.retractions = 0

    def read(self, line: str) -> None:
        line = _COLOUR.sub("", line).rstrip()
        prefix = _PREFIX.match(line)
        if prefix is None or any(not rank.endswith("0") or rank[-2:].isdigit() for rank in prefix[1].split()):
            return
        text = line[prefix.end() :]
        if match := _LOAD_BEGIN.match(text):
            self.available = self.available or float(match[1]) * GIB
        elif match := _LOAD_END.match(text):
            self.weights.append(float(match[1]) * GIB)
        elif match := _STATE.match(text):
            self.slots = int(match[1])
            self.state_bytes = sum(map(float, _SIZE.findall(match[2]))) * GIB
        elif match := _KV.search(text):
            self.kv.append((int(match[1]), sum(map(float, _SIZE.findall(match[2]))) * GIB))
        elif match := _POOLS_END.match(text):
            self.after_pools = float(match[1]) * GIB
        elif match := _GRAPH.match(text):
            self.graphs.append(float(match[1]) * GIB)
        elif match := _LIMITS.match(text):
            self.limits = int(match[1]), int(match[2]), float(match[3]) * GIB
        elif match := _RETRACTED.search(text):
            self.retractions += int(match[1])
        elif _CHANGED.search(text):
            self.warnings.append(text)

    def facts(self) -> LaunchFacts:
        tokens, running, after_start = self.limits or (self.kv[0][0] if self.kv else None, None, None)
        has_draft = len(self.weights) > 1
        # A target with sliding windows has several pools; the draft's is the last.
        draft_kv = self.kv[-1][1] if has_draft and len(self.kv) > 1 else None
        return LaunchFacts(
            available_bytes=self.available,
            weight_bytes=self.weights[0] if self.weights else None,
            draft_weight_bytes=self.weights[1] if has_draft else None,
            kv_tokens=tokens,
            kv_bytes=sum(size for _, size in self.kv) - (draft_kv or 0.0) if self.kv else None,
            draft_kv_bytes=draft_kv,
            state_slots=self.slots,
            state_bytes=self.state_bytes,
            max_running_requests=running,
            graph_bytes=sum(self.graphs) if self.graphs else None,
            available_after_pools_bytes=self.after_pools,
            available_after_start_bytes=after_start,
            warnings=tuple(self.warnings),
            retractions=self.retractions,
        )
