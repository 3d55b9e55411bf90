"""The simulated server under requests: exact counts on every route, SGLang's endpoints, and failures under load."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import aiohttp
import pytest

from bench.engines.simulator.options import Disturbance
from tests.engines.simulated import ATTENTION, MTP, EndedError, events, no_exits, server, serving

__all__ = ["no_exits"]
FAST = ("--mem-fraction-static", "0.8", *ATTENTION)


def body(tokens: int, prompt: int = 16, **more: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return {"input_ids": list(range(prompt)), "sampling_params": sampling, "stream": True, **more}


async def test_streamed_token_counts_are_exact_on_every_request() -> None:
    rng = random.Random(1)
    lengths = [rng.randint(1, 90) for _ in range(60)]
    async with serving(server(*FAST, *MTP, faults=("no_crash_at_batch",))) as session:

        async def ask(tokens: int) -> None:
            seen = await events(await session.post("/generate", json=body(tokens)))
            counts = [event["meta_info"]["completion_tokens"] for event in seen]
            assert counts == sorted(set(counts))
            assert counts[-1] == tokens
            for event in seen:
                assert len(event["output_ids"]) == event["meta_info"]["completion_tokens"]
                assert len(event["text"].split()) == event["meta_info"]["completion_tokens"]
            last = seen[-1]["meta_info"]
            assert last["finish_reason"] == {"type": "length", "length": tokens}
            if tokens > 1:
                assert last["spec_verify_ct"] == len(seen) - 1
                assert sum(last["spec_correct_drafts_histogram"]) == last["spec_verify_ct"]

        await asyncio.gather(*(ask(tokens) for tokens in lengths))
        page = await (await session.get("/metrics")).text()
    assert (
        f'sglang:generation_tokens_total{{engine_type="unified",model_name="/models/q"}} {float(sum(lengths))}' in page
    )


async def test_openai_routes_stream_exact_usage_and_their_text_adds_up() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with serving(server(*FAST, *MTP, version="0.5.20")) as session:
        common = {"max_tokens": 37, "stream": True, "stream_options": options, "return_spec_tokens_details": True}
        completions = await events(await session.post("/v1/completions", json={"prompt": "Once upon", **common}))
        messages = [{"role": "user", "content": "hello"}]
        chat = await events(await session.post("/v1/chat/completions", json={"messages": messages, **common}))
    text = "".join(choice["text"] for event in completions for choice in event["choices"])
    assert len(text.split()) == 37
    spoken = "".join(choice["delta"].get("content") or "" for event in chat for choice in event["choices"])
    assert len(spoken.split()) == 37
    for seen in (completions, chat):
        assert seen[-1]["choices"] == []
        assert seen[-1]["usage"]["completion_tokens"] == 37
        details = [event["sglext"]["spec_tokens_details"] for event in seen if "sglext" in event]
        assert details[0]["spec_verify_ct"] > 37 / 4 - 1
    assert chat[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}


async def test_whole_replies() -> None:
    async with serving(server(*FAST)) as session:
        native = await (await session.post("/generate", json=body(9, stream=False))).json()
        asked = {"prompt": [1, 2, 3], "max_tokens": 9}
        completion = await (await session.post("/v1/completions", json=asked)).json()
    assert native["meta_info"]["completion_tokens"] == len(native["output_ids"]) == 9
    assert "spec_verify_ct" not in native["meta_info"]
    assert completion["usage"]["completion_tokens"] == 9
    assert completion["usage"]["prompt_tokens"] == 3


async def test_simulated_acceptance_length_is_honoured() -> None:
    async with serving(server(*FAST, *MTP, env={"SGLANG_SIMULATE_ACC_LEN": "3.0"})) as session:
        last = (await events(await session.post("/generate", json=body(64))))[-1]["meta_info"]
    assert last["spec_verify_ct"] == 21  # as the H200's reply has it
    assert last["spec_correct_drafts_histogram"] == [0, 0, 21]
    assert last["spec_accept_rate"] == pytest.approx(2 / 3)


async def test_server_info_tells_resolved_arguments_and_that_it_is_simulated() -> None:
    async with serving(server(*FAST, *MTP, "--served-model-name", "trial-7")) as session:
        info = await (await session.get("/server_info")).json()
        models = await (await session.get("/v1/models")).json()
    assert info["simulated"] is True
    assert info["speculative_algorithm"] == "EAGLE"
    assert info["max_running_requests"] == 48
    assert info["mamba_radix_cache_strategy"] == "extra_buffer"
    assert info["cuda_graph_config"]["decode"]["max_bs"] == 256
    state = info["internal_states"][0]
    assert state["effective_max_running_requests_per_dp"] == 20
    assert state["memory_usage"]["token_capacity"] == info["max_total_num_tokens"]
    assert info["served_model_name"] == models["data"][0]["id"] == "trial-7"


async def test_flush_is_refused_while_requests_run_and_empties_the_cache_otherwise() -> None:
    prompt = list(range(600))
    asked = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 4}}
    # Slow enough that a request of 4,000 tokens still runs when the flush arrives.
    async with serving(server(*FAST, time_scale=2000.0)) as session:
        cached = []
        for flush in (False, False, True):
            if flush:
                assert (await session.post("/flush_cache")).status == 200
            reply = await (await session.post("/generate", json=asked)).json()
            cached.append(reply["meta_info"]["cached_tokens"])
        assert cached == [0, 512, 0]  # a state is kept every 256 tokens
        running = await session.post("/generate", json=body(4000))
        assert (await session.post("/flush_cache")).status == 400
        running.close()


async def test_a_client_that_goes_away_frees_its_place() -> None:
    simulated = server(*FAST, time_scale=2000.0)
    async with serving(simulated) as session:
        response = await session.post("/generate", json=body(100_000))
        await response.content.readany()
        response.close()
        deadline = time.monotonic() + 5
        while not simulated.scheduler.idle and time.monotonic() < deadline:
            await session.get("/v1/models")
        assert simulated.scheduler.idle
    assert simulated.scheduler.used_tokens == 0


async def test_a_prompt_that_is_too_long_is_refused() -> None:
    async with serving(server(*FAST, "--context-length", "4096")) as session:
        response = await session.post("/generate", json=body(5, prompt=5000))
        assert response.status == 400
        assert "longer than the model's context length" in await response.text()


async def test_a_full_pool_retracts_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--max-total-tokens", "1000", "--schedule-conservativeness", "0.01", *FAST)
    async with serving(server(*arguments)) as session:

        async def ask() -> int:
            seen = await events(await session.post("/generate", json=body(150)))
            assert seen[-1]["meta_info"]["completion_tokens"] == 150
            return int(seen[-1]["meta_info"]["num_retractions"])

        retractions = sum(await asyncio.gather(*(ask() for _ in range(12))))
        page = await (await session.get("/metrics")).text()
    assert retractions > 0
    assert f'tp_rank="0"}} {float(retractions)}' in page
    assert "KV cache pool is full. Retract requests. #retracted_reqs:" in capsys.readouterr().err


class TestUnderLoad:
    async def ask_until_it_ends(self, capsys: pytest.CaptureFixture[str], *faults: str, requests: int = 24) -> str:
        simulated = server(*FAST, *MTP, faults=faults)
        with pytest.raises(EndedError) as ended:
            await simulated.startup().run()
            await simulated.come_up()
            for _ in range(requests):
                simulated.scheduler.submit(_request(simulated))
            simulated.arrived.set()
            async with asyncio.timeout(20):
                await simulated.schedule()
        assert ended.value.code == -9
        return capsys.readouterr().err

    @pytest.mark.usefixtures("no_exits")
    async def test_the_crash_of_0_5_15_at_a_full_batch(self, capsys: pytest.CaptureFixture[str]) -> None:
        log = await self.ask_until_it_ends(capsys)
        assert (
            "RuntimeError: The expanded size of the tensor (20971520) must match the existing size (20971840) at "
            "non-singleton dimension 0.  Target sizes: [20971520].  Tensor sizes: [20971840]"
        ) in log
        assert "SIGQUIT received. signum=None" in log

    @pytest.mark.usefixtures("no_exits")
    async def test_a_batch_below_the_limit_lives(self) -> None:
        async with serving(server(*FAST, *MTP)) as session:
            replies = await asyncio.gather(*(session.post("/generate", json=body(20)) for _ in range(19)))
            for reply in replies:
                assert (await events(reply))[-1]["meta_info"]["completion_tokens"] == 20

    @pytest.mark.usefixtures("no_exits")
    async def test_memory_that_runs_out_in_a_prefill(self, capsys: pytest.CaptureFixture[str]) -> None:
        log = await self.ask_until_it_ends(capsys, "oom_runtime:0", requests=2)
        assert "torch.OutOfMemoryError: CUDA out of memory." in log

    @pytest.mark.parametrize(
        ("fault", "check"),
        [
            ("garbage_empty", lambda event: event["text"] == ""),
            ("garbage_repeated", lambda event: len(set(event["text"].split())) == 1),
            ("garbage_bytes", lambda event: set(event["text"]) == {"\ufffd"}),
            ("garbage_count", lambda event: event["meta_info"]["completion_tokens"] == 10),
        ],
    )
    async def test_garbage(self, fault: str, check: Any) -> None:
        async with serving(server(*FAST, faults=(fault,))) as session:
            assert check((await events(await session.post("/generate", json=body(20))))[-1])

    async def test_errors(self) -> None:
        async with serving(server(*FAST, faults=("errors_under_load:1",))) as session:
            assert (await session.post("/generate", json=body(5))).status == 500

    async def test_resets(self) -> None:
        async with serving(server(*FAST, faults=("reset_under_load:1",))) as session:
            with pytest.raises(aiohttp.ClientError):
                await (await session.post("/generate", json=body(5))).text()

    async def test_a_hang_stops_every_answer_and_health(self) -> None:
        async with serving(server(*FAST, faults=("hang_under_load:1",))) as session:
            await session.post("/generate", json=body(2))
            with pytest.raises(asyncio.TimeoutError):
                await session.post("/generate", json=body(2), timeout=aiohttp.ClientTimeout(0.3))
            assert (await session.get("/health")).status == 503

    async def test_lying_health(self) -> None:
        async with serving(server(*FAST, faults=("lying_health",))) as session:
            assert (await session.get("/health")).status == 200
            with pytest.raises(asyncio.TimeoutError):
                await session.post("/generate", json=body(2), timeout=aiohttp.ClientTimeout(0.3))

    async def test_another_configuration_shows_in_server_info(self) -> None:
        async with serving(server("--mem-fraction-static", "0.8", faults=("wrong_configuration",))) as session:
            info = await (await session.get("/server_info")).json()
        assert info["mem_fraction_static"] == pytest.approx(0.73)


def _request(simulated: Any) -> Any:
    from bench.engines.simulator.scheduler import Request

    return Request("r", 16, 64, 0.0, acceptance=simulated.model.acceptance(0.0))


async def test_a_disturbed_step_is_longer() -> None:
    latency = []
    for scale in (1.0, 1.1):
        simulated = server(*FAST, disturbance=Disturbance(step_scale=scale))
        async with serving(simulated) as session:
            seen = await events(await session.post("/generate", json=body(50)))
        meta = seen[-1]["meta_info"]
        latency.append(meta["e2e_latency"] - meta["first_token_latency"])
    assert latency[1] / latency[0] == pytest.approx(1.1, rel=0.01)
