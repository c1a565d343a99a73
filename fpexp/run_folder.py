"""A run on disk: `<results_dir>/runs/<id>/`, the only interface between what runs and what reads.

config.yaml       the resolved config; runs again as it is
environment.json  versions, commit, device, seeds, command, parameter count
metrics.jsonl     one row for each logged step and each validation
curve.jsonl       one row for each length
status.json       running, finished, failed (with its reason) or interrupted
checkpoints/      see fpexp.training.checkpoint
evaluations/      later curves, one folder each
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fpexp.config.run import RunConfig, read_config, write_config
from fpexp.config.schema import did_you_mean
from fpexp.errors import FpexpError, UserError
from fpexp.kept import kept

Row = Mapping[str, Any]


class RunFolder:
    """Paths, status and rows of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.id = path.name
        self.metrics = path / "metrics.jsonl"
        self.curve = path / "curve.jsonl"
        self.checkpoints = path / "checkpoints"

    @classmethod
    def create(cls, config: RunConfig) -> RunFolder:
        """Make a new folder with the config in it; the id says task, model, seed and time and never collides."""
        choices = config.choices
        names = "-".join(re.sub(r"[^\w.]+", "_", name)[:40] for name in (choices.task, choices.model))
        stem = f"{names}-seed{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
        runs = Path(config.results_dir) / "runs"
        try:
            runs.mkdir(parents=True, exist_ok=True)
            run = cls(make_unique(runs, stem))
            run.checkpoints.mkdir()
            write_config(config, run.path / "config.yaml")
        except OSError as error:
            raise UserError(
                f"cannot write to results_dir={config.results_dir}: {error.strerror}; use results_dir=<folder>"
            ) from error
        return run

    @classmethod
    def find(cls, run: str | Path, results_dir: str | Path) -> RunFolder:
        """Return the run with this id, or in this folder; a `UserError` names the nearest id."""
        for path in (Path(results_dir) / "runs" / run, Path(run)):
            if (path / "config.yaml").is_file():
                return cls(path.resolve())
        recorded = kept("reference", results_dir) / "runs" / run / "config.yaml"
        if recorded.is_file():
            raise UserError(f"run '{run}' is recorded without weights; fpexp train config={recorded} trains it anew")
        known = [folder.id for folder in all_runs(results_dir)]
        hint = did_you_mean(str(run), known) or f"; `fpexp runs results_dir={results_dir}` lists them"
        raise UserError(f"no run '{run}' under {Path(results_dir) / 'runs'}{hint}")

    def config(self) -> RunConfig:
        """Read the saved config."""
        return read_config(self.path / "config.yaml")

    def write_status(self, state: str, **fields: Any) -> None:
        """Replace status.json."""
        write_json(self.path / "status.json", {"state": state, "time": _now(), **fields})

    def status(self) -> dict[str, Any]:
        """Return status.json; a run that says it is running while nobody holds its lock is `lost`."""
        try:
            status: Any = json.loads((self.path / "status.json").read_text())
        except (OSError, ValueError, RecursionError):
            status = None
        if not isinstance(status, dict) or not isinstance(status.get("state"), str):
            return {"state": "unknown"}
        if status["state"] == "running" and not self._is_locked():
            status["state"] = "lost"
        return status

    def add_sitting(self, description: Row) -> None:
        """Add to environment.json what one sitting, from the start or a resumption, was made with."""
        path = self.path / "environment.json"
        sittings = json.loads(path.read_text())["sittings"] if path.exists() else []
        write_json(path, {"sittings": [*sittings, {"time": _now(), **description}]})

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run for this process; a `UserError` when another one has it."""
        with open(self.path / ".lock", "w") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UserError(f"run '{self.id}' is being used by another process") from error
            except OSError as error:
                raise FpexpError(f"cannot lock {handle.name}: {error.strerror}") from error
            yield

    def _is_locked(self) -> bool:
        try:
            with self.lock():
                return False
        except (FpexpError, OSError):
            return True


def all_runs(results_dir: str | Path) -> list[RunFolder]:
    """Return the runs under a results folder, oldest first."""
    folders = [path.parent for path in (Path(results_dir) / "runs").glob("*/config.yaml")]
    return [RunFolder(path) for path in sorted(folders, key=lambda path: (path / "config.yaml").stat().st_mtime_ns)]


def append_row(path: Path, row: Row) -> None:
    """Append one line, flushed, so that a killed process loses none that it reported."""
    with open(path, "a") as handle:
        handle.write(json.dumps(_finite(row)) + "\n")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read a JSONL file; a last line that was cut short by a crash is left out."""
    if not path.is_file():
        return []
    rows = []
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            if number < len(lines):
                raise UserError(f"line {number} of {path} is not JSON; mend or remove it") from error
    return rows


def rewrite_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Replace a JSONL file atomically."""
    _replace(path, "".join(json.dumps(row) + "\n" for row in rows))


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file atomically."""
    _replace(path, json.dumps(value, indent=2) + "\n")


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text)
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise


def make_unique(parent: Path, stem: str) -> Path:
    """Make a new folder under `parent`, named `stem` or `stem`-<number>."""
    number = 1
    while True:
        path = parent / (stem if number == 1 else f"{stem}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            number += 1
        else:
            return path


def _finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON has no word for, by null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
