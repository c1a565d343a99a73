"""A sweep on disk: `<results_dir>/sweeps/<time>/`, where whoever carries out its jobs tells those that watch.

<number>/job.json       overrides, state, run, reason, when it began and the seconds that it took
<number>/traceback.txt  of a job that failed
<number>/log.txt        what a job has printed where it was not alone on the terminal
stop                    there from the moment when no further job is to start
curves.png              the length curves of all jobs that are done
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from fpexp.config.values import parse_value
from fpexp.errors import UserError
from fpexp.run_folder import make_unique, write_json

DONE = ("finished", "done before", "recorded")
"""States of jobs that need nothing more."""


class JobFolder:
    """One job of a sweep. Its states: waiting, running, those of DONE, and failed, interrupted, lost, not started,
    running elsewhere."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.number = int(path.name)
        self.log = path / "log.txt"

    def read(self) -> dict[str, Any]:
        """Return job.json."""
        record: dict[str, Any] = json.loads((self.path / "job.json").read_text())
        return record

    def write(self, **changes: Any) -> None:
        """Change some fields of job.json, atomically."""
        path = self.path / "job.json"
        write_json(path, {**(self.read() if path.exists() else {}), **changes})


class SweepFolder:
    """The jobs of a sweep, and the word that it is to stop."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, results_dir: Path, jobs: Sequence[Sequence[str]]) -> SweepFolder:
        """Make a new folder in which every job waits; `jobs` are their words."""
        sweeps = results_dir / "sweeps"
        try:
            sweeps.mkdir(parents=True, exist_ok=True)
            folder = cls(make_unique(sweeps, time.strftime("%Y%m%d-%H%M%S")).resolve())
            for number, words in enumerate(jobs):
                job = JobFolder(folder.path / str(number))
                job.path.mkdir()
                job.write(number=number, overrides=[word.lstrip("+") for word in words], state="waiting")
        except OSError as error:
            raise UserError(f"cannot write to results_dir={results_dir}: {error.strerror}") from error
        return folder

    def jobs(self) -> list[dict[str, Any]]:
        """Return job.json of each job, by number."""
        return sorted((JobFolder(path.parent).read() for path in self.path.glob("*/job.json")), key=_number)

    def job(self, number: int) -> JobFolder:
        """Return the folder of one job."""
        return JobFolder(self.path / str(number))

    def stop(self) -> None:
        """Let no further job start."""
        (self.path / "stop").touch()

    @property
    def stopped(self) -> bool:
        """Whether no further job is to start."""
        return (self.path / "stop").exists()


def _number(job: dict[str, Any]) -> int:
    return int(job["number"])


def seconds(job: dict[str, Any]) -> float | None:
    """Return how long a job has taken, or has been running so far; None before it starts."""
    if "seconds" in job:
        return float(job["seconds"])
    return time.time() - job["began"] if job["state"] == "running" and "began" in job else None


def own_words(jobs: Sequence[dict[str, Any]], but: Sequence[str] = ()) -> list[str]:
    """Return of each job the words that not all have, 1e-3 being 0.001, `but` for those of some keys."""
    meanings = [{_meaning(word): word for word in job["overrides"]} for job in jobs]
    common = set.intersection(*map(set, meanings)) if len(jobs) > 1 else set()
    return [
        " ".join(word for (key, value), word in words.items() if (key, value) not in common and key not in but)
        for words in meanings
    ]


@cache
def _meaning(word: str) -> tuple[str, str]:
    """Return a word's key, and its value as it is read."""
    key, _, text = word.partition("=")
    try:
        return key, repr(parse_value(text, key))
    except UserError:  # in Hydra's grammar and not YAML's
        return key, text
