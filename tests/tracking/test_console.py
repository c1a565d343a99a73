"""The console: what a terminal shows, what a pipe gets, and what is left without rich."""

from __future__ import annotations

import io
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from runs import run_python

from fpexp.config.compose import compose
from fpexp.run_folder import RunFolder
from fpexp.tracking import console
from fpexp.tracking.console import ConsoleTracker, format_duration, print_curve, print_table, warn
from fpexp.tracking.tracker import RunStart

TRAIN = {"kind": "train", "step": 200, "loss": 0.8123, "token_accuracy": 0.7654, "length": 3}
VALIDATION = {"kind": "validation", "step": 200, "length": 16, "loss": 0.5, "token_accuracy": 0.5, "n": 8}
CURVE = {
    "kind": "curve",
    "step": 2500,
    "length": 64,
    "token_accuracy": 0.91,
    "last_token_accuracy": 0.8,
    "sequence_accuracy": None,
    "n": 1024,
    "seen_in_training": False,
}
SOLVER = {"iterations_mean": 8.44, "iterations_max": 12, "fraction_converged": 1.0}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    return Terminal()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, as a list so that a test can move it."""
    now = [1000.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def start(tmp_path: Path) -> RunStart:
    config = compose(["task=a4", "model=lstm", "training.steps=2500", f"results_dir={tmp_path}"])
    return RunStart(RunFolder.create(config), config, 123456, None, ("scan: reference", "a [bracketed] note"))


def resume(start: RunStart, step: int) -> RunStart:
    return RunStart(start.run, start.config, start.parameters, step, start.notes)


def play(tracker: ConsoleTracker, start: RunStart, rows: list[dict[str, Any]]) -> None:
    tracker.start(start)
    for row in rows:
        tracker.progress(row["step"])
        tracker.log(row)
    tracker.finish("finished")


def test_the_header_says_what_runs(start: RunStart, capsys: pytest.CaptureFixture[str]) -> None:
    ConsoleTracker().start(resume(start, 100))
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"run {start.run.id}",
        "task a4, model lstm, 123,456 parameters",
        "device auto, precision auto",
        "scan: reference",
        "a [bracketed] note",
        "resumed from step 100",
    ]


def test_a_pipe_gets_a_line_for_each_row(
    start: RunStart, clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = ConsoleTracker()
    tracker.start(start)
    capsys.readouterr()
    clock[0] += 2
    tracker.progress(1)
    clock[0] += 10
    tracker.progress(200)
    for row in (TRAIN | SOLVER, VALIDATION, CURVE | SOLVER, CURVE | {"seen_in_training": True}):
        tracker.log(row)
    tracker.finish("finished")
    assert capsys.readouterr().out.splitlines() == [
        "step 200/2500  loss 0.812  token accuracy 0.77 (length 3)  iterations 8.4  0:12 elapsed, 1:56 left",
        "step 200 validation  loss 0.5  token accuracy 0.500  sequence - (length 16)",
        "length 64  token accuracy 0.910  last token 0.800  sequence -  iterations 8.4 (max 12)  n 1024",
        "length 64  token accuracy 0.910  last token 0.800  sequence -  n 1024  trained",
    ]


def test_time_left_counts_the_steps_of_this_process(
    start: RunStart, clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = ConsoleTracker()
    tracker.start(resume(start, 2299))
    clock[0] += 60  # compiling
    tracker.progress(2300)
    tracker.log(TRAIN | {"step": 2300})
    assert capsys.readouterr().out.endswith("  1:00 elapsed\n")
    clock[0] += 100
    tracker.progress(2400)
    tracker.log(TRAIN | {"step": 2400})
    assert capsys.readouterr().out.endswith("2:40 elapsed, 1:40 left\n")


def test_a_terminal_gets_a_bar_and_a_table(start: RunStart, terminal: Terminal) -> None:
    with redirect_stdout(terminal):
        play(ConsoleTracker(), start, [VALIDATION, TRAIN | SOLVER, CURVE, CURVE | SOLVER])
    shown = terminal.getvalue()
    assert "a [bracketed] note" in shown
    assert "200/2500" in shown
    assert "loss 0.812  token accuracy 0.77 (length 3)  iterations 8.4" in shown
    assert "step 200 validation" in shown
    assert "accuracy by length" in shown
    assert shown.rindex("accuracy by length") > shown.rindex("\x1b[?25h")  # the cursor is back before the table
    assert max(map(len, shown[shown.rindex("accuracy by length") :].splitlines()[-3:])) <= 80


@pytest.mark.parametrize("state", ["finished", "interrupted", "failed"])
def test_the_terminal_is_given_back_without_a_curve(state: str, start: RunStart, terminal: Terminal) -> None:
    tracker = ConsoleTracker()
    with redirect_stdout(terminal):
        tracker.start(start)
        tracker.progress(1)
        tracker.finish(state)
        tracker.finish(state)
        assert sys.stdout is terminal
    assert terminal.getvalue().count("\x1b[?25h") == 1
    assert "by length" not in terminal.getvalue()


def test_warnings_stay_on_stderr_while_the_bar_is_up(start: RunStart, terminal: Terminal) -> None:
    errors = io.StringIO()
    tracker = ConsoleTracker()
    with redirect_stdout(terminal), redirect_stderr(errors):
        tracker.start(start)
        warn("careful")
        tracker.finish("finished")
    assert errors.getvalue() == "warning: careful\n"
    assert "careful" not in terminal.getvalue()


@pytest.mark.parametrize("why", ["no rich", "dumb"])
def test_plain_lines_on_a_terminal_that_rich_cannot_use(
    why: str, start: RunStart, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "no rich":
        monkeypatch.setitem(sys.modules, "rich", None)
    else:
        monkeypatch.setenv("TERM", "dumb")
    with redirect_stdout(terminal):
        play(ConsoleTracker(), start, [TRAIN, CURVE])
        print_table("t", ["a"], [["1"]])
    assert "step 200/2500  loss 0.812" in terminal.getvalue()
    assert "\x1b" not in terminal.getvalue()


def test_quiet_prints_nothing(start: RunStart, terminal: Terminal) -> None:
    with redirect_stdout(terminal):
        play(ConsoleTracker(quiet=True), start, [TRAIN, VALIDATION, CURVE])
    assert terminal.getvalue() == ""


def test_tables_are_aligned_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("runs", ["id", "task"], [["a4-lstm", "a4"], ["x", ""]])
    print_table("", ["id"], [])
    assert capsys.readouterr().out == "runs\nid       task\na4-lstm  a4\nx\nid\n"


def test_tables_show_brackets_and_whole_cells_on_a_terminal(terminal: Terminal) -> None:
    with redirect_stdout(terminal):
        print_table("[t]", ["lengths"], [["[2,16]"], ["x" * 100]])
    shown = terminal.getvalue()
    assert "[t]" in shown
    assert "[2,16]" in shown
    assert shown.count("x") == 100


def test_a_curve_of_rows_with_and_without_iterations(capsys: pytest.CaptureFixture[str]) -> None:
    print_curve([CURVE, CURVE | SOLVER])
    print_curve([CURVE])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split("  ")[-3:] == ["iterations", "max", "n"]
    assert lines[2].split() == ["64", "0.910", "0.800", "-", "-", "-", "1024"]
    assert lines[3].split() == ["64", "0.910", "0.800", "-", "8.4", "12", "1024"]
    assert "iterations" not in lines[5]


def test_durations() -> None:
    assert [format_duration(s) for s in (0, 59.6, 151, 3599.6, 90061)] == [
        "0:00",
        "1:00",
        "2:31",
        "1:00:00",
        "25:01:01",
    ]


def test_rich_is_not_imported_before_it_is_needed() -> None:
    code = "import sys, fpexp.tracking.console; sys.exit('rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_run_goes_on_when_nobody_reads(tmp_path: Path) -> None:
    """`fpexp train ... | head -1`."""
    code = """
import os
reader, writer = os.pipe()
os.dup2(writer, 1)
os.close(writer)
os.close(reader)
from fpexp.tracking.console import note
note("nobody reads this")
note("nor this")
os.write(2, b"went on")
"""
    answer = run_python(code, tmp_path)
    assert (answer.code, answer.err) == (0, "went on")
