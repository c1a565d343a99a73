"""From a run on disk back to a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fpexp.build import Experiment, build
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
    run: str | Path, *, results_dir: str | Path, device: str, checkpoint: Literal["newest", "best"] = "newest"
) -> LoadedRun:
    """Build the model of a run as its config says and load its newest checkpoint, or the best of its validations."""
    folder = RunFolder.find(run, results_dir)
    experiment = build(folder.config().replace(device=device))
    warnings: list[str] = []
    saved = load_best(folder.checkpoints) if checkpoint == "best" else load_newest(folder.checkpoints, warnings)
    saved.load_model(experiment.model)
    experiment.model.eval()
    experiment.model.config = experiment.config
    return LoadedRun(folder, experiment, dict(saved.state), tuple(warnings))
