"""fpexp train -m: the jobs of a sweep by one of Hydra's launchers, failing alone, and a summary of all."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from fpexp.commands.arguments import take
from fpexp.commands.sweep_jobs import Job, find_jobs, look_up, own_overrides
from fpexp.config.catalogue import conf_dir
from fpexp.config.compose import CONFIG_NAME, from_hydra, permissive
from fpexp.config.run import RunConfig
from fpexp.errors import Interrupted, UserError, first_line
from fpexp.known_runs import KnownRuns
from fpexp.measurement import Measurement, parse_measurements, unmeasured
from fpexp.reporting.figures import draw_curves
from fpexp.reporting.store import Curve, read_curve
from fpexp.run_folder import RunFolder
from fpexp.sweep_folder import DONE, JobFolder, SweepFolder, own_words
from fpexp.tracking.console import has_rich_terminal, note, print_table, warn
from fpexp.tracking.jobs import JobTracker, text_of, watched
from fpexp.tracking.tracker import Trackers
from fpexp.tracking.watchers import trackers

STOPPED = "the sweep was stopped"


def run(words: list[str]) -> int:
    """Run every combination. All are checked before the first starts; 0 only when all are done."""
    for key in ("resume", "config"):
        if take(words, key)[0] is not None:
            raise UserError(f"{key}= and -m do not go together; a sweep run again resumes what is missing")
    jobs = find_jobs(words)
    _check_builds(jobs)
    sweep = SweepFolder.create(Path(jobs[0].config.results_dir), [own_overrides(job.words) for job in jobs])
    waiting = _not_yet_done(sweep, jobs)
    signum = _carry_out(sweep, waiting) if waiting else None
    return _summarise(sweep, signum)


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


def _not_yet_done(sweep: SweepFolder, jobs: Sequence[Job]) -> dict[int, Job]:
    """Return the jobs that are to be run, by number; of the others, say so in their folders."""
    waiting = {}
    for number, (job, known) in enumerate(zip(jobs, look_up(jobs), strict=True)):
        if job.config.sweep.rerun or known.run is None or known.state not in ("finished", "recorded") or known.wanting:
            waiting[number] = job
            continue
        state = "recorded" if known.state == "recorded" else "done before"
        sweep.job(number).write(state=state, run=known.run.id, folder=str(known.run.path.resolve()), seconds=0.0)
        note(f"job {number}: {state}: {known.run.id}")
    return waiting


def _carry_out(sweep: SweepFolder, jobs: dict[int, Job]) -> int | None:
    """Hand the jobs to the launcher that is asked for; return the signal that ended it, or None."""
    from hydra import initialize_config_dir
    from hydra._internal.callbacks import Callbacks
    from hydra._internal.core_plugins.basic_launcher import BasicLauncher
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.plugins import Plugins
    from hydra.types import HydraContext, RunMode

    first = next(iter(jobs.values()))
    launched = [[*permissive(own_overrides(j.words)), f"hydra.sweep.subdir={number}"] for number, j in jobs.items()]
    with initialize_config_dir(str(conf_dir()), version_base="1.3", job_name="fpexp"):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        words = [*permissive(first.words), f"hydra.sweep.dir='{_escaped(sweep.path)}'"]
        master = hydra.compose_config(CONFIG_NAME, words, RunMode.MULTIRUN)
        kind = str(master.hydra.launcher._target_).rpartition(".")[2]
        hidden = kind == "JoblibLauncher" or has_rich_terminal()
        launcher = Plugins.instance().instantiate_launcher(
            hydra_context=HydraContext(config_loader=hydra.config_loader, callbacks=Callbacks(master)),
            task_function=partial(run_job, sweep_pid=os.getpid(), hidden=hidden),
            config=master,
        )
        if kind == "JoblibLauncher":
            _say_threads(int(master.hydra.launcher.n_jobs), len(jobs), first.config.threads)
        received: list[int] = []
        with watched(sweep, speak=isinstance(launcher, BasicLauncher) and not hidden):
            try:
                if isinstance(launcher, BasicLauncher):
                    for words in launched:
                        if not sweep.stopped:
                            launcher.launch([words], initial_job_idx=0)
                elif kind == "JoblibLauncher":
                    with _handing_on(sweep, received):
                        launcher.launch(launched, initial_job_idx=0)
                else:
                    launcher.launch(launched, initial_job_idx=0)
            except KeyboardInterrupt:
                if isinstance(launcher, BasicLauncher):
                    sweep.stop()
                elif kind != "JoblibLauncher":
                    warn("the jobs that are queued elsewhere go on; the same command again finds what they finish")
                return int(signal.SIGINT)
            except (Exception, SystemExit) as error:  # a launcher's own: a worker that was killed, a cluster's refusal
                warn(f"the launcher has ended with {type(error).__name__}: {first_line(error)}")
            finally:
                _close(sweep, apart=kind == "JoblibLauncher")
    return next(iter(received), None)


def _say_threads(n_jobs: int, jobs: int, threads: int) -> None:
    """Say how the machine is shared out: joblib gives each process an equal part of the CPUs, unless told otherwise."""
    import joblib

    at_once = min(joblib.effective_n_jobs(n_jobs), jobs)
    share = threads or int(os.environ.get("OMP_NUM_THREADS") or max(1, joblib.cpu_count() // at_once))
    why = f"threads={threads}" if threads else "threads=0: a share each"
    note(f"{at_once} jobs at once, {share} CPU thread{'s' if share > 1 else ''} each of {joblib.cpu_count()} ({why})")


@contextmanager
def _handing_on(sweep: SweepFolder, received: list[int]) -> Iterator[None]:
    """Hand the first signal on to the processes of the jobs, which save and end; the second has its usual effect.

    It is added to `received`: a job that it ends before there is anything to save cannot tell of it.

    They are in groups of their own (`_apart`), so that a Ctrl-C of the terminal does not reach them a second time.
    """
    previous: dict[int, Any] = {}

    def restore() -> None:
        for signum, handler in previous.items():
            signal.signal(signum, handler)

    def hand_on(signum: int, frame: FrameType | None) -> None:
        restore()
        received.append(signum)
        sweep.stop()
        for job in sweep.jobs():
            if job["state"] == "running":
                with suppress(ProcessLookupError):
                    os.kill(job["pid"], signum)

    for signum in (signal.SIGINT, signal.SIGTERM):
        previous[signum] = signal.signal(signum, hand_on)
    try:
        yield
    finally:
        restore()


def _close(sweep: SweepFolder, apart: bool) -> None:
    """Say of jobs that no process will go on with what has become of them."""
    for job in sweep.jobs():
        if job["state"] == "waiting" and (apart or sweep.stopped):
            sweep.job(job["number"]).write(state="not started", reason=STOPPED)
        if job["state"] == "running" and apart:
            sweep.job(job["number"]).write(state="lost", reason="its process was killed")


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
        _apart(sweep_pid)
    with _hidden(job) if hidden else _shown(job), _ended_by_sigterm():
        signum = _carry_out_job(job, hydra_config, dict(context.runtime.choices))
    if apart and os.getppid() != sweep_pid:
        os._exit(1)  # the sweep was killed; there is nobody to wait for
    if signum is not None:
        _hand_on(signum)


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
        end = _measure(config, job, _train(config, job), parse_measurements(wanted, "sweep.evaluate"))
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
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM interrupt a job before training, which saves first, has begun to listen to it."""

    def end(signum: int, frame: FrameType | None) -> None:
        raise Interrupted(signum)

    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:  # a launcher's own: a cluster's asks for the job again
        yield
        return
    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def _hidden(job: JobFolder) -> Iterator[None]:
    with job.log.open("a") as log, redirect_stdout(log), redirect_stderr(log):
        yield


