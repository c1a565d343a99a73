"""The jobs that the words of a sweep stand for, and what there is of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fpexp.commands.duration import Paces
from fpexp.config.catalogue import choice_file
from fpexp.config.compose import each_job, measured_afterwards
from fpexp.config.run import RunConfig
from fpexp.config.search_path import own_folders
from fpexp.errors import UserError
from fpexp.kept import kept
from fpexp.known_runs import Known, KnownRuns
from fpexp.measurement import Measurement, parse_measurements, unmeasured
from fpexp.reporting.layout import read_layout
from fpexp.run_folder import RunFolder, all_runs, read_rows
from fpexp.tracking.console import note

HYDRAS = ("hydra.", "hydra/")


@dataclass(frozen=True)
class Job:
    """One run of a sweep: the words that a single run takes, the config that they give, what is measured afterwards."""

    words: list[str]
    config: RunConfig
    measurements: list[Measurement]


@dataclass(frozen=True)
class Standing:
    """What there is of a job: the state and run of `KnownRuns`, and what is still to be measured of that run.

    `seconds`: how long it still trains; None where that is unknown.
    """

    state: str
    run: RunFolder | None
    wanting: list[Measurement]
    seconds: float | None


def find_jobs(words: Sequence[str]) -> list[Job]:
    """Compose and check every job, in the order in which they are run."""
    measurements: dict[str | None, list[Measurement]] = {}
    jobs = []
    for job, config in each_job(words):
        experiment = config.choices.experiment
        if experiment not in measurements:
            measurements[experiment] = parse_measurements(measured_afterwards(job), "sweep.evaluate")
        jobs.append(Job(job, config, measurements[experiment]))
    for name in measurements:
        if name is not None:
            _check_trains(name, words)
    return jobs if jobs[0].config.sweep.rerun else _distinct(jobs)


def _distinct(jobs: Sequence[Job]) -> list[Job]:
    """Leave out jobs that an earlier one has the numbers of: started at the same time, both would be run."""
    from fpexp.build import settle

    first: dict[str, Job] = {}
    for job in jobs:
        first.setdefault(settle(job.config)[0].fingerprint(), job)
    if len(first) < len(jobs):
        note(f"{len(jobs)} jobs, {len(first)} that differ in what decides their numbers: the others are left out")
    return list(first.values())


def _check_trains(experiment: str, words: Sequence[str]) -> None:
    """Refuse an experiment that is reported from benchmarks and not from runs."""
    benchmarks = read_layout(choice_file("experiment", experiment, own_folders(words))).benchmarks
    if benchmarks:
        raise UserError(f"experiment={experiment} is not trained but measured: fpexp bench {' '.join(benchmarks)}")


def look_up(jobs: Sequence[Job]) -> list[Standing]:
    """Return what there is of each job, by this machine's settling of what is `auto`."""
    from fpexp.build import settle

    folders = [folder for folder in (jobs[0].config.results_dir, _recorded(jobs[0].config)) if folder is not None]
    known_runs, paces = KnownRuns(*folders), Paces(run for folder in folders for run in reversed(all_runs(folder)))
    found = []
    for job in jobs:
        settled = settle(job.config)[0]
        known = known_runs.of(settled)
        wanting = [] if known.run is None else unmeasured(job.measurements, known.run, job.config)
        steps = _steps_left(job, known, wanting)
        found.append(Standing(known.state, known.run, wanting, paces.seconds(settled, steps) if steps else 0.0))
    return found


def _steps_left(job: Job, known: Known, wanting: Sequence[Measurement]) -> int:
    """Return the steps that are still to be trained; what is only recorded has no weights left to be measured."""
    steps = job.config.training.steps
    if job.config.sweep.rerun:
        return steps
    if known.run is not None and known.state in ("interrupted", "lost"):
        return steps - steps_done(known.run)
    return 0 if known.state in ("finished", "running") or (known.state == "recorded" and not wanting) else steps


def steps_done(run: RunFolder) -> int:
    """Return the last training step that a run has logged; 0 where its rows cannot be read."""
    try:
        return max((row["step"] for row in read_rows(run.metrics) if row.get("kind") == "train"), default=0)
    except (UserError, OSError, ValueError, LookupError, TypeError, AttributeError):
        return 0


def _recorded(config: RunConfig) -> str | Path | None:
    """Return the results folder whose finished runs count as done."""
    return kept("reference", config.results_dir) if config.sweep.recorded == "auto" else config.sweep.recorded


def own_overrides(words: Sequence[str]) -> list[str]:
    """Return the words of a run itself, without those that are Hydra's."""
    return [word for word in words if not word.lstrip("+~").startswith(HYDRAS)]
