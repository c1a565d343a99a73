"""How an experiment is reported: the `report:` block of its file in conf/experiment.

report:
  paper: Figure 4                  # what it stands for in the paper; those that have it come first
  title: State tracking            # default: the experiment's name
  metrics: [token_accuracy]        # in the table and in figures that name none; default: perplexity of text, else this
  at: [16, 32, 64]                 # lengths with a column in the table, or 2x: twice the training length; others for
                                   # each value of panel: {a5: [16], copy: [2x]}; default: [1x, 2x, 4x]
  names: [model, model.layers]     # keys that name a setting; default: all that are not the same in every run
  panel: task                      # a key with a panel for each of its values
  labels: {model.layers: depth, model=gdn model.decay=false: DeltaNet} # what keys, values and several of them together
                                   # are called, beside fpexp.reporting.names
  figures:                         # default: one of kind curve; []: the table alone
    - {kind: curve}                # by length
    - {kind: setting, x: schedule.max_iterations, over: training.steps} # a line joins what differs in these alone;
                                   # x: a key with numbers (of several the one that a setting has), or seconds, steps,
                                   # parameters, reached
    - {kind: training, x: step, rows: validation, metrics: layers.0.iterations_mean} # x: or seconds; rows: or train
    - {kind: iterations}           # by the cap, from the first of sweep.evaluate that has max_iterations
    - {kind: agreement, metrics: distance_mean} # by length, from the first of sweep.evaluate that has against
  benchmarks: [complexity]         # what fpexp bench has measured, in the place of runs
  on_request: false                # true: reported only where it is named

Every key has a default, so that an experiment without a block is reported by its length curves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fpexp.config.schema import Checker, did_you_mean
from fpexp.config.values import parse_value
from fpexp.errors import UserError

KEY = "report"

LONGEST_ABOVE = "longest_above_90"
"""The longest length up to which every length of the curve has a token accuracy above 90 % (paper fig. 6)."""

METRICS: Mapping[str, str] = {
    "token_accuracy": "accuracy of tokens",
    "last_token_accuracy": "accuracy of the last token",
    "sequence_accuracy": "accuracy of whole sequences",
    "scaled_accuracy": "scaled accuracy",
    "generated_token_accuracy": "accuracy of tokens, written",
    "generated_sequence_accuracy": "accuracy of whole answers, written",
    "perplexity": "perplexity of a token",
    "byte_perplexity": "perplexity of a byte",
    "iterations_mean": "iterations",
    "iterations_max": "most iterations",
    "loss": "loss",
    LONGEST_ABOVE: "longest length above 90 %",
}
"""Numbers of a row of a curve, and what they are called."""


@dataclass(frozen=True)
class Figure:
    """One figure of an experiment."""

    kind: Literal["curve", "setting", "training", "iterations", "agreement"] = "curve"
    metrics: list[str] = field(default_factory=list)
    x: list[str] = field(default_factory=list)
    over: list[str] = field(default_factory=list)
    rows: Literal["validation", "train"] = "validation"

    def __post_init__(self) -> None:
        if self.kind in ("setting", "training") and not self.x:
            raise UserError(f"a figure of kind {self.kind} needs x")
        if self.kind in ("curve", "setting", "iterations"):
            _check_metrics(self.metrics)


@dataclass(frozen=True)
class Layout:
    """The block, checked."""

    paper: str | None = None
    title: str | None = None
    metrics: list[str] = field(default_factory=list)
    at: Any = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    panel: str = "task"
    labels: Any = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=lambda: [Figure()])
    benchmarks: list[str] = field(default_factory=list)
    on_request: bool = False

    def __post_init__(self) -> None:
        _check_metrics(self.metrics)
        if not isinstance(self.labels, Mapping):
            raise UserError(f"labels is a mapping, not {self.labels!r}")
        for entries in self.at.values() if isinstance(self.at, Mapping) else [self.at]:
            for entry in entries if isinstance(entries, list) else [entries]:
                if not (isinstance(entries, list) and _is_length(entry)):
                    raise UserError(f"at is a list of lengths, or of multiples of that in training (2x), not {entry!r}")


def _is_length(entry: Any) -> bool:
    if isinstance(entry, str):
        return re.fullmatch(r"[1-9]\d*x", entry) is not None
    return isinstance(entry, int) and not isinstance(entry, bool) and entry > 0


def read_layout(path: Path) -> Layout:
    """Read the block of one experiment's own file; a `UserError` names the file and the key."""
    try:
        raw = parse_value(path.read_text(), f"{path}: not YAML")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    block = raw.get(KEY) or {} if isinstance(raw, Mapping) else {}
    try:
        if not isinstance(block, Mapping):
            raise UserError(f"{KEY} is a mapping, not {block!r}")
        layout: Layout = Checker({KEY: block}).check(Layout, _with_lists(block), KEY)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return layout


def _with_lists(block: Mapping[str, Any]) -> dict[str, Any]:
    """Return a block in which a single name stands in a list."""
    lists = ("metrics", "x", "over", "names", "benchmarks")
    result = {key: [value] if key in lists and isinstance(value, str) else value for key, value in block.items()}
    if isinstance(result.get("figures"), list):
        result["figures"] = [_with_lists(f) if isinstance(f, Mapping) else f for f in result["figures"]]
    return result


def _check_metrics(metrics: list[str]) -> None:
    for metric in metrics:
        if metric not in METRICS:
            raise UserError(f"unknown metric '{metric}'{did_you_mean(metric, METRICS)} ({', '.join(METRICS)})")