@contextmanager
def _shown(job: JobFolder) -> Iterator[None]:
    print(f"\njob {job.number}: {' '.join(job.read()['overrides'])}", flush=True)
    yield


def _apart(sweep_pid: int) -> None:
    """Make this process, one of several that a sweep has started, listen to the sweep alone, and end with it."""
    with suppress(PermissionError):
        os.setpgid(0, 0)

    def watch() -> None:
        while os.getppid() == sweep_pid:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)

    if not any(thread.name == _apart.__name__ for thread in threading.enumerate()):
        threading.Thread(target=watch, name=_apart.__name__, daemon=True).start()


def _hand_on(signum: int) -> None:
    """Let a launcher that put this job on a cluster, and wants to know of the signal, queue the job again."""
    if signum == signal.SIGUSR2 and callable(signal.getsignal(signum)):
        signal.raise_signal(signum)


def _escaped(folder: Path) -> str:
    """Return a path as it stands between single quotes in Hydra's grammar."""
    return str(folder).replace("\\", "\\\\").replace("'", "\\'")


def _summarise(sweep: SweepFolder, signum: int | None) -> int:
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
    """Yield those of jobs that are done; a run that is recorded elsewhere is named by its folder in full."""
    for job in jobs:
        try:
            yield read_curve(RunFolder.find(job.get("folder", job["run"]), sweep.path.parent.parent))
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
