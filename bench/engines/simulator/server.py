"""Server: a process that starts, serves and dies as SGLang does, on a card that is not there.

Time is virtual: ``time_scale`` virtual seconds pass in one real second, and every time that is told (in replies, log
lines, metrics) is virtual. When the processor cannot keep up, the server says so in its log and in ``/server_info``.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import random
import signal
import sys
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from bench.engines.sglang.model_shape import ModelShape
from bench.engines.sglang.settings import GIB, parse_version
from bench.engines.simulator.arguments import Arguments
from bench.engines.simulator.clock import Clock, Pace
from bench.engines.simulator.faults import Faults
from bench.engines.simulator.http import REASONS, Connection, Exchange
from bench.engines.simulator.log import Log
from bench.engines.simulator.metrics import Metrics
from bench.engines.simulator.model import RANDOM_IDS_ACCEPTANCE, ServerModel
from bench.engines.simulator.options import Options
from bench.engines.simulator.process import Process
from bench.engines.simulator.replies import Garbage, NativeReply, OpenAiReply, Reply
from bench.engines.simulator.scheduler import Request, Scheduler, StepResult
from bench.engines.simulator.startup import Startup

DECODE_LOG_INTERVAL = 40
# A reply that waits longer than this (virtual) makes /health give up (SGLANG_HEALTH_CHECK_TIMEOUT).
HEALTH_TIMEOUT_S = 20.0
WATCHDOG_S = 300.0
STOP_S = 2.0
# Lost virtual seconds at which the server complains, and after how many more again.
LAG_LIMIT_S = 0.5
LAG_COMPLAINT_S = 10.0
BYTES_PER_TEXT_TOKEN = 4


class Server:
    """One server process.

    Args:
        arguments: SGLang's command line.
        shape: of the model.
        env: its environment.
    """

    def __init__(self, options: Options, arguments: Arguments, shape: ModelShape, env: Mapping[str, str]) -> None:
        self.options = options
        self.faults = Faults.read(options.faults)
        self.version = parse_version(options.version)
        self.values = dict(arguments.values)
        self.given = arguments.given
        self.warnings = arguments.warnings
        self.env = env
        self.log = Log(self.version)
        self.process = Process(self.log, options.hardware)
        self.clock = Clock(options.time_scale)
        flags = {name: value for name, value in self.given.items() if value is not False}
        if "wrong_configuration" in self.faults:
            flags["mem_fraction_static"] = round(float(flags.get("mem_fraction_static", 0.8)) - 0.07, 3)
            flags["max_running_requests"] = max(1, int(flags.get("max_running_requests", 48)) // 2)
        self.model = ServerModel.of(
            flags,
            version=options.version,
            shape=shape,
            hardware=options.hardware,
            env=env,
            disturbance=options.disturbance,
            first_acceptance=options.first_acceptance,
        )
        self.settings, self.plan = self.model.settings, self.model.plan
        self.shape = self.model.shape
        self.random = random.Random(options.seed)
        self.scheduler = Scheduler(
            self.plan,
            self.model.times,
            hybrid=bool(shape.linear_layers),
            rng=self.random,
            noise=options.disturbance.noise,
        )
        self.host = str(self.values.get("host") or "127.0.0.1")
        self.port = int(self.values.get("port") or 30000)
        self.name = str(self.values.get("served_model_name") or self.values["model_path"])
        if "wrong_name" in self.faults:
            self.name += "-other"
        self.garbage = Garbage(
            empty="garbage_empty" in self.faults,
            repeated="garbage_repeated" in self.faults,
            undecodable="garbage_bytes" in self.faults,
            short="garbage_count" in self.faults,
        )
        self.metrics = Metrics(self.name, bool(self.values.get("enable_metrics")))
        self.replies: dict[Request, Reply] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self.numbers = itertools.count()
        self.arrived = asyncio.Event()
        self.ready = False
        self.stopping = False
        self.hung = False
        self.finished = 0
        self.pace = Pace(self.clock)
        self.complained = 0.0
        self.rate = 0.0
        self.last_decode_log = (0, 0.0, 0, 0)  # steps, time, generated, verify steps
        self.last_prefill_s = 0.0
        self.accepted: float | None = None
        self.resolve()

    # What the server says of itself

    def resolve(self) -> None:
        """Arguments as SGLang resolves them, by the names of the version."""
        settings, values = self.settings, self.values
        backend = {"sm100": "trtllm_mha", "sm90": "fa3"}.get(self.options.hardware.architecture, "flashinfer")
        strategy = (
            "mamba_radix_cache_strategy" if "mamba_radix_cache_strategy" in values else "mamba_scheduler_strategy"
        )
        resolved: dict[str, Any] = {
            "tokenizer_path": values.get("tokenizer_path") or values["model_path"],
            "served_model_name": self.name,
            "mem_fraction_static": settings.mem_fraction_static,
            "chunked_prefill_size": settings.chunked_prefill_size,
            "max_running_requests": settings.max_running_requests,
            "page_size": settings.page_size,
            "disable_overlap_schedule": not settings.overlap,
            "attention_backend": values.get("attention_backend") or backend,
            "sampling_backend": values.get("sampling_backend") or "flashinfer",
            "random_seed": values.get("random_seed") or self.options.seed,
            "host": self.host,
            "port": self.port,
        }
        if settings.speculative:
            resolved |= {
                "speculative_algorithm": settings.algorithm,
                "speculative_num_steps": settings.steps or None,
                "speculative_eagle_topk": settings.topk or None,
                "speculative_num_draft_tokens": settings.draft_tokens,
            }
        if self.shape.linear_layers and settings.radix_cache:
            resolved |= {strategy: settings.strategy, "uses_mamba_radix_cache": True}
        sizes = list(settings.graph_batch_sizes)
        largest = max(sizes, default=0)
        if self.version >= (0, 5, 14):
            prefill = str(values.get("cuda_graph_backend_prefill") or "breakable")
            resolved["cuda_graph_config"] = {
                "decode": {"backend": "full" if sizes else "disabled", "max_bs": largest, "bs": sizes},
                "prefill": {"backend": prefill, "max_bs": settings.chunked_prefill_size},
            }
        else:
            resolved |= {"cuda_graph_max_bs": largest, "cuda_graph_bs": sizes}
        known = ("tokenizer_path", "served_model_name", "uses_mamba_radix_cache", "cuda_graph_config")
        values |= {name: value for name, value in resolved.items() if name in values or name in known}

    def info(self) -> dict[str, Any]:
        """``/server_info``."""
        plan = self.plan
        graphs = sum(item.size_bytes for item in plan.graphs) / GIB
        usage: dict[str, Any] = {
            "weight": round(plan.steps[0].taken_bytes / GIB, 2),
            "kvcache": round(plan.kv_bytes / GIB, 2),
            "token_capacity": plan.kv_tokens,
            "graph": round(graphs, 2),
        }
        if self.version >= (0, 5, 17):
            usage |= {"startup_available": round(plan.free_bytes / GIB, 3), "graph": self.graph_usage()}
        state: dict[str, Any] = self.values | {
            "last_gen_throughput": self.rate,
            "effective_max_running_requests_per_dp": plan.max_running_requests,
            "memory_usage": usage,
        }
        if self.shape.linear_layers:
            state["max_mamba_cache_size"] = plan.state_slots
        if self.settings.speculative and self.accepted is not None:
            state["avg_spec_accept_length"] = self.accepted
        more: dict[str, Any] = {}
        if self.version >= (0, 5, 20):
            more["launch_command"] = " ".join(sys.argv[1:])
        return (
            self.values
            | more
            | {
                "status": "ready" if self.ready else "starting",
                "max_total_num_tokens": plan.kv_tokens,
                "max_req_input_len": self.longest_input(),
                "internal_states": [state],
                "version": self.options.version,
                "kv_events": None,
                "simulated": True,
                "simulator_lag_s": round(self.pace.lag, 3),
                "simulator_worst_lag_s": round(self.pace.worst_lag, 3),
                "simulator_lost_s": round(self.pace.lost, 3),
            }
        )

    def graph_usage(self) -> dict[str, float]:
        target = "target_verify" if self.settings.speculative else "decode"
        names = {"target": target, "draft decode": "draft_decode", "draft extend": "draft_extend"}
        usage = dict.fromkeys(
            ("prefill", "decode", "target_verify", "draft_prefill", "draft_decode", "draft_extend"), 0.0
        )
        return usage | {names[item.kind]: round(item.size_bytes / GIB, 3) for item in self.plan.graphs}

    def context_length(self) -> int:
        return self.settings.context_length

    def longest_input(self) -> int:
        return min(self.context_length() - 1, self.plan.kv_tokens - 1) - 5

    def startup(self) -> Startup:
        return Startup(
            model=self.model,
            options=self.options,
            faults=self.faults,
            given=self.given,
            values=self.values,
            warnings=self.warnings,
            env=self.env,
            log=self.log,
            clock=self.clock,
            process=self.process,
        )

    # Its life

    async def run(self) -> None:
        """Start and serve; ends the process."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.told_to_stop)
        await self.startup().run()
        try:
            await loop.create_server(lambda: Connection(self.handle, self.tasks), self.host, self.port, backlog=2048)
        except OSError as error:
            await self.port_taken(error)
        await self.come_up()
        await self.schedule()

    async def come_up(self) -> None:
        """The web server is there; what follows is the warm-up."""
        self.log.line(f"INFO:     Started server process [{os.getpid()}]")
        self.log.line("INFO:     Waiting for application startup.")
        self.log.line("INFO:     Application startup complete.")
        self.log.line(f"INFO:     Uvicorn running on http://{self.host}:{self.port} (Press CTRL+C to quit)")
        if not self.values.get("skip_server_warmup"):
            await self.clock.sleep(1.0)
        self.metrics.refresh(self.scheduler, 0.0, None)
        self.ready = "never_healthy" not in self.faults
        self.process.serving = True
        self.log.line("The server is fired up and ready to roll!")
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 20, 100)
        if self.plan.failure:
            self.hung = True  # until 0.5.12: started, with room for no request

    async def port_taken(self, error: OSError) -> NoReturn:
        """What SGLang does on a port that is taken: it says that it is ready, and ends."""
        self.log.line("INFO:     Application startup complete.")
        self.log.line(
            f"ERROR:    [Errno {error.errno}] error while attempting to bind on address "
            f"('{self.host}', {self.port}): address already in use"
        )
        self.log.line("INFO:     Waiting for application shutdown.")
        await self.clock.sleep(1.0)
        self.log.line("The server is fired up and ready to roll!")
        self.log.line("INFO:     Application shutdown complete.")
        if self.version >= (0, 5, 20):
            self.process.kill()
        self.process.end(3)

    def told_to_stop(self) -> None:
        if "ignore_sigterm" in self.faults or self.stopping:
            return
        self.stopping = True
        self.log.line("SIGTERM received. signum=None frame=None. Draining requests and shutting down...")
        loop = asyncio.get_running_loop()
        loop.call_later(self.faults.values.get("slow_stop", STOP_S) / self.clock.scale, self.stopped)

    def stopped(self) -> None:
        left = len(self.replies)
        names = [request.name for request in self.replies]
        self.log.line(
            f"Gracefully exiting... Remaining number of requests {left}. Remaining requests remaining_rids={names}."
        )
        pid = os.getpid()
        self.log.line(f"kill_process_tree called: parent_pid={pid}, include_parent=False, pid={pid}")
        self.process.end(0)

    # Scheduling

    async def schedule(self) -> NoReturn:
        """Run the scheduler for ever, each step at its virtual time."""
        scheduler = self.scheduler
        while True:
            if self.hung or scheduler.idle:
                self.arrived.clear()
                self.pace.pause()
                await self.arrived.wait()
                self.pace.resume()
                continue
            result = scheduler.step(self.pace.virtual)
            if result.kind == "idle":  # nothing that waits can run
                self.arrived.clear()
                await self.arrived.wait()
                continue
            self.crash_if_due(result)
            await self.pace.advance(result.duration_s)
            self.complain_of_lag()
            self.deliver(result)

    def complain_of_lag(self) -> None:
        if self.pace.lost > self.complained + LAG_LIMIT_S:
            self.complained = self.pace.lost + LAG_COMPLAINT_S
            self.log.line(
                f"The simulator lost {self.pace.lost:.1f} virtual seconds: this processor cannot keep up with "
                f"{self.clock.scale:g} virtual seconds a second. Its throughput is too low; lower the time scale."
            )

    def crash_if_due(self, result: StepResult) -> None:
        """Failures that a step brings about."""
        faults, running = self.faults, len(self.scheduler.running)
        limit = int(faults.values.get("crash_at_batch", 0)) or self.plan.max_running_requests
        demanded = "crash_at_batch" in faults
        real = self.model.crashes_at_full_batch and "no_crash_at_batch" not in faults
        if result.kind == "decode" and running >= limit and (demanded or real):
            self.process.die(self.model.full_batch_crash())
        if result.kind == "prefill":
            missing = self.model.prefill_missing_bytes(result.new_tokens)
            if missing > 0 or faults.after("oom_runtime", self.finished):
                asked = max(missing, 0.5 * GIB) / GIB
                message = f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {asked:.2f} GiB."
                self.process.run_out(message, min(self.plan.free_bytes, 0.3 * GIB))
        if faults.after("crash_under_load", self.finished):
            self.process.die("RuntimeError: simulated engine failure (serving)")
        if faults.after("illegal_access", self.finished):
            self.process.die("RuntimeError: CUDA error: an illegal memory access was encountered")
        if faults.after("hang_under_load", self.finished):
            self.hung = True
        if faults.after("watchdog", self.finished) and not self.hung:
            self.hung = True
            asyncio.get_running_loop().call_later(WATCHDOG_S / self.clock.scale, self.bark)

    def bark(self) -> None:
        self.log.line("Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)")
        self.log.main_was_told(serving=True)
        self.process.kill()

    def deliver(self, result: StepResult) -> None:
        """Send what a step brought, count it, and log it when it is time."""
        if self.hung:
            return
        interval = self.metrics.histograms["inter_token_latency_seconds"]
        for request, tokens in result.produced:
            reply = self.replies.get(request)
            if reply is None:
                continue
            done = request.finished_s is not None
            reply.progress(done)
            if result.kind == "decode" and tokens:
                interval.add(result.duration_s / tokens, tokens)
            if done:
                self.finish(request, reply)
        counters = self.metrics.counters
        counters["generation_tokens_total"] += sum(tokens for _, tokens in result.produced)
        if result.retracted:
            counters["num_retracted_requests_total"] += result.retracted
            self.log.retracted(result, self.scheduler.ratio)
        if result.kind == "prefill":
            self.log_prefill(result)
        elif self.scheduler.decode_steps - self.last_decode_log[0] >= self.decode_log_interval():
            self.log_decode()

    def decode_log_interval(self) -> int:
        return int(self.values.get("decode_log_interval") or DECODE_LOG_INTERVAL)

    def finish(self, request: Request, reply: Reply) -> None:
        del self.replies[request]
        self.finished += 1
        counters, histograms = self.metrics.counters, self.metrics.histograms
        counters["num_requests_total"] += 1
        counters["prompt_tokens_total"] += request.prompt_tokens
        counters["cached_tokens_total"] += request.cached
        if self.settings.speculative:
            counters["spec_verify_calls_total"] += request.verify_steps
        first, last = request.first_token_s or 0.0, request.finished_s or 0.0
        histograms["time_to_first_token_seconds"].add(first - request.arrival_s)
        histograms["e2e_request_latency_seconds"].add(last - request.arrival_s)
        histograms["queue_time_seconds"].add((request.admitted_s or request.arrival_s) - request.arrival_s)
        self.access(reply.exchange)

    def log_prefill(self, result: StepResult) -> None:
        gap = max(1e-6, self.pace.virtual - self.last_prefill_s)
        self.last_prefill_s = self.pace.virtual
        self.log.prefill(result, self.scheduler, bool(self.shape.linear_layers), result.new_tokens / gap)

    def log_decode(self) -> None:
        _, then, generated, verified = self.last_decode_log
        scheduler = self.scheduler
        made, checked = scheduler.generated - generated, scheduler.verify_steps - verified
        self.rate = made / max(1e-6, self.pace.virtual - then)
        self.accepted = made / checked if self.settings.speculative and checked > 0 else None
        self.last_decode_log = (scheduler.decode_steps, self.pace.virtual, scheduler.generated, scheduler.verify_steps)
        self.log.decode(scheduler, bool(self.shape.linear_layers), self.rate, self.accepted)
        self.metrics.refresh(scheduler, self.rate, self.accepted)

    # Requests

    def handle(self, exchange: Exchange) -> Any:
        """Answer a request; a coroutine where the answer takes its time."""
        path = exchange.path
        if path in ("/generate", "/v1/completions", "/v1/chat/completions"):
            self.generate(exchange)
            return None
        if path in ("/health", "/health_generate"):
            return self.health(exchange)
        simple = {
            "/server_info": self.info,
            "/get_server_info": self.info,
            "/model_info": self.model_info,
            "/get_model_info": self.model_info,
            "/v1/models": self.models,
        }
        if path in simple:
            exchange.reply_json(200, simple[path]())
        elif path == "/metrics" and self.metrics.enabled:
            exchange.reply(200, self.metrics.page().encode(), "text/plain; version=0.0.4; charset=utf-8")
        elif path == "/flush_cache":
            self.flush(exchange)
        elif path == "/set_internal_state":
            exchange.reply_json(200, [False])
        elif path == "/ready" and self.version >= (0, 5, 20):
            exchange.reply(200 if self.ready else 503)
        else:
            exchange.reply_json(404, {"detail": "Not Found"})
        self.access(exchange)
        return None

    def access(self, exchange: Exchange) -> None:
        said = f"{exchange.status} {REASONS.get(exchange.status, 'Unknown')}"
        self.log.line(f'INFO:     {exchange.peer} - "{exchange.method} {exchange.path} HTTP/1.1" {said}')
        if not exchange.keep_alive:
            exchange.transport.close()

    async def health(self, exchange: Exchange) -> None:
        """A sign of life; it takes a token, unless other requests show life anyway."""
        if "lying_health" in self.faults:
            exchange.reply(200)
        elif not self.ready or self.stopping:
            exchange.reply(503)
        elif self.hung:
            begun = time.strftime("%H:%M:%S")
            await self.clock.sleep(HEALTH_TIMEOUT_S)
            self.log.line(
                "Health check failed. Server couldn't get a response from detokenizer for last 20 seconds. "
                f"tic start time: {begun}. last_heartbeat time: {begun}"
            )
            exchange.reply(503)
        else:
            await self.clock.sleep(min(1.0, self.model.times.prefill_s(1, 1.0)))
            exchange.reply(200)
        self.access(exchange)

    def model_info(self) -> dict[str, Any]:
        return {
            "model_path": self.values["model_path"],
            "served_model_name": self.name,
            "tokenizer_path": self.values["tokenizer_path"],
            "is_generation": True,
            "weight_version": "default",
            "load_format": self.values.get("load_format"),
            "architectures": [self.shape.architecture],
            "simulated": True,
        }

    def models(self) -> dict[str, Any]:
        card = {"id": self.name, "object": "model", "created": int(self.clock.wall_started), "owned_by": "sglang"}
        return {
            "object": "list",
            "data": [card | {"root": self.name, "parent": None, "max_model_len": self.context_length()}],
        }

    def flush(self, exchange: Exchange) -> None:
        if not self.scheduler.flush():
            exchange.reply(400, b"Flush cache failed.\n", "text/plain")
            return
        self.last_decode_log = (self.scheduler.decode_steps, self.pace.virtual, 0, 0)
        self.accepted = None
        exchange.reply(
            200,
            b"Cache flushed.\nPlease check backend logs for more details. (When there are running or waiting requests, "
            b"the operation will not be performed.)\n",
            "text/plain",
        )

    def generate(self, exchange: Exchange) -> None:
        """Take a generation request on any of its routes."""
        try:
            body = exchange.json()
            tokens, sampling, is_text = _prompt(exchange.path, body)
            wanted = int(sampling.get("max_new_tokens") or 128)
            temperature = float(sampling.get("temperature", 1.0) or 0.0)
        except (ValueError, TypeError, AttributeError) as error:
            exchange.reply_json(400, {"error": {"message": str(error), "type": "invalid_request_error", "code": 400}})
            self.access(exchange)
            return
        if len(tokens) > self.longest_input():
            limit = f"the model's context length ({self.longest_input()} tokens)"
            text = f"The input ({len(tokens)} tokens) is longer than {limit}."
            exchange.reply_json(400, {"error": {"message": text, "type": "invalid_request_error", "code": 400}})
            self.access(exchange)
            return
        if self.fails_request(exchange):
            return
        request = Request(
            name=f"{next(self.numbers):032x}",
            prompt_tokens=len(tokens),
            output_tokens=max(1, min(wanted, self.context_length() - len(tokens))),
            arrival_s=self.pace.arrival(),
            keys=self.scheduler.cache.keys(tokens),
            acceptance=self.model.acceptance(temperature, None if is_text else RANDOM_IDS_ACCEPTANCE),
        )
        reply = self.reply(exchange, request, body)
        self.replies[request] = reply
        exchange.gone = lambda: self.give_up(request)
        if "lying_health" in self.faults:
            return
        self.scheduler.submit(request)
        self.arrived.set()

    def fails_request(self, exchange: Exchange) -> bool:
        """Errors under load, on demand."""
        draw = self.random.random()
        if draw < self.faults.values.get("errors_under_load", 0.0):
            exchange.reply_json(500, {"error": {"message": "simulated internal error", "code": 500}})
            self.access(exchange)
            return True
        if draw < self.faults.values.get("reset_under_load", 0.0):
            exchange.begin_stream()
            exchange.abort()
            return True
        return False

    def reply(self, exchange: Exchange, request: Request, body: Mapping[str, Any]) -> Reply:
        common: dict[str, Any] = {
            "exchange": exchange,
            "request": request,
            "stream": bool(body.get("stream")),
            "model": str(body.get("model") or self.name),
            "version": self.version,
            "drafts": self.settings.draft_tokens - 1 if self.settings.speculative else 0,
            "metrics": self.metrics.enabled,
            "wall_start_s": self.clock.wall_started,
            "offset": self.random.randrange(8192),
            "incremental": bool(self.values.get("incremental_streaming_output") or self.values.get("stream_output")),
            "garbage": self.garbage,
        }
        if exchange.path == "/generate":
            return NativeReply(**common)
        options = body.get("stream_options") or {}
        return OpenAiReply(
            **common,
            chat=exchange.path == "/v1/chat/completions",
            include_usage=bool(options.get("include_usage")),
            continuous_usage=bool(options.get("continuous_usage_stats")),
            spec_details=bool(body.get("return_spec_tokens_details")),
            report_cached=bool(self.values.get("enable_cache_report")),
        )

    def give_up(self, request: Request) -> None:
        """The client went away."""
        if self.replies.pop(request, None) is not None:
            self.scheduler.abort(request)
            self.metrics.counters["num_aborted_requests_total"] += 1


