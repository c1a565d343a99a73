"""Runs written by hand, as they would be found on disk, for the tests of the report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runs import TINY

from fpexp.build import settle
from fpexp.config.compose import compose
from fpexp.config.run import RunConfig, write_config
from fpexp.run_folder import RunFolder

SMALL = [*TINY, "evaluation.lengths=[2,4,8,16]"]
"""Overrides of a tiny run that is measured at one, two and four times its training length."""


def small(*words: str) -> RunConfig:
    """Compose a tiny run and settle it on this machine."""
    return settle(compose([*words, *SMALL]))[0]


def curve_row(length: int, accuracy: float | None, **more: Any) -> dict[str, Any]:
    """A row of a curve of A4."""
    return {
        "kind": "curve",
        "step": 6,
        "length": length,
        "token_accuracy": accuracy,
        "last_token_accuracy": accuracy,
        "sequence_accuracy": accuracy,
        "n": 8,
        "chance": 1 / 12,
        "iterations_mean": 3.0,
        **more,
    }


def metrics_rows(reached: int = 4) -> list[dict[str, Any]]:
    """What training wrote: six steps in 90 seconds."""
    return [
        {
            "kind": "train",
            "step": step,
            "length": min(step + 1, reached),
            "token_accuracy": step / 6,
            "seconds": 15.0 * step,
        }
        for step in range(1, 7)
    ]


def record(
    results: Path,
    name: str,
    config: RunConfig,
    accuracies: Sequence[float | None] = (1.0, 0.9, 0.8, 0.7),
    *,
    state: str = "finished",
    place: str = "runs",
    ended: str = "2026-11-30T03:00:00+0000",
    **status: Any,
) -> RunFolder:
    """A run with the accuracies at the lengths of SMALL."""
    path = results / place / name
    path.mkdir(parents=True)
    write_config(config, path / "config.yaml")
    (path / "status.json").write_text(json.dumps({"state": state, "time": ended, **status}))
    (path / "environment.json").write_text(json.dumps({"sittings": [{"parameters": 1234, "time": ended}]}))
    rows = [curve_row(length, value) for length, value in zip(config.evaluation.lengths, accuracies, strict=True)]
    write_rows(path / "curve.jsonl", rows if state == "finished" else [])
    write_rows(path / "metrics.jsonl", metrics_rows())
    return RunFolder(path)


def write_rows(path: Path, rows: Sequence[Any]) -> None:
    """Write lines of JSON."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
