"""Answer: what a run found, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from analysis import words
from analysis.figures.style import KINDS, origins
from analysis.frames import Run, advice_text, excess, interval_of, measurement_at, meets_limits
from analysis.intervals import is_difference, relative_difference
from analysis.standing import Standing, baseline, best, by_load, gpus, settings, standings
from bench.load.measurement import Interval
from bench.outcome import OutcomeKind
from bench.records import TrialRecord


@dataclass(frozen=True)
class Answer:
    """The answer of a run.

    Attributes:
        headline: one sentence.
        sentences: what it means: load, limits, certainty, cost, or why there is none.
    """

    headline: str
    sentences: tuple[str, ...]


def answer(run: Run) -> Answer:
    """What the run found, whatever state it is in."""
    if not run.records:
        return Answer("No trial has ended yet.", ("The folder holds an experiment and no result.",))
    winner = best(run)
    if winner is None:
        return _nothing(run)
    if run.best is None:
        again = any(record.value is not None for record in run.finalist_records)
        return _in_rounds(run, winner) if again else _so_far(run, winner)
    return _found(run, run.best, winner)


def _found(run: Run, chosen: Mapping[str, Any], winner: TrialRecord) -> Answer:
    value, gain = interval_of(chosen.get("value")), interval_of(chosen.get("gain"))
    rows = [
        _at_load(run),
        f"It sets: {settings(winner, None if _is_baseline(run, winner) else baseline(run))}.",
        *_certainty(run, value, gain, chosen.get("tied") or ()),
        *_cost(run, winner, value),
        *_why(run, winner),
        *_failures_in_short(run),
        *_reality(run, winner),
    ]
    return Answer(_headline(run, chosen, winner, value, gain), _once(rows))


def _headline(
    run: Run, chosen: Mapping[str, Any], winner: TrialRecord, value: Interval | None, gain: Interval | None
) -> str:
    shown = "" if value is None else f" with {_marked(run, value.mean)}"
    if chosen.get("verdict") == "not_meeting_limits":
        return (
            f"No configuration keeps the limits; trial {winner.number} comes nearest{shown}. {_misses(chosen)}".strip()
        )
    if _is_baseline(run, winner):
        plain = "" if value is None else f" with {words.metric_value(run.objective.metric, value.mean)}"
        return f"Keep the baseline{plain}: nothing that was measured again is better beyond doubt{_mark(run)}."
    if chosen.get("verdict") == "no_difference" or gain is None:
        why = "there is no fresh baseline to hold it against" if gain is None else "it cannot be told from the baseline"
        return f"Trial {winner.number} is picked{shown}, but {why}."
    word = "more" if run.objective.larger_is_better else "less"
    sure = f" (95 % interval {_range(gain)})" if _bounded(gain) else ""
    return f"Trial {winner.number} is best{shown}, {words.percent(gain.mean)} {word} than the baseline{sure}."


def _is_baseline(run: Run, record: TrialRecord) -> bool:
    first = baseline(run)
    return first is not None and first.config.key == record.config.key


def _marked(run: Run, value: float) -> str:
    """The objective's value as a headline has it, which may be all that is quoted."""
    return words.metric_value(run.objective.metric, value) + _mark(run)


def _mark(run: Run) -> str:
    return " (simulated)" if any(record.simulated for record in run.all_records) else ""


def _misses(chosen: Mapping[str, Any]) -> str:
    excess = chosen.get("excess") or {}
    parts = [
        f"{words.metric_name(name)} is over its limit" + (f" by {words.percent(amount)}" if amount is not None else "")
        for name, amount in excess.items()
        if amount is None or amount > 0
    ]
    return f"There, {' and '.join(parts)}." if parts else ""


def _in_rounds(run: Run, winner: TrialRecord) -> Answer:
    """The finalists are being measured again, or were when the sweep ended: only those launches count."""
    shown, metric = standings(run), run.objective.metric
    values = {key: value for (key, at), value in by_load(shown, metric).items() if at == run.objective.level}
    first = next((item for item in shown if item.role == "baseline" and item.again), None)
    value = values.get(winner.config.key)
    reference = None if first is None else values.get(first.record.config.key)
    gave = _marked(run, value.mean if value else winner.value or 0.0)
    if first is not None and first.record.config.key == winner.config.key:
        lead = f"nothing beats the baseline's {gave}"
    elif value is not None and reference is not None and not is_difference(relative_difference(value, reference)):
        lead = f"trial {winner.number} with {gave} cannot be told from the baseline"
    else:
        lead = f"trial {winner.number} leads with {gave}"
    launches = sum(record.value is not None for record in run.finalist_records)
    fresh = words.counted(launches, "fresh launch", "fresh launches")
    sentences = [
        _at_load(run),
        *(
            _against(item, values[item.record.config.key], reference)
            for item in shown
            if item.record.config.key in values
        ),
        "The rounds of fresh launches did not come to their end: the same sweep command with the same run= goes on.",
        *_cost(run, winner, value),
        *_why(run, winner),
        *_failures_in_short(run),
        *_reality(run, winner),
    ]
    return Answer(f"Not finished: after {fresh} of the finalists {lead}.", _once(sentences))


