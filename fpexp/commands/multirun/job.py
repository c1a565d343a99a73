"""One job of a sweep, in whatever process a launcher runs it: its end stands in its folder and is never raised."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from fpexp.claims import Claimed, claim
from fpexp.commands.multirun.signals import ended_by_sigterm, hand_on_to_launcher, stand_apart
from fpexp.config.compose import from_hydra
from fpexp.config.run import RunConfig
from fpexp.errors import Interrupted
from fpexp.known_runs import KnownRuns
from fpexp.measurement import Measurement, parse_measurements, unmeasured
from fpexp.run_folder import RunFolder
from fpexp.sweep_folder import DONE, JobFolder, SweepFolder
from fpexp.tracking.jobs import JobTracker
from fpexp.tracking.tracker import Trackers
from fpexp.tracking.watchers import trackers

STOPPED = "the sweep was stopped"


def run_job(hydra_config: Any, sweep_pid: int, hidden: bool) -> None:
    """Carry out one job; its end is written to job.json in the job's folder and never raised.

    `sweep_pid` is the process of the sweep: this one, its parent, or one on another machine. A `hidden` job prints into
    its log.
    """
    from hydra.core.hydra_config import HydraConfig

    context = HydraConfig.get()
    job = JobFolder(Path(context.runtime.output_dir))
    apart = os.getppid() == sweep_pid
    if apart:
        stand_apart(sweep_pid)
    with _hidden(job) if hidden else _shown(job), ended_by_sigterm():
        signum = _carry_out_job(job, hydra_config, dict(context.runtime.choices))
    if apart and os.getppid() != sweep_pid:
        os._exit(1)  # the sweep was killed; there is nobody to wait for
    if signum is not None:
        hand_on_to_launcher(signum)


def _carry_out_job(job: JobFolder, hydra_config: Any, choices: dict[str, Any]) -> int | None:
    from omegaconf import OmegaConf

    sweep = SweepFolder(job.path.parent)
    if sweep.stopped:
        job.write(state="not started", reason=STOPPED)
        return None
    began = time.time()
    signum = None
    try:
        config = from_hydra(hydra_config, choices)
        if config.sweep.fail_fast and any(other["state"] == "failed" for other in sweep.jobs()):
            job.write(state="not started", reason="an earlier job failed and sweep.fail_fast=true")
            return None
        job.write(state="running", began=began, pid=os.getpid())
        afterwards = OmegaConf.select(hydra_config, "sweep.evaluate")
        wanted = None if afterwards is None else OmegaConf.to_container(afterwards, resolve=True)
        with _claim(config, job):
            end = _measure(config, job, _train(config, job), parse_measurements(wanted, "sweep.evaluate"))
    except Claimed as error:
        end = {"state": "running elsewhere", "reason": f"in the hands of {error}"}
    except (Interrupted, KeyboardInterrupt) as error:
        signum = error.signum if isinstance(error, Interrupted) else int(signal.SIGINT)
        sweep.stop()
        end = {"state": "interrupted", "reason": str(error), "signal": signum}
    except BaseException as error:
        (job.path / "traceback.txt").write_text("".join(traceback.format_exception(error)))
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        end = {"state": "failed", "reason": reason}
        print(f"fpexp: error: job {job.number}: {reason}", file=sys.stderr, flush=True)
    job.write(**end, seconds=time.time() - began)
    return signum


def _claim(config: RunConfig, job: JobFolder) -> AbstractContextManager[None]:
    """Have the job's config for this process alone; a sweep that runs all anew asks nobody."""
    from fpexp.build import settle

    if config.sweep.rerun:
        return nullcontext()
    return claim(config.results_dir, settle(config)[0].fingerprint(), f"job {job.number} of {job.path.parent}")


def _train(config: RunConfig, job: JobFolder) -> dict[str, Any]:
    """Run a job, or go on with it, or find that it is done: a job is known by its settled config."""
    from fpexp.build import settle
    from fpexp.run import resume_run, start_run

    words = job.read()["overrides"]
    watchers = Trackers([trackers(config), JobTracker(job)])
    known = KnownRuns(config.results_dir).of(settle(config)[0])
    if known.run is not None and not config.sweep.rerun:
        if known.state == "finished":
            return {"state": "done before", "run": known.run.id}
        if known.state == "running":
            reason = f"{known.run.id} is in the hands of another process"
            return {"state": "running elsewhere", "run": known.run.id, "reason": reason}
        if known.state in ("interrupted", "lost"):
            return {"state": "finished", "run": resume_run(known.run, known.run.config(), watchers, words).id}
    return {"state": "finished", "run": start_run(config, watchers, words).id}


def _measure(config: RunConfig, job: JobFolder, end: dict[str, Any], wanted: list[Measurement]) -> dict[str, Any]:
    """Measure of a finished run what the experiment asks for beside its curve; return how the job ends."""
    if end["state"] not in DONE:
        return end
    run = RunFolder.find(end["run"], config.results_dir)
    for measurement in unmeasured(wanted, run, config):
        job.write(run=run.id, doing=f"measuring {' '.join(f'{k}={v}' for k, v in measurement.asked().items())}")
        measurement.carry_out(run, config.device)
        end = {**end, "state": "finished"}
    return end


@contextmanager
def _hidden(job: JobFolder) -> Iterator[None]:
    with job.log.open("a") as log, redirect_stdout(log), redirect_stderr(log):
        yield


@contextmanager
def _shown(job: JobFolder) -> Iterator[None]:
    print(f"\njob {job.number}: {' '.join(job.read()['overrides'])}", flush=True)
    yield
