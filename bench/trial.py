"""Trial: one candidate's life, from launch over identity and load to teardown and outcome."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import traceback
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp
import orjson
import pyarrow.parquet

from bench import probe, records
from bench.engines.protocol import Command, Engine, LaunchFacts, ServerCounters
from bench.experiment import Experiment
from bench.launch import ports
from bench.launch.gpus import Gpus
from bench.launch.readiness import Ready, wait_failure, wait_ready
from bench.launch.server import LaunchError, Server, Teardown
from bench.load.client import Target
from bench.load.doubts import MAX_FAILED_SHARE
from bench.load.level import MIN_STALL_WALL_S, LevelFailure, LevelResult, measure_level
from bench.load.measurement import Measurement
from bench.outcome import Cause, Outcome, OutcomeKind, Phase
from bench.records import RecordError, Times, TrialRecord
from bench.search import objective
from bench.search.pruning import Pruning
from bench.search.study import Proposal
from bench.secrets import redact_argv, redact_env, redact_text, redact_tree, secret_values

HTTP_TIMEOUT = aiohttp.ClientTimeout(total=30)
# A server that dies under load closes its sockets before its log is whole; the reason follows within this time.
LAST_WORDS_S = 3.0
SLOWED_SHARE, VOID_SLOWED_SHARE = 0.02, 0.10  # of a level's time, lost by a simulated server
GPU_WAIT_S = 120.0
FLUSH_TIMEOUT_S = 10.0
# One reply in a hundred may be cut short by the end of a level; more is the server's doing.
MAX_GARBAGE_SHARE = 0.01
# What a trial cannot be believed to have ended as, if somebody else was on its GPU.
DISTURBED = frozenset({OutcomeKind.COMPLETE, OutcomeKind.PRUNED, OutcomeKind.INFEASIBLE})


PROBE_FILE_NAME = "probe.json"


@dataclass(frozen=True)
class Host:
    """What all trials of a process share.

    Attributes:
        idle_bytes: GPU memory in use before the first launch, by GPU.
    """

    gpus: Gpus
    idle_bytes: tuple[int, ...]


@dataclass
class _Gathered:
    """What a trial has gathered so far; it becomes the record, whatever ends the trial."""

    outcome: Outcome = field(default_factory=lambda: Outcome(OutcomeKind.COMPLETE))
    command: Command = field(default_factory=lambda: Command(()))
    facts: LaunchFacts | None = None
    measurements: list[Measurement] = field(default_factory=list)
    startup_s: float = 0.0
    identity_s: float = 0.0
    warmup_s: float = 0.0
    measure_s: float = 0.0
    teardown: Teardown | None = None


async def run_trial(
    experiment: Experiment,
    engine: Engine,
    proposal: Proposal,
    host: Host,
    *,
    folder: Path,
    on_phase: Callable[[str], None],
    bar: float | None = None,
    text_is_sane: bool = False,
) -> TrialRecord:
    """Launch, identify, measure and end one server.

    Args:
        folder: of the trial; its files are written there.
        on_phase: told what is going on, in a few words.
        bar: value of the objective that a finalist needs; a trial that surely misses it is pruned. None never prunes.
        text_is_sane: the baseline's replies were, so that one with empty or repetitive text is broken.

    Returns:
        the record, whatever happened; an interruption alone is raised (``asyncio.CancelledError``), after teardown.
    """
    started_at, begin_s = time.time(), time.monotonic()
    trial = _Trial(experiment, engine, proposal, host, folder, on_phase, bar, text_is_sane)
    try:
        await trial.run()
    except RecordError:
        raise
    except Exception as error:  # one odd reply or log must not end a night's sweep; it is not the configuration's fault
        trial.harness_failed(error)
    got = trial.got
    times = Times(
        startup_s=got.startup_s,
        identity_s=got.identity_s,
        warmup_s=got.warmup_s,
        measure_s=got.measure_s,
        teardown_s=got.teardown.duration_s if got.teardown else 0.0,
        total_s=time.monotonic() - begin_s,
    )
    record = trial.record(started_at, times)
    records.write_json(folder / "outcome.json", record.outcome)
    return record


class _Trial:
    def __init__(
        self,
        experiment: Experiment,
        engine: Engine,
        proposal: Proposal,
        host: Host,
        folder: Path,
        on_phase: Callable[[str], None],
        bar: float | None,
        text_is_sane: bool,
    ) -> None:
        self.got = _Gathered()
        self._experiment = experiment
        self._engine = engine
        self._proposal = proposal
        self._host = host
        self._folder = folder
        self._on_phase = on_phase
        self._text_is_sane = text_is_sane
        self._pruning = Pruning(experiment, proposal.role, bar)
        self._secrets: frozenset[str] = frozenset()
        self._log_reader = engine.log_reader()
        # Nobody else can know this name: who answers to it is the server that was launched here.
        self._served_name = f"trial-{proposal.number}-{uuid.uuid4().hex[:12]}"

    async def run(self) -> None:
        self._on_phase("waiting for the GPU")
        occupants = await self._host.gpus.wait_free(self._host.idle_bytes, deadline_s=GPU_WAIT_S)
        if occupants:
            detail = f"after {GPU_WAIT_S:.0f} s the GPU is still in use: {'; '.join(occupants)}"
            self.got.outcome = Outcome(OutcomeKind.INFRASTRUCTURE, Cause.GPU_BUSY, Phase.ARGS, detail)
            return
        with ports.reserve() as port:
            self.got.command = self._engine.command(
                self._proposal.config, port=port.port, served_model_name=self._served_name
            )
            self._secrets = secret_values({**os.environ, **dict(self.got.command.env)}, self.got.command.argv)
            try:
                server = await Server.start(
                    self.got.command,
                    folder=self._folder,
                    port=port,
                    launch_id=uuid.uuid4().hex,
                    environment=os.environ,
                    gpus=self._host.gpus,
                )
            except LaunchError as error:
                self.got.outcome = error.outcome
                return
            async with server, aiohttp.ClientSession(f"http://127.0.0.1:{port.port}", timeout=HTTP_TIMEOUT) as session:
                await self._start(server, session)
                self._on_phase("teardown")
                self.got.teardown = await server.stop(grace_s=self._experiment.engine.stop_timeout_s)
            self._close(server)

    async def _start(self, server: Server, session: aiohttp.ClientSession) -> None:
        begin_s = time.monotonic()
        ready = await wait_ready(
            server,
            log_reader=self._log_reader,
            health=lambda: _is_healthy(session),
            start_timeout_s=self._experiment.engine.start_timeout_s,
            stall_timeout_s=self._experiment.engine.stall_timeout_s,
            on_phase=lambda phase: self._on_phase(f"start-up: {phase}"),
        )
        self.got.startup_s = time.monotonic() - begin_s
        if not isinstance(ready, Ready):
            self.got.outcome = ready
            return
        self._on_phase("identity")
        begin_s = time.monotonic()
        watching = asyncio.ensure_future(wait_failure(server, log_reader=self._log_reader))
        try:
            mismatch = await self._identify(session, watching)
            self.got.identity_s = time.monotonic() - begin_s
            if mismatch is not None:
                self.got.outcome = mismatch
                return
            self.got.facts = self._engine.facts(_lines(server))
            await self._load(server, session, watching)
        finally:
            watching.cancel()

    async def _identify(self, session: aiohttp.ClientSession, watching: asyncio.Future[Outcome]) -> Outcome | None:
        """The outcome when the server that answers is not the one that was asked for, else None."""
        try:
            async with session.get("/server_info") as response:
                info = orjson.loads(await response.read())
            if response.status != 200 or not isinstance(info, Mapping) or "served_model_name" not in info:
                raise aiohttp.ClientPayloadError(f"HTTP {response.status}, no served_model_name in {str(info)[:80]}")
        except (aiohttp.ClientError, TimeoutError, orjson.JSONDecodeError) as error:
            detail = f"ready, but /server_info did not tell what runs: {type(error).__name__} {error}"
            unhealthy = Outcome(OutcomeKind.UNHEALTHY, Cause.SERVER_ERRORS, Phase.IDENTITY, detail)
            return await _last_words(watching) or unhealthy
        records.write_json(self._folder / "server_info.json", redact_tree(info, self._secrets))
        differences = self._engine.differences(self._proposal.config, info, served_model_name=self._served_name)
        if not differences:
            return None
        seen = "; ".join(f"{item.name}: asked {item.asked}, runs {item.seen}" for item in differences)
        foreign = any(item.name == "served_model_name" for item in differences)
        cause = Cause.FOREIGN_SERVER if foreign else Cause.WRONG_CONFIGURATION
        return Outcome(OutcomeKind.MISMATCHED, cause, Phase.IDENTITY, seen)

    async def _load(self, server: Server, session: aiohttp.ClientSession, watching: asyncio.Future[Outcome]) -> None:
        limit = self.got.facts.max_running_requests if self.got.facts else None
        levels = self._pruning.levels(limit)
        for concurrency in levels:
            self._on_phase(f"load: {concurrency} concurrent requests")
            begin_s = time.monotonic()
            result = await self._measure(server, session, concurrency, watching)
            elapsed_s = time.monotonic() - begin_s
            self._keep(result, concurrency, elapsed_s)
            failure = result.failure or _failing(result) or await self._probe(result, session)
            if failure is not None:
                self.got.outcome = await self._failed(failure, concurrency, watching)
                return
            garbage = _garbage(result)
            if garbage is not None:
                detail = f"at {concurrency} concurrent requests: {garbage}"
                self.got.outcome = Outcome(OutcomeKind.UNHEALTHY, Cause.GARBAGE_OUTPUT, Phase.MEASURE, detail)
                return
            if result.stopped or (concurrency != levels[-1] and self._pruning.is_over(self.got.measurements)):
                detail = f"at {concurrency} concurrent requests: {self._pruning.reason}"
                self.got.outcome = Outcome(OutcomeKind.PRUNED, Cause.CANNOT_WIN, Phase.MEASURE, detail)
                return

    async def _measure(
        self, server: Server, session: aiohttp.ClientSession, concurrency: int, watching: asyncio.Future[Outcome]
    ) -> LevelResult:
        workload = self._experiment.workload
        if workload.flush_cache:
            await _flush(session)
        deciding = concurrency == objective.level(self._experiment)
        lost_before_s = await self._lost_s(session)
        result = await measure_level(
            Target(f"http://127.0.0.1:{server.port}", "chat" if workload.chat else "generate", self._served_name),
            workload,
            concurrency,
            clock_scale=self._experiment.engine.time_scale,
            seed=workload.seed,
            should_stop=self._pruning.should_stop if deciding else None,
            read_counters=lambda: self._counters(session),
            acceptance_simulated=self._engine.acceptance_is_simulated(self._proposal.config),
            # False also when the log says that it cannot go on: its sockets may stay open for minutes after that.
            server_alive=lambda: server.alive and not watching.done(),
        )
        return _slowed(result, await self._lost_s(session) - lost_before_s)

    async def _lost_s(self, session: aiohttp.ClientSession) -> float:
        if not self._engine.simulated:
            return 0.0
        try:
            async with session.get("/server_info") as response:
                return self._engine.lost_s(orjson.loads(await response.read()))
        except (aiohttp.ClientError, TimeoutError, orjson.JSONDecodeError):
            return 0.0  # it died; the level says so

    async def _counters(self, session: aiohttp.ClientSession) -> ServerCounters:
        try:
            async with session.get("/metrics") as response:
                return self._engine.counters(await response.text())
        except (aiohttp.ClientError, TimeoutError):
            return ServerCounters()

    def _keep(self, result: LevelResult, concurrency: int, elapsed_s: float) -> None:
        """Keep what a level gave. What its load took beyond its own clock is the harness's, and counted as such."""
        scale = self._experiment.engine.time_scale
        if result.measurement is None:
            self.got.warmup_s += elapsed_s
        else:
            self.got.measurements.append(result.measurement)
            self.got.measure_s += result.measurement.window_s / scale
            self.got.warmup_s += (result.measurement.duration_s - result.measurement.window_s) / scale
        if result.requests.num_rows:
            path = self._folder / f"requests-{concurrency}.parquet"
            try:
                pyarrow.parquet.write_table(result.requests, path)
            except OSError as error:
                raise RecordError(f"cannot write {path}: {error}") from error

    async def _probe(self, result: LevelResult, session: aiohttp.ClientSession) -> LevelFailure | None:
        """Whether the server still answers after a level, whose own time may have been up before a hang showed, and
        whether it answers sense.
        """
        reply = await probe.ask(session)
        if reply is None:
            return LevelFailure(Cause.SERVING_HANG, "no answer to one more request after the level")
        records.write_json(self._folder / PROBE_FILE_NAME, reply)
        if reply.broken:
            cause = Cause.SERVER_ERRORS if reply.broken.startswith("HTTP ") else Cause.GARBAGE_OUTPUT
            return LevelFailure(cause, f"one more request after the level was answered by {reply.broken}")
        if reply.odd and self._text_is_sane and not self._engine.acceptance_is_simulated(self._proposal.config):
            detail = f"its text is {reply.odd}, unlike the baseline's: {reply.text[:60]!r}"
            return LevelFailure(Cause.GARBAGE_OUTPUT, detail)
        got = result.measurement
        if got is None or got.output_tokens or got.window_s / self._experiment.engine.time_scale < MIN_STALL_WALL_S:
            return None
        return LevelFailure(Cause.SERVING_HANG, f"no token arrived in the window of {got.window_s:.0f} s")

    async def _failed(self, failure: LevelFailure, concurrency: int, watching: asyncio.Future[Outcome]) -> Outcome:
        """The log's own reason where it gives one in time, else what the client saw; with level and limit."""
        limit = self.got.facts.max_running_requests if self.got.facts else None
        where = f"at {concurrency} concurrent requests"
        if limit is not None:
            where += f" (the server's limit is {limit} running)"
        died = await _last_words(watching) if failure.cause is not Cause.GARBAGE_OUTPUT else None
        if died is not None:
            return replace(died, detail=f"{where}: {died.detail}")
        kind = OutcomeKind.HUNG if failure.cause is Cause.SERVING_HANG else OutcomeKind.UNHEALTHY
        return Outcome(kind, failure.cause, Phase.MEASURE, f"{where}: {failure.detail}")

    def _close(self, server: Server) -> None:
        """What is known only after the end: the whole log's facts, and what did not come back."""
        facts = self._engine.facts(_lines(server))
        self.got.facts = facts if self.got.facts is None else replace(self.got.facts, retractions=facts.retractions)
        teardown, outcome = self.got.teardown, self.got.outcome
        if teardown is None or not teardown.stragglers:
            return
        left = f"left behind: {'; '.join(teardown.stragglers)}"
        if teardown.group_gone and teardown.gpu_memory_back is False and outcome.kind in DISTURBED:
            # Nothing of ours is left, and yet somebody is on the GPU: what was seen there is not the configuration's.
            detail = f"another process came onto the GPU during the trial, which had ended as {outcome.kind}; {left}"
            self.got.outcome = Outcome(OutcomeKind.INFRASTRUCTURE, Cause.GPU_BUSY, outcome.phase, detail)
            return
        self.got.outcome = replace(outcome, detail=f"{outcome.detail}; {left}".lstrip("; "))

    def harness_failed(self, error: Exception) -> None:
        """Keep an error of the harness itself in ``harness_error.txt``; it is retried like the host's failures."""
        text = redact_text("".join(traceback.format_exception(error)), self._secrets)
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / "harness_error.txt").write_text(text)
        detail = f"the harness itself failed ({type(error).__name__}: {error}); see harness_error.txt of the trial"
        self.got.outcome = Outcome(OutcomeKind.INFRASTRUCTURE, Cause.OTHER, self.got.outcome.phase, detail)

    def record(self, started_at: float, times: Times) -> TrialRecord:
        got = self.got
        score = objective.score(self._experiment, got.measurements)
        complete = got.outcome.kind is OutcomeKind.COMPLETE
        void = [item for item in got.measurements if not item.valid]
        if complete and score is None:
            metric = self._experiment.objective.metric
            why = void[0].warnings[0] if void else f"no {metric} in the deciding level; raise workload.min_window_s"
            got.outcome = Outcome(OutcomeKind.INFRASTRUCTURE, Cause.MEASUREMENT_VOID, Phase.MEASURE, why)
        outcome = replace(
            got.outcome,
            detail=redact_text(got.outcome.detail, self._secrets),
            line=None if got.outcome.line is None else redact_text(got.outcome.line, self._secrets),
        )
        return TrialRecord(
            number=self._proposal.number,
            role=self._proposal.role,
            candidate=self._proposal.candidate,
            config=self._proposal.config,
            outcome=outcome,
            engine=f"{self._engine.name} {self._engine.version}",
            simulated=self._engine.simulated,
            started_at=started_at,
            optuna_number=self._proposal.trial.number if self._proposal.trial else None,
            forecast=self._proposal.forecast,
            facts=got.facts,
            measurements=tuple(got.measurements),
            value=score.value if complete and score is not None else None,
            objective_level=objective.level(self._experiment),
            times=times,
            command=redact_argv(got.command.argv, self._secrets),
            env=tuple(redact_env(dict(got.command.env), self._secrets).items()),
        )


