"""Recorded runs as values."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fpexp.config.values import parse_value
from fpexp.errors import UserError, first_line
from fpexp.run_folder import RunFolder, read_rows


@dataclass(frozen=True)
class RunSummary:
    """One line about a run; accuracies are token accuracies from its curve, None where not measured.

    `perplexity` is that of text at the training length.
    """

    id: str
    task: str
    model: str
    state: str
    training_length: int | None
    accuracy: float | None
    far_length: int | None  # four times the training length
    far_accuracy: float | None
    perplexity: float | None = None


def summarise(run: RunFolder) -> RunSummary:
    """Summarise a run as far as its files go."""
    state = str(run.status().get("state"))
    config = read_plain_config(run)
    if config is None:
        return RunSummary(run.id, "?", "?", f"{state}, unreadable config", None, None, None, None)
    length = training_length(config)
    try:
        rows = {row["length"]: row for row in _rows(run.curve)}
    except UserError:
        rows, state = {}, f"{state}, unreadable curve"
    curve = {length: row.get("token_accuracy") for length, row in rows.items()}
    far = None if length is None else 4 * length
    return RunSummary(
        id=run.id,
        task=config["choices"]["task"],
        model=config["choices"]["model"],
        state=state,
        training_length=length,
        accuracy=curve.get(length),
        far_length=far,
        far_accuracy=curve.get(far),
        perplexity=rows.get(length, {}).get("perplexity"),
    )


@dataclass(frozen=True)
class Curve:
    """The rows of one length curve, ascending, and what it is a curve of."""

    task: str
    model: str
    seed: int
    trained_to: int | None  # longest of the lengths that training has seen
    chance: float | None
    rows: list[dict[str, Any]]


def read_curve(run: RunFolder, path: Path | None = None) -> Curve:
    """Read a run's own curve, or a later one of it at `path`."""
    config = read_plain_config(run)
    if config is None:
        raise UserError(f"cannot read {run.path / 'config.yaml'}")
    rows = sorted(_rows(path or run.curve), key=lambda row: row["length"])
    seen = [row["length"] for row in rows if row.get("seen_in_training")]
    return Curve(
        task=config["choices"]["task"],
        model=config["choices"]["model"],
        seed=config["seed"],
        trained_to=max(seen, default=None),
        chance=rows[0].get("chance") if rows else None,
        rows=rows,
    )


def whole_curve(run: RunFolder, lengths: Iterable[int]) -> list[dict[str, Any]]:
    """Return the rows of a finished run's curve, ascending, or those of `fpexp evaluate run=<id>` where it is damaged.

    A curve without one of the lengths is damaged too. A `UserError` says what is wrong with it.
    """
    try:
        return _whole(run.curve, lengths)
    except UserError:
        for path in sorted((run.path / "evaluations").glob("*/curve.jsonl"), reverse=True):
            if settings_beside(path) == {}:  # measured again, by the run's own settings
                with suppress(UserError):
                    return _whole(path, lengths)
        raise


def _whole(path: Path, lengths: Iterable[int]) -> list[dict[str, Any]]:
    rows = sorted(_rows(path), key=lambda row: row["length"])
    lacking = [str(length) for length in sorted({*lengths} - {row["length"] for row in rows})]
    if lacking:
        raise UserError(f"{path} lacks {'length' if len(lacking) == 1 else 'lengths'} {', '.join(lacking)}")
    if not rows:
        raise UserError(f"{path} has no rows")
    return rows


def read_plain_config(run: RunFolder) -> dict[str, Any] | None:
    """Read the config as it stands, without the packages and the schema that made it; None where it is no config."""
    try:
        config = parse_value((run.path / "config.yaml").read_text(), "config.yaml")
        config["choices"]["task"], config["choices"]["model"], config["seed"], config["task"].get("lengths")
    except (OSError, UserError, KeyError, TypeError, AttributeError, UnicodeDecodeError):
        return None
    return dict(config)


def settings_beside(path: Path) -> Any:
    """Read what an evaluation was asked for; None where that cannot be read."""
    try:
        return json.loads((path.parent / "settings.json").read_text())
    except (OSError, ValueError, RecursionError):
        return None


def _rows(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a curve; a `UserError` where one is none."""
    try:
        rows = read_rows(path)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {first_line(error)}") from error
    if not all(isinstance(row, dict) and isinstance(row.get("length"), int) for row in rows):
        raise UserError(f"{path} has lines that are no rows of a curve; mend or remove them")
    return rows


def curve_lengths(config: Mapping[str, Any]) -> list[int]:
    """Return the lengths that a config has measured, ascending."""
    lengths = (config.get("evaluation") or {}).get("lengths") or []
    return sorted(length for length in lengths if isinstance(length, int))


def training_length(config: Mapping[str, Any]) -> int | None:
    """Return the longest length that training may use, by the task's length policy or its context."""
    task = config.get("task") or {}
    longest = (task.get("lengths") or {}).get("max", task.get("context"))
    return longest if isinstance(longest, int) else None
