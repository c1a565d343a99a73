"""The panels of an experiment's figures, from what its runs have measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fpexp.reporting.chart import Axis, Chart, Line, Panel, Point
from fpexp.reporting.layout import LONGEST_ABOVE, METRICS, Figure
from fpexp.reporting.measured import at_length, lengths_of, longest_above, metrics_of, summarise
from fpexp.reporting.names import label_of, name_of, styles
from fpexp.reporting.outcome import Outcome, Setting
from fpexp.reporting.paper import look_up
from fpexp.reporting.record import Record, number
from fpexp.reporting.store import training_length

LOGARITHMIC = ("perplexity", "byte_perplexity", "loss")
"""What is drawn on a logarithmic axis, besides distances."""

SHARES = ("answers_alike", "both_converged")
"""What lies between 0 and 1 as accuracies do."""

OF_RUNS = {
    "seconds": "training time (s)",
    "steps": "steps",
    "parameters": "weights",
    "reached": "longest length in training",
}
"""Numbers of a run that are none of its config, and what they are called."""


def charts_of(outcome: Outcome) -> tuple[Chart, ...]:
    """Return the figures of an experiment, but those for which nothing is measured."""
    charts: list[Chart] = []
    for figure in outcome.plan.layout.figures:
        panels = tuple(
            panel
            for title, members in _panels(outcome).items()
            for metric in figure.metrics or metrics_of(outcome)
            if (panel := _MAKERS[figure.kind](_Drawn(outcome, figure, members, metric, title))).lines
        )
        name = outcome.plan.name if not charts else f"{outcome.plan.name}_{len(charts) + 1}"
        if panels:
            charts.append(Chart(name, outcome.plan.title, panels))
    return tuple(charts)


def _panels(outcome: Outcome) -> dict[str, list[Setting]]:
    """Group settings by the key that the layout names; a single group has no title."""
    layout = outcome.plan.layout
    groups: dict[str, list[Setting]] = {}
    for setting in outcome.settings:
        groups.setdefault(str(look_up(setting.config, layout.panel)), []).append(setting)
    several = len(groups) > 1
    return {name_of(value, layout) if several else "": members for value, members in groups.items()}


@dataclass(frozen=True)
class _Drawn:
    """What a panel is made of."""

    outcome: Outcome
    figure: Figure
    members: Sequence[Setting]
    metric: str
    title: str

    def name(self, setting: Setting, without: Sequence[str] = ()) -> str:
        """Return what a setting is called where the panel's title says a part of it and x another."""
        layout = self.outcome.plan.layout
        said = {*without, *([layout.panel] if self.title else [])}
        values = {key: value for key, value in setting.values.items() if key not in said}
        if len(values) == len(setting.values):
            return setting.label
        return label_of(values, layout) or ("" if without else setting.label)

    def lines(self, points: Callable[[Setting], Iterable[Point]]) -> tuple[Line, ...]:
        """Return one line a setting."""
        series = [(self.name(setting), _model(setting)) for setting in self.outcome.settings]
        found = [(self.name(setting), self._usable(points(setting))) for setting in self.members]
        return self._styled(series, found)

    def grouped(self, points: Callable[[Setting, int], Iterable[Point]], without: Sequence[str]) -> tuple[Line, ...]:
        """Return a line for each length and for what differs in the keys `without` alone; length 0: has none."""
        series, found = [], []
        for members in _panels(self.outcome).values():
            for setting in members:
                series += [(name, _model(setting)) for name, _ in self._names(setting, members, without)]
        for name, length in dict.fromkeys(n for s in self.members for n in self._names(s, self.members, without)):
            members = [s for s in self.members if (name, length) in self._names(s, self.members, without)]
            usable = self._usable(point for setting in members for point in points(setting, length))
            found.append((name, sorted(usable, key=lambda point: point.x)))
        return self._styled(series, found)

    def _names(self, setting: Setting, among: Sequence[Setting], without: Sequence[str]) -> list[tuple[str, int]]:
        """Return the names of a setting's lines, and the length of each."""
        label = self.name(setting, without)
        lengths = [0] if self.metric == LONGEST_ABOVE else lengths_of(self.outcome.plan.layout, among)
        names = (", ".join(part for part in (label, f"length {n}" if n else "") if part) for n in lengths)
        return [(name or METRICS[self.metric], length) for name, length in zip(names, lengths, strict=True)]

    @staticmethod
    def _styled(series: Sequence[tuple[str, str]], found: Iterable[tuple[str, list[Point]]]) -> tuple[Line, ...]:
        """Return lines that look and stand as among all (label, model) of the experiment, drawn here or not."""
        looks = styles(series)
        order = list(looks)
        return tuple(Line(name, order.index(name), looks[name], tuple(points)) for name, points in found if points)

    def panel(self, x: Axis, lines: tuple[Line, ...], marked: bool = False) -> Panel:
        """Return the panel; `marked` with the longest lengths in training."""
        trained = sorted({length for s in self.members if (length := training_length(s.config))}) if marked else []
        marks = tuple((float(length), "longest in training") for length in trained)
        return Panel(self.title, x, _y_axis(self.metric), lines, _levels(self.members, self.metric), marks)

    def _usable(self, points: Iterable[Point]) -> list[Point]:
        """Return what its axis has a place for: no zero on a logarithmic one."""
        linear = _y_axis(self.metric).scale == "linear"
        return [point for point in points if linear or point.y.mean > 0]


