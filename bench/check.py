"""Check: says what a sweep would do, and what is wrong with it, without launching anything."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import config, engines
from bench.engines.protocol import (
    Calibration,
    Candidate,
    Engine,
    EngineError,
    Forecast,
    RefusedError,
    ServerConfig,
    Value,
)
from bench.experiment import Experiment, Parameter
from bench.launch.gpus import Gpus
from bench.launch.ports import reserve
from bench.load.prompts import PromptSet
from bench.search import objective
from bench.search.space import Space
from bench.words import listed

MAX_ENUMERATED = 20_000  # points that are looked at one by one; larger spaces are sampled
SAMPLES = 2_000
EXAMPLES = 5
# Seconds from launch to ready and from SIGTERM to gone: 27B on an H200 took 55 to 122 and 1 to 6, a tiny model on two
# CPU cores 15 to 75 and 5 to 8; the simulator's are virtual.
LAUNCH_S = (60.0, 120.0)
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")  # owner and name
FREE_BYTES_PER_LAUNCH = 2e6  # log, samples and outcome of one launch of the committed runs, rounded up


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the check of an experiment; 0 when it can run, 2 when its configuration is wrong."""
    try:
        experiment = config.load(sys.argv[1:] if arguments is None else arguments, command="bench.check")
    except config.ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    engine = engines.create(experiment)
    try:
        for line in report(experiment, engine):
            print(line)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    hopeless = _hopeless(experiment, engine)
    if hopeless:
        print(f"bench.check: {hopeless}", file=sys.stderr)
    return 2 if hopeless else 0


def _hopeless(experiment: Experiment, engine: Engine) -> str | None:
    """Why a sweep would stop at its first launch."""
    tensor_parallel = int(str(experiment.engine.flags.get("tp_size", 1)))
    if tensor_parallel > experiment.hardware.gpu_count:
        return (
            f"engine.flags.tp_size={tensor_parallel} asks for more than hardware.gpu_count="
            f"{experiment.hardware.gpu_count} GPUs"
        )
    if not experiment.search.require_baseline:
        return None
    try:
        config_ = engine.canonical(Candidate(dict(experiment.space.baseline)))
    except RefusedError as refused:
        return f"the baseline is refused: {refused}"
    forecast = engine.forecast(config_, Calibration())
    if forecast.verdict == "does_not_fit":
        return f"the baseline does not fit on this hardware: {'; '.join(forecast.reasons)}"
    return None


def report(experiment: Experiment, engine: Engine) -> Iterator[str]:
    """The check, line by line."""
    space = Space(experiment.space)
    yield f"{experiment.name}: nothing is launched"
    yield ""
    yield from _surroundings(experiment, engine)
    yield ""
    yield from _question(experiment)
    yield ""
    yield from _described_space(experiment, space)
    yield from (f"  renamed: {text}" for text in _renames(experiment, engine))
    yield ""
    yield from _named_configurations(experiment, engine)
    yield ""
    yield from _survey(experiment, engine, space)
    yield ""
    yield from _plan(experiment)


def _surroundings(experiment: Experiment, engine: Engine) -> Iterator[str]:
    yield f"engine    {engine.name} {engine.version}; flags checked against {engine.flags_from}"
    if engine.missing is not None:
        yield f"          NOT INSTALLED HERE: {engine.missing}; a sweep needs engine.python=INTERPRETER"
    path = Path(experiment.model.path)
    if not engine.simulated and not path.is_dir() and (path.is_absolute() or not HUB_NAME.fullmatch(str(path))):
        yield f"          NO SUCH FOLDER: {path}; a sweep needs model.path=FOLDER, or the name of a model on the hub"
    if experiment.engine.flags:
        yield f"flags     of every launch: {_settings(experiment.engine.flags)}"
        searched = {parameter.name for parameter in experiment.space.parameters}
        if both := sorted(searched & set(experiment.engine.flags)):
            yield f"          {listed(both)} also searched: the value here holds where the space sets none"
    yield f"model     {experiment.model.name}: {experiment.model.path}"
    hardware = experiment.hardware
    with Gpus(experiment.engine.visible_gpus(os.environ)) as gpus:
        seen = gpus.facts()
        why_none = gpus.why_none
    yield f"hardware  {hardware.name}: {_gib(hardware.memory_bytes)}, as described in its file"
    if seen:
        for gpu in seen:
            used = f"{_gib(gpu.used_bytes)} of {_gib(gpu.total_bytes)} in use"
            yield f"GPU       {gpu.index}: {gpu.name}, {used}" + (
                "" if engine.simulated else "; the forecast is for it"
            )
    else:
        yield f"GPU       none seen here ({why_none}); the forecast is for the hardware as described"
    try:
        engines.see_that_the_shell_is_neutral(experiment, os.environ)
    except EngineError as error:
        yield f"shell     NOT NEUTRAL, and a sweep refuses it: {error}"
    with reserve() as port:
        yield f"port      {port.port} is free on the loopback address, as any launch needs one"
    yield from _disk(experiment)


