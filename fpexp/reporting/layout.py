"""How an experiment is reported: the `report:` block of its file in conf/experiment.

report:
  paper: Figure 4                  # what it stands for in the paper; those that have it come first
  title: State tracking            # default: the first comment of the file
  kind: curve                      # curve: by length; setting: over `x`; training: over steps or time; table: no figure
  metrics: [token_accuracy]        # a panel for each; default: perplexity of text, else token_accuracy
  at: [16, 32, 64]                 # lengths with a column in the table; default: the training length, twice and 4 times
  panel: task                      # a key with a panel for each of its values; default: task where there are several
  x: schedule.max_iterations       # of `setting`, a key with numbers, or seconds, steps, parameters, reached; of
                                   # `training`, step or seconds
  rows: validation                 # of `training`: the rows of metrics.jsonl that are drawn, or train
  labels: {fp_mamba_h: FP-Mamba-H} # what values and keys are called
  on_request: false                # true: reported only where it is named

Every key has a default, so that an experiment without a block is reported by its length curves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fpexp.config.schema import Checker, did_you_mean
from fpexp.config.values import parse_value
from fpexp.errors import UserError
from fpexp.ranges import Count

KEY = "report"

LONGEST_ABOVE = "longest_above_90"
"""The longest length up to which every length of the curve has a token accuracy of 90 % or more (paper fig. 6)."""

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
class Layout:
    """The block, checked."""

    paper: str | None = None
    title: str | None = None
    kind: Literal["curve", "setting", "training", "table"] = "curve"
    metrics: tuple[str, ...] = ()
    at: tuple[Count, ...] = ()
    panel: str | None = None
    x: str | None = None
    rows: Literal["validation", "train"] = "validation"
    labels: Any = field(default_factory=dict)
    on_request: bool = False


def read_layout(path: Path) -> Layout:
    """Read the block of one experiment's own file; a `UserError` names the file and the key."""
    try:
        raw = parse_value(path.read_text(), f"{path}: not YAML")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    block = raw.get(KEY) or {} if isinstance(raw, Mapping) else {}
    try:
        return _parse(block)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def _parse(block: Any) -> Layout:
    if not isinstance(block, Mapping):
        raise UserError(f"{KEY} is a mapping, not {block!r}")
    if isinstance(block.get("metrics"), str):
        block = {**block, "metrics": [block["metrics"]]}
    layout: Layout = Checker({KEY: block}).check(Layout, block, KEY)
    if not isinstance(layout.labels, Mapping):
        raise UserError(f"{KEY}.labels is a mapping, not {layout.labels!r}")
    for metric in layout.metrics:
        if metric not in METRICS and layout.kind != "training":
            raise UserError(f"{KEY}.metrics: unknown '{metric}'{did_you_mean(metric, METRICS)} ({', '.join(METRICS)})")
    if layout.kind in ("setting", "training") and not layout.x:
        raise UserError(f"{KEY}.kind={layout.kind} needs {KEY}.x")
    return layout
