"""What people see of a sweep while it goes on: a live table on a terminal, a line for each change elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fpexp.run_folder import Row
from fpexp.sweep_folder import DONE, JobFolder, SweepFolder, own_words, seconds
from fpexp.tracking.console import Pace, format_duration, has_rich_terminal, note
from fpexp.tracking.tracker import RunStart

REFRESH = 1.0
"""Seconds between two looks at the jobs' files."""


class JobTracker:
    """Tells those that watch a sweep which run a job has become, how far it is and how long it still takes."""

    def __init__(self, job: JobFolder) -> None:
        self._job = job
        self._pace = Pace(0, 0)
        self._told = 0.0

    def start(self, start: RunStart) -> None:
        """Write the run's id and its steps into job.json."""
        self._pace = Pace(start.resumed_from or 0, start.config.training.steps)
        self._job.write(run=start.run.id, step=self._pace.first, steps=self._pace.total)

    def log(self, row: Row) -> None:
        """Leave rows to the run's own files."""

    def progress(self, step: int) -> None:
        """Write the step and the seconds left, once in a while."""
        self._pace.take(step)
        if time.monotonic() - self._told >= REFRESH:
            self._told = time.monotonic()
            self._job.write(step=step, left=self._pace.left(step))

    def finish(self, state: str) -> None:
        """Leave the end to whoever runs the job."""


@contextmanager
def watched(sweep: SweepFolder, speak: bool) -> Iterator[None]:
    """Show the jobs of a sweep inside the block; without a terminal only where the jobs do not `speak` themselves."""
    if has_rich_terminal():
        with _live(sweep):
            yield
    elif speak:
        yield
    else:
        with _lines(sweep):
            yield


def text_of(job: dict[str, Any]) -> str:
    """Return what is to be said of a job beside its state: how far it is, its run, or the reason."""
    if job["state"] == "running" and "doing" in job:
        return str(job["doing"])
    if job["state"] == "running" and "steps" in job:
        left = job.get("left")
        return f"step {job['step']}/{job['steps']}" + ("" if left is None else f", {format_duration(left)} left")
    return str(job.get("reason") or job.get("run") or "")


@contextmanager
def _live(sweep: SweepFolder) -> Iterator[None]:
    from rich.console import Console
    from rich.live import Live

    console = Console(file=sys.stdout, highlight=False)  # this very terminal, whatever jobs make of sys.stdout
    began = time.monotonic()
    with Live(
        get_renderable=lambda: table(sweep.jobs(), time.monotonic() - began, console.height),
        console=console,
        refresh_per_second=1 / REFRESH,
        transient=True,  # the summary takes its place
        redirect_stderr=sys.stderr.isatty(),
    ):
        yield


def table(jobs: Sequence[dict[str, Any]], elapsed: float, height: int) -> Any:
    """Return a rich table with as many jobs as the terminal has lines; what is done makes room first."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    counts = {state: sum(job["state"] == state for job in jobs) for state in dict.fromkeys(j["state"] for j in jobs)}
    done = sum(count for state, count in counts.items() if state in DONE)
    others = [f"{count} {state}" for state, count in counts.items() if state not in DONE]
    remaining = left(jobs)
    end = [] if remaining is None else [f"about {format_duration(remaining)} left"]
    title = ", ".join([f"{done} of {len(jobs)} jobs done", *others, f"{format_duration(elapsed)} elapsed", *end])
    result = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, expand=True)
    for name, ratio in (("job", None), ("overrides", 3), ("state", None), ("time", None), ("", 2)):
        result.add_column(name, ratio=ratio, no_wrap=True, overflow="ellipsis")
    words = own_words(jobs)
    shown = _visible(jobs, height - 6)
    for index in shown:
        job, spent = jobs[index], seconds(jobs[index])
        cells = [str(job["number"]), words[index], job["state"], "" if spent is None else format_duration(spent)]
        result.add_row(*map(Text, [*cells, text_of(job)]), style=_STYLES.get(job["state"]))
    if len(shown) < len(jobs):
        result.add_row("", Text(f"and {len(jobs) - len(shown)} more"), style="dim")
    return result


def left(jobs: Sequence[dict[str, Any]]) -> float | None:
    """Return the seconds that a sweep still takes, by those of the jobs that it has finished; None where none is."""
    spent = [job["seconds"] for job in jobs if job["state"] == "finished"]
    running = [job for job in jobs if job["state"] == "running"]
    waiting = sum(job["state"] == "waiting" for job in jobs)
    if not spent or not (running or waiting):
        return None
    mean = sum(spent) / len(spent)
    rest = [max(mean - (seconds(job) or 0.0), 0.0) if job.get("left") is None else job["left"] for job in running]
    return (sum(rest) + mean * waiting) / max(len(running), 1)


_STYLES = {"running": "bold", "waiting": "dim", "failed": "red", "lost": "red", "interrupted": "yellow"}


def _visible(jobs: Sequence[dict[str, Any]], room: int) -> list[int]:
    """Return which jobs are shown, in order: those that run or went wrong, then those that wait, then what is done."""
    if len(jobs) <= room:
        return list(range(len(jobs)))

    def rank(index: int) -> tuple[int, int]:
        state = jobs[index]["state"]
        return (2, -index) if state in DONE else (1, index) if state == "waiting" else (0, index)

    return sorted(sorted(range(len(jobs)), key=rank)[: max(room - 1, 1)])


@contextmanager
def _lines(sweep: SweepFolder) -> Iterator[None]:
    """Print a line for each job that begins or ends."""
    over = threading.Event()
    told = {job["number"]: job["state"] for job in sweep.jobs()}

    def look() -> None:
        jobs = sweep.jobs()
        for job, words in zip(jobs, own_words(jobs), strict=True):
            if job["state"] != told[job["number"]]:
                told[job["number"]] = job["state"]
                spent = "" if "seconds" not in job else f"  {format_duration(job['seconds'])}"
                parts = [f"job {job['number']}: {words}", job["state"] + spent, text_of(job)]
                note("  ".join(part for part in parts if part))

    def watch() -> None:
        while not over.wait(REFRESH):
            look()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        look()
