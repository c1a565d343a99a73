"""Several jobs of a sweep at once, by Hydra's joblib launcher: they fail alone, stop together, leave nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runs import TINY, CommandLine, finish, start, wait_for
from test_sweep import jobs, outside, sweeps  # noqa: F401

from fpexp.run_folder import read_rows

pytest.importorskip("hydra_plugins.hydra_joblib_launcher")

AT_ONCE = ["train", "-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]


def alive(pid: int) -> bool:
    """Tell whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def both_wait(tmp_path: Path) -> Callable[[], bool]:
    """Return whether two jobs have made a step and wait."""

    def look() -> bool:
        found = list((tmp_path / "results" / "runs").glob("*/metrics.jsonl"))
        return (tmp_path / "waiting").exists() and sum(len(read_rows(path)) >= 2 for path in found) == 2

    return look


def states() -> dict[int, str]:
    return {number: job["state"] for number, job in jobs(sweeps()[-1]).items()}


def start_waiting(words: list[str], tmp_path: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """Start a sweep of which two jobs are in their third step; return it and the pids of these jobs."""
    Path("may-wait").touch()
    process = start(*words, cwd=tmp_path)
    wait_for(both_wait(tmp_path), process, timeout=150)
    found: list[dict[str, Any]] = [job for job in jobs(sweeps()[-1]).values() if job["state"] == "running"]
    assert len(found) == 2
    return process, [job["pid"] for job in found]


def gone(pids: list[int]) -> bool:
    end = time.monotonic() + 20
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.1)
    return not any(map(alive, pids))


def test_a_job_that_fails_does_not_stop_those_beside_it(
    cli: CommandLine,
    outside: list[str],  # noqa: F811
    tmp_path: Path,
) -> None:
    answer = finish(start(*AT_ONCE, *outside, "model.behaviour=fine,fail,exit,good", cwd=tmp_path), timeout=200)
    assert answer.code == 1, answer
    assert "2 of 4 jobs are done" in answer.out
    assert "2 jobs at once" in answer.out
    assert "thread" in answer.out
    assert "Traceback" not in answer.out + answer.err
    assert states() == {0: "finished", 1: "failed", 2: "failed", 3: "finished"}
    (sweep,) = sweeps()
    assert "the trap has shut" in (sweep / "1" / "traceback.txt").read_text()
    assert "step 6/6" in (sweep / "0" / "log.txt").read_text()


def test_ctrl_c_stops_all_jobs_and_the_same_command_goes_on(
    cli: CommandLine,
    outside: list[str],  # noqa: F811
    tmp_path: Path,
) -> None:
    words = [*AT_ONCE, *outside, "model.behaviour=wait", "seed=0,1,2"]
    process, pids = start_waiting(words, tmp_path)
    process.send_signal(signal.SIGINT)
    answer = finish(process, timeout=100)
    assert answer.code == 130, answer
    assert "Traceback" not in answer.out + answer.err
    assert states() == {0: "interrupted", 1: "interrupted", 2: "not started"}
    assert gone(pids)
    assert [run.status()["state"] for run in cli.runs()] == ["interrupted", "interrupted"]
    before = {run.id for run in cli.runs()}

    Path("may-wait").unlink()
    answer = finish(start(*words, cwd=tmp_path), timeout=200)
    assert answer.code == 0, answer
    assert states() == {0: "finished", 1: "finished", 2: "finished"}
    assert len(cli.runs()) == 3
    assert before < {run.id for run in cli.runs()}
    for run in cli.runs():
        assert [row["step"] for row in read_rows(run.metrics) if row["kind"] == "train"] == list(range(1, 7))


def test_a_sweep_that_is_killed_takes_its_jobs_with_it(
    cli: CommandLine,
    outside: list[str],  # noqa: F811
    tmp_path: Path,
) -> None:
    process, pids = start_waiting([*AT_ONCE, *outside, "model.behaviour=wait", "seed=0,1"], tmp_path)
    process.kill()
    finish(process)
    assert gone(pids)
    assert [run.status()["state"] for run in cli.runs()] == ["interrupted", "interrupted"]


def test_a_job_whose_process_is_killed_is_lost_and_gone_on_with(
    cli: CommandLine,
    outside: list[str],  # noqa: F811
    tmp_path: Path,
) -> None:
    words = [*AT_ONCE, *outside, "model.behaviour=wait", "seed=0,1"]
    process, pids = start_waiting(words, tmp_path)
    os.kill(pids[0], signal.SIGKILL)
    answer = finish(process, timeout=100)
    assert answer.code == 1, answer
    assert "the launcher has ended" in answer.err
    assert "lost" in states().values()
    assert gone(pids)
    runs = {run.id for run in cli.runs()}
    Path("may-wait").unlink()
    assert cli("train", "-m", *words[4:]).code == 0
    assert {run.id for run in cli.runs()} == runs


def test_the_same_runs_come_out_one_by_one_and_at_once(cli: CommandLine, tmp_path: Path) -> None:
    words = ["task=a4", "model=lstm", "seed=0,1", "threads=1", *TINY]
    assert finish(start(*AT_ONCE, *words, cwd=tmp_path), timeout=200).code == 0
    answer = cli("train", "-m", *words)
    assert answer.code == 0
    assert states() == {0: "done before", 1: "done before"}
    assert json.loads((sweeps()[-1] / "0" / "job.json").read_text())["run"] in {run.id for run in cli.runs()}


def test_sigterm_before_there_is_anything_to_save(
    cli: CommandLine,
    outside: list[str],  # noqa: F811
    tmp_path: Path,
) -> None:
    Path("may-wait").touch()
    process = start(*AT_ONCE, *outside, "model.behaviour=wait", "seed=0,1,2", cwd=tmp_path)
    wait_for(lambda: any(Path("results").glob("sweeps/*/2/job.json")), process, timeout=150)
    wait_for(lambda: "running" in states().values(), process, timeout=150)
    process.send_signal(signal.SIGTERM)
    answer = finish(process, timeout=100)
    assert answer.code == 143, answer
    assert "Traceback" not in answer.out + answer.err
    assert "lost" not in states().values()
    assert "interrupted" in states().values()