def _against(standing: Standing, value: Interval, reference: Interval | None) -> str:
    said = f"Measured again, the {standing.label} gave {words.interval(value)}"
    if reference is None or standing.role == "baseline":
        return f"{said}."
    difference = relative_difference(value, reference)
    against = f"{words.interval(difference, relative=True)} against the baseline"
    return f"{said}, {against}{'' if is_difference(difference) else ': no difference'}."


def _so_far(run: Run, winner: TrialRecord) -> Answer:
    total, count = run.setting("search", "trials"), len(run.records)
    unfinished = isinstance(total, int) and count < total
    ended = f"{count} of {total} trials {'has' if count == 1 else 'have'} ended" if unfinished else ""
    value = winner.value or 0.0
    first = baseline(run)
    shown = _marked(run, value)
    if first is not None and first.config.key == winner.config.key:
        lead = f"nothing beats the baseline's {shown} so far" if count > 1 else f"the baseline gave {shown}"
    else:
        lead = f"trial {winner.number} leads with {shown}"
    headline = f"Not finished: {ended}, and {lead}." if unfinished else f"Not confirmed: {lead}, measured once."
    sentences = [_at_load(run)]
    if first is not None and first.value and first.config.key != winner.config.key:
        sentences.append(
            f"That is {words.percent(value / first.value - 1, signed=True)} against the baseline, measured once each."
        )
        sentences.append(f"It sets: {settings(winner, first)}.")
    if meets_limits(winner, run.objective) is False:
        sentences.append(_nearest(run, winner))
    if count > 1:
        sentences.append(
            "Nothing has been measured again, so this is a lead and no answer: the best of many noisy values looks "
            "better than it is."
        )
    sentences += _cost(run, winner, None)
    return Answer(headline, _once([*sentences, *_failures_in_short(run), *_reality(run, winner)]))


def _nothing(run: Run) -> Answer:
    only = len(run.records) == 1
    headline = (
        "The one trial of this run gave no number that counts."
        if only
        else f"No configuration could be measured: none of {len(run.records)} trials gave a number that counts."
    )
    return Answer(headline, _once([*_failures_in_short(run), *_reasons(run), *_advice(run)]))


def _at_load(run: Run) -> str:
    objective = run.objective
    load = "" if objective.level is None else f" at {words.counted(objective.level, 'request')} in flight"
    limits = " and ".join(
        f"{words.metric_name(name)} at most {words.metric_value(name, limit)}"
        for name, limit in objective.limits.items()
    )
    bound = f"under {limits}" if limits else "without a limit on latency"
    return f"Best means: {words.metric_name(objective.metric)}{load}, {bound}."


def _certainty(run: Run, value: Interval | None, gain: Interval | None, tied: Sequence[str]) -> list[str]:
    sentences = []
    if value is not None and _bounded(value):
        rounds = len({record.round for record in run.finalist_records})
        how = f" over {words.counted(rounds, 'round')} of fresh launches in turns" if rounds else ""
        sentences.append(f"{words.metric_name(run.objective.metric).capitalize()}: {words.interval(value)}{how}.")
    if gain is not None and _bounded(gain) and gain.low <= 0 <= gain.high:
        sentences.append(f"The gain over the baseline, {words.interval(gain, relative=True)}, may be nothing.")
    if gain is None:
        sentences += _runner_up(run)
    if tied:
        numbers = sorted({r.number for r in run.records if r.config.key in tied})
        names = ", ".join(f"trial {number}" for number in numbers)
        sentences.append(f"It cannot be told from {names}; of equals the one with the fewest settings is picked.")
    return sentences


def _runner_up(run: Run) -> list[str]:
    """What the finalist that came next gave against the baseline, where the baseline is kept."""
    shown = standings(run)
    metric, level = run.objective.metric, run.objective.level or 0
    values = {key: value for (key, at), value in by_load(shown, metric).items() if at == level}
    first = next((item for item in shown if item.role == "baseline"), None)
    others = [item for item in shown if item.role == "finalist" and item.record.config.key in values]
    if first is None or first.record.config.key not in values or not others:
        return []
    sign = 1.0 if run.objective.larger_is_better else -1.0
    runner = max(others, key=lambda item: sign * values[item.record.config.key].mean)
    difference = relative_difference(values[runner.record.config.key], values[first.record.config.key])
    if sign * difference.mean <= 0 or is_difference(difference):
        return []
    seen = words.interval(difference, relative=True)
    return [f"Trial {runner.trial} gave {seen} against it; more search.finalist_rounds would narrow that."]


