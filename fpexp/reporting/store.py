"""Recorded runs as values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fpexp.errors import UserError
from fpexp.run_folder import RunFolder, read_rows


@dataclass(frozen=True)
class RunSummary:
    """One line about a run; accuracies are token accuracies from its curve, None where not measured."""

    id: str
    task: str
    model: str
    seed: int | None
    state: str
    training_length: int | None
    accuracy: float | None
    far_length: int | None  # four times the training length
    far_accuracy: float | None


def summarise(run: RunFolder) -> RunSummary:
    """Summarise a run as far as its files go."""
    state = str(run.status().get("state"))
    try:
        config = run.config()
    except UserError:
        return RunSummary(run.id, "?", "?", None, f"{state}, unreadable config", None, None, None, None)
    length = training_length(config.task.settings)
    curve = {row["length"]: row["token_accuracy"] for row in read_rows(run.curve)}
    far = None if length is None else 4 * length
    return RunSummary(
        id=run.id,
        task=config.choices.task,
        model=config.choices.model,
        seed=config.seed,
        state=state,
        training_length=length,
        accuracy=curve.get(length),
        far_length=far,
        far_accuracy=curve.get(far),
    )


@dataclass(frozen=True)
class Curve:
    """The rows of one length curve, ascending, and what it is a curve of."""

    task: str
    model: str
    seed: int
    training_length: int | None
    rows: list[dict[str, Any]]


def read_curve(run: RunFolder, path: Path | None = None) -> Curve:
    """Read a run's own curve, or a later one of it at `path`."""
    config = run.config()
    rows = sorted(read_rows(path or run.curve), key=lambda row: row["length"])
    choices = config.choices
    return Curve(choices.task, choices.model, config.seed, training_length(config.task.settings), rows)


def training_length(task_settings: Any) -> int | None:
    """Return the longest length that training uses, where the task has a length policy."""
    policy = task_settings.get("lengths")
    return None if policy is None else int(policy.max)
