"""One run from config to curve, with its folder telling how it ended.

Of several processes the first one writes; the others compute their share, know the folder, and read it on resuming.
"""

from __future__ import annotations

import dataclasses
import errno
import traceback
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext, suppress
from typing import NoReturn

from fpexp.build import Experiment, build
from fpexp.config.run import RunConfig
from fpexp.environment import describe
from fpexp.errors import EndedElsewhere, FpexpError, Interrupted, UserError
from fpexp.evaluation.length_curve import length_curve
from fpexp.machine import apply_settings, is_out_of_memory
from fpexp.reporting.figures import draw_curves
from fpexp.reporting.store import read_curve
from fpexp.run_folder import RunFolder, read_rows
from fpexp.tasks import HeldOut
from fpexp.tracking.console import warn
from fpexp.tracking.tracker import RunStart, Tracker
from fpexp.training.checkpoint import Checkpoint, load_newest, read
from fpexp.training.distributed import check_shares
from fpexp.training.interruption import Interruption
from fpexp.training.loop import Trainer
from fpexp.world import ALONE, LOST_CONTACT, World, is_lost_contact


def start_run(config: RunConfig, tracker: Tracker, words: Sequence[str] = (), world: World = ALONE) -> RunFolder:
    """Train a new run and measure its curve; `words` are the arguments it was started with, for the record."""
    experiment = world.together(lambda: _build(config, world))
    run = world.by_first(lambda: RunFolder.create(experiment.config))
    with run.lock() if world.is_first else nullcontext():
        _carry_out(run, experiment, tracker, words, world)
    return run


def resume_run(
    run: RunFolder, config: RunConfig, tracker: Tracker, words: Sequence[str] = (), world: World = ALONE
) -> RunFolder:
    """Go on with a run from its newest whole checkpoint; `config` is its own, but for where it runs."""
    with ExitStack() as held:
        warnings: list[str] = []
        saved = world.together(lambda: _take_up(run, world, held, warnings))
        if not world.is_alone:
            path = world.from_first(None if saved is None else saved.path)
            saved = world.together(lambda: saved or (None if path is None else read(path)))
        experiment = world.together(lambda: _build(config, world, saved))
        notes = (*experiment.notes, *(f"warning: {warning}" for warning in warnings))
        _carry_out(run, dataclasses.replace(experiment, notes=notes), tracker, words, world, resuming=True, saved=saved)
    return run


def _take_up(run: RunFolder, world: World, held: ExitStack, warnings: list[str]) -> Checkpoint | None:
    """Lock the run for the first process and return its newest checkpoint, which the others are told of."""
    if not world.is_first:
        return None
    held.enter_context(run.lock())
    if run.status()["state"] == "finished":
        raise UserError(f"run '{run.id}' is finished; `fpexp evaluate run={run.id}` measures it again")
    return load_newest(run.checkpoints, warnings) if any(run.checkpoints.glob("step_*")) else None


def _build(config: RunConfig, world: World, saved: Checkpoint | None = None) -> Experiment:
    world.check_device(config.device)
    check_shares(config, world)
    try:
        experiment = build(config, world.size)
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            raise FpexpError("out of memory while building the model; lower model.d_model or model.layers") from error
        raise
    if saved is not None:
        saved.check_fits(experiment.model)
    if isinstance(experiment.task, HeldOut):
        # Text that is not there is said before a run begins.
        next(experiment.task.held_out("validation", experiment.task.lengths.max, 1))
    notes = apply_settings(experiment.config)
    if not world.is_alone:
        notes = (*notes, f"{world.size} processes, parallel={config.parallel}", *_own_to_each(experiment))
    return dataclasses.replace(experiment, notes=(*experiment.notes, *notes))


def _own_to_each(experiment: Experiment) -> list[str]:
    """Say what makes several processes differ from one."""
    settings, notes = experiment.config.model.settings, []
    if settings.get("dropout"):
        notes.append("dropout is drawn by each process for itself, so another number of them gives another run")
    if experiment.model.iterations_depend_on_length and getattr(experiment.schedule, "stop_early", True):
        notes.append("each process stops its training solves by its own sequences (not with schedule.stop_early=false)")
    return notes