def _cost(run: Run, winner: TrialRecord, value: Interval | None) -> list[str]:
    price = run.setting("hardware", "price_per_hour")
    measurement = measurement_at(winner, run.objective.level)
    if not isinstance(price, (int, float)) or measurement is None:
        return []
    speed = value.mean if value is not None and run.objective.metric == "output_tok_per_s" else None
    per_million = price * gpus(winner) / (speed or measurement.output_tok_per_s.mean) / 3600 * 1e6
    currency = run.setting("hardware", "currency") or "USD"
    return [f"At {price:g} {currency} per GPU and hour a million output tokens cost {per_million:.2f} {currency}."]


def _why(run: Run, winner: TrialRecord) -> list[str]:
    """Step time and acceptance length of the best against the baseline's."""
    first = baseline(run)
    if first is None or first.config.key == winner.config.key:
        return []
    mine, other = measurement_at(winner, run.objective.level), measurement_at(first, run.objective.level)
    if mine is None or other is None or not mine.step_time_s or not other.step_time_s:
        return []
    parts = [f"a decode step takes {words.seconds(mine.step_time_s)} ({words.seconds(other.step_time_s)})"]
    if mine.acceptance_length or other.acceptance_length:
        parts.append(
            f"yields {mine.acceptance_length or 1:.2f} tokens per request ({other.acceptance_length or 1:.2f})"
        )
    parts.append(f"serves {mine.in_flight_mean:.3g} requests at a time ({other.in_flight_mean:.3g})")
    return [f"Why, with the baseline's in brackets: {', '.join(parts[:-1])} and {parts[-1]}."]


def _reality(run: Run, winner: TrialRecord) -> list[str]:
    texts = {
        "simulated engine": "These are the simulator's numbers, not a GPU's.",
        "dummy weights": "The weights are dummies: memory and step times are real, texts and acceptance are not.",
        "acceptance simulated": "The engine was told how many draft tokens to accept; real prompts differ.",
    }
    launches = [record for record in run.all_records if record.config.key == winner.config.key]
    return [texts[item] for item in origins(launches)]


def _nearest(run: Run, winner: TrialRecord) -> str:
    misses = [
        f"{words.metric_name(name)} is {words.metric_value(name, run.objective.limits[name] * (1 + amount))}, "
        f"{words.percent(amount)} over"
        for name, amount in (excess(winner, run.objective) or {}).items()
        if amount > 0
    ]
    return "No configuration keeps the limits; of the nearest, " + " and ".join(misses) + "."


def _failures_in_short(run: Run) -> list[str]:
    kinds = Counter(record.outcome.kind for record in run.records if record.outcome.kind is not OutcomeKind.COMPLETE)
    if not kinds:
        return []
    parts = ", ".join(f"{count} {KINDS[kind][2]}" for kind, count in kinds.most_common())
    return [f"Trials that gave no value: {parts}."]


def _reasons(run: Run) -> list[str]:
    causes = Counter(record.outcome.cause for record in run.records if record.outcome.kind is not OutcomeKind.COMPLETE)
    sentences = []
    for cause, count in causes.most_common(3):
        example = next(record for record in run.records if record.outcome.cause is cause)
        proof = example.outcome.detail or example.outcome.line or ""
        phase = "" if example.outcome.phase is None else f" in phase {example.outcome.phase}"
        sentences.append(
            f"{words.counted(count, 'time')} {cause}{phase}, for example trial {example.number}: {proof.rstrip('.')}."
        )
    complete = [record for record in run.records if record.outcome.kind is OutcomeKind.COMPLETE]
    if complete:
        void = _once(text for record in complete for item in record.measurements for text in item.warnings)
        sentences.append(
            f"{words.counted(len(complete), 'trial')} ran to the end with no valid number at the deciding load. "
            + " ".join(void[:3])
        )
    return sentences


def _advice(run: Run) -> list[str]:
    asked = Counter(advice_text(item) for record in run.records for item in record.outcome.flags)
    sentences = []
    if asked:
        most = "; ".join(f"{text} ({words.counted(count, 'time')})" for text, count in asked.most_common(4))
        sentences.append(f"What the failures ask for: {most}.")
    ways = {(item.flag, item.direction) for record in run.records for item in record.outcome.flags}
    closed = [flag for flag in sorted({flag for flag, _ in ways}) if {(flag, "raise"), (flag, "lower")} <= ways]
    return sentences + [
        f"Some launches need {flag} higher and others need it lower: at these settings the room between the two is "
        "closed, and something else that takes memory has to shrink."
        for flag in closed
    ]


def _bounded(value: Interval) -> bool:
    return abs(value.low) < float("inf") and abs(value.high) < float("inf")


def _range(value: Interval) -> str:
    return f"{words.percent(max(-1.0, value.low), signed=True)} to {words.percent(value.high, signed=True)}"


def _once(texts: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text for text in texts if text))
