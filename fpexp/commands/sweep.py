"""fpexp train -m: Hydra's multirun, with jobs that fail alone and a summary of all."""

from __future__ import annotations

import json
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fpexp.commands.arguments import take
from fpexp.config.catalogue import conf_dir
from fpexp.config.compose import CONFIG_NAME, compose_jobs, from_hydra, permissive, with_own_sweep
from fpexp.config.run import RunConfig
from fpexp.errors import FpexpError, Interrupted, UserError
from fpexp.reporting.figures import draw_curves
from fpexp.reporting.store import read_curve
from fpexp.run_folder import RunFolder, all_runs, make_unique, write_json
from fpexp.tracking.console import print_table
from fpexp.tracking.watchers import trackers

DONE = ("finished", "done before")


class _SweepInterrupted(BaseException):
    """Passes through Hydra, which takes every Exception for the failure of one job."""

    def __init__(self, signum: int) -> None:
        super().__init__()
        self.signum = signum


def run(words: list[str]) -> int:
    """Run every combination. All are checked before the first starts; 0 only when all are done."""
    import hydra

    for key in ("resume", "config"):
        if take(words, key)[0] is not None:
            raise UserError(f"{key}= and -m do not go together; a sweep run again resumes what is missing")
    words = with_own_sweep(words)
    configs = compose_jobs(words)
    _check_builds(configs)
    folder = _sweep_folder(Path(configs[0].results_dir))
    arguments, sys.argv = sys.argv, ["fpexp", "--multirun", *permissive(words), f"hydra.sweep.dir='{_escaped(folder)}'"]
    signum = None
    try:
        hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=CONFIG_NAME)(run_job)()
    except _SweepInterrupted as error:
        signum = error.signum
    except SystemExit as error:
        raise FpexpError(f"the sweep stopped: Hydra ended it with exit code {error.code}") from error
    finally:
        sys.argv = arguments
    return _summarise(folder, len(configs), signum)


def run_job(hydra_config: Any) -> None:
    """Carry out one job; its end is written to job.json in the job's folder and never raised, but for a signal."""
    from hydra.core.hydra_config import HydraConfig

    context = HydraConfig.get()
    folder = Path(context.runtime.output_dir)
    record: dict[str, Any] = {
        "number": context.job.num,
        "overrides": [word.lstrip("+") for word in context.overrides.task],
    }
    began = time.monotonic()
    signum = None
    try:
        config = from_hydra(hydra_config, dict(context.runtime.choices))
        if config.sweep.fail_fast and any(job["state"] == "failed" for job in _jobs(folder.parent)):
            record |= {"state": "not started", "reason": "an earlier job failed and sweep.fail_fast=true"}
        else:
            print(f"\njob {context.job.num}: {' '.join(record['overrides'])}", flush=True)
            state, run_folder = _train(config, record["overrides"])
            record |= {"state": state, "run": run_folder.id}
    except (Interrupted, KeyboardInterrupt) as error:
        signum = error.signum if isinstance(error, Interrupted) else 2
        record |= {"state": "interrupted", "reason": str(error)}
    except BaseException as error:
        (folder / "traceback.txt").write_text("".join(traceback.format_exception(error)))
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        record |= {"state": "failed", "reason": reason}
        print(f"fpexp: error: job {context.job.num}: {record['reason']}", file=sys.stderr, flush=True)
    write_json(folder / "job.json", {**record, "seconds": time.monotonic() - began})
    if signum is not None:
        _hand_on(signum)
        raise _SweepInterrupted(signum)


def _hand_on(signum: int) -> None:
    """Let a launcher that put this job on a cluster, and wants to know of the signal, queue the job again."""
    if signum == signal.SIGUSR2 and callable(signal.getsignal(signum)):
        signal.raise_signal(signum)


def _train(config: RunConfig, words: list[str]) -> tuple[str, RunFolder]:
    """Run a job, or go on with it, or find that it is done: a job is known by its settled config."""
    from fpexp.build import settle
    from fpexp.run import resume_run, start_run

    earlier = [] if config.sweep.rerun else _runs_of(settle(config)[0])
    for run_folder in earlier:
        if run_folder.status()["state"] == "finished":
            print(f"done before: {run_folder.id}")
            return "done before", run_folder
    for run_folder in earlier:
        if run_folder.status()["state"] in ("interrupted", "lost"):
            return "finished", resume_run(run_folder, run_folder.config(), trackers(config), words)
    return "finished", start_run(config, trackers(config), words)


def _runs_of(config: RunConfig) -> list[RunFolder]:
    fingerprint = config.fingerprint()
    return [folder for folder in reversed(all_runs(config.results_dir)) if _fingerprint(folder) == fingerprint]


def _fingerprint(folder: RunFolder) -> str | None:
    """Return that of a run's config as the present version reads it; None where it cannot."""
    try:
        return folder.config().fingerprint()
    except (OSError, FpexpError):
        return None


def _check_builds(configs: Sequence[RunConfig]) -> None:
    from fpexp.build import check

    for config in configs:
        check(config)


def _sweep_folder(results_dir: Path) -> Path:
    sweeps = results_dir / "sweeps"
    try:
        sweeps.mkdir(parents=True, exist_ok=True)
        return make_unique(sweeps, time.strftime("%Y%m%d-%H%M%S")).resolve()
    except OSError as error:
        raise UserError(f"cannot write to results_dir={results_dir}: {error.strerror}") from error


def _escaped(folder: Path) -> str:
    """Return a path as it stands between single quotes in Hydra's grammar."""
    return str(folder).replace("\\", "\\\\").replace("'", "\\'")


def _jobs(folder: Path) -> list[dict[str, Any]]:
    jobs = [json.loads(path.read_text()) for path in folder.glob("*/job.json")]
    return sorted(jobs, key=lambda job: job["number"])


def _summarise(folder: Path, total: int, signum: int | None) -> int:
    jobs = _jobs(folder)
    common = set.intersection(*(set(job["overrides"]) for job in jobs)) if len(jobs) > 1 else set()
    rows = [
        [
            str(job["number"]),
            " ".join(word for word in job["overrides"] if word not in common),
            job["state"],
            f"{job['seconds']:.0f} s",
            job.get("run") or job.get("reason", ""),
        ]
        for job in jobs
    ]
    print()
    print_table("jobs", ["job", "overrides", "state", "time", "run or reason"], rows)
    done = [job for job in jobs if job["state"] in DONE]
    results_dir = folder.parent.parent
    curves = [read_curve(RunFolder.find(job["run"], results_dir)) for job in done]
    if curves:
        _show_curves(curves)
        draw_curves(curves, folder / "curves.png")
        print(f"curves: {folder / 'curves.png'}")
    again = "; the same command again runs what is missing" if len(done) < total else ""
    print(f"{len(done)} of {total} jobs are done{again}")
    if signum is not None:
        return 128 + signum
    return 0 if len(done) == total else 1


def _show_curves(curves: Sequence[Any]) -> None:
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
