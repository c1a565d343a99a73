"""What the runs of an experiment measured, summarised over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fpexp.reporting.layout import Layout
from fpexp.reporting.outcome import Outcome, Setting
from fpexp.reporting.paper import look_up
from fpexp.reporting.record import Record, number
from fpexp.reporting.store import curve_lengths, training_length

MASTERED = 0.9
"""The accuracy of LONGEST_ABOVE (paper fig. 6)."""


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


def metrics_of(outcome: Outcome) -> tuple[str, ...]:
    """Return what is reported of an experiment: what its layout says, else perplexity of text or token accuracy."""
    if outcome.plan.layout.metrics:
        return tuple(outcome.plan.layout.metrics)
    return (metric_of(row for run in outcome.runs for row in run.curve),)


def metric_of(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the metric that rows of curves are read by."""
    numbers = [number(row, "perplexity") for row in rows]
    return "token_accuracy" if not numbers or None in numbers else "perplexity"


def lengths_of(layout: Layout, settings: Iterable[Setting]) -> list[int]:
    """Return the lengths with a number of their own: the layout's, as far as they are measured at this scale.

    Else, of each setting, those at or next after 1, 2 and 4 times its training length.
    """
    settings = list(settings)
    chosen = {length for setting in settings for length in _chosen(layout, setting.config)}
    return sorted(chosen or {length for setting in settings for length in own_lengths(setting.config)})


def _chosen(layout: Layout, config: Mapping[str, Any]) -> list[int]:
    at = layout.at.get(str(look_up(config, layout.panel)), []) if isinstance(layout.at, Mapping) else layout.at
    multiples = [int(entry.removesuffix("x")) for entry in at if isinstance(entry, str)]
    return [*(n for n in at if n in curve_lengths(config)), *_multiples(config, multiples)]


def own_lengths(config: Mapping[str, Any]) -> list[int]:
    """Return the measured lengths at or next after 1, 2 and 4 times the training length; without one the longest."""
    return _multiples(config, (1, 2, 4)) if training_length(config) else curve_lengths(config)[-3:]


def _multiples(config: Mapping[str, Any], factors: Iterable[int]) -> list[int]:
    measured, longest = curve_lengths(config), training_length(config)
    wanted = (next((n for n in measured if longest and n >= factor * longest), None) for factor in factors)
    return [length for length in wanted if length is not None]


def at_length(runs: Sequence[Record], metric: str, length: int) -> Summary | None:
    """Summarise a metric of the curve at one length."""
    return summarise((run.id, number(run.by_length.get(length, {}), metric)) for run in runs)


def longest_above(run: Record) -> float | None:
    """Return the longest length up to which every measured one has an accuracy above 90 %; 0 where none has."""
    if not run.curve:
        return None
    longest = 0
    for row in run.curve:
        accuracy = number(row, "token_accuracy")
        if accuracy is None or accuracy <= MASTERED:
            break
        longest = row["length"]
    return float(longest)
