"""The figure of an experiment as numbers; `drawing` and the page make pictures of the same ones."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fpexp.reporting.layout import LONGEST_ABOVE, METRICS
from fpexp.reporting.outcome import Outcome, Setting, label_of
from fpexp.reporting.paper import look_up
from fpexp.reporting.record import Record, number

MASTERED = 0.9
"""The accuracy of LONGEST_ABOVE (paper fig. 6)."""

UNBOUNDED = {"perplexity": "log", "byte_perplexity": "log", "loss": "log"}
"""Scales of what is no accuracy; anything else that is none has a linear one."""


@dataclass(frozen=True)
class Summary:
    """Mean of what some runs measured, sample standard deviation (None of one run), and each run's own value."""

    mean: float
    spread: float | None
    runs: tuple[tuple[str, float], ...]

    @property
    def n(self) -> int:
        """How many runs."""
        return len(self.runs)


def summarise(values: Iterable[tuple[str, float | None]]) -> Summary | None:
    """Summarise the values that there are, by run id; None of none."""
    found = tuple((name, value) for name, value in values if value is not None)
    if not found:
        return None
    numbers = [value for _, value in found]
    return Summary(statistics.fmean(numbers), statistics.stdev(numbers) if len(numbers) > 1 else None, found)


@dataclass(frozen=True)
class Point:
    """One point of a line."""

    x: float
    y: Summary


@dataclass(frozen=True)
class Line:
    """The points of one setting, ascending in x; `index` chooses colour and marker and is the same in all panels."""

    label: str
    index: int
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Axis:
    """An axis; `limits` where they are not the data's."""

    label: str
    scale: Literal["linear", "log2", "log"] = "linear"
    limits: tuple[float, float] | None = None


@dataclass(frozen=True)
class Panel:
    """One pair of axes. `levels` are drawn across (chance), `marks` upright (the longest length in training)."""

    title: str
    x: Axis
    y: Axis
    lines: tuple[Line, ...]
    levels: tuple[tuple[float, str], ...] = ()
    marks: tuple[tuple[float, str], ...] = ()


@dataclass(frozen=True)
class Chart:
    """All panels of an experiment's figure."""

    name: str
    title: str
    panels: tuple[Panel, ...]


def chart_of(outcome: Outcome) -> Chart | None:
    """Return the figure of an experiment; None where its layout has none or nothing is measured."""
    layout = outcome.plan.layout
    make = {"curve": _by_length, "setting": _by_setting, "training": _over_training}.get(layout.kind)
    if make is None:
        return None
    panels = tuple(
        panel
        for title, members in _panels(outcome).items()
        for metric in metrics_of(outcome)
        if (panel := make(outcome, members, metric, title)).lines
    )
    return Chart(outcome.plan.name, outcome.plan.title, panels) if panels else None


def metrics_of(outcome: Outcome) -> tuple[str, ...]:
    """Return what is reported of an experiment: what its layout says, else perplexity of text or token accuracy."""
    if outcome.plan.layout.metrics:
        return outcome.plan.layout.metrics
    rows = [row for run in outcome.runs for row in run.curve]
    text = bool(rows) and all(number(row, "perplexity") is not None for row in rows)
    return ("perplexity",) if text else ("token_accuracy",)


def lengths_of(outcome: Outcome) -> list[int]:
    """Return the lengths with a column: the layout's, else those at or next after 1, 2 and 4 times training's.

    They are of those that are measured at this scale.
    """
    measured = sorted({length for setting in outcome.settings for length in setting.config["evaluation"]["lengths"]})
    chosen = [length for length in outcome.plan.layout.at if length in measured]
    if chosen:
        return chosen
    longest = max((trained for s in outcome.settings if (trained := training_length(s.config))), default=None)
    if longest is None:
        return measured[-3:]
    wanted = [next((m for m in measured if m >= factor * longest), None) for factor in (1, 2, 4)]
    return list(dict.fromkeys(length for length in wanted if length is not None))


def training_length(config: Mapping[str, Any]) -> int | None:
    """Return the longest length that training may use, by the task's length policy or its context."""
    task = config.get("task") or {}
    longest = (task.get("lengths") or {}).get("max", task.get("context"))
    return longest if isinstance(longest, int) else None


def at_length(runs: Sequence[Record], metric: str, length: int) -> Summary | None:
    """Summarise a metric of the curve at one length."""
    return summarise((run.id, number(run.by_length.get(length, {}), metric)) for run in runs)


def longest_above(run: Record) -> float | None:
    """Return the longest length up to which every measured one has an accuracy of 90 % or more; 0 where none has."""
    if not run.curve:
        return None
    longest = 0
    for row in run.curve:
        accuracy = number(row, "token_accuracy")
        if accuracy is None or accuracy < MASTERED:
            break
        longest = row["length"]
    return float(longest)


def _panels(outcome: Outcome) -> dict[str, list[Setting]]:
    """Group settings by the key that the layout names, or by task; a single group has no title."""
    key = outcome.plan.layout.panel or "task"
    groups: dict[str, list[Setting]] = {}
    for setting in outcome.settings:
        groups.setdefault(str(look_up(setting.config, key)), []).append(setting)
    labels = outcome.plan.layout.labels
    titles = {value: str(labels.get(value, value)) for value in groups}
    return {titles[value] if len(groups) > 1 else "": members for value, members in groups.items()}


