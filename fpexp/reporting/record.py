"""A recorded run as the report needs it, read as far as its files go."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from fpexp.errors import FpexpError, UserError, first_line
from fpexp.kept import places
from fpexp.reporting.store import curve_lengths, read_plain_config, settings_beside, whole_curve
from fpexp.run_folder import RunFolder, read_rows

EVALUATIONS = ("iterations", "agreement")
"""What a run may have been measured for besides its curve, by `fpexp evaluate`."""


@dataclass(frozen=True)
class Evaluation:
    """One such measurement: its kind, of EVALUATIONS, what was asked for (its settings.json), and its rows."""

    kind: str
    asked: Any
    rows: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Record:
    """One run. `identity` is equal for runs that differ in nothing but the seed; None where the config is unreadable.

    `problems` are one line each. A row's number that is missing or not finite is left out of what is read from it.
    """

    id: str
    place: str
    identity: str | None
    config: Mapping[str, Any]
    state: str  # as in status.json; `damaged`: finished, and its curve cannot be read
    reason: str
    ended: datetime
    curve: tuple[Mapping[str, Any], ...]  # ascending in length
    metrics: tuple[Mapping[str, Any], ...]
    environment: Mapping[str, Any]  # of its last sitting
    evaluations: tuple[Evaluation, ...] = ()  # oldest first
    has_weights: bool = False
    problems: tuple[str, ...] = ()

    @property
    def seed(self) -> int:
        """The run's seed."""
        return int(self.config["seed"])

    @property
    def finished(self) -> bool:
        """Whether it ended well and its curve is whole."""
        return self.state == "finished"

    @cached_property
    def steps(self) -> int | None:
        """Steps that it trained for."""
        return max((row["step"] for row in self.metrics if isinstance(row.get("step"), int)), default=None)

    @cached_property
    def seconds(self) -> float | None:
        """Time of training over all sittings, without the curve."""
        found = [value for row in self.metrics if (value := number(row, "seconds")) is not None]
        return max(found, default=None)

    @cached_property
    def reached(self) -> int | None:
        """Longest length in training."""
        drawn = [row["length"] for row in self.metrics if row.get("kind") == "train" and _is_length(row.get("length"))]
        return max(drawn, default=None)

    @property
    def parameters(self) -> int | None:
        """Number of trainable weights."""
        value = self.environment.get("parameters")
        return value if isinstance(value, int) else None

    @cached_property
    def by_length(self) -> dict[int, Mapping[str, Any]]:
        """The rows of the curve."""
        return {row["length"]: row for row in self.curve}

    def evaluated(self, kind: str, asked: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """Return the rows of the newest evaluation that was asked for just so; none where there is none."""
        found = (made.rows for made in reversed(self.evaluations) if (made.kind, made.asked) == (kind, asked))
        return next(found, ())


def number(row: Mapping[str, Any], key: str) -> float | None:
    """Return a finite number of a row, or None; `layers.0.iterations_mean` goes into mappings and lists."""
    value: Any = row
    for part in key.split("."):
        if isinstance(value, list) and part.isdigit():
            value = value[int(part)] if int(part) < len(value) else None
        else:
            value = value.get(part) if isinstance(value, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an int beyond every float
        return None


def read_records(results_dir: Path, identify: Callable[[RunFolder], str]) -> list[Record]:
    """Read every run of a results folder and every recorded one, by id; an `FpexpError` of `identify` is a problem."""
    found = places("runs", results_dir)
    records = [_read(RunFolder(path), place, identify) for place, where in found.items() for path in _folders(where)]
    return sorted(records, key=lambda record: (record.id, record.place))


def _folders(path: Path) -> list[Path]:
    try:
        return [folder for folder in path.iterdir() if folder.is_dir() and not folder.name.startswith(".")]
    except OSError:
        return []


def _read(run: RunFolder, place: str, identify: Callable[[RunFolder], str]) -> Record:
    problems: list[str] = []
    config = read_plain_config(run)
    identity = None
    if config is None:
        problems.append("its config.yaml cannot be read")
    else:
        try:
            identity = identify(run)
        except (FpexpError, OSError) as error:
            problems.append(f"its config is not one of this version: {first_line(error)}")
    status = run.status()
    state, reason, curve = str(status.get("state")), status.get("reason"), []
    if state == "finished" and config is not None:
        try:
            curve = whole_curve(run, curve_lengths(config))
        except UserError as error:
            state, reason = "damaged", error
            problems.append(f"damaged: {error}")
    for row in curve:
        lost = [key for key in row if key.endswith(("accuracy", "perplexity")) and number(row, key) is None]
        if lost:
            problems.append(f"not a number at length {row['length']}, left out: {', '.join(lost)}")
    environment = _environment(run, problems)
    return Record(
        id=run.id,
        place=place,
        identity=identity,
        config=config or {},
        state=state,
        reason=" ".join(str(reason or "").split()),
        ended=_time(status.get("time")) or _time(environment.get("time")) or datetime.min.replace(tzinfo=UTC),
        curve=tuple(curve),
        metrics=tuple(_rows(run.metrics, problems)),
        environment=environment,
        evaluations=_evaluations(run, problems),
        has_weights=any(run.checkpoints.glob("step_*")),
        problems=tuple(problems),
    )


def _rows(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """Read a JSONL file's rows; what is wrong with it is added to `problems`."""
    try:
        rows = read_rows(path)
        lines = len(path.read_text().splitlines()) if rows or path.is_file() else 0
    except (FpexpError, OSError, UnicodeDecodeError) as error:
        problems.append(f"its {path.name} cannot be read: {first_line(error)}")
        return []
    if len(rows) < lines:
        problems.append(f"the last line of its {path.name} is cut short and left out")
    whole = [row for row in rows if isinstance(row, dict)]
    if len(whole) < len(rows):
        problems.append(f"its {path.name} has lines that are no rows, left out")
    return whole


def _evaluations(run: RunFolder, problems: list[str]) -> tuple[Evaluation, ...]:
    """Read what the run was measured for later; a file has its name only when it is whole."""
    files = [path for kind in EVALUATIONS for path in (run.path / "evaluations").glob(f"*/{kind}.jsonl")]
    return tuple(Evaluation(path.stem, settings_beside(path), _rows(path, problems)) for path in sorted(files))


def _environment(run: RunFolder, problems: list[str]) -> dict[str, Any]:
    try:
        path = run.path / "environment.json"
        return dict(json.loads(path.read_text())["sittings"][-1]) if path.is_file() else {}
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        problems.append(f"its environment.json cannot be read: {first_line(error)}")
        return {}


def _time(text: Any) -> datetime | None:
    try:
        return datetime.strptime(str(text), "%Y-%m-%dT%H:%M:%S%z")
    except ValueError:
        return None


def _is_length(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