def _carry_out(
    run: RunFolder,
    experiment: Experiment,
    tracker: Tracker,
    words: Sequence[str],
    world: World,
    resuming: bool = False,
    saved: Checkpoint | None = None,
) -> None:
    begun = False
    with Interruption(world) as interruption:
        try:
            parameters = experiment.model.parameter_count()
            trainer = Trainer(experiment, run, tracker, interruption, world)
            if saved is not None:
                trainer.restore(saved)
            step, begun = trainer.progress.step, True
            if world.is_first:
                run.write_status("running")
                described = describe(experiment.config, parameters, words)
                run.add_sitting({"from_step": step, **described, "processes": world.size})
            tracker.start(RunStart(run, experiment.config, parameters, step if resuming else None, experiment.notes))
            trainer.fit()
            _measure(run, experiment, trainer, tracker, interruption)
            interruption.check()
            tracker.finish("finished")
            if world.is_first:
                run.write_status("finished", step=trainer.progress.step, skipped=trainer.progress.skipped)
        except BaseException as error:
            if not world.is_first:
                _end_silently(error, experiment.config, world)
            if resuming and not begun and isinstance(error, FpexpError):
                raise  # nothing has happened to the run
            _end_badly(run, experiment.config, tracker, error)


def _measure(
    run: RunFolder, experiment: Experiment, trainer: Trainer, tracker: Tracker, interruption: Interruption
) -> None:
    """Measure the lengths that an interrupted sitting has not measured yet, and draw the curve."""
    settings, world = experiment.config.evaluation, trainer.world
    measured = world.by_first(lambda: {row["length"] for row in read_rows(run.curve)})
    missing = [length for length in settings.lengths if length not in measured]
    if missing:
        drawn = trainer.batches.lengths.drawn
        rows = length_curve(experiment, missing, settings.samples, drawn, world, interruption.look)
        for row in interruption.between(rows):
            tracker.log({"kind": "curve", "step": trainer.progress.step, **row})
    if not world.is_first:
        return
    try:
        draw_curves([read_curve(run)], run.path / "curve.png")
    except (ImportError, OSError) as error:
        warn(f"no picture of the curve: {error}")


def _end_silently(error: BaseException, config: RunConfig, world: World) -> NoReturn:
    """Raise what a process that is not the first has to say: only of what has happened to it alone."""
    if isinstance(error, EndedElsewhere):
        raise error
    if isinstance(error, FpexpError):  # it comes from numbers that all have
        raise EndedElsewhere(error.exit_code) from error
    if is_lost_contact(error):
        raise EndedElsewhere(1) from error
    raise FpexpError(f"process {world.rank} of {world.size}: {_reason(error, config)}") from error


def _end_badly(run: RunFolder, config: RunConfig, tracker: Tracker, error: BaseException) -> NoReturn:
    """Record how the run ended and raise what the user is to read."""
    resume = f"fpexp train resume={run.id}"
    if config.results_dir != "results":
        resume += f" results_dir={config.results_dir}"
    if isinstance(error, (Interrupted, KeyboardInterrupt)):
        tracker.finish("interrupted")
        run.write_status("interrupted", reason=str(error), resume=resume)
        if isinstance(error, Interrupted):
            raise Interrupted(error.signum, f"{error}; the state is saved, go on with: {resume}") from None
        raise error
    reason, told = _reason(error, config), ""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        reason = f"the disk of {run.path} is full; free some space and go on with: {resume}"
    with suppress(Exception):
        tracker.finish("failed")
    with suppress(OSError):  # where the disk is full, what is told below still reaches the user
        run.write_status("failed", reason=reason)
        (run.path / "traceback.txt").write_text("".join(traceback.format_exception(error)))
        told = f"; traceback in {run.path / 'traceback.txt'}"
    if isinstance(error, FpexpError):
        raise error
    raise FpexpError(f"run {run.id} failed: {reason}{told}") from error


def _reason(error: BaseException, config: RunConfig) -> str:
    text = str(error)
    if is_lost_contact(error):
        return LOST_CONTACT
    if is_out_of_memory(error):
        training, evaluation = config.training, config.evaluation
        return (
            f"out of memory on {config.device}; lower training.batch_size={training.batch_size}, raise "
            f"training.accumulation={training.accumulation}, or lower model.d_model, task.lengths.max or "
            f"evaluation.batch_size={evaluation.batch_size}"
        )
    if isinstance(error, SystemExit):
        return f"it ended itself with exit code {error.code} before its end"
    first = next(iter(text.strip().splitlines()), "")
    return first if isinstance(error, FpexpError) and first else f"{type(error).__name__}: {first}"
