"""Metrics: the page that SGLang gives Prometheus, with the names and labels that its readers know."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from bench.engines.simulator.scheduler import Scheduler

BUCKETS = {
    "time_to_first_token_seconds": (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400),
    "inter_token_latency_seconds": (0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.1, 0.2, 0.5, 1),
    "e2e_request_latency_seconds": (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400, 600),
    "queue_time_seconds": (0.001, 0.01, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100),
}


@dataclass
class Histogram:
    """Counts of values up to each bound, of seconds."""

    bounds: tuple[float, ...]
    counts: Counter[float] = field(default_factory=Counter)
    total: float = 0.0
    number: int = 0

    def add(self, value: float, times: int = 1) -> None:
        self.total += value * times
        self.number += times
        for bound in self.bounds:
            if value <= bound:
                self.counts[bound] += times
                break

    def lines(self, name: str, labels: str) -> list[str]:
        lines, below = [], 0
        for bound in self.bounds:
            below += self.counts[bound]
            lines.append(f'sglang:{name}_bucket{{{labels},le="{bound:g}"}} {float(below)}')
        lines.append(f'sglang:{name}_bucket{{{labels},le="+Inf"}} {float(self.number)}')
        return [
            f"# TYPE sglang:{name} histogram",
            f"sglang:{name}_sum{{{labels}}} {self.total}",
            *lines,
            f"sglang:{name}_count{{{labels}}} {float(self.number)}",
        ]


@dataclass
class Metrics:
    """What a server counts; gauges are refreshed where SGLang does it, at its log intervals."""

    model: str
    enabled: bool
    counters: Counter[str] = field(default_factory=Counter)
    gauges: dict[str, float] = field(default_factory=dict)
    histograms: dict[str, Histogram] = field(
        default_factory=lambda: {name: Histogram(bounds) for name, bounds in BUCKETS.items()}
    )

    def refresh(self, scheduler: Scheduler, rate: float, accepted: float | None) -> None:
        plan = scheduler.plan
        slots = len(scheduler.running) * max(1, scheduler.settings.slots_per_request - 1)
        tokens = scheduler.used_tokens / max(1, plan.kv_tokens)
        states = slots / plan.state_slots if plan.state_slots else 0.0
        self.gauges |= {
            "num_running_reqs": len(scheduler.running),
            "num_queue_reqs": len(scheduler.waiting),
            "gen_throughput": rate,
            "token_usage": max(tokens, states),
            "full_token_usage": tokens,
            "mamba_usage": states,
            "num_used_tokens": scheduler.used_tokens,
            "max_total_num_tokens": plan.kv_tokens,
            "new_token_ratio": scheduler.ratio,
            "spec_accept_length": accepted or 0.0,
            "is_cuda_graph": float(len(scheduler.running) <= scheduler.times.largest_graph),
            "num_retracted_reqs": 0.0,
        }

    def page(self) -> str:
        """The text; labels of the scheduler's metrics and of the tokenizer's differ, as in SGLang."""
        plain = f'engine_type="unified",model_name="{self.model}"'
        ranked = f'{plain},moe_ep_rank="0",pp_rank="0",tp_rank="0"'
        lines: list[str] = []
        for name, value in sorted(self.counters.items()):
            labels = ranked if name in ("num_retracted_requests_total", "spec_verify_calls_total") else plain
            lines += [f"# TYPE sglang:{name} counter", f"sglang:{name}{{{labels}}} {float(value)}"]
        for name, gauge in sorted(self.gauges.items()):
            lines += [f"# TYPE sglang:{name} gauge", f"sglang:{name}{{{ranked}}} {float(gauge)}"]
        for name, histogram in self.histograms.items():
            lines += histogram.lines(name, ranked if name == "queue_time_seconds" else plain)
        return "\n".join(lines) + "\n"
