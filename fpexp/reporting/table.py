"""The table of an experiment: one row a setting, our numbers, and the paper's in a column of its own."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass

from fpexp.reporting.chart import Chart
from fpexp.reporting.layout import LONGEST_ABOVE, METRICS
from fpexp.reporting.measured import (
    Summary,
    at_length,
    lengths_of,
    longest_above,
    metrics_of,
    summarise,
)
from fpexp.reporting.outcome import Outcome, Setting
from fpexp.reporting.paper import Paper
from fpexp.reporting.record import Record
from fpexp.reporting.store import training_length

NOTHING = "-"
REPORTED = "paper, as reported"
ABOUT = ("iterations", "trained to", "steps", "wall time", "weights", "scale", "device")
"""What the runs of a setting were, behind what they measured."""


@dataclass(frozen=True)
class Table:
    """Cells as text, for people."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def table_of(outcome: Outcome) -> Table:
    """Return the table; settings without a run have a row too, and so has what only the paper has."""
    measured, paper = _measured(outcome), outcome.plan.paper
    columns = ["setting", "runs", *(_title(metric, length) for metric, length in measured)]
    if paper:
        columns.append(f"{REPORTED}: {paper.measure}" if paper.measure else REPORTED)
    rows = []
    for setting in outcome.settings:
        cells = [_cell(metric, _value(setting.runs, metric, n), len(setting.runs)) for metric, n in measured]
        reported = [_reported(paper, setting)] if paper else []
        rows.append([setting.label, _counted(setting), *cells, *reported, *_about(setting)])
    for row in paper.rows if paper else ():
        if not any(row.fits(setting.config) for setting in outcome.settings):
            before, after = [NOTHING] * (len(columns) - 2), [NOTHING] * len(ABOUT)
            rows.append([f"{row.label} (paper only)", *before, row.text, *after])
    return Table((*columns, *ABOUT), tuple(map(tuple, rows)))


def runs_of(outcome: Outcome) -> Table:
    """Return one row for each run that counts, with its id."""
    measured = _measured(outcome)
    titles = [_title(metric, length) for metric, length in measured]
    columns = ("run", "under", "setting", "seed", "steps", "wall time", "trained to", *titles)
    rows = []
    for setting in outcome.settings:
        for run in setting.runs:
            numbers = [_cell(metric, _value([run], metric, length)) for metric, length in measured]
            about = [run.id, run.place, setting.label, str(run.seed), _count(run.steps), _duration(run.seconds)]
            rows.append((*about, _trained(setting, [run]), *numbers))
    return Table(columns, tuple(rows))


def to_markdown(table: Table) -> str:
    """Return a Markdown table."""
    lines = [table.columns, tuple("---" for _ in table.columns), *table.rows]
    return "\n".join("| " + " | ".join(escaped(cell) or " " for cell in line) + " |" for line in lines)


def numbers_csv(outcome: Outcome) -> str:
    """Return every number of an experiment: a row for each setting, metric and length, ours and the paper's."""
    header = ["setting", "source", "metric", "length", "mean", "std", "n", "low", "high", "says", "runs"]
    lines: list[list[str]] = []
    for setting in outcome.settings:
        lengths = sorted({length for run in setting.runs for length in run.by_length})
        for metric in METRICS:
            for length in [0] if metric == LONGEST_ABOVE else lengths:
                value = _value(setting.runs, metric, length)
                if value is not None:
                    ids = " ".join(name for name, _ in value.runs)
                    spread = "" if value.spread is None else repr(value.spread)
                    row = [setting.label, "measured", metric, str(length or ""), repr(value.mean), spread, str(value.n)]
                    lines.append([*row, "", "", "", ids])
    paper = outcome.plan.paper
    for row_of_paper in paper.rows if paper else ():
        value_text = "" if row_of_paper.value is None else repr(row_of_paper.value)
        spread = "" if row_of_paper.spread is None else repr(row_of_paper.spread)
        low, high = map(repr, row_of_paper.range) if row_of_paper.range else ("", "")
        measure = paper.measure if paper else ""
        lines.append([row_of_paper.label, "reported", measure, "", value_text, spread, "", low, high])
        lines[-1] += [row_of_paper.says or "", ""]
    return to_csv(header, lines)


