"""From a run on disk back to a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fpexp.build import Experiment, build
from fpexp.config.schema import Component
from fpexp.models import LanguageModel
from fpexp.run_folder import RunFolder
from fpexp.training.checkpoint import load_best, load_newest


@dataclass(frozen=True)
class LoadedRun:
    """A run with its weights; `state` is the checkpoint's and `warnings` tell of broken files."""

    run: RunFolder
    experiment: Experiment
    state: dict[str, Any]
    warnings: tuple[str, ...]

    @property
    def model(self) -> LanguageModel:
        """The model, in evaluation mode."""
        return self.experiment.model


def load_run(
    run: str | Path,
    *,
    results_dir: str | Path,
    device: str,
    checkpoint: Literal["newest", "best"] = "newest",
    solver: Component | None = None,
) -> LoadedRun:
    """Build the model of a run as its config says and load its newest checkpoint, or the best of its validations.

    `solver` takes the place of the run's own; a cap on whole-sequence iterations in training has then no meaning.
    """
    folder = RunFolder.find(run, results_dir)
    config = folder.config().replace(device=device)
    if solver is not None:
        config = config.replace(solver=solver, schedule=_uncapped(config.schedule))
    experiment = build(config)
    warnings: list[str] = []
    saved = load_best(folder.checkpoints) if checkpoint == "best" else load_newest(folder.checkpoints, warnings)
    saved.load_model(experiment.model)
    experiment.model.eval()
    experiment.model.config = experiment.config
    return LoadedRun(folder, experiment, dict(saved.state), tuple(warnings))


def _uncapped(schedule: Component) -> Component:
    kept = {key: value for key, value in schedule.settings.items() if key == "evaluation_max_iterations"}
    return Component("fpexp.fixed_point.Converge", kept)
