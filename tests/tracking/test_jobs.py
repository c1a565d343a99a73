"""What is seen of a sweep while it goes on."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from runs import TINY

from fpexp.sweep_folder import SweepFolder, own_words
from fpexp.tracking import jobs as watching
from fpexp.tracking.jobs import left, table, watched


def job(number: int, state: str, **fields: Any) -> dict[str, Any]:
    return {"number": number, "overrides": ["task=a4", f"seed={number}"], "state": state, **fields}


def render(jobs: list[dict[str, Any]], height: int = 30, elapsed: float = 75.0) -> list[str]:
    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=100).print(table(jobs, elapsed, height))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_the_table_says_of_each_job_what_it_does() -> None:
    lines = render(
        [
            job(0, "finished", seconds=61.0, run="the-run"),
            job(1, "failed", seconds=5.0, reason="the trap has shut"),
            job(2, "running", began=time.time() - 30, run="r", step=50, steps=200, left=90.0),
            job(3, "running", began=time.time(), doing="measuring solver=picard"),
            job(4, "waiting"),
        ]
    )
    assert "1 of 5 jobs done, 1 failed, 2 running, 1 waiting, 1:15 elapsed" in lines[0]
    rows = {line.split()[0]: line for line in lines[1:] if line.split()[:1] and line.split()[0].isdigit()}
    assert all(text in rows["0"] for text in ("seed=0", "finished", "1:01", "the-run"))
    assert all(text in rows["1"] for text in ("failed", "the trap has shut"))
    assert all(text in rows["2"] for text in ("running", "0:30", "step 50/200, 1:30 left"))
    assert "measuring solver=picard" in rows["3"]
    assert "waiting" in rows["4"]
    assert "task=a4" not in "".join(lines)


def test_the_time_left_is_that_of_the_jobs_which_the_sweep_has_done() -> None:
    waiting = [job(n, "waiting") for n in (5, 6)]
    assert left([job(0, "done before", seconds=0.0), job(1, "failed", seconds=3.0), *waiting]) is None
    done = [job(0, "finished", seconds=60.0), job(1, "finished", seconds=120.0), job(2, "recorded", seconds=0.0)]
    assert left([*done, *waiting]) == 180.0
    begun = [job(3, "running", began=time.time(), left=20.0), job(4, "running", began=time.time() - 50)]
    assert left([*done, *begun, *waiting]) == pytest.approx((20 + 40 + 180) / 2, abs=1)
    assert left([*done, job(3, "running", began=time.time() - 500), *waiting]) == 180.0
    assert "0:00 elapsed, about 3:00 left" in render([*done, *waiting], elapsed=0.0)[0]
    assert "left" not in render(done)[0]


def test_a_low_terminal_shows_what_matters() -> None:
    jobs = [job(n, "finished", seconds=1.0, run=f"run-{n}") for n in range(20)]
    jobs += [job(20, "failed", seconds=1.0, reason="why"), job(21, "running", began=time.time())]
    jobs += [job(n, "waiting") for n in range(22, 60)]
    lines = render(jobs, height=14)
    text = "\n".join(lines)
    assert len(lines) <= 14
    assert "why" in text
    assert "running" in text
    assert "22" in text
    assert "run-0" not in text
    assert "and 53 more" in text


def test_lines_where_there_is_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "REFRESH", 0.02)
    sweep = SweepFolder.create(tmp_path, [["task=a4", "seed=0"], ["task=a4", "seed=1"]])
    with watched(sweep, speak=False):
        sweep.job(0).write(state="running", began=time.time())
        time.sleep(0.2)
        sweep.job(0).write(state="finished", seconds=61.0, run="the-run")
        sweep.job(1).write(state="failed", seconds=2.0, reason="why")
    assert capsys.readouterr().out.splitlines() == [
        "job 0: seed=0  running",
        "job 0: seed=0  finished  1:01  the-run",
        "job 1: seed=1  failed  0:02  why",
    ]
    with watched(sweep, speak=True):
        sweep.job(0).write(state="running")
    assert capsys.readouterr().out == ""


def test_on_a_terminal_the_table_is_live_and_the_jobs_print_into_their_logs(tmp_path: Path) -> None:
    """The whole command on a pseudo-terminal: one table, no bar of a job, a summary at the end."""
    leader, follower = pty.openpty()
    longer = ["training.steps=1500", "training.log_every=500"]  # than it takes the table to be drawn anew
    process = subprocess.Popen(
        [sys.executable, "-m", "fpexp", "train", "-m", "task=a4", "model=lstm", "seed=0,1", *TINY, *longer],
        cwd=tmp_path,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "30"},
        stdout=follower,
        stderr=follower,
    )
    os.close(follower)
    shown = b""
    while True:
        try:
            piece = os.read(leader, 65536)
        except OSError:
            break
        if not piece:
            break
        shown += piece
    assert process.wait(timeout=60) == 0
    text = shown.decode()
    assert "of 2 jobs done" in text
    assert "running" in text
    assert "2 of 2 jobs are done" in text
    assert "/1500  loss" not in text
    (sweep,) = (tmp_path / "results" / "sweeps").iterdir()
    for number in (0, 1):
        assert "step 1500/1500  loss" in (sweep / str(number) / "log.txt").read_text()


def test_words_are_compared_by_what_they_mean() -> None:
    jobs = [
        {"overrides": ["lr=1e-3", "range=[0.1,1.0]", "seed=0"]},
        {"overrides": ["lr=0.001", "range=[0.1, 1.0]", "seed=1"]},
    ]
    assert own_words(jobs) == ["seed=0", "seed=1"]
    assert own_words(jobs[:1], but=("seed",)) == ["lr=1e-3 range=[0.1,1.0]"]
    assert own_words([{"overrides": ["group='A4 x Z5'"]}, {"overrides": ["group='A4 x Z5'", "key=[1"]}]) == [
        "",
        "key=[1",
    ]
