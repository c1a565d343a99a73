"""One run from config to curve, with its folder telling how it ended."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from fpexp.build import Experiment, build
from fpexp.config.run import RunConfig
from fpexp.environment import describe
from fpexp.errors import FpexpError, Interrupted, UserError
from fpexp.evaluation.length_curve import length_curve
from fpexp.machine import apply_settings, is_out_of_memory
from fpexp.reporting.figures import draw_curves
from fpexp.reporting.store import read_curve
from fpexp.run_folder import RunFolder, read_rows
from fpexp.tasks import HeldOut
from fpexp.tracking.console import warn
from fpexp.tracking.tracker import RunStart, Tracker
from fpexp.training.checkpoint import Checkpoint, load_newest
from fpexp.training.interruption import Interruption
from fpexp.training.loop import Trainer


def start_run(config: RunConfig, tracker: Tracker, words: Sequence[str] = ()) -> RunFolder:
    """Train a new run and measure its curve; `words` are the arguments it was started with, for the record."""
    experiment = _build(config)
    run = RunFolder.create(experiment.config)
    with run.lock():
        _carry_out(run, experiment, tracker, words)
    return run


def resume_run(run: RunFolder, config: RunConfig, tracker: Tracker, words: Sequence[str] = ()) -> RunFolder:
    """Go on with a run from its newest whole checkpoint; `config` is its own, but for where it runs."""
    with run.lock():
        if run.status()["state"] == "finished":
            raise UserError(f"run '{run.id}' is finished; `fpexp evaluate run={run.id}` measures it again")
        warnings: list[str] = []
        saved = load_newest(run.checkpoints, warnings) if any(run.checkpoints.glob("step_*")) else None
        experiment = _build(config)
        if saved is not None:
            saved.check_fits(experiment.model)
        notes = (*experiment.notes, *(f"warning: {warning}" for warning in warnings))
        _carry_out(run, dataclasses.replace(experiment, notes=notes), tracker, words, resuming=True, saved=saved)
    return run


def _build(config: RunConfig) -> Experiment:
    try:
        experiment = build(config)
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            raise FpexpError("out of memory while building the model; lower model.d_model or model.layers") from error
        raise
    if isinstance(experiment.task, HeldOut):
        next(experiment.task.held_out("validation", 1, 1))  # text that is not there is said before a run begins
    notes = apply_settings(experiment.config)
    return dataclasses.replace(experiment, notes=(*experiment.notes, *notes))


def _carry_out(
    run: RunFolder,
    experiment: Experiment,
    tracker: Tracker,
    words: Sequence[str],
    resuming: bool = False,
    saved: Checkpoint | None = None,
) -> None:
    with Interruption() as interruption:
        try:
            run.write_status("running")
            trainer = Trainer(experiment, run, tracker, interruption)
            if saved is not None:
                trainer.restore(saved)
            step, parameters = trainer.progress.step, experiment.model.parameter_count()
            run.add_sitting({"from_step": step, **describe(experiment.config, parameters, words)})
            tracker.start(RunStart(run, experiment.config, parameters, step if resuming else None, experiment.notes))
            trainer.fit()
            _measure(run, experiment, trainer, tracker, interruption)
            interruption.check()
            tracker.finish("finished")
            run.write_status("finished", step=trainer.progress.step, skipped=trainer.progress.skipped)
        except BaseException as error:
            _end_badly(run, experiment.config, tracker, error)


def _measure(
    run: RunFolder, experiment: Experiment, trainer: Trainer, tracker: Tracker, interruption: Interruption
) -> None:
    """Measure the lengths that an interrupted sitting has not measured yet, and draw the curve."""
    settings = experiment.config.evaluation
    measured = {row["length"] for row in read_rows(run.curve)}
    missing = [length for length in settings.lengths if length not in measured]
    if missing:
        rows = length_curve(experiment, missing, settings.samples, trainer.batches.lengths.drawn)
        for row in interruption.between(rows):
            tracker.log({"kind": "curve", "step": trainer.progress.step, **row})
    try:
        draw_curves([read_curve(run)], run.path / "curve.png")
    except (ImportError, OSError) as error:
        warn(f"no picture of the curve: {error}")


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
    reason = _reason(error, config)
    with suppress(Exception):
        tracker.finish("failed")
    with suppress(OSError):  # where the disk is full, what is told below still reaches the user
        run.write_status("failed", reason=reason)
        (run.path / "traceback.txt").write_text("".join(traceback.format_exception(error)))
    if isinstance(error, FpexpError):
        raise error
    raise FpexpError(f"run {run.id} failed: {reason}; traceback in {run.path / 'traceback.txt'}") from error


def _reason(error: BaseException, config: RunConfig) -> str:
    text = str(error)
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
