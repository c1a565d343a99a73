"""Recorded benchmarks as tables: those under bench/, one's own and the committed ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fpexp.errors import first_line
from fpexp.kept import places
from fpexp.reporting.outcome import PlannedBenchmark
from fpexp.reporting.table import NOTHING, Table


@dataclass(frozen=True)
class Benchmark:
    """What `fpexp bench` measured: where it stands, on which machine, and a table for each group of contenders.

    `rows` are the contenders as they stand in the file.
    """

    name: str
    file: str
    machine: str
    tables: tuple[tuple[str, Table], ...]
    rows: tuple[Mapping[str, Any], ...] = ()

    def lacks(self, planned: PlannedBenchmark) -> list[str]:
        """Return what a table needs of it and it has not measured."""
        measured = {(str(row["contender"]), name, str(row["group"])) for row in self.rows for name in _numbers(row)}
        return [
            " ".join(part for part in (f"{group}, {contender}", number) if part)
            for group, contender, number in planned.needed
            if not any(m[:2] == (contender, number) and f"{m[2]},".startswith(f"{group},") for m in measured)
        ]


def read_benchmarks(results_dir: Path) -> tuple[dict[str, list[Benchmark]], list[str]]:
    """Return the readable benchmarks by name, of each the newest first, and a line for each file that is not one."""
    found: dict[str, list[tuple[str, Benchmark]]] = {}
    problems = []
    for place, folder in places("bench", results_dir).items():
        for path in sorted(folder.glob("*.json")):
            file = f"{place}/{path.name}"
            try:
                raw = json.loads(path.read_text())
                made, time = _benchmark(raw, file), str(raw["time"])
            except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
                problems.append(f"{file}: no benchmark that can be read: {first_line(error)}")
                continue
            found.setdefault(made.name, []).append((time, made))
    newest_first = {name: sorted(made, key=lambda one: one[0], reverse=True) for name, made in sorted(found.items())}
    return {name: [benchmark for _, benchmark in made] for name, made in newest_first.items()}, problems


def _benchmark(raw: Mapping[str, Any], file: str) -> Benchmark:
    environment, rows = raw["environment"], raw["contenders"]
    count = environment.get("threads")
    threads = f", {count} {'thread' if count == 1 else 'threads'}" if count else ""
    machine = f"{environment['device']}{threads}, {environment['cpus']} CPUs; {environment['command']}"
    groups = dict.fromkeys(str(row["group"]) for row in rows)
    tables = tuple((group, _table([row for row in rows if str(row["group"]) == group])) for group in groups)
    return Benchmark(str(raw["benchmark"]), file, machine, tables, tuple(rows))


def _numbers(row: Mapping[str, Any]) -> list[str | None]:
    """Return the names of what a row has measured; None is its time."""
    found = {None: row.get("median_s"), **row["numbers"]}
    return [name for name, value in found.items() if value is not None]


def _table(rows: list[Mapping[str, Any]]) -> Table:
    numbers = list(dict.fromkeys(name for row in rows for name in row["numbers"]))
    columns = ("contender", "median", "quartiles", "ratio", "baseline", *(name.replace("_", " ") for name in numbers))
    cells = [_cells(row, numbers) for row in rows]
    used = [index for index in range(len(columns)) if any(row[index] != NOTHING for row in cells)]
    return Table(tuple(columns[i] for i in used), tuple(tuple(row[i] for i in used) for row in cells))


def _cells(row: Mapping[str, Any], numbers: list[str]) -> tuple[str, ...]:
    quartiles = row.get("quartiles_s") or ()
    return (
        str(row["contender"]),
        str(row["missing"]) if row.get("missing") else _seconds(row.get("median_s")),
        " to ".join(map(_seconds, quartiles)) or NOTHING,
        NOTHING if row.get("ratio") is None else f"{row['ratio']:.3g}",
        str(row.get("baseline") or NOTHING),
        *(_number(row["numbers"].get(name)) for name in numbers),
    )


def _seconds(value: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"


def _number(value: Any) -> str:
    if value is None:
        return NOTHING
    return f"{value:.4g}" if isinstance(value, float) else str(value)
