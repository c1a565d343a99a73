"""Handing the jobs of a sweep to the launcher that is asked for: one after another, joblib's, a cluster's."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

from fpexp.commands.multirun.job import STOPPED, run_job
from fpexp.commands.multirun.signals import handing_on
from fpexp.commands.sweep_jobs import Job, own_overrides
from fpexp.config.catalogue import conf_dir
from fpexp.config.compose import CONFIG_NAME, permissive
from fpexp.errors import first_line
from fpexp.sweep_folder import SweepFolder
from fpexp.tracking.console import has_rich_terminal, note, warn
from fpexp.tracking.jobs import watched


def carry_out(sweep: SweepFolder, jobs: dict[int, Job]) -> int | None:
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
                    with handing_on(sweep, received):
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


def _close(sweep: SweepFolder, apart: bool) -> None:
    """Say of jobs that no process will go on with what has become of them."""
    for job in sweep.jobs():
        if job["state"] == "waiting" and (apart or sweep.stopped):
            sweep.job(job["number"]).write(state="not started", reason=STOPPED)
        if job["state"] == "running" and apart:
            sweep.job(job["number"]).write(state="lost", reason="its process was killed")


def _escaped(folder: Path) -> str:
    """Return a path as it stands between single quotes in Hydra's grammar."""
    return str(folder).replace("\\", "\\\\").replace("'", "\\'")