def _by_length(drawn: _Drawn) -> Panel:
    def points(setting: Setting) -> Iterable[Point]:
        for length in sorted({length for run in setting.runs for length in run.by_length}):
            if summary := at_length(setting.runs, drawn.metric, length):
                yield Point(length, summary)

    return drawn.panel(Axis("length", "log2"), drawn.lines(points), marked=True)


def _agreement(drawn: _Drawn) -> Panel:
    def points(setting: Setting) -> Iterable[Point]:
        rows = [(run.id, row) for run in setting.runs for row in drawn.outcome.evaluated(run, "agreement")]
        yield from _points(rows, "length", drawn.metric)

    return drawn.panel(Axis("length", "log2"), drawn.lines(points), marked=True)


def _over_training(drawn: _Drawn) -> Panel:
    figure = drawn.figure

    def points(setting: Setting) -> Iterable[Point]:
        rows = [(run.id, row) for run in setting.runs for row in run.metrics if row.get("kind") == figure.rows]
        found = _points(rows, "step", drawn.metric)
        if figure.x == ["step"]:
            return found
        seconds = {point.x: point.y.mean for point in _points(rows, "step", "seconds")}
        return [Point(seconds[point.x], point.y) for point in found if point.x in seconds]

    x = Axis("step" if figure.x == ["step"] else OF_RUNS["seconds"])
    return drawn.panel(x, drawn.lines(points))


def _by_setting(drawn: _Drawn) -> Panel:
    keys, layout = drawn.figure.x, drawn.outcome.plan.layout

    def points(setting: Setting, length: int) -> Iterable[Point]:
        x = _of_setting(setting, keys)
        y = summarise((run.id, _of_run(run, drawn.metric, length)) for run in setting.runs)
        if x is not None and y is not None:
            yield Point(x, y)

    lines = drawn.grouped(points, [*keys, *drawn.figure.over])
    names = dict.fromkeys(name_of(key, layout, key.rpartition(".")[2].replace("_", " ")) for key in keys)
    if keys[0] in OF_RUNS:
        return drawn.panel(Axis(OF_RUNS[keys[0]]), lines)
    return drawn.panel(_growing(" or ".join(names), lines), lines)


def _by_cap(drawn: _Drawn) -> Panel:
    def points(setting: Setting, length: int) -> Iterable[Point]:
        rows = [(run.id, row) for run in setting.runs for row in drawn.outcome.evaluated(run, "iterations")]
        return _points([(run, row) for run, row in rows if row.get("length") == length], "max_iterations", drawn.metric)

    lines = drawn.grouped(points, [])
    return drawn.panel(_growing("cap on iterations", lines), lines)


_MAKERS: Mapping[str, Callable[[_Drawn], Panel]] = {
    "curve": _by_length,
    "setting": _by_setting,
    "training": _over_training,
    "iterations": _by_cap,
    "agreement": _agreement,
}


def _points(rows: Iterable[tuple[str, Mapping[str, Any]]], x: str, metric: str) -> list[Point]:
    """Summarise the rows, each of a run's id, that have the same x, ascending."""
    groups: dict[float, list[tuple[str, float | None]]] = {}
    for run, row in rows:
        if (place := number(row, x)) is not None:
            groups.setdefault(place, []).append((run, number(row, metric)))
    found = ((place, summarise(values)) for place, values in sorted(groups.items()))
    return [Point(place, summary) for place, summary in found if summary]


def _growing(name: str, lines: Sequence[Line]) -> Axis:
    """Return an axis in powers of two, where all has a place on it."""
    return Axis(name, "log2" if all(point.x > 0 for line in lines for point in line.points) else "linear")


def _of_setting(setting: Setting, keys: Sequence[str]) -> float | None:
    if keys[0] in OF_RUNS:
        found = summarise((run.id, getattr(run, keys[0])) for run in setting.runs)
        return found.mean if found else None
    own = [key for key in keys if key in setting.values]
    return number({"x": look_up(setting.config, (own or keys)[0])}, "x") if own or len(keys) == 1 else None


def _model(setting: Setting) -> str:
    return str(setting.config["choices"]["model"])


def _of_run(run: Record, metric: str, length: int) -> float | None:
    return number(run.by_length.get(length, {}), metric) if length else longest_above(run)


def _y_axis(metric: str) -> Axis:
    name = METRICS.get(metric, metric.removeprefix("layers.").replace(".", ": ").replace("_", " "))
    if metric == "scaled_accuracy":
        return Axis(name, "linear", (-0.05, 1.02))
    if metric.endswith("accuracy") or metric in SHARES:
        return Axis(name, "linear", (0.0, 1.02))
    return Axis(name, "log" if metric in LOGARITHMIC or metric.startswith("distance") else "linear")


def _levels(members: Sequence[Setting], metric: str) -> tuple[tuple[float, str], ...]:
    """Return what a guess has (chance, or the perplexity of a unigram), and the tolerance of distances."""
    runs = [run for setting in members for run in setting.runs]
    rows: list[Mapping[str, Any]] = [row for run in runs for row in run.curve]
    if metric == "scaled_accuracy":
        return ((0.0, "chance"),)
    if metric in ("token_accuracy", "last_token_accuracy"):
        key, name = "chance", "chance"
    elif metric == "perplexity":
        key, name = "unigram_perplexity", "unigram"
    elif metric.startswith("distance"):
        key, name, rows = "solver.tolerance", "tolerance", [run.config for run in runs]
    else:
        return ()
    found = (number(row, key) for row in rows)
    levels = sorted({value for value in found if value is not None})
    return tuple((level, name if len(levels) == 1 else f"{name} {level:g}") for level in levels)
