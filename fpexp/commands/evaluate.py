"""fpexp evaluate: a recorded run at other lengths."""

from __future__ import annotations

import dataclasses
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fpexp.commands.arguments import parse
from fpexp.errors import FpexpError, UserError
from fpexp.ranges import Count

if TYPE_CHECKING:
    from fpexp.loading import LoadedRun

OPTIONS = {
    "run": str,
    "lengths": list[Count],
    "samples": Count,
    "batch_size": Count,
    "checkpoint": Literal["newest", "best"],
    "device": str,
    "results_dir": str,
}
MEASURING = ("lengths", "samples", "batch_size")  # the options that stand for settings under `evaluation`


def run(arguments: list[str]) -> int:
    """Measure a checkpoint and keep the rows under the run's evaluations/ folder."""
    options = parse(arguments, OPTIONS)
    if "run" not in options:
        raise UserError("which run? write run=<run id>; `fpexp runs` lists them")
    if options.get("lengths") == []:
        raise UserError("lengths=[] is empty; name at least one, such as lengths=[16]")

    from fpexp.loading import load_run
    from fpexp.machine import is_out_of_memory
    from fpexp.tracking.console import print_curve, warn

    loaded = load_run(
        options["run"],
        results_dir=options.get("results_dir", "results"),
        device=options.get("device", "auto"),
        checkpoint=options.get("checkpoint", "newest"),
    )
    for warning in loaded.warnings:
        warn(warning)
    chosen: dict[str, Any] = {key: options[key] for key in MEASURING if key in options}
    try:
        rows, folder = _measure(loaded, chosen)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise FpexpError(
            f"out of memory on {loaded.experiment.config.device}; lower batch_size or the longest of lengths"
        ) from error
    print_curve(rows)
    print(f"rows and curve: {folder}")
    return 0


def _measure(loaded: LoadedRun, chosen: dict[str, Any]) -> tuple[list[dict[str, Any]], Path]:
    """Measure and record. The rows' file has its name only when it is whole; an interrupted one keeps `.partial`."""
    from fpexp.evaluation.length_curve import length_curve
    from fpexp.footprint import check_evaluation
    from fpexp.machine import apply_settings
    from fpexp.reporting.figures import draw_curves
    from fpexp.reporting.store import read_curve
    from fpexp.run_folder import append_row, make_unique
    from fpexp.tasks import HeldOut, Streamed
    from fpexp.training.interruption import Interruption

    if "samples" in chosen and isinstance(loaded.experiment.task, HeldOut):
        raise UserError("samples has no meaning for held-out text, which is measured whole; leave it out")
    if isinstance(loaded.experiment.task, Streamed):  # text that is not what it was may have been trained on
        with closing(loaded.experiment.task.open_stream(loaded.experiment.config.seed)) as stream:
            stream.load_state_dict(loaded.state["stream"])
    config = loaded.experiment.config
    settings = dataclasses.replace(config.evaluation, **chosen)
    for length in settings.lengths:
        loaded.experiment.task.check_length(length, "lengths")
    experiment = dataclasses.replace(loaded.experiment, config=config.replace(evaluation=settings))
    check_evaluation(experiment.config, experiment.task, experiment.model, settings.lengths, "lengths", "batch_size")
    apply_settings(experiment.config)
    evaluations = loaded.run.path / "evaluations"
    evaluations.mkdir(exist_ok=True)
    folder = make_unique(evaluations, time.strftime("%Y%m%d-%H%M%S"))
    partial, whole = folder / "curve.jsonl.partial", folder / "curve.jsonl"
    drawn = {int(length): int(count) for length, count in loaded.state["lengths"]["drawn"]}
    rows = []
    with Interruption() as interruption:
        for row in interruption.between(length_curve(experiment, settings.lengths, settings.samples, drawn)):
            append_row(partial, {"kind": "curve", "step": loaded.state["step"], **row})
            rows.append(row)
    partial.rename(whole)
    draw_curves([read_curve(loaded.run, whole)], folder / "curve.png")
    return rows, folder
