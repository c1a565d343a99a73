"""fpexp train -m: the jobs of a sweep by one of Hydra's launchers, failing alone, and a summary of all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fpexp.commands.arguments import take
from fpexp.commands.duration import say_duration
from fpexp.commands.multirun.launching import carry_out
from fpexp.commands.multirun.summary import summarise
from fpexp.commands.sweep_jobs import Job, Standing, find_jobs, look_up, own_overrides
from fpexp.config.run import RunConfig
from fpexp.errors import UserError
from fpexp.sweep_folder import SweepFolder
from fpexp.tracking.console import note


def run(words: list[str]) -> int:
    """Run every combination. All are checked before the first starts; 0 only when all are done."""
    for key in ("resume", "config"):
        if take(words, key)[0] is not None:
            raise UserError(f"{key}= and -m do not go together; a sweep run again resumes what is missing")
    jobs = find_jobs(words)
    _check_builds(jobs)
    sweep = SweepFolder.create(Path(jobs[0].config.results_dir), [own_overrides(job.words) for job in jobs])
    waiting = _not_yet_done(sweep, dict(enumerate(jobs)))
    own = [standing.seconds for standing in waiting.values() if standing.state != "running"]
    if own:
        note(say_duration(own))
    signum = carry_out(sweep, {number: jobs[number] for number in waiting}) if waiting else None
    elsewhere = [job["number"] for job in sweep.jobs() if job["state"] == "running elsewhere"]
    if elsewhere:  # another sweep may have finished them by now
        _not_yet_done(sweep, {number: jobs[number] for number in elsewhere})
    return summarise(sweep, signum)


def _check_builds(jobs: Sequence[Job]) -> None:
    """Check that every job can be built and measured; seeds make no difference to that."""
    from fpexp.build import check

    checked: list[RunConfig] = []
    for job in jobs:
        alike = job.config.replace(seed=0)
        if alike not in checked:
            experiment = check(job.config)
            for measurement in job.measurements:
                if measurement.fits(experiment.config):
                    measurement.check(experiment.config)
                    for length in measurement.lengths or ():
                        experiment.task.check_length(length, "sweep.evaluate: lengths")
            checked.append(alike)


def _not_yet_done(sweep: SweepFolder, jobs: dict[int, Job]) -> dict[int, Standing]:
    """Return what there is of the jobs that are not done, by number; of the others, say so in their folders."""
    waiting = {}
    for (number, job), known in zip(jobs.items(), look_up(list(jobs.values())), strict=True):
        if job.config.sweep.rerun or known.run is None or known.state not in ("finished", "recorded") or known.wanting:
            waiting[number] = known
            continue
        state = "recorded" if known.state == "recorded" else "done before"
        folder = str(known.run.path.resolve())
        sweep.job(number).write(state=state, run=known.run.id, folder=folder, seconds=0.0, reason="")
        note(f"job {number}: {state}: {known.run.id}")
    return waiting
