"""What is read from real logs."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.engines.sglang.log_facts import read_facts

LOGS = Path(__file__).parents[1] / "fixtures" / "logs"
PUBLIC = Path(__file__).parents[3] / "shared" / "logs" / "public"
GIB = 1 << 30


def lines(name: str) -> list[str]:
    return (LOGS / f"{name}.log").read_text().splitlines()


def test_base_launch() -> None:
    facts = read_facts(lines("h200_0515_grid_a1_base_f80"))
    assert (facts.kv_tokens, facts.state_slots, facts.max_running_requests) == (525_474, 201, 40)
    assert facts.available_bytes == pytest.approx(139.09 * GIB)
    assert facts.weight_bytes == pytest.approx(50.33 * GIB)
    assert facts.kv_bytes == pytest.approx(32.08 * GIB)
    assert facts.state_bytes == pytest.approx(28.96 * GIB)
    assert facts.graph_bytes == pytest.approx(0.27 * GIB)
    assert facts.available_after_pools_bytes == pytest.approx(27.60 * GIB)
    assert facts.available_after_start_bytes == pytest.approx(27.21 * GIB)
    assert facts.draft_weight_bytes is None
    assert facts.draft_kv_bytes is None
    assert facts.warnings == ()


def test_launch_with_a_draft_keeps_its_weights_and_pool_apart() -> None:
    facts = read_facts(lines("h200_0515_mtp_27b_ready_then_crash_under_load"))
    assert facts.draft_weight_bytes == pytest.approx(5.53 * GIB)
    assert facts.draft_kv_bytes == pytest.approx(1.84 * GIB)
    assert facts.kv_bytes == pytest.approx(29.42 * GIB)
    assert facts.graph_bytes == pytest.approx((0.46 + 0.23 + 0.29) * GIB)
    assert [line.split(" ")[0] for line in facts.warnings] == ["Max", "max_running_requests"]


def test_launch_that_died_says_what_it_got_to() -> None:
    facts = read_facts(lines("h200_0515_mtp_oom_state_cache"))
    assert facts.weight_bytes == pytest.approx(50.33 * GIB)
    assert (facts.kv_tokens, facts.max_running_requests, facts.available_after_start_bytes) == (None, None, None)


def test_retractions_are_counted() -> None:
    assert read_facts(lines("cpu_0523_retraction_then_stopped")).retractions == 19


def test_cpu_launch() -> None:
    facts = read_facts(lines("cpu_0515_ready_py311"))
    assert (facts.kv_tokens, facts.max_running_requests) == (20_000, 8)


def test_old_formats_and_ranks() -> None:
    facts = read_facts(
        [
            "\x1b[32m[2026-06-07 18:37:25 TP0] Load weight begin. avail mem=112.22 GB\x1b[0m\n",
            "[2026-06-07 18:37:25 TP1] Load weight begin. avail mem=99.00 GB\n",
            "[2026-06-07 18:37:46 TP1] Load weight end. elapsed=20.7 s, type=Q, avail mem=1 GB, mem usage=3.99 GB.\n",
            "[2026-06-07 18:37:46 TP0] Load weight end. elapsed=20 s, type=Q, avail mem=108 GB, mem usage=3.26 GB.",
            "[2026-06-07 18:37:47 TP0] KV Cache is allocated. #tokens: 5534509, K size: 18.47 GB, V size: 18.47 GB",
            "[2026-06-07 18:37:48 TP0] Capture cuda graph end. Time elapsed: 9 s. mem usage=0.36 GB. avail mem=7 GB.",
            "[2026-06-07 18:37:48 TP0] KV cache pool is full. Retract requests. #retracted_reqs: 2",
        ]
    )
    assert facts.available_bytes == pytest.approx(112.22 * GIB)
    assert facts.weight_bytes == pytest.approx(3.26 * GIB)
    assert facts.draft_weight_bytes is None
    assert facts.kv_tokens == 5_534_509
    assert facts.graph_bytes == pytest.approx(0.36 * GIB)
    assert facts.retractions == 2


@pytest.mark.skipif(not PUBLIC.exists(), reason="public logs are not part of the repository")
def test_public_logs_are_read_without_nonsense() -> None:
    for path in sorted(PUBLIC.glob("*.log")):
        facts = read_facts(path.read_text(errors="replace").splitlines())
        if facts.kv_bytes is not None and facts.available_bytes is not None:
            assert 0 < facts.kv_bytes < facts.available_bytes, path.name
