"""fpexp train: one run, a resumed run, or with -m a sweep of runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fpexp.commands.arguments import take
from fpexp.config.run import RunConfig, read_config
from fpexp.errors import UserError
from fpexp.run_folder import RunFolder
from fpexp.tracking.tracker import Tracker, Trackers
from fpexp.tracking.watchers import trackers

if TYPE_CHECKING:
    from fpexp.world import World

MOVABLE = ("device", "threads", "tracking", "parallel")
"""What may change when a run is resumed: where it runs and who watches, nothing that decides its numbers."""


def run(arguments: list[str]) -> int:
    """Train as the overrides say; with the other processes where torchrun has started some."""
    from fpexp.world import World

    world = World.from_environment()
    with world.joined():
        return _run(arguments, world)


def _run(arguments: list[str], world: World) -> int:
    words = [word for word in arguments if word not in ("-m", "--multirun")]
    if len(words) < len(arguments):
        return _sweep(words, world)
    resume, words = take(words, "resume")
    if resume is not None:
        return _resume(resume, words, world)
    from fpexp.run import start_run

    config = world.together(lambda: read_run_config(words))
    _show_where(start_run(config, _watchers(config, world), arguments, world), world)
    return 0


def _sweep(words: list[str], world: World) -> int:
    if not world.is_alone:
        world.together(_refuse_sweep)
    from fpexp.commands import multirun

    return multirun.run(words)


def _refuse_sweep() -> None:
    raise UserError(
        "-m runs its jobs one after another, in one process; start each as a run of its own under torchrun, or the "
        "sweep on a cluster with hydra/launcher=submitit_slurm"
    )


def _watchers(config: RunConfig, world: World) -> Tracker:
    return trackers(config) if world.is_first else Trackers([])


def read_run_config(words: list[str]) -> RunConfig:
    """Return the config that the words describe: composed from conf/, or a saved one given as config=<file>."""
    from pathlib import Path

    from fpexp.config.override import override

    saved, words = take(words, "config")
    if saved is not None:
        return override(read_config(Path(saved)), words)
    from fpexp.config.compose import compose

    return compose(words)


def _resume(run_id: str, words: list[str], world: World) -> int:
    from fpexp.run import resume_run

    folder, config = world.together(lambda: _find(run_id, words))
    watchers = _watchers(config, world)
    _show_where(resume_run(folder, config, watchers, [f"resume={folder.id}", *words], world), world)
    return 0


def _find(run_id: str, words: list[str]) -> tuple[RunFolder, RunConfig]:
    from fpexp.config.override import override

    results_dir, words = take(words, "results_dir")
    folder = RunFolder.find(run_id, results_dir or "results")
    for word in words:
        key = word.partition("=")[0].lstrip("+~")
        if key.partition(".")[0] not in MOVABLE:
            raise UserError(
                f"'{key}' cannot change in a resumed run, which goes on as it was configured; a new run from its "
                f"config: fpexp train config={folder.path / 'config.yaml'} {word}"
            )
    return folder, override(folder.config(), words)


def _show_where(folder: RunFolder, world: World) -> None:
    if world.is_first:
        print(f"run {folder.id}: {folder.path}")
        print(f"curve: {folder.path / 'curve.png'}")
