"""The report as one HTML file: its style and its script stand beside this file and are put into it."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from fpexp.reporting.benchmark import Benchmark
from fpexp.reporting.chart import Axis, Chart, Line
from fpexp.reporting.names import COLOURS
from fpexp.reporting.report import Report, Section
from fpexp.reporting.table import REPORTED, Table
from fpexp.reporting.words import BENCHMARKS, CAPTION, OTHERS, PAPERS, READING, TITLE, summary_of


def page(report: Report) -> str:
    """Return report.html. It loads nothing, and its policy lets no script run but its own."""
    parts = [_summary(report)]
    if report.problems:
        parts += ["<h3>Not as it should be</h3>", _list(map(escape, report.problems))]
    parts += [part for section in report.sections for part in _section(section)]
    if report.benchmarks:
        parts.append(f"<h2>{escape(BENCHMARKS)}</h2>")
        parts += [part for benchmark in report.benchmarks for part in _benchmark(benchmark)]
    for title, table in ((PAPERS, report.papers), (OTHERS, report.others)):
        if table:
            parts += [f"<h2>{escape(title)}</h2>", _table(table, title)]
    style, script = _own("page.css") + _colours(), _own("page.js")
    return Template(_own("page.html")).substitute(
        title=escape(TITLE),
        reading=escape(READING),
        style=style,
        style_hash=_hash(style),
        script=script,
        script_hash=_hash(script),
        content="\n".join(parts),
    )


def chart_data(chart: Chart) -> dict[str, Any]:
    """Return a chart as the script reads it."""
    return {
        "panels": [
            {
                "title": panel.title,
                "x": _axis(panel.x),
                "y": _axis(panel.y),
                "lines": [_line(line) for line in panel.lines],
                "levels": panel.levels,
                "marks": panel.marks,
            }
            for panel in chart.panels
        ]
    }


def _axis(axis: Axis) -> dict[str, Any]:
    return {"label": axis.label, "scale": axis.scale, "limits": axis.limits}


def _line(line: Line) -> dict[str, Any]:
    points = [{"x": p.x, "y": p.y.mean, "spread": p.y.spread, "runs": p.y.runs} for p in line.points]
    return {"label": line.label, "index": line.index, **dataclasses.asdict(line.style), "points": points}


def _summary(report: Report) -> str:
    table = summary_of(report)
    rows = []
    for (name, title, done), section in zip(table.rows, report.sections, strict=True):
        link = f'<a href="#{escape(section.plan.name)}">{escape(name)}</a>'
        rows.append(f"<tr><th scope='row'>{link}</th><td>{escape(title)}</td><td>{escape(done)}</td></tr>")
    return _scrolling("experiments", _head(table.columns), rows)


def _section(section: Section) -> list[str]:
    plan, name = section.plan, escape(section.plan.name)
    parts = [f'<section aria-labelledby="{name}">', f'<h2 id="{name}">{escape(plan.title)}</h2>']
    parts.append(f"<p><code>experiment={name}</code>. {escape(plan.description)}</p>")
    if plan.paper and plan.paper.claims:
        parts += ["<h3>As the paper reports it</h3>", _list(map(escape, plan.paper.claims))]
    for chart in section.charts:
        parts += ['<figure class="chart">', _data(chart_data(chart))]
        parts.append("<noscript>The curves are drawn by a script; figures/ has them as pictures.</noscript>")
        parts.append(f"<figcaption>{escape(CAPTION)}</figcaption></figure>")
    if section.table.rows:
        parts.append(_table(section.table, f"table of {plan.name}"))
    parts += [part for benchmark in section.benchmarks for part in _benchmark(benchmark)]
    if section.runs.rows:
        runs = _table(section.runs, f"runs of {plan.name}")
        parts.append(f"<details><summary>Each run by itself ({len(section.runs.rows)})</summary>{runs}</details>")
    if section.unfinished:
        parts += ["<h3>Not finished</h3>", _list(_unfinished(*entry) for entry in section.unfinished)]
    if section.missing:
        parts += [
            "<h3>Missing</h3>",
            f"<p><code>{escape(plan.command)}</code> runs all of it. What is missing:</p>",
        ]
        lines = escape("\n".join(section.missing))
        parts.append(f"<details><summary>Commands ({len(section.missing)})</summary><pre>{lines}</pre></details>")
    if section.remarks:
        parts += ["<h3>Recorded more than once</h3>", _list(map(escape, section.remarks))]
    return [*parts, "</section>"]


def _benchmark(benchmark: Benchmark) -> list[str]:
    parts = [f"<h3>{escape(benchmark.name)}</h3>"]
    parts.append(f'<p class="faint"><code>{escape(benchmark.file)}</code>: {escape(benchmark.machine)}</p>')
    for group, table in benchmark.tables:
        parts += [*([f"<p>{escape(group)}</p>"] if group else []), _table(table, f"{benchmark.name} {group}".strip())]
    return parts


def _unfinished(what: str, command: str | None) -> str:
    return escape(what) + (f"; <code>{escape(command)}</code>" if command else "")


def _list(items: Any) -> str:
    return "<ul>" + "".join(f"<li>{item}</li>" for item in items) + "</ul>"


def _table(table: Table, name: str) -> str:
    rows = []
    for first, *rest in table.rows:
        cells = "".join(
            f"<td{_class(column, cell)}>{escape(cell)}</td>"
            for column, cell in zip(table.columns[1:], rest, strict=True)
        )
        rows.append(f"<tr><th scope='row'>{escape(first)}</th>{cells}</tr>")
    return _scrolling(name, _head(table.columns), rows)


def _class(column: str, cell: str = "") -> str:
    """Mark what the paper reports, and keep short cells on one line."""
    if column.startswith(REPORTED):
        return ' class="reported"'
    return ' class="number"' if 0 < len(cell) <= 24 else ""


def _head(columns: Sequence[str]) -> str:
    cells = "".join(f"<th scope='col'{_class(column)}>{escape(column)}</th>" for column in columns)
    return f"<thead><tr>{cells}</tr></thead>"


def _scrolling(name: str, head: str, rows: Sequence[str]) -> str:
    """Return a table in a box of its own to scroll, which the keyboard reaches too."""
    body = "<tbody>" + "".join(rows) + "</tbody>"
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(name)}"><table>{head}{body}</table></div>'
    )


def _data(value: Mapping[str, Any]) -> str:
    """Return JSON inside a script element, which nothing in it can end."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return f'<script type="application/json">{text}</script>'


def _colours() -> str:
    """Return a rule for the lines and for the areas of every colour, on white and on dark."""
    light = [f".line-{i}{{stroke:{c.on_white}}}.fill-{i}{{fill:{c.on_white}}}" for i, c in enumerate(COLOURS)]
    dark = [f".line-{i}{{stroke:{c.on_dark}}}.fill-{i}{{fill:{c.on_dark}}}" for i, c in enumerate(COLOURS)]
    return "\n".join([*light, "@media (prefers-color-scheme: dark) {", *dark, "}\n"])


def _own(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