def _failing(result: LevelResult) -> LevelFailure | None:
    """A server that fails many requests, if not many in a row: its throughput is that of another load."""
    got = result.measurement
    if got is None or got.requests_failed <= MAX_FAILED_SHARE * (got.requests_ok + got.requests_failed):
        return None
    return LevelFailure(Cause.SERVER_ERRORS, next(text for text in got.warnings if "requests failed" in text))


async def _last_words(watching: asyncio.Future[Outcome]) -> Outcome | None:
    """Why the server died, where its log says so in time; None while it lives on."""
    done, _ = await asyncio.wait([watching], timeout=LAST_WORDS_S)
    return watching.result() if done else None


def _lines(server: Server) -> list[str]:
    return server.log.path.read_text(errors="replace").splitlines() if server.log.path.exists() else []


def _slowed(result: LevelResult, lost_s: float) -> LevelResult:
    """The level with what a simulated server lost to a busy host: said from 2 % on, void from 10 % on."""
    measured = result.measurement
    if measured is None or lost_s <= SLOWED_SHARE * measured.duration_s:
        return result
    said = (
        f"the simulated server lost {lost_s:.1f} of {measured.duration_s:.1f} s to other programs on this host, so its "
        "throughput is too low; lower engine.time_scale"
    )
    valid = measured.valid and lost_s <= VOID_SLOWED_SHARE * measured.duration_s
    return replace(result, measurement=replace(measured, valid=valid, warnings=(said, *measured.warnings)))


def _garbage(result: LevelResult) -> str | None:
    """What is wrong with the replies' token counts; their text is looked at by the probe."""
    wrong = result.requests_empty + result.requests_miscounted
    if wrong <= MAX_GARBAGE_SHARE * result.requests_finished:
        return None
    return (
        f"of {result.requests_finished} replies {result.requests_empty} were empty and "
        f"{result.requests_miscounted} held another number of tokens than asked for"
    )


async def _is_healthy(session: aiohttp.ClientSession) -> bool:
    """One real generation: /health alone has answered for servers that hang."""
    try:
        async with session.get("/health_generate") as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


async def _flush(session: aiohttp.ClientSession) -> None:
    """Empty the prefix cache; the server refuses while requests are still being aborted, so ask until it does."""
    end_s = time.monotonic() + FLUSH_TIMEOUT_S
    while True:
        try:
            async with session.post("/flush_cache") as response:
                if response.status == 200 or time.monotonic() > end_s:
                    return
        except (aiohttp.ClientError, TimeoutError):
            return  # the load that follows will say what is wrong with the server
        await asyncio.sleep(0.05)