def _question(experiment: Experiment) -> Iterator[str]:
    """What is asked: of which load, and what counts as best."""
    goal, workload, prompts = experiment.objective, experiment.workload, experiment.workload.prompts
    wanted = "largest" if objective.maximized(goal) else "smallest"
    yield f"best      {wanted} {goal.metric} at {objective.level(experiment)} concurrent requests"
    limits = listed(f"{name} <= {limit:g} s" for name, limit in goal.limits.items())
    yield f"limits    {limits or 'none'}"
    source = f"{prompts.kind} from {prompts.path}" if prompts.path else f"{prompts.kind}, {prompts.input_tokens} tokens"
    count = PromptSet(workload, seed=workload.seed).size
    source += f", {count} of them" if count else ""
    source += f", {prompts.shared_share:.0%} of each a shared prefix" if prompts.shared_share else ""
    yield f"load      {workload.name}: {listed(workload.levels)} concurrent requests; prompts: {source}"
    spread = f" +- {workload.output_tokens_spread:.0%}" if workload.output_tokens_spread else ""
    end = "whatever the model says" if workload.ignore_eos else "at most"
    yield f"answers   {workload.output_tokens} tokens{spread}, {end}; temperature {workload.temperature:g}"
    price = experiment.hardware.price_per_hour
    if price is not None:
        yield f"price     {price:g} {experiment.hardware.currency} per GPU and hour"


def _disk(experiment: Experiment) -> Iterator[str]:
    folder = next(path for path in [experiment.folder, *experiment.folder.absolute().parents] if path.exists())
    free = shutil.disk_usage(folder).free
    needed = FREE_BYTES_PER_LAUNCH * experiment.search.trials
    verdict = "enough" if free > needed else f"too little: about {needed / 1e9:.1f} GB are needed"
    yield f"results   {experiment.folder}; {free / 1e9:.1f} GB free: {verdict}"
    if not os.access(folder, os.W_OK):
        yield f"results   {folder} cannot be written: choose another results_dir="


def _described_space(experiment: Experiment, space: Space) -> Iterator[str]:
    size = f"{space.size:,}" if space.size is not None else "too many to count, or infinitely many,"
    yield f"space     {experiment.space.name}: {len(space.parameters)} parameters, {size} points"
    for parameter in space.parameters:
        yield f"  {parameter.name}: {_described(parameter)}"
    for text in experiment.space.constraints:
        yield f"  constraint: {text}"


def _described(parameter: Parameter) -> str:
    if parameter.kind == "categorical":
        values = listed("default" if choice is None else json.dumps(choice) for choice in parameter.choices)
    elif parameter.kind == "flag":
        values = "off, on"
    else:
        values = f"{parameter.low:g} to {parameter.high:g}"
        values += f" by {parameter.step:g}" if parameter.step else ""
        values += ", logarithmic" if parameter.log else ""
    conditions = listed(
        f"{item.parameter} is {' or '.join(json.dumps(value) for value in item.values)}" for item in parameter.when
    )
    return values + (f" (when {conditions})" if conditions else "")


def _renames(experiment: Experiment, engine: Engine) -> list[str]:
    """How this version calls parameters that are written in another spelling."""
    notes = (engine.renamed(parameter.name) for parameter in experiment.space.parameters if not parameter.env)
    return [note for note in notes if note]


def _named_configurations(experiment: Experiment, engine: Engine) -> Iterator[str]:
    """Baseline, recipes and what was tried by hand: each reason on a line of its own."""
    spec = experiment.space
    renames = set(_renames(experiment, engine))
    named = [("baseline", spec.baseline)]
    named += [(f"recipe {number}", recipe) for number, recipe in enumerate(spec.recipes, 1)]
    named += [(f"tried {number}", tried) for number, tried in enumerate(spec.tried, 1)]
    for name, values in named:
        judged = _judge(engine, Candidate(dict(values)))
        yield f"{name}: {_settings(values) or 'no flags beside those of every launch'}"
        yield from (f"  {judged.verdict}: {reason}" for reason in judged.reasons or ("no reason given",))
        if judged.config is not None:
            yield from (f"  rewritten: {text}" for text in judged.config.rewrites if text not in renames)


@dataclass(frozen=True)
class Judged:
    """What becomes of one candidate: its verdict, and its canonical form where it has one."""

    verdict: str
    reasons: tuple[str, ...]
    config: ServerConfig | None


VERDICTS = {"fits": "fits", "edge": "at the edge", "does_not_fit": "does not fit", "refused": "refused"}


