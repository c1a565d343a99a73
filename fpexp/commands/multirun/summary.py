"""What a sweep has come to: a table of its jobs, their curves, the exit code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from fpexp.errors import UserError
from fpexp.reporting.figures import draw_curves
from fpexp.reporting.store import Curve, read_curve
from fpexp.run_folder import RunFolder
from fpexp.sweep_folder import DONE, SweepFolder, own_words
from fpexp.tracking.console import note, print_table, warn
from fpexp.tracking.jobs import text_of


def summarise(sweep: SweepFolder, signum: int | None) -> int:
    """Print the table and the curves, draw these, and return the exit code; `signum` is the signal that ended it."""
    jobs = sweep.jobs()
    rows = [
        [str(job["number"]), words, job["state"], f"{job['seconds']:.0f} s" if "seconds" in job else "-", text_of(job)]
        for job, words in zip(jobs, own_words(jobs), strict=True)
    ]
    note("")
    print_table("jobs", ["job", "overrides", "state", "time", "run or reason"], rows)
    done = [job for job in jobs if job["state"] in DONE]
    curves = list(_curves(done, sweep))
    if curves:
        _show_curves(curves)
        draw_curves(curves, sweep.path / "curves.png")
        note(f"curves: {sweep.path / 'curves.png'}")
    again = "; the same command again runs what is missing" if len(done) < len(jobs) else ""
    note(f"{len(done)} of {len(jobs)} jobs are done{again}")
    signum = signum or next((job["signal"] for job in jobs if "signal" in job), None)
    if signum is not None:
        return 128 + signum
    return 0 if len(done) == len(jobs) else 1


def _curves(jobs: Sequence[dict[str, Any]], sweep: SweepFolder) -> Iterator[Curve]:
    """Yield those of jobs that are done, each model with the settings that not all jobs have.

    A run that is recorded elsewhere is named by its folder in full.
    """
    settings = own_words(jobs, but=("task", "model", "seed")) if len(jobs) > 1 else [""] * len(jobs)
    for job, setting in zip(jobs, settings, strict=True):
        try:
            curve = read_curve(RunFolder.find(job.get("folder", job["run"]), sweep.path.parent.parent))
            yield replace(curve, model=f"{curve.model} {setting}".rstrip())
        except UserError as error:
            warn(f"job {job['number']}: {error}")


def _show_curves(curves: Sequence[Curve]) -> None:
    lengths = sorted({row["length"] for curve in curves for row in curve.rows})
    for key, title, spec in (("token_accuracy", "token accuracy", ".3f"), ("perplexity", "perplexity", ".4g")):
        rows = []
        for curve in curves:
            values = {row["length"]: format(row[key], spec) for row in curve.rows if row.get(key) is not None}
            if values:
                name = f"{curve.task} {curve.model} seed {curve.seed}"
                rows.append([name, *(values.get(length, "-") for length in lengths)])
        if rows:
            print_table(f"{title} by length", ["run", *map(str, lengths)], rows)
