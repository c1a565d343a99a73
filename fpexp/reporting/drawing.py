"""Charts as PNG and SVG, by matplotlib without a display. The same chart gives the same bytes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from fpexp.reporting.chart import Axis, Chart, Line, Panel
from fpexp.reporting.names import COLOURS

SHAPES = ("o", "s", "^", "D", "v", "P", "X", "*", "<")
STROKES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)))
COLUMNS = 2
"""Panels beside each other."""

FEW = 6
"""Series that have their names below a single panel; more stand at its right."""


def draw(chart: Chart, stem: Path) -> list[Path]:
    """Draw a chart at `stem`.png and `stem`.svg and return the two paths.

    Lines are means, bands one sample standard deviation; chance is dashed, the longest training length a dotted line.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(COLUMNS, len(chart.panels))
    rows = math.ceil(len(chart.panels) / columns)
    labels = {line.label: line.index for panel in chart.panels for line in panel.lines}
    width = 4.6 * columns + 0.6
    name_width = 0.085 * max(map(len, labels)) + 0.9  # inches: letters, and a sample of the line
    if len(chart.panels) == 1 and len(labels) > FEW:
        place: dict[str, Any] = {"loc": "outside center right"}
        size = (width + name_width, max(3.6, 0.2 * len(labels) + 0.3))
    else:
        beside = max(1, int(width / name_width))
        place = {"loc": "outside lower center", "ncols": beside}
        size = (width, 3.3 * rows + 0.3 + (0.2 * math.ceil(len(labels) / beside) if len(labels) > 1 else 0))
    with rc_context({"svg.hashsalt": "fpexp", "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=size, dpi=150, layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(rows, columns, squeeze=False).flat
        handles: dict[str, Any] = {}
        for axes, panel in zip(grid, chart.panels, strict=False):
            _draw_panel(axes, panel, handles)
        for spare in figure.axes[len(chart.panels) :]:
            spare.set_axis_off()
        names = sorted(handles, key=lambda name: labels[name])
        if len(names) > 1:
            figure.legend(
                [handles[name] for name in names],
                list(map(_plain, names)),
                **place,
                handlelength=3.2,
                fontsize=8,
                frameon=False,
            )
        paths = [stem.with_name(f"{stem.name}.png"), stem.with_name(f"{stem.name}.svg")]
        figure.savefig(paths[0], metadata={"Software": None})
        figure.savefig(paths[1], metadata={"Date": None, "Creator": None})
    return paths


def _draw_panel(axes: Any, panel: Panel, handles: dict[str, Any]) -> None:
    for line in panel.lines:
        handles.setdefault(line.label, _draw_line(axes, line))
    for level, name in panel.levels:
        axes.axhline(level, color="0.45", lw=1, ls="--", zorder=1)
        # At the left end, where lengths are short and curves far from a guess.
        style: dict[str, Any] = {"fontsize": 7, "color": "0.35", "ha": "left", "va": "bottom"}
        axes.text(0.01, level, name, transform=axes.get_yaxis_transform(), **style)
    for position, name in panel.marks:
        axes.axvline(position, color="0.45", lw=1, ls=":", zorder=1)
        style = {"fontsize": 7, "color": "0.35", "ha": "center", "va": "bottom"}
        axes.text(position, 1.005, name, transform=axes.get_xaxis_transform(), **style)
    axes.set(xlabel=panel.x.label, ylabel=panel.y.label)
    axes.set_title(_plain(panel.title), fontsize=10, loc="left")
    _scale(axes, "x", panel.x)
    _scale(axes, "y", panel.y)
    axes.grid(alpha=0.2)


def _draw_line(axes: Any, line: Line) -> Any:
    x = [point.x for point in line.points]
    means = [point.y.mean for point in line.points]
    colour = COLOURS[line.style.colour].on_white
    marker = SHAPES[line.style.marker] if len(x) <= 24 else None
    dashes = STROKES[line.style.dash]
    (drawn,) = axes.plot(x, means, color=colour, marker=marker, ms=4, lw=1.5, ls=dashes)
    if any(point.y.spread for point in line.points):
        low = [point.y.mean - (point.y.spread or 0.0) for point in line.points]
        high = [point.y.mean + (point.y.spread or 0.0) for point in line.points]
        axes.fill_between(x, low, high, color=colour, alpha=0.15, lw=0)
    return drawn


def _scale(axes: Any, which: str, axis: Axis) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    if axis.scale != "linear":
        getattr(axes, f"set_{which}scale")("log", base=2 if axis.scale == "log2" else 10)
        ticks = getattr(axes, f"{which}axis")
        if axis.scale == "log":
            ticks.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ticks.set_major_formatter("{x:g}")
        ticks.set_minor_locator(NullLocator())
    if axis.limits:
        getattr(axes, f"set_{which}lim")(*axis.limits)


def _plain(text: str) -> str:
    """Return a text that matplotlib takes as it is, no mathematics in it."""
    return text.replace("$", r"\$")