def _judge(engine: Engine, candidate: Candidate) -> Judged:
    try:
        server = engine.canonical(candidate)
    except RefusedError as error:
        return Judged(VERDICTS["refused"], tuple(str(error).split("; ")), None)
    forecast: Forecast = engine.forecast(server, Calibration())
    return Judged(VERDICTS[forecast.verdict], forecast.reasons, server)


@dataclass
class _Group:
    count: int = 0
    example: str = ""
    reason: str = ""


def _survey(experiment: Experiment, engine: Engine, space: Space) -> Iterator[str]:
    """All canonical configurations, or a sample of them: how many there are, what is ruled out and why."""
    whole = space.size is not None and space.size <= MAX_ENUMERATED
    points: Iterable[Candidate] = space.enumerate() if whole else space.sample(SAMPLES, seed=experiment.search.seed)
    servers: dict[str, tuple[Judged, Mapping[str, Value]]] = {}
    seen = 0
    for seen, point in enumerate(points, 1):  # noqa: B007
        judged = _judge(engine, point)
        key = judged.config.key if judged.config else _settings(point.values)
        servers.setdefault(key, (judged, point.values))
    launchable = [judged.config for judged, _ in servers.values() if judged.config is not None]
    what = "all" if whole else "a random sample of"
    yield f"configurations: {what} {seen:,} points are {len(launchable):,} different servers that are accepted, e.g."
    for server in itertools.islice(launchable, EXAMPLES):
        yield f"  {server.key}: {_settings(dict(server.flags)) or 'the engine as it comes'}"
    groups = _grouped(servers.values())
    share = 100 / len(servers) if servers else 0.0
    for verdict in ("refused", "does not fit", "at the edge"):
        count = sum(judged.verdict == verdict for judged, _ in servers.values())
        launched = ", launched all the same: the forecast may be off by as much" if verdict == "at the edge" else ""
        yield f"{verdict}: {count:,} of {len(servers):,} ({count * share:.0f} %){launched}"
        of_verdict = [group for (kind, _), group in groups.items() if kind == verdict]
        for group in sorted(of_verdict, key=lambda item: -item.count):
            yield f"  {group.count:,} x {group.reason}"
            yield f"      e.g. {group.example}"


def _grouped(judged: Iterable[tuple[Judged, Mapping[str, Value]]]) -> dict[tuple[str, str], _Group]:
    """By verdict and by the wording of the decisive reason, numbers aside."""
    groups: dict[tuple[str, str], _Group] = {}
    for item, values in judged:
        if item.verdict == VERDICTS["fits"] or not item.reasons:
            continue
        # What is refused may first say how a flag is called now; a forecast begins with what decides.
        reason = item.reasons[-1 if item.config is None else 0]
        wording = re.sub(r"[\d.,]+", "#", reason)
        group = groups.setdefault((item.verdict, wording), _Group(0, _settings(values), reason))
        group.count += 1
    return groups


def _plan(experiment: Experiment) -> Iterator[str]:
    """How long it takes, from the bounds that the experiment sets."""
    search, workload = experiment.search, experiment.workload
    again = (search.finalists + 1) * search.finalist_rounds if search.finalists else 0
    launches = search.trials + again
    levels = len(workload.levels)
    shortest = LAUNCH_S[0] + levels * workload.min_window_s
    longest = LAUNCH_S[1] + levels * (workload.max_window_s + workload.max_warmup_s)
    low, high = (launches * seconds / experiment.engine.time_scale / 3600 for seconds in (shortest, longest))
    if search.hours is not None:
        high = min(high, max(low, search.hours * (1 + again / max(search.trials, 1))))
    yield f"plan      {search.trials} launches and {again} to measure the best again, {levels} load levels each"
    scale = experiment.engine.time_scale
    faster = f", and its clock runs {scale:g} times as fast (engine.time_scale)" if scale != 1 else ""
    yield (
        f"time      {_hours(low)} to {_hours(high)}; a server takes {LAUNCH_S[0]:.0f} to {LAUNCH_S[1]:.0f} s to "
        f"start and stop{faster}"
    )
    yield f"forecast  search.forecast={search.forecast}: {_FORECAST[search.forecast]}"


_FORECAST = {
    "off": "everything is launched, nothing is forecast",
    "advise": "everything is launched, the forecast is recorded",
    "prune": "what does not fit is recorded and not launched",
}


def _settings(values: Mapping[str, Value]) -> str:
    return " ".join(
        f"{name}={json.dumps(value) if isinstance(value, list) else value}" for name, value in values.items()
    )


def _gib(amount: float) -> str:
    return f"{amount / 2**30:.1f} GiB"


def _hours(hours: float) -> str:
    return f"{hours * 60:.0f} min" if hours < 2 else f"{hours:.1f} h"


if __name__ == "__main__":
    sys.exit(main())
