"""Recorded benchmarks: only one that has measured what a table needs fills it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fpexp.bench.complexity import Sizes, contenders, needed
from fpexp.bench.context import Context
from fpexp.reporting.benchmark import read_benchmarks
from fpexp.reporting.layout import Layout
from fpexp.reporting.outcome import Plan, PlannedBenchmark
from fpexp.reporting.report import Found, Section, make_report

NEEDED = (("mamba, forward", "length 32", None), ("mamba, backward", "length 64", "peak_MB"))
PLANNED = PlannedBenchmark("complexity", "fpexp bench complexity", NEEDED)


@pytest.fixture(autouse=True)
def _nothing_else_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fpexp.kept.repository_results", lambda: tmp_path)


def write(
    folder: Path, time: str, rows: Sequence[tuple[str, str, dict[str, float]]], seconds: float | None = 0.5
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    contenders = [
        {"group": group, "contender": name, "median_s": seconds, "numbers": numbers} for group, name, numbers in rows
    ]
    environment = {"device": "cpu", "cpus": 2, "command": "fpexp bench complexity"}
    content = {"benchmark": "complexity", "time": time, "environment": environment, "contenders": contenders}
    (folder / f"{time}.json").write_text(json.dumps(content))


def section(results: Path) -> Section:
    benchmarks, problems = read_benchmarks(results)
    assert not problems
    plan = Plan("table2", "", "", (), Layout(benchmarks=["complexity"]), benchmarks=(PLANNED,))
    (made,) = make_report([plan], Found([], benchmarks, {}, []), whole=False).sections
    return made


WHOLE: Any = [("mamba, forward, batch 8", "length 32", {}), ("mamba, backward, batch 8", "length 64", {"peak_MB": 1.5})]


@pytest.mark.parametrize(
    ("rows", "first"),
    [
        (WHOLE[1:], "mamba, forward, length 32"),
        ([WHOLE[0], ("mamba, backward, batch 8", "length 64", {})], "mamba, backward, length 64 peak_MB"),
        (
            [WHOLE[0], ("mamba2, backward, batch 8", "length 64", {"peak_MB": 1.5})],
            "mamba, backward, length 64 peak_MB",
        ),
    ],
)
def test_a_shortened_benchmark_is_partial(tmp_path: Path, rows: Any, first: str) -> None:
    write(tmp_path / "bench", "2", rows)
    made = section(tmp_path)
    assert (made.benchmarks, made.missing, made.done) == ((), (), "0 of 1")
    said = f"bench/2.json: lacks 1 of the 2 numbers of this table, first {first}"
    assert made.unfinished == ((said, "fpexp bench complexity"),)


def test_a_row_without_a_time_is_not_measured(tmp_path: Path) -> None:
    write(tmp_path / "bench", "2", WHOLE, seconds=None)
    ((said, _),) = section(tmp_path).unfinished
    assert "lacks 1 of the 2 numbers of this table, first mamba, forward, length 32" in said


def test_a_whole_benchmark_counts_though_a_newer_one_is_shortened(tmp_path: Path) -> None:
    write(tmp_path / "bench", "3", WHOLE[1:])
    write(tmp_path / "reference/bench", "2", WHOLE)
    write(tmp_path / "bench", "1", WHOLE)
    made = section(tmp_path)
    assert [benchmark.file for benchmark in made.benchmarks] == ["reference/bench/2.json"]
    assert (made.missing, made.unfinished, made.done) == ((), (), "1 of 1")


def test_a_benchmark_that_is_not_there_is_missing(tmp_path: Path) -> None:
    made = section(tmp_path)
    assert (made.missing, made.unfinished, made.done) == (("fpexp bench complexity",), (), "0 of 1")


def test_what_table_2_needs_is_what_its_benchmark_measures(tmp_path: Path) -> None:
    made = list(contenders(Sizes(), Context(str(tmp_path), 1, tmp_path)))
    rows = {
        (one.group.removesuffix(", batch 8"), one.name, "peak_MB" if one.numbers is not dict else None) for one in made
    }
    assert set(needed()) == rows
    assert len(rows) == 5 * 2 * 5  # models with their caps, passes, lengths


def test_a_column_in_which_there_is_nothing_is_left_out(tmp_path: Path) -> None:
    write(tmp_path / "bench", "now", [("kernels", "forward", {"registers": 72, "shared_bytes": 12290})], seconds=None)
    ((_, table),) = read_benchmarks(tmp_path)[0]["complexity"][0].tables
    assert table.columns == ("contender", "registers", "shared bytes")
    assert table.rows == (("forward", "72", "12290"),)
