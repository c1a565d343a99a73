"""The report's CSV files: one number a cell, its unit in the name of the column; an empty cell was not measured."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fpexp.reporting.benchmark import Benchmark
from fpexp.reporting.chart import Chart
from fpexp.reporting.layout import LONGEST_ABOVE, METRICS
from fpexp.reporting.measured import at_length, summarise
from fpexp.reporting.outcome import Outcome
from fpexp.reporting.paper import Paper, Reported
from fpexp.reporting.record import Record
from fpexp.reporting.store import training_length
from fpexp.reporting.table import columns_of, paper_only, value_of

Cells = dict[str, Any]


def settings_sheet(outcome: Outcome) -> str:
    """Return a row a setting, then one for each row of the paper that is none of them."""
    paper, rows = outcome.plan.paper, []
    for setting in outcome.settings:
        row: Cells = {"setting": setting.label, "n_seeds": len(setting.runs), "asked_seeds": setting.asked}
        for metric, length in columns_of(outcome):
            row |= _spread(_name(metric, length), value_of(setting.runs, metric, length))
        longest = training_length(setting.config)
        row |= _spread("iterations", at_length(setting.runs, "iterations_mean", longest) if longest else None)
        row |= _spread("training_seconds", summarise((run.id, run.seconds) for run in setting.runs))
        for name in ("steps", "reached", "parameters"):
            row |= _spread(name, summarise((run.id, getattr(run, name)) for run in setting.runs))
        row |= {"training_length": longest, "scale": setting.config["choices"]["scale"]}
        row["runs"] = " ".join(run.id for run in setting.runs)
        fitting = (row_of_paper for row_of_paper in paper.rows if row_of_paper.fits(setting.config)) if paper else ()
        rows.append(row | _reported(paper, next(iter(fitting), None)))
    nothing = {"n_seeds": 0, "asked_seeds": 0}
    rows += [{"setting": row.label, **nothing, **_reported(paper, row)} for row in paper_only(outcome)]
    return _to_csv(rows, ["setting", "n_seeds", "asked_seeds"])


def runs_sheet(outcome: Outcome) -> str:
    """Return a row a run."""
    rows = []
    for setting in outcome.settings:
        for run in setting.runs:
            row: Cells = {"run": run.id, "place": run.place, "setting": setting.label, "seed": run.seed}
            for metric, length in columns_of(outcome):
                value = value_of([run], metric, length)
                row[_name(metric, length)] = value.mean if value else None
            row |= {"training_seconds": run.seconds, "steps": run.steps, "reached": run.reached}
            row |= {"parameters": run.parameters, "training_length": training_length(setting.config), **_about(run)}
            rows.append(row)
    return _to_csv(rows, ["run", "place", "setting", "seed"])


def curves_sheet(outcome: Outcome) -> str:
    """Return a row for each setting, metric and length of the curves."""
    rows = []
    for setting in outcome.settings:
        lengths = sorted({length for run in setting.runs for length in run.by_length})
        for metric in METRICS:
            for length in [0] if metric == LONGEST_ABOVE else lengths:
                if value := value_of(setting.runs, metric, length):
                    row = {"setting": setting.label, "metric": metric, "length": length or None}
                    rows.append(row | {"mean": value.mean, "std": value.spread, **_of(value.runs)})
    return _to_csv(rows, ["setting", "metric", "length", "mean", "std", "n", "runs"])


def figure_sheet(chart: Chart) -> str:
    """Return what a figure draws, a row a point."""
    rows = [
        {"panel": panel.title, "line": line.label, "x_is": panel.x.label, "x": point.x, "y_is": panel.y.label}
        | {"mean": point.y.mean, "std": point.y.spread, **_of(point.y.runs)}
        for panel in chart.panels
        for line in panel.lines
        for point in line.points
    ]
    return _to_csv(rows, [])


def benchmark_sheet(benchmark: Benchmark) -> str:
    """Return a row for each contender; times in seconds."""
    rows = []
    for row in benchmark.rows:
        low, high = row.get("quartiles_s") or (None, None)
        times = {"median_s": row.get("median_s"), "lower_quartile_s": low, "upper_quartile_s": high}
        about = {"group": row["group"], "contender": row["contender"]}
        rows.append({**about, **times, "ratio": row.get("ratio"), "baseline": row.get("baseline"), **row["numbers"]})
    return _to_csv(rows, ["group", "contender"])


def _name(metric: str, length: int) -> str:
    return f"{metric}_{length}" if length else metric


def _spread(name: str, value: Any) -> Cells:
    return {f"{name}_mean": value.mean if value else None, f"{name}_std": value.spread if value else None}


def _of(runs: Sequence[tuple[str, float]]) -> Cells:
    return {"n": len(runs), "runs": " ".join(name for name, _ in runs)}


def _about(run: Record) -> Cells:
    return {"scale": run.config["choices"]["scale"], "device": str(run.config["device"]).partition(":")[0]}


def _reported(paper: Paper | None, row: Reported | None) -> Cells:
    """Return the paper's columns, none where there is no file of it."""
    names = [f"paper_{name}" for name in ("measure", "value", "std", "low", "high", "says")]
    if paper is None or row is None:
        return dict.fromkeys(names if paper else [])
    low, high = row.range or (None, None)
    return dict(zip(names, (paper.measure, row.value, row.spread, low, high, row.says), strict=True))


def _to_csv(rows: Sequence[Mapping[str, Any]], first: Sequence[str]) -> str:
    """Return CSV with a header of all that the rows have, lines ended by a newline."""
    header = list(dict.fromkeys([*first, *(name for row in rows for name in row)]))
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *_cells(rows, header)])
    return text.getvalue()


def _cells(rows: Sequence[Mapping[str, Any]], header: Sequence[str]) -> Iterator[list[str]]:
    for row in rows:
        yield ["" if row.get(name) is None else str(row[name]) for name in header]
