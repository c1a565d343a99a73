"""Measuring a trained run once more: other lengths, another solver or tolerance, caps, or two solvers' agreement.

`<run>/evaluations/<time>/` holds settings.json, what was asked for, and one of

    curve.jsonl       a row a length, with curve.png
    iterations.jsonl  a row for each cap and length, `max_iterations` the cap
    agreement.jsonl   a row a length: how far the solver's fixed points are from those of another

A file has its name only when it is whole; what an interruption leaves is called `.partial`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fpexp.config.run import RunConfig
from fpexp.config.schema import Checker, Component, settings_of
from fpexp.errors import UserError
from fpexp.ranges import Count, Positive
from fpexp.reporting.store import settings_beside
from fpexp.run_folder import RunFolder, append_row, make_unique, write_json

SolverName = Literal["anderson", "lagged", "picard", "sequential"]
TARGETS = {name: f"fpexp.fixed_point.{name.title()}" for name in ("anderson", "lagged", "picard", "sequential")}


@dataclass(frozen=True)
class Measurement:
    """What is to be measured; None stands for the run's own settings."""

    lengths: list[Count] | None = None
    samples: Count | None = None
    batch_size: Count | None = None
    checkpoint: Literal["newest", "best"] = "newest"
    solver: SolverName | None = None
    tolerance: Positive | None = None  # of the solvers
    max_iterations: list[Count] | None = None  # caps on whole-sequence iterations, each measured
    against: SolverName | None = None  # how far `solver` is from this one

    def __post_init__(self) -> None:
        for name in ("lengths", "max_iterations"):
            if getattr(self, name) == []:
                raise UserError(f"{name}=[] is empty; name at least one, such as {name}=[16]")
        if self.against is not None and self.max_iterations is not None:
            raise UserError("against= compares two solvers, max_iterations= measures one at several caps; ask for one")

    @property
    def kind(self) -> str:
        """What the rows are: `agreement`, `iterations` or `curve`."""
        return "agreement" if self.against else "iterations" if self.max_iterations else "curve"

    @property
    def file(self) -> str:
        """The name of the file that the rows go to."""
        return f"{self.kind}.jsonl"

    def asked(self) -> dict[str, Any]:
        """Return what differs from a run's own settings."""
        fields = dataclasses.fields(self)
        return {f.name: getattr(self, f.name) for f in fields if getattr(self, f.name) != f.default}

    def fits(self, config: RunConfig) -> bool:
        """Tell whether this can be measured: what is asked of solvers needs a model that solves fixed points."""
        from fpexp.build import uses_solver

        return uses_solver(config.model) or not self._of_solvers()

    def _of_solvers(self) -> list[str]:
        return [name for name in ("solver", "tolerance", "max_iterations", "against") if getattr(self, name)]

    def check(self, config: RunConfig) -> None:
        """Raise a `UserError` where what is asked for makes no sense of a run with this config."""
        if not self.fits(config):
            name, model = self._of_solvers()[0], config.choices.model
            raise UserError(f"{name}= has no meaning for model={model}, which solves no fixed point")
        if self.tolerance and self.solver is None and "tolerance" not in settings_of(config.solver.resolve()):
            raise UserError(f"tolerance= has no meaning for {config.solver.target}, which has none; add solver=picard")
        whole = TARGETS[self.solver] if self.solver else config.solver.target
        if self.max_iterations and whole == TARGETS["sequential"]:
            raise UserError(
                "max_iterations= caps whole-sequence iterations, which the sequential solver does not make; "
                "add solver=picard"
            )
        if self.against is not None and self.solver is None:
            raise UserError("against= compares two solvers; name the other, such as solver=picard")

    def recorded(self, run: RunFolder) -> bool:
        """Tell whether the run has been measured just so."""
        whole = (run.path / "evaluations").glob(f"*/{self.file}")
        return any(settings_beside(path) == self.asked() for path in whole)

    def carry_out(self, run: RunFolder, device: str) -> tuple[list[dict[str, Any]], Path]:
        """Measure and record; return the rows and their folder."""
        from fpexp.training.interruption import Interruption

        rows, drawn = [], self._rows(run, device)
        with Interruption() as interruption:
            first = next(interruption.between(drawn))  # what is asked for in vain leaves no folder
            evaluations = run.path / "evaluations"
            evaluations.mkdir(exist_ok=True)
            folder = make_unique(evaluations, time.strftime("%Y%m%d-%H%M%S"))
            write_json(folder / "settings.json", self.asked())
            partial = folder / f"{self.file}.partial"
            rows.append(first)
            append_row(partial, first)
            for row in interruption.between(drawn):
                append_row(partial, row)
                rows.append(row)
        partial.rename(folder / self.file)
        return rows, folder

    def _rows(self, run: RunFolder, device: str) -> Iterator[dict[str, Any]]:
        from fpexp.build import Experiment
        from fpexp.evaluation.agreement import agreement
        from fpexp.evaluation.length_curve import length_curve
        from fpexp.fixed_point import Converge
        from fpexp.footprint import check_evaluation
        from fpexp.loading import load_run
        from fpexp.machine import apply_settings
        from fpexp.tasks import HeldOut, Streamed
        from fpexp.tracking.console import warn

        self.check(run.config())
        solver = self._solver(self.solver, run.config()) if self.solver or self.tolerance else None
        loaded = load_run(run.path, results_dir="", device=device, checkpoint=self.checkpoint, solver=solver)
        for warning in loaded.warnings:
            warn(warning)
        task, config = loaded.experiment.task, loaded.experiment.config
        if isinstance(task, HeldOut) and self.samples is not None:
            raise UserError("samples has no meaning for held-out text, which is measured whole; leave it out")
        if isinstance(task, HeldOut) and self.against:
            raise UserError("against= draws sequences, which held-out text has none of")
        if isinstance(task, Streamed):  # text that is not what it was may have been trained on
            with closing(task.open_stream(config.seed)) as stream:
                stream.load_state_dict(loaded.state["stream"])
        changes = {name: getattr(self, name) for name in ("lengths", "samples", "batch_size")}
        settings = dataclasses.replace(config.evaluation, **{k: v for k, v in changes.items() if v is not None})
        for length in settings.lengths:
            task.check_length(length, "lengths")
        experiment = dataclasses.replace(loaded.experiment, config=config.replace(evaluation=settings))
        check_evaluation(experiment.config, task, experiment.model, settings.lengths, "lengths", "batch_size")
        apply_settings(experiment.config)
        step = {"step": loaded.state["step"]}
        if self.against is not None:
            from fpexp.build import make

            other = make(self._solver(self.against, run.config()))
            for row in agreement(experiment, other, settings.lengths, settings.samples):
                yield {"kind": "agreement", **step, "solver": self.solver, "against": self.against, **row}
            return
        drawn = {int(length): int(count) for length, count in loaded.state["lengths"]["drawn"]}
        caps: list[int | None] = [*self.max_iterations] if self.max_iterations else [None]
        for cap in caps:
            capped: Experiment = experiment
            if cap is not None:
                capped = dataclasses.replace(experiment, schedule=Converge(evaluation_max_iterations=cap))
            about = {} if cap is None else {"max_iterations": cap}
            for row in length_curve(capped, settings.lengths, settings.samples, drawn):
                yield {"kind": "iterations" if cap else "curve", **step, **about, **row}

    def _solver(self, name: SolverName | None, config: RunConfig) -> Component:
        """Return the run's own solver, or one of this name with its tolerance unless another is asked for."""
        own = config.solver
        if name is not None and own.target != TARGETS[name]:
            kept = {key: own.settings[key] for key in ("tolerance", "tolerance_kind") if key in own.settings}
            own = Component(TARGETS[name], kept)
        return own if self.tolerance is None else Component(own.target, {**own.settings, "tolerance": self.tolerance})


def parse_measurements(raw: Any, key: str) -> list[Measurement]:
    """Check a list of mappings, such as an experiment's sweep.evaluate; None stands for none."""
    checked: list[Measurement] = [] if raw is None else Checker({}).check(list[Measurement], raw, key)
    return checked


def unmeasured(wanted: Sequence[Measurement], run: RunFolder, config: RunConfig) -> list[Measurement]:
    """Return what is still to be measured of a run."""
    return [measurement for measurement in wanted if measurement.fits(config) and not measurement.recorded(run)]
