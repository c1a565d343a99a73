"""What a benchmark leaves: tables for people, and `<results_dir>/bench/<name>-<time>.json`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fpexp.bench.measure import Row
from fpexp.errors import UserError
from fpexp.run_folder import write_json
from fpexp.tracking.console import print_table


def to_dict(row: Row) -> dict[str, Any]:
    """Return a row as it stands in the JSON file; the keys are always the same."""
    contender = row.contender
    return {
        "group": contender.group,
        "contender": contender.name,
        "missing": contender.missing or None,
        "repeats": len(row.seconds),
        "median_s": row.median_s,
        "quartiles_s": row.quartiles_s,
        "seconds": list(row.seconds),
        "baseline": contender.baseline,
        "ratio": row.ratio,
        "target": None if contender.target is None else dataclasses.asdict(contender.target),
        "met": row.met,
        "checks": [dataclasses.asdict(check) for check in row.checks],
        "numbers": dict(row.numbers),
    }


def make_folder(results_dir: str) -> Path:
    """Make the folder of the JSON files; a `UserError` where it cannot be written, before anything is measured."""
    folder = Path(results_dir) / "bench"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot write to results_dir={results_dir}: {error.strerror}; use results_dir=<folder>"
        ) from error
    return folder


def write(
    folder: Path, name: str, rows: Sequence[Row], settings: Mapping[str, Any], environment: Mapping[str, Any]
) -> Path:
    """Write the file of one benchmark under a name that nothing has yet, and return its path."""
    stem = f"{name.replace('/', '-')}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = folder / f"{stem}.json", 1
    while path.exists():
        number += 1
        path = folder / f"{stem}-{number}.json"
    write_json(
        path,
        {
            "benchmark": name,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "settings": dict(settings),
            "environment": dict(environment),
            "contenders": [to_dict(row) for row in rows],
        },
    )
    return path


def show(name: str, rows: Sequence[Row]) -> None:
    """Print one table for each group; what says nothing there, such as quartiles of one time, is left out."""
    for group in dict.fromkeys(row.contender.group for row in rows):
        members = [row for row in rows if row.contender.group == group]
        columns = {"contender": [row.contender.name for row in members]}
        timed = [row.contender for row in members if row.contender.seconds]
        if timed:
            columns["median"] = [_duration(row.median_s) for row in members]
        if not all(contender.once for contender in timed):
            columns["quartiles"] = [_spread(row) for row in members]
            columns["rounds"] = [str(len(row.seconds) or "-") for row in members]
        if any(row.contender.baseline for row in members):
            columns["ratio"] = ["-" if r.ratio is None else f"{r.ratio:.2f}x {r.contender.baseline}" for r in members]
        if any(row.contender.target for row in members):
            columns["target"] = [str(row.contender.target or "-") for row in members]
            columns["met"] = [{True: "yes", False: "no", None: "-"}[row.met] for row in members]
        for number in dict.fromkeys(number for row in members for number in row.numbers):
            columns[number.replace("_", " ")] = [_number(row.numbers.get(number)) for row in members]
        if any(row.contender.missing for row in members):
            columns[""] = [row.contender.missing for row in members]
        cells = [list(row) for row in zip(*columns.values(), strict=True)]
        print_table(f"{name}: {group}" if group else name, list(columns), cells)


def _spread(row: Row) -> str:
    return "-" if row.quartiles_s is None else " to ".join(map(_duration, row.quartiles_s))


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"


def _number(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
