"""The table of an experiment: one row a setting, our numbers, and the paper's in a column of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
from fpexp.reporting.paper import Paper, Reported
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
    """Return the table; settings without a run have a row too, and so has what only the paper has.

    Where nothing is run it is what the paper reports.
    """
    measured = columns_of(outcome)
    paper = outcome.plan.paper if outcome.plan.paper and outcome.plan.paper.rows else None
    if not outcome.runs:
        if paper is None:
            return Table((), ())
        found = [(setting.label, _reported(paper, setting)) for setting in outcome.settings]
        only = [(f"{row.label} (paper only)", row.text) for row in paper_only(outcome)]
        return Table(("setting", _paper_title(paper)), (*(row for row in found if row[1] != NOTHING), *only))
    columns = ["setting", "runs", *(_title(metric, length) for metric, length in measured)]
    if paper:
        columns.append(_paper_title(paper))
    rows = []
    for setting in outcome.settings:
        cells = [_cell(metric, value_of(setting.runs, metric, n), len(setting.runs)) for metric, n in measured]
        reported = [_reported(paper, setting)] if paper else []
        rows.append([setting.label, _counted(setting), *cells, *reported, *_about(setting)])
    for row in paper_only(outcome):
        before, after = [NOTHING] * (len(columns) - 2), [NOTHING] * len(ABOUT)
        rows.append([f"{row.label} (paper only)", *before, row.text, *after])
    return Table((*columns, *ABOUT), tuple(map(tuple, rows)))


def runs_of(outcome: Outcome) -> Table:
    """Return one row for each run that counts, with its id."""
    measured = columns_of(outcome)
    titles = [_title(metric, length) for metric, length in measured]
    columns = ("run", "under", "setting", "seed", "steps", "wall time", "trained to", *titles)
    rows = []
    for setting in outcome.settings:
        for run in setting.runs:
            numbers = [_cell(metric, value_of([run], metric, length)) for metric, length in measured]
            about = [run.id, run.place, setting.label, str(run.seed), count(run.steps), duration(run.seconds)]
            rows.append((*about, trained(setting.config, [run]), *numbers))
    return Table(columns, tuple(rows))


def to_markdown(table: Table) -> str:
    """Return a Markdown table."""
    lines = [table.columns, tuple("---" for _ in table.columns), *table.rows]
    return "\n".join("| " + " | ".join(escaped(cell) or " " for cell in line) + " |" for line in lines)


def columns_of(outcome: Outcome) -> list[tuple[str, int]]:
    """Return the metric and the length of every column of numbers; length 0 for what has none."""
    metrics = [metric for metric in metrics_of(outcome) if metric in METRICS]  # not those of the rows of training
    lengths = lengths_of(outcome.plan.layout, outcome.settings)
    return [(m, length) for m in metrics for length in ([0] if m == LONGEST_ABOVE else lengths)]


def value_of(runs: Sequence[Record], metric: str, length: int) -> Summary | None:
    """Summarise a metric at a length, 0 for what has none."""
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
    """Return how many runs there are, and of how many that are asked for or were begun where some are lacking."""
    there, lacking = len(setting.runs), len(setting.missing) + len(setting.unfinished)
    return f"{there} of {there + lacking}" if lacking else str(there)


def _about(setting: Setting) -> list[str]:
    """Return the cells of ABOUT."""
    runs, length = setting.runs, training_length(setting.config)
    iterations = at_length(runs, "iterations_mean", length) if length else None
    seconds = summarise((run.id, run.seconds) for run in runs)
    return [
        _cell("iterations_mean", iterations, len(runs)),
        trained(setting.config, runs),
        _common([count(run.steps) for run in runs]),
        duration(seconds.mean) if seconds else NOTHING,
        _common([count(run.parameters) for run in runs]),
        str(setting.config["choices"]["scale"]),
        _common([str(run.config["device"]).partition(":")[0] for run in runs]),
    ]


def trained(config: Mapping[str, Any], runs: Sequence[Record]) -> str:
    """Return the longest length in training; with growing lengths that the runs did not all reach, `5 of 16`."""
    allowed = training_length(config)
    reached = sorted({run.reached for run in runs if run.reached is not None})
    if not reached or allowed is None:
        return NOTHING
    if reached == [allowed]:
        return str(allowed)
    return f"{' to '.join(map(str, dict.fromkeys((reached[0], reached[-1]))))} of {allowed}"


def _paper_title(paper: Paper) -> str:
    return f"{REPORTED}: {paper.measure}" if paper.measure else REPORTED


def paper_only(outcome: Outcome) -> list[Reported]:
    """Return the paper's rows that are of no setting of the grid."""
    rows = outcome.plan.paper.rows if outcome.plan.paper else ()
    return [row for row in rows if not any(row.fits(setting.config) for setting in outcome.settings)]


def _reported(paper: Paper, setting: Setting) -> str:
    return "; ".join(row.text for row in paper.rows if row.fits(setting.config)) or NOTHING


def _common(values: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(values)) or NOTHING


def count(value: int | None) -> str:
    """Return a count in groups of three."""
    return NOTHING if value is None else f"{value:,}"


def duration(seconds: float | None) -> str:
    """Return a time in the unit that fits it."""
    if seconds is None:
        return NOTHING
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def escaped(line: str) -> str:
    """Return a line of text that Markdown shows as it is."""
    return "".join(f"\\{c}" if c in r"\|*`[]<>_" else c for c in " ".join(line.split()))
