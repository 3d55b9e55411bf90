"""Report: one self-contained page about a run, and its figures as files.

python -m analysis.report results/EXPERIMENT/RUN
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import yaml

from analysis import words
from analysis.answer import Answer, answer
from analysis.doubts import doubts
from analysis.figures import drawings
from analysis.figures.style import COLOURS, KINDS, SIMULATED, Drawing, inline_svg, origins, save
from analysis.frames import (
    AnalysisError,
    Run,
    advice_text,
    command_text,
    interval_of,
    load,
    measurement_at,
    metric_interval,
)
from analysis.intervals import is_difference, relative_difference
from analysis.standing import Standing, baseline, best, by_load, measured, settings, standings
from bench.outcome import OutcomeKind
from bench.records import RunFolder, TrialRecord

GLYPHS = {
    OutcomeKind.COMPLETE: "●",
    OutcomeKind.PRUNED: "○",
    OutcomeKind.INFEASIBLE: "▼",
    OutcomeKind.REJECTED: "■",
    OutcomeKind.CRASHED: "✖",
    OutcomeKind.HUNG: "◆",
    OutcomeKind.UNHEALTHY: "▲",
    OutcomeKind.MISMATCHED: "✚",
    OutcomeKind.INTERRUPTED: "❙",
    OutcomeKind.INFRASTRUCTURE: "★",
}
COLOUR_NAMES = {light: name for name, (light, _) in COLOURS.items()}
GROUPS = (
    ("Load", ("throughput", "latency", "pareto", "speculation")),
    ("Search", ("progress", "failures", "importance", "timeline")),
    ("Memory", ("memory", "forecast")),
)
PRODUCTION = (
    "For production: `launch.sh`, `server.service` and `compose.yaml` in the run's folder; `python -m bench.verify` "
    "with one of its files measures it again."
)
LONGEST_VALUE = 120  # of an environment variable
LONGEST_LINE = 600  # a log line beyond that is cut; the log itself is in the trial's folder


def write_report(run: Path) -> Path:
    """Write ``RUN/report/index.html`` and every figure as SVG and PNG beside it; return the page's path.

    Raises:
        AnalysisError: it is no run folder, or the report cannot be written.
    """
    loaded = load(run)
    folder = RunFolder(loaded.path).report
    try:
        folder.mkdir(parents=True, exist_ok=True)
        page = _page(loaded, [_drawn(drawing, folder) for drawing in drawings(loaded)])
        path = folder / "index.html"
        temporary = folder / "index.html.new"
        temporary.write_text(page, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise AnalysisError(f"cannot write the report under {folder}: {error}") from error
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m analysis.report", description="Write the report of a run.")
    parser.add_argument("run", type=Path, help="folder of the run, results/EXPERIMENT/RUN; it may still be running")
    options = parser.parse_args(arguments)
    try:
        print(write_report(options.run))
    except AnalysisError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _drawn(drawing: Drawing, folder: Path) -> tuple[str, str]:
    """Name and HTML of a figure, its files written on the way; a list item where there is only a reason."""
    title, text = escape(drawing.title), _prose(drawing.text)
    if drawing.figure is None:
        for suffix in ("svg", "png"):  # of an earlier report
            (folder / f"{drawing.name}.{suffix}").unlink(missing_ok=True)
        return drawing.name, f"<li>{title}: {text}</li>"
    body = inline_svg(save(drawing.figure, drawing.name, folder), drawing.name, title)
    figure = f'<figure id="{drawing.name}"><h3>{title}</h3>{body}<figcaption>{text}</figcaption></figure>'
    return drawing.name, figure


def _group(parts: Sequence[str]) -> str:
    """The figures of a section, and below them what could not be drawn."""
    figures = "".join(part for part in parts if part.startswith("<figure"))
    reasons = "".join(part for part in parts if not part.startswith("<figure"))
    grid = f'<div class="figures">{figures}</div>' if figures else ""
    return grid + (f'<ul class="plain quiet">{reasons}</ul>' if reasons else "")


def _page(run: Run, figures: Sequence[tuple[str, str]]) -> str:
    said, marks = answer(run), origins(run.all_records)
    drawn = dict(figures)
    sections = [
        (
            "finalists",
            "Finalists and baseline" if run.finalist_records else "Best so far and baseline",
            _finalists(run),
        ),
        ("verified", "Verified", _verified(run)),
        ("warnings", "Warnings", _warnings(run)),
        *((title.lower(), title, _group([drawn[name] for name in names])) for title, names in GROUPS),
        ("trials", "All trials", _trials(run)),
        ("environment", "Environment", _environment(run)),
    ]
    sections = [section for section in sections if section[2]]
    template = Template((files("analysis") / "report.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(f"{run.name}: {'simulated ' if SIMULATED in marks else ''}sweep report"),
        light=_colours(0),
        dark=_colours(1),
        eyebrow=_eyebrow(run),
        headline=_prose(said.headline),
        stamps="".join(f"<span>{escape(text)}</span>" for text in marks),
        answer=_answer_items(run, said),
        navigation="".join(f'<a href="#{anchor}">{title}</a>' for anchor, title, _ in sections),
        sections="\n".join(
            f'<section id="{anchor}"><h2>{title}</h2>{body}</section>' for anchor, title, body in sections
        ),
        footer=f"Written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC from the files of {escape(run.name)}. "
        "The figures lie beside this page as SVG and PNG.",
    )


def _colours(scheme: int) -> str:
    return " ".join(f"--{name}: {pair[scheme]};" for name, pair in COLOURS.items())


def _eyebrow(run: Run) -> str:
    parts = [f"Sweep {run.name}", *sorted({record.engine for record in run.records})]
    model = run.setting("model", "name")
    parts += [str(model)] if model else []
    parts += [str(name) for name in (run.environment.get("gpus") or [run.setting("hardware", "name")]) if name]
    if run.records:
        started = datetime.fromtimestamp(min(record.started_at for record in run.records), UTC)
        parts.append(f"begun {started:%Y-%m-%d %H:%M} UTC")
    return " · ".join(escape(part) for part in parts)


def _answer_items(run: Run, said: Answer) -> str:
    items = [f"<li>{_prose(sentence)}</li>" for sentence in said.sentences]
    winner = best(run)
    if winner is not None and winner.command:
        items.append(f"<li>{_command(winner, 'Its command')}</li>")
    if (run.path / "launch.sh").exists():
        items.append(f"<li>{_prose(PRODUCTION)}</li>")
    return "".join(items)


def _finalists(run: Run) -> str:
    shown = standings(run)
    if not shown:
        return ""
    level, metric = run.objective.level, run.objective.metric
    speeds = by_load(shown, "output_tok_per_s")
    first = next((item for item in shown if item.role == "baseline"), None)
    reference = None if first is None else speeds.get((first.record.config.key, level or 0))
    latencies = [name for name in run.objective.limits if name != metric] or ["ttft_s.p95", "tpot_s.p95"]
    heads = ["configuration", "sets, against the baseline", "output tokens/s", "against the baseline"]
    heads += [words.metric_name(name) for name in latencies] + ["launches"]
    rows = []
    for standing in shown:
        speed = speeds.get((standing.record.config.key, level or 0))
        against = ""
        if speed is not None and reference is not None and standing is not first:
            difference = relative_difference(speed, reference)
            against = words.interval(difference, relative=True)
            against += "" if is_difference(difference) else ", no difference"
        cells = [
            standing.label,
            settings(standing.record, None if standing is first else baseline(run)),
            "" if speed is None else words.interval(speed),
            against,
            *(_mean_latency(standing, level, name) for name in latencies),
            f"{len(standing.launches)}{'' if standing.again else ', of the search'}",
        ]
        labelled = "".join(
            f'<td data-label="{escape(head)}">{_unbroken(escape(cell))}</td>'
            for head, cell in zip(heads, cells, strict=True)
        )
        rows.append(f"<tr{' class=best' if standing.role == 'best' else ''}>{labelled}</tr>")
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    load_text = "" if level is None else f"<p>At {words.counted(level, 'request')} in flight; 95 % intervals.</p>"
    table = f'<table class="cards"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
    return f'{load_text}<div class="scroll">{table}</div>'


def _verified(run: Run) -> str:
    """What ``bench.verify`` measured again, the latest first."""
    heads = ("file", "when", "at", "stated", "measured again", "")
    rows = []
    for verdict in reversed(run.verdicts):
        stated, fresh = interval_of(verdict.get("stated")), interval_of(verdict.get("measured"))
        held, weak, reasons = verdict["holds"], verdict["weak"], "; ".join(verdict["reasons"])
        mark = " (simulated)" if verdict["simulated"] else ""
        cells = (
            f"{verdict['file']} (trial {verdict['trial']})",
            f"{datetime.fromtimestamp(verdict['at'], UTC):%Y-%m-%d %H:%M} UTC",
            f"{words.counted(verdict['level'], 'request')} in flight",
            "" if stated is None else f"{words.interval(stated)} {words.metric_name(verdict['metric'])}{mark}",
            "no number" if fresh is None else f"{words.interval(fresh)}{mark}",
            ("holds" + (", but the intervals are so wide that this says little" if weak else ""))
            if held
            else f"does not hold: {reasons}",
        )
        rows.append(
            "".join(f'<td data-label="{head}">{escape(cell)}</td>' for head, cell in zip(heads, cells, strict=True))
        )
    if not rows:
        return ""
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    intro = "<p>Launched and measured once more with <code>python -m bench.verify</code>; 95 % intervals.</p>"
    table = f'<table class="cards"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f'{intro}<div class="scroll">{table}</div>'


def _mean_latency(standing: Standing, level: int | None, metric: str) -> str:
    seen = [metric_interval(item, metric) for item in measured(standing) if item.concurrency == level]
    values = [value.mean for value in seen if value is not None]
    return words.metric_value(metric, sum(values) / len(values)) if values else ""


def _warnings(run: Run) -> str:
    found = doubts(run)
    if not found:
        measured_any = any(record.measurements for record in run.all_records)
        return "<p>None: nothing about these measurements looked doubtful.</p>" if measured_any else ""
    items = [f"<li>{_prose(text)}</li>" for text in found]
    if len(items) <= 12:
        return f'<ul class="plain">{"".join(items)}</ul>'
    rest = f"<details><summary>{len(items) - 10} more</summary><ul>{''.join(items[10:])}</ul></details>"
    return f'<ul class="plain">{"".join(items[:10])}</ul>{rest}'


def _trials(run: Run) -> str:
    if not run.records:
        return "<p>None yet.</p>"
    metric = words.metric_name(run.objective.metric)
    heads = (
        ("trial", "", "number"),
        ("role", "", ""),
        ("ended", "", ""),
        (metric, "descending" if run.objective.larger_is_better else "", "number"),
        ("TTFT p95", "", "number"),
        ("TPOT p95", "", "number"),
        ("wall time", "descending", "number"),
    )
    sortable = "".join(
        f"<th{f' class={kind}' if kind else ''}{f' data-first={first}' if first else ''}>"
        f'<button type="button">{escape(text)}</button></th>'
        for text, first, kind in heads
    )
    plain = "".join(f"<th>{text}</th>" for text in ("sets, against the baseline", "evidence"))
    first_baseline, winner = baseline(run), best(run)
    rows = "".join(_trial_row(run, record, first_baseline, winner, metric) for record in run.all_records)
    kinds = Counter(record.outcome.kind for record in run.all_records)
    options = "".join(
        f'<option value="{kind}">{KINDS[kind][2]} ({count})</option>' for kind, count in kinds.most_common()
    )
    return (
        '<div class="controls"><label>Show <select id="filter-kind"><option value="">all '
        f"({len(run.all_records)})</option>{options}</select></label>"
        '<label class="phone">Sort by <select id="sort-by"></select></label></div>'
        '<div class="scroll"><table class="cards" id="trials-table">'
        f"<thead><tr>{sortable}{plain}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _trial_row(
    run: Run, record: TrialRecord, reference: TrialRecord | None, winner: TrialRecord | None, metric: str
) -> str:
    outcome = record.outcome
    colour, words_of_kind = COLOUR_NAMES[KINDS[outcome.kind][1]], KINDS[outcome.kind][2]
    cause = (
        "" if str(outcome.cause) in ("none", "healthy") else f' <span class="cause">{_breakable(outcome.cause)}</span>'
    )
    measurement = measurement_at(record, run.objective.level)
    latencies = [
        None if measurement is None else metric_interval(measurement, name) for name in ("ttft_s.p95", "tpot_s.p95")
    ]
    value = "" if record.value is None else words.metric_value(run.objective.metric, record.value).split(" output")[0]
    apart = settings(record, None if reference is None or record.number == reference.number else reference)
    cells = [
        f'<td class="number" data-label="trial" data-value="{record.number}">{record.number}</td>',
        f'<td data-label="role">{escape(record.role)}{f" {record.round}" if record.round else ""}</td>',
        f'<td data-label="ended" data-value="{words_of_kind}"><span class="nowrap"><span class="mark" '
        f'style="color:var(--{colour})">{GLYPHS[outcome.kind]}</span> {words_of_kind}</span>{cause}</td>',
        _number_cell(metric, value, record.value),
        *(
            _number_cell(label, "" if item is None else words.seconds(item.mean), None if item is None else item.mean)
            for label, item in zip(("TTFT p95", "TPOT p95"), latencies, strict=True)
        ),
        _number_cell("wall time", words.duration(record.times.total_s), record.times.total_s),
        f'<td class="settings" data-label="sets">{_breakable(apart)}{_command(record)}</td>',
        f'<td class="evidence" data-label="evidence">{_evidence(record)}</td>',
    ]
    best_class = ' class="best"' if winner is not None and record.config.key == winner.config.key else ""
    return f'<tr data-kind="{outcome.kind}"{best_class}>{"".join(cells)}</tr>'


def _number_cell(label: str, text: str, value: float | None) -> str:
    sort = "" if value is None else f"{value:.9g}"
    return f'<td class="number" data-label="{escape(label)}" data-value="{sort}">{escape(text)}</td>'


def _evidence(record: TrialRecord) -> str:
    outcome = record.outcome
    parts = [escape(outcome.detail)] if outcome.detail else []
    if outcome.line:
        place = "" if outcome.line_number is None else f" (line {outcome.line_number})"
        line = outcome.line if len(outcome.line) <= LONGEST_LINE else outcome.line[:LONGEST_LINE] + " …"
        parts.append(f"<code>{escape(line)}</code>{place}")
    if outcome.flags:
        parts.append("Advice: " + escape("; ".join(advice_text(item) for item in outcome.flags)))
    return "<br>".join(parts)


def _command(record: TrialRecord, title: str = "command") -> str:
    if not record.command:
        return ""
    # The simulator is told its model in the environment: kilobytes that nobody reads here.
    short = [
        (name, value if len(value) <= LONGEST_VALUE else value[: LONGEST_VALUE - 1] + "…") for name, value in record.env
    ]
    cut = short != list(record.env)
    text = escape(command_text(replace(record, env=tuple(short))))
    whole = f"<p>Whole in <code>trials/{record.number:04d}/command.sh</code>.</p>" if cut else ""
    return f"<details><summary>{title}</summary><pre>{text}</pre>{whole}</details>"


def _environment(run: Run) -> str:
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in _flat(run.environment) if text)
    written = yaml.safe_dump(dict(run.experiment), sort_keys=False, allow_unicode=True) if run.experiment else ""
    experiment = f"<details><summary>The experiment as it was resolved</summary><pre>{escape(written)}</pre></details>"
    return (f"<dl>{rows}</dl>" if rows else "") + (experiment if written else "")


def _flat(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in data.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            yield f"{prefix}{name}", "; ".join(_joined(item) for item in value)
        else:
            text = words.gib(value) if name.endswith("_bytes") and isinstance(value, (int, float)) else str(value)
            yield f"{prefix}{name.removesuffix('_bytes')}", "" if value is None else text


def _joined(item: Any) -> str:
    return " ".join(str(part) for part in item) if isinstance(item, (list, tuple)) else str(item)


def _breakable(name: str) -> str:
    """A long name that a narrow column may break at its underscores."""
    return escape(name).replace("_", "_<wbr>")


def _prose(text: str) -> str:
    """Text for the page; what stands between backticks is code."""
    parts = escape(text, quote=False).split("`")
    if len(parts) % 2 == 0:  # a backtick without its fellow is a backtick
        return "`".join(parts)
    return "".join(f"<code>{part}</code>" if index % 2 else _unbroken(part) for index, part in enumerate(parts))


def _unbroken(text: str) -> str:
    """Escaped text in which a line breaks neither before a percent sign nor after the dashes of a flag."""
    text = re.sub(r"(?<=\d) %", "\u00a0%", text)
    return re.sub(r"--[a-z][a-z0-9-]*", r'<span class="nowrap">\g<0></span>', text)


if __name__ == "__main__":
    sys.exit(main())
