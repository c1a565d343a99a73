"""A figure as numbers: `panels` makes it of what is measured, `drawing` and the page make pictures of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fpexp.reporting.measured import Summary
from fpexp.reporting.names import Style


@dataclass(frozen=True)
class Point:
    """One point of a line."""

    x: float
    y: Summary


@dataclass(frozen=True)
class Line:
    """The points of one setting, ascending in x; its place in the legend and its style are the same in all panels."""

    label: str
    index: int
    style: Style
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