def points_csv(chart: Chart) -> str:
    """Return what a figure draws: a row for each point."""
    header = ["panel", "y", "line", chart.panels[0].x.label, "mean", "std", "n", "runs"]
    rows = []
    for panel in chart.panels:
        for line in panel.lines:
            for x, y in ((point.x, point.y) for point in line.points):
                spread = "" if y.spread is None else repr(y.spread)
                numbers = [f"{x:g}", repr(y.mean), spread, str(y.n)]
                rows.append([panel.title, panel.y.label, line.label, *numbers, " ".join(name for name, _ in y.runs)])
    return to_csv(header, rows)


def to_csv(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return CSV with a header, lines ended by a newline."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([header, *rows])
    return text.getvalue()


def _measured(outcome: Outcome) -> list[tuple[str, int]]:
    """Return the metric and the length of every column of numbers; length 0 for what has none."""
    metrics = [metric for metric in metrics_of(outcome) if metric in METRICS]  # not those of the rows of training
    lengths = lengths_of(outcome.plan.layout, outcome.settings)
    return [(m, length) for m in metrics for length in ([0] if m == LONGEST_ABOVE else lengths)]


def _value(runs: Sequence[Record], metric: str, length: int) -> Summary | None:
    if metric == LONGEST_ABOVE:
        return summarise((run.id, longest_above(run)) for run in runs)
    return at_length(runs, metric, length)


def _title(metric: str, length: int) -> str:
    return f"{METRICS[metric]} at {length}" if length else METRICS[metric]


def _cell(metric: str, value: Summary | None, runs: int = 1) -> str:
    """Return mean and spread; of how many runs, where some of them have no such number."""
    if value is None:
        return NOTHING
    digits = 0 if metric == LONGEST_ABOVE else 1 if metric.startswith("iterations") else 3
    spread = "" if value.spread is None else f" ± {value.spread:.{digits}f}"
    return f"{value.mean:.{digits}f}{spread}" + (f" (n={value.n})" if value.n != runs else "")


def _counted(setting: Setting) -> str:
    """Return how many runs there are, and of how many where some are not."""
    return (
        f"{len(setting.runs)} of {setting.asked}" if setting.missing or setting.unfinished else str(len(setting.runs))
    )


def _about(setting: Setting) -> list[str]:
    """Return the cells of ABOUT."""
    runs, trained = setting.runs, training_length(setting.config)
    iterations = at_length(runs, "iterations_mean", trained) if trained else None
    seconds = summarise((run.id, run.seconds) for run in runs)
    return [
        _cell("iterations_mean", iterations, len(runs)),
        _trained(setting, runs),
        _common([_count(run.steps) for run in runs]),
        _duration(seconds.mean) if seconds else NOTHING,
        _common([_count(run.parameters) for run in runs]),
        str(setting.config["choices"]["scale"]),
        _common([str(run.config["device"]).partition(":")[0] for run in runs]),
    ]


def _trained(setting: Setting, runs: Sequence[Record]) -> str:
    """Return the longest length in training; with growing lengths that the runs did not all reach, `5 of 16`."""
    allowed = training_length(setting.config)
    reached = sorted({run.reached for run in runs if run.reached is not None})
    if not reached or allowed is None:
        return NOTHING
    if reached == [allowed]:
        return str(allowed)
    return f"{' to '.join(map(str, dict.fromkeys((reached[0], reached[-1]))))} of {allowed}"


def _reported(paper: Paper, setting: Setting) -> str:
    return "; ".join(row.text for row in paper.rows if row.fits(setting.config)) or NOTHING


def _common(values: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(values)) or NOTHING


def _count(value: int | None) -> str:
    return NOTHING if value is None else f"{value:,}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return NOTHING
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def escaped(line: str) -> str:
    """Return a line of text that Markdown shows as it is."""
    return "".join(f"\\{c}" if c in r"\|*`[]<>_" else c for c in " ".join(line.split()))