def _prompt(path: str, body: Any) -> tuple[list[int], Mapping[str, Any], bool]:
    """Token ids of a prompt, its sampling parameters, and whether it is text, which is cut into pieces of some bytes.

    Raises:
        ValueError: there is no prompt.
    """
    if path == "/generate":
        ids, text, sampling = body.get("input_ids"), body.get("text"), body.get("sampling_params") or {}
    else:
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        sampling = {"max_new_tokens": limit, "temperature": body.get("temperature", 1.0)}
        prompt = body.get("prompt")
        if path == "/v1/chat/completions":
            prompt = "".join(f"<{item.get('role')}>{item.get('content')}" for item in body.get("messages") or ())
        ids, text = (prompt, None) if isinstance(prompt, list) else (None, prompt)
    if ids:
        return [int(item) for item in ids], sampling, False
    if not isinstance(text, str) or not text:
        raise ValueError("Either text, input_ids or input_embeds should be provided.")
    data = text.encode()
    pieces = range(0, len(data), BYTES_PER_TEXT_TOKEN)
    return [zlib.crc32(data[start : start + BYTES_PER_TEXT_TOKEN]) for start in pieces], sampling, True


def load_config(path: str, options: Options) -> dict[str, Any] | None:
    """The model's config.json: from the options, else from the folder; None where there is none."""
    if options.model_config is not None:
        return dict(options.model_config)
    try:
        loaded: dict[str, Any] = json.loads((Path(path) / "config.json").read_text())
        return loaded
    except (OSError, json.JSONDecodeError):
        return None
