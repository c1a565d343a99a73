"""Recorded runs as values, from folders written by hand, whole and broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from runs import run_python, tiny

from fpexp.config.run import write_config
from fpexp.errors import UserError
from fpexp.reporting.store import RunSummary, read_curve, summarise
from fpexp.run_folder import RunFolder, all_runs


def row(length: int, token: float) -> dict[str, Any]:
    """What every line of a curve has, and no more."""
    return {
        "kind": "curve",
        "step": 6,
        "length": length,
        "token_accuracy": token,
        "last_token_accuracy": token / 2,
        "sequence_accuracy": token / 4,
        "n": 8,
    }


def full_row(length: int, token: float) -> dict[str, Any]:
    return {**row(length, token), "seen_in_training": length <= 4, "chance": 1 / 12, "decoding": "tagging"}


def write_run(results: Path, name: str, *words: str, state: str | None = "finished", rows: Any = ()) -> RunFolder:
    """A run as it would be found on disk, trained at length 4."""
    path = results / "runs" / name
    path.mkdir(parents=True)
    write_config(tiny(results, *words), path / "config.yaml")
    if state:
        (path / "status.json").write_text(json.dumps({"state": state}))
    if rows:
        (path / "curve.jsonl").write_text("".join(json.dumps(item) + "\n" for item in rows))
    return RunFolder(path)


def test_summary_of_a_finished_run(tmp_path: Path) -> None:
    run = write_run(tmp_path, "one", "seed=3", rows=[row(16, 0.5), row(4, 0.9), row(2, 1.0)])
    assert summarise(run) == RunSummary(
        id="one",
        task="a4",
        model="lstm",
        state="finished",
        training_length=4,
        accuracy=0.9,
        far_length=16,
        far_accuracy=0.5,
    )


def test_summary_says_none_where_nothing_was_measured(tmp_path: Path) -> None:
    without = summarise(write_run(tmp_path, "without curve", state="failed"))
    assert (without.state, without.accuracy, without.far_accuracy) == ("failed", None, None)
    other = summarise(write_run(tmp_path, "other lengths", rows=[row(2, 0.9), row(8, 0.7)]))
    assert (other.accuracy, other.far_accuracy) == (None, None)


@pytest.mark.parametrize(
    ("status", "state"),
    [
        (None, "unknown"),
        ("", "unknown"),
        ("{", "unknown"),
        ('{"state": "running"}', "lost"),
        ('{"state": "interrupted"}', "interrupted"),
        ("{}", "unknown"),
    ],
)
def test_state_of_a_broken_or_lost_run(tmp_path: Path, status: str | None, state: str) -> None:
    run = write_run(tmp_path, "run", state=None, rows=[row(4, 0.9)])
    if status is not None:
        (run.path / "status.json").write_text(status)
    assert summarise(run).state == state
    assert summarise(run).accuracy == 0.9


def test_running_while_its_lock_is_held(tmp_path: Path) -> None:
    run = write_run(tmp_path, "run", state="running")
    with run.lock():
        assert summarise(run).state == "running"


@pytest.mark.parametrize("config", ["", "{", "task: 5", "a: [1", "- 1"])
def test_unreadable_config_is_said_not_raised(tmp_path: Path, config: str) -> None:
    run = write_run(tmp_path, "run")
    (run.path / "config.yaml").write_text(config)
    summary = summarise(run)
    assert (summary.id, summary.task, summary.model) == ("run", "?", "?")
    assert summary.state == "finished, unreadable config"


def test_a_curve_cut_short_by_a_crash(tmp_path: Path) -> None:
    run = write_run(tmp_path, "run", rows=[full_row(4, 0.9)])
    with open(run.curve, "a") as handle:
        handle.write('{"kind": "curve", "length": 16, "token_acc')
    assert summarise(run).accuracy == 0.9
    assert summarise(run).far_accuracy is None
    assert [item["length"] for item in read_curve(run).rows] == [4]


def test_curve_is_ascending_and_says_what_it_is_of(tmp_path: Path) -> None:
    run = write_run(tmp_path, "run", "seed=2", rows=[full_row(16, 0.5), full_row(2, 1.0), full_row(4, 0.9)])
    curve = read_curve(run)
    assert [item["length"] for item in curve.rows] == [2, 4, 16]
    assert (curve.task, curve.model, curve.seed) == ("a4", "lstm", 2)
    later = tmp_path / "later.jsonl"
    later.write_text(json.dumps(full_row(32, 0.1)) + "\n")
    assert [item["length"] for item in read_curve(run, later).rows] == [32]


def test_a_curve_with_nothing_but_what_every_line_has(tmp_path: Path) -> None:
    """Such as one that an earlier version recorded."""
    curve = read_curve(write_run(tmp_path, "run", rows=[row(4, 0.9), row(2, 1.0)]))
    assert [item["length"] for item in curve.rows] == [2, 4]
    assert (curve.trained_to, curve.chance) == (None, None)


def test_curve_says_how_far_training_went_and_what_chance_is(tmp_path: Path) -> None:
    run = write_run(tmp_path, "run", rows=[full_row(n, 0.5) for n in (16, 2, 4)])
    assert read_curve(run).trained_to == 4
    assert read_curve(run).chance == 1 / 12
    never = [{**full_row(n, 0.5), "seen_in_training": False} for n in (2, 4)]
    assert read_curve(write_run(tmp_path, "other", rows=never)).trained_to is None


def test_a_line_in_the_middle_that_is_no_json_is_said_not_skipped(tmp_path: Path) -> None:
    run = write_run(tmp_path, "run", rows=[row(2, 1.0)])
    run.curve.write_text(run.curve.read_text() + "garbage\n" + json.dumps(row(4, 0.9)) + "\n")
    assert summarise(run).state == "finished, unreadable curve"
    with pytest.raises(UserError, match=rf"line 2 of {run.curve} is not JSON"):
        read_curve(run)


def test_runs_are_listed_oldest_first_and_other_folders_left_out(tmp_path: Path) -> None:
    for name in ("c", "a", "b"):
        write_run(tmp_path, name)
    (tmp_path / "runs" / "no run").mkdir()
    (tmp_path / "runs" / "file").write_text("")
    assert [run.id for run in all_runs(tmp_path)] == ["c", "a", "b"]
    assert all_runs(tmp_path / "nowhere") == []


REPORTING = """
import sys
from pathlib import Path
import fpexp.reporting.figures, fpexp.reporting.store
from fpexp.reporting.figures import draw_curves
from fpexp.reporting.store import read_curve, summarise
from fpexp.run_folder import all_runs
print("import", "torch" in sys.modules)
(run,) = all_runs(".")
assert summarise(run).accuracy == 0.9, summarise(run)
draw_curves([read_curve(run)], Path("curve.png"))
print("use", "torch" in sys.modules)
"""


def test_reporting_reads_results_without_torch(tmp_path: Path) -> None:
    write_run(tmp_path, "run", rows=[full_row(4, 0.9), full_row(2, 1.0)])
    answer = run_python(REPORTING, tmp_path)
    assert answer.code == 0, answer.err
    assert "import False" in answer.out
    assert "use False" in answer.out


@pytest.mark.parametrize("text", ["3\n{}\n", '{"token_accuracy": 1}\n{}\n', '{"length": "4"}\n', "\xff\n"])
def test_lines_that_are_no_rows_of_a_curve(tmp_path: Path, text: str) -> None:
    run = write_run(tmp_path, "one")
    run.curve.write_bytes(text.encode("latin-1"))
    assert summarise(run).state == "finished, unreadable curve"
    with pytest.raises(UserError, match=r"curve\.jsonl"):
        read_curve(run)


def test_a_config_without_a_task(tmp_path: Path) -> None:
    run = write_run(tmp_path, "one")
    path = run.path / "config.yaml"
    path.write_text(path.read_text().replace("\ntask:", "\ntask: 3\nx:").replace("task:\n", "task: 3\nx:\n", 1))
    assert summarise(run).state == "finished, unreadable config"