def _by_length(outcome: Outcome, members: list[Setting], metric: str, title: str) -> Panel:
    def points(setting: Setting) -> list[Point]:
        lengths = sorted({length for run in setting.runs for length in run.by_length})
        found = ((length, at_length(setting.runs, metric, length)) for length in lengths)
        return [Point(length, summary) for length, summary in found if summary]

    x = Axis("length", "log2")
    return _panel(outcome, members, metric, title, x, points)


def _by_setting(outcome: Outcome, members: list[Setting], metric: str, title: str) -> Panel:
    """A line for each length, or one for what has no length; x is a number of the config, or one of the run's own."""
    layout, key = outcome.plan.layout, str(outcome.plan.layout.x)
    lengths = [None] if metric == LONGEST_ABOVE else lengths_of(outcome)
    groups: dict[str, list[Setting]] = {}
    for setting in members:
        others = {name: value for name, value in setting.values.items() if name != key}
        groups.setdefault(label_of(others, layout), []).append(setting)
    lines = []
    for index, (label, length) in enumerate((label, length) for label in groups for length in lengths):
        points = []
        for setting in groups[label]:
            x = _of_setting(setting, key)
            y = summarise((run.id, _at(run, metric, length)) for run in setting.runs)
            if x is not None and y is not None:
                points.append(Point(x, y))
        name = ", ".join(part for part in (label, "" if length is None else f"length {length}") if part)
        if points:
            lines.append(Line(name or metric, index, tuple(sorted(points, key=lambda point: point.x))))
    name = str(layout.labels.get(key, key.rpartition(".")[2].replace("_", " ")))
    scale: Literal["linear", "log2"] = "log2" if all(p.x > 0 for line in lines for p in line.points) else "linear"
    levels = _levels(members, metric)
    return Panel(title, Axis(name, scale), _y_axis(metric), tuple(lines), levels)


def _over_training(outcome: Outcome, members: list[Setting], metric: str, title: str) -> Panel:
    layout = outcome.plan.layout

    def points(setting: Setting) -> list[Point]:
        by_step: dict[int, list[tuple[Record, Mapping[str, Any]]]] = {}
        for run in setting.runs:
            for row in run.metrics:
                if row.get("kind") == layout.rows and isinstance(row.get("step"), int):
                    by_step.setdefault(row["step"], []).append((run, row))
        result = []
        for step, rows in sorted(by_step.items()):
            y = summarise((run.id, number(row, metric)) for run, row in rows)
            seconds = summarise((run.id, number(row, "seconds")) for run, row in rows)
            x = float(step) if layout.x == "step" else seconds.mean if seconds else None
            if y is not None and x is not None:
                result.append(Point(x, y))
        return result

    x = Axis("step" if layout.x == "step" else "training time (s)")
    return _panel(outcome, members, metric, title, x, points)


def _panel(
    outcome: Outcome,
    members: Sequence[Setting],
    metric: str,
    title: str,
    x: Axis,
    points: Callable[[Setting], list[Point]],
) -> Panel:
    y = _y_axis(metric)
    panel_key = outcome.plan.layout.panel or "task"
    labels = _without(outcome, panel_key if title else None)
    order = list(dict.fromkeys(labels.values()))
    lines = [
        Line(labels[setting.label], order.index(labels[setting.label]), tuple(found))
        for setting in members
        if (found := [point for point in points(setting) if y.scale == "linear" or point.y.mean > 0])
    ]
    trained = sorted({length for s in members if (length := training_length(s.config))}) if x.scale == "log2" else []
    marks = tuple((float(length), "longest in training") for length in trained)
    return Panel(title, x, y, tuple(lines), _levels(members, metric), marks)


def _without(outcome: Outcome, key: str | None) -> dict[str, str]:
    """Return what each setting's line is called where its panel already says the value of `key`."""
    names = {}
    for setting in outcome.settings:
        values = {name: value for name, value in setting.values.items() if name != key}
        own = label_of(values, outcome.plan.layout) or setting.label
        names[setting.label] = own if key else setting.label
    return names


def _of_setting(setting: Setting, key: str) -> float | None:
    if key in ("seconds", "steps", "parameters", "reached"):
        found = summarise((run.id, getattr(run, key)) for run in setting.runs)
        return found.mean if found else None
    return number({"value": look_up(setting.config, key)}, "value")


def _at(run: Record, metric: str, length: int | None) -> float | None:
    return longest_above(run) if length is None else number(run.by_length.get(length, {}), metric)


def _y_axis(metric: str) -> Axis:
    name = METRICS.get(metric, metric.rpartition(".")[2].replace("_", " "))
    if metric == "scaled_accuracy":
        return Axis(name, "linear", (-0.05, 1.02))
    if metric.endswith("accuracy"):
        return Axis(name, "linear", (0.0, 1.02))
    return Axis(name, UNBOUNDED.get(metric, "linear"))  # type: ignore[arg-type]


def _levels(members: Sequence[Setting], metric: str) -> tuple[tuple[float, str], ...]:
    """Return what a guess has: chance of a token, 0 of scaled accuracy, the unigram's perplexity of text."""
    rows = [row for setting in members for run in setting.runs for row in run.curve]
    if metric == "scaled_accuracy":
        return ((0.0, "chance"),)
    if metric in ("token_accuracy", "last_token_accuracy"):
        key, name = "chance", "chance"
    elif metric == "perplexity":
        key, name = "unigram_perplexity", "unigram"
    else:
        return ()
    found = (number(row, key) for row in rows)
    return tuple((level, name) for level in sorted({value for value in found if value is not None}))
